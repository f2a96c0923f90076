"""How prompts become groups of scored answers."""

"""How prompts become groups of scored completions."""

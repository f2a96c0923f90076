"""Which prompts are trained on, and in which order."""

"""The prompts of a run: data files, their schemas, tokenizers, and the order in which prompts are issued."""

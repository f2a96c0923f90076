"""What looks at a run, or breaks it on purpose, from beside it: audit, replay, chaos."""

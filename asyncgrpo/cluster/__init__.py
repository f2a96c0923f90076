"""Where every process runs, and who watches it."""

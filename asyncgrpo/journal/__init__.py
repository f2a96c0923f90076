"""The journal: groups and what became of them, written to disk before they are acknowledged."""

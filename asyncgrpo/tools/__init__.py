"""Tools for a run besides training: audit it, train it again from its journal, and inject faults into it."""

"""The generators: leases become groups of scored completions."""

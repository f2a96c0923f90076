"""The formulas of the papers, as pure functions on packed tokens."""

"""Splits of GPUs between generators and learner: a measured profile, and formulas."""

"""Splits of GPUs between generators and learner: a measured profile, a closed form, a simulation of the product's own code."""

"""Inference engines behind one protocol: `sglang`, `torch` and `fake`."""

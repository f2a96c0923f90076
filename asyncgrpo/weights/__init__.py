"""How a policy version reaches every generator, and the proof that it did."""

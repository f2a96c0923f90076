"""How a weight version reaches every generator, and the proof that it did."""

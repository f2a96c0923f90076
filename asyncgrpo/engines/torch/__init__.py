"""The embedded engine over a transformers model."""

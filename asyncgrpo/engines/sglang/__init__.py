"""The SGLang engine."""

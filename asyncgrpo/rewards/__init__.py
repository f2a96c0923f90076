"""How answers are scored."""

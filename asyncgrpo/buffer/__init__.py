"""Who may generate, what is ready, and what is trained next."""

"""How groups become the next weight version."""

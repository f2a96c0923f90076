"""How groups become the next policy version."""

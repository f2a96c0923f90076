"""A running run, looked at and steered: the admin API, its page, and the client of the commands."""

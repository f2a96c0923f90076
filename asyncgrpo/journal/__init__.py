"""The run's memory of record: groups and what became of them, on disk before anyone is told."""

"""What a run leaves behind and shows: metrics.jsonl, samples, loggers, curves, the live screen."""

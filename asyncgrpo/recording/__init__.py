"""What a run writes down, and how a person sees it: events, samples, text lines, the live screen and the curves."""

"""Training: configuration, loop, run folder, resuming."""

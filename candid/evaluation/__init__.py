"""What a model is worth on data: one pass over a split, and pure functions of it."""

"""Evaluation of a model on data: one pass over a split, and pure functions of it."""

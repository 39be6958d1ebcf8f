"""One pass of a model over images."""

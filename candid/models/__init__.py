"""Image classifiers and how they are stored."""

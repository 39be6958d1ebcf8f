"""Data sets from one string, and batches of them."""

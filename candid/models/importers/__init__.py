"""Checkpoints of other projects as models."""

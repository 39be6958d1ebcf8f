"""Adversarial attacks."""

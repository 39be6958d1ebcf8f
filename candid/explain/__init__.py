"""Explanations that add up: functions of the latent, the class means and one forward pass."""

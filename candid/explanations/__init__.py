"""Explanations that add up: functions of the latent, the class means and one forward pass.

What needs more is in modules of its own: :mod:`candid.judging.examine` (image files),
:mod:`candid.models.flow.means` (a model with its means in a plane).
"""

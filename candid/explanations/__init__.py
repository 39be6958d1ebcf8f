"""Explanations that add up: functions of the latent, the class means and one forward pass.

What needs more is in modules of its own: :mod:`candid.trust.examine` (image files),
:mod:`candid.models.flow.plane` (a model with its means in a plane).
"""

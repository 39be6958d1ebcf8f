"""Explanations that add up: functions of the latent, the class means and one forward pass.

What needs more is in modules of its own: :mod:`candid.explain.examine` (image files),
:mod:`candid.explain.plane` (a model with its means in a plane).
"""

from candid.explain.coefficients import dct_basis, mean_spread
from candid.explain.counterfactual import (
    Counterfactual,
    Interpolation,
    Path,
    counterfactual,
    interpolate,
    path_towards,
    samples,
)
from candid.explain.decision_space import DecisionSpace, Reading, decision_spaces, in_words
from candid.explain.heatmaps import Heatmaps, SpatialMixture, heatmaps
from candid.explain.receptive_field import ReceptiveField, receptive_field
from candid.explain.similarity import (
    Pair,
    Similarity,
    chosen_classes,
    expected_uncertainty,
    log_expected_uncertainty,
    measured_uncertainty,
    similarity,
)

__all__ = [
    "Counterfactual",
    "DecisionSpace",
    "Heatmaps",
    "Interpolation",
    "Pair",
    "Path",
    "Reading",
    "ReceptiveField",
    "Similarity",
    "SpatialMixture",
    "chosen_classes",
    "counterfactual",
    "dct_basis",
    "decision_spaces",
    "expected_uncertainty",
    "heatmaps",
    "in_words",
    "interpolate",
    "log_expected_uncertainty",
    "mean_spread",
    "measured_uncertainty",
    "path_towards",
    "receptive_field",
    "samples",
    "similarity",
]

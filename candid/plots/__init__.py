"""Figures; the only place that imports matplotlib."""

import matplotlib

matplotlib.use("Agg")

from candid.plots.attacks import attack_bars, attack_examples
from candid.plots.coefficients import dct_basis, mean_spread
from candid.plots.comparison import calibration_curves, trade_off
from candid.plots.corruptions import corruption_grid
from candid.plots.demo import SIGNIFICANT, opinions, round_trip
from candid.plots.evaluation import auc_table, calibration, ood_zones, roc_curves
from candid.plots.examine import decision_space, examination, heatmaps
from candid.plots.latent import counterfactual, counterfactuals, interpolation, samples
from candid.plots.plane import decision_plane
from candid.plots.receptive_field import receptive_fields
from candid.plots.similarity import similarity, similarity_groups
from candid.plots.style import save
from candid.plots.training import curves
from candid.plots.trajectories import trajectories

__all__ = [
    "SIGNIFICANT",
    "attack_bars",
    "attack_examples",
    "auc_table",
    "calibration",
    "calibration_curves",
    "corruption_grid",
    "counterfactual",
    "counterfactuals",
    "curves",
    "dct_basis",
    "decision_plane",
    "decision_space",
    "examination",
    "heatmaps",
    "interpolation",
    "mean_spread",
    "ood_zones",
    "opinions",
    "receptive_fields",
    "roc_curves",
    "round_trip",
    "samples",
    "save",
    "similarity",
    "similarity_groups",
    "trade_off",
    "trajectories",
]

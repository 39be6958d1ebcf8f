"""Figures; the only place that imports matplotlib."""

import matplotlib

matplotlib.use("Agg")

from candid.reports.plots.attacks import attack_bars, attack_examples
from candid.reports.plots.coefficients import dct_basis, mean_spread
from candid.reports.plots.comparison import calibration_curves, trade_off
from candid.reports.plots.corruptions import corruption_grid
from candid.reports.plots.demo import SIGNIFICANT, opinions, round_trip
from candid.reports.plots.evaluation import auc_table, calibration, ood_zones, roc_curves
from candid.reports.plots.examine import decision_space, examination, heatmaps
from candid.reports.plots.latent import counterfactual, counterfactuals, interpolation, samples
from candid.reports.plots.plane import decision_plane
from candid.reports.plots.receptive_field import receptive_fields
from candid.reports.plots.similarity import similarity, similarity_groups
from candid.reports.plots.style import save
from candid.reports.plots.training import curves
from candid.reports.plots.trajectories import trajectories

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

"""Figures; the only place that imports matplotlib."""

import matplotlib

matplotlib.use("Agg")

from candid.plots.comparison import trade_off
from candid.plots.demo import SIGNIFICANT, opinions, round_trip
from candid.plots.evaluation import auc_table, calibration, ood_zones, roc_curves
from candid.plots.style import save
from candid.plots.training import curves

__all__ = [
    "SIGNIFICANT",
    "auc_table",
    "calibration",
    "curves",
    "ood_zones",
    "opinions",
    "roc_curves",
    "round_trip",
    "save",
    "trade_off",
]

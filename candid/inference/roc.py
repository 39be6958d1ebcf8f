"""ROC curves: how well a score separates outliers (the positives) from inliers; it rises with outlyingness.

The curve is scikit-learn's. The area is computed from scipy's ranks instead of ``roc_auc_score``: these count
pairs of images exactly, while the trapezoids of ``roc_auc_score`` differ in the last digits and refuse
infinite scores.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn import metrics
from torch import Tensor

from candid._support.errors import CandidError


class Roc(NamedTuple):
    """The rates at every threshold, from (0, 0) to (1, 1): an image is positive from the threshold on."""

    false_positive_rate: Tensor
    """Share of inliers that are flagged, (T,)."""
    true_positive_rate: Tensor
    """Share of outliers that are flagged, (T,)."""
    thresholds: Tensor
    """Every distinct score in falling order, (T,); the first one is infinite and flags no image."""


def roc_curve(inliers: Tensor, outliers: Tensor) -> Roc:
    """Return the rates at every threshold, for scores (N,) and (M,).

    >>> roc_curve(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])).true_positive_rate.tolist()
    [0.0, 0.5, 1.0, 1.0]
    """
    values, ranks = np.unique(_together(inliers, outliers), return_inverse=True)  # ranks are always finite
    positive = np.arange(len(ranks)) >= len(inliers)
    false, true, _ = metrics.roc_curve(positive, ranks, drop_intermediate=False)
    return Roc(*map(torch.from_numpy, (false, true, np.append(np.inf, values[::-1]))))


def area_under_curve(inliers: Tensor, outliers: Tensor) -> float:
    """Return the probability that an outlier scores higher than an inlier; equal scores count half.

    >>> area_under_curve(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ranks = rankdata(_together(inliers, outliers))[len(inliers) :]
    m = len(outliers)
    return float((ranks.sum() - m * (m + 1) / 2) / (len(inliers) * m))


def false_positive_rate_at(inliers: Tensor, outliers: Tensor, true_positive_rate: float = 0.95) -> float:
    """Return the lowest false-positive rate at which at least this share of the outliers is found.

    >>> false_positive_rate_at(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.5
    """
    if not 0 <= true_positive_rate <= 1:
        raise CandidError(f"The true positive rate must be from 0 to 1, not {true_positive_rate}.")
    curve = roc_curve(inliers, outliers)
    return curve.false_positive_rate[curve.true_positive_rate >= true_positive_rate].min().item()


def detection_metrics(inliers: Tensor, outliers: Tensor) -> dict[str, float]:
    """Return the area under the curve, and the false-positive rate at 95 % true positives."""
    return {
        "auc": area_under_curve(inliers, outliers),
        "fpr95": false_positive_rate_at(inliers, outliers, 0.95),
    }


def _together(inliers: Tensor, outliers: Tensor) -> np.ndarray:
    """Return all scores, inliers first, in float64."""
    for name, scores in (("inliers", inliers), ("outliers", outliers)):
        if scores.ndim != 1 or not len(scores):
            raise CandidError(
                f"Scores of {name} must be (images,) of at least one image, not {tuple(scores.shape)}."
            )
        if scores.isnan().any():
            raise CandidError(f"Some scores of {name} are NaN: they can't be ranked.")
    return torch.cat((inliers.double(), outliers.double())).cpu().numpy()

"""How well do scores tell outliers, the positives, from inliers? Scores rise with outlyingness."""

from typing import NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError


class Roc(NamedTuple):
    """Rates of calling an image an outlier if its score is at least the threshold, from (0, 0) to (1, 1)."""

    false_positive_rate: Tensor
    """Share of inliers, (T,)."""
    true_positive_rate: Tensor
    """Share of outliers, (T,)."""
    thresholds: Tensor
    """Every distinct score, falling, (T,); the first one is infinite and stands for no image at all."""


def roc_curve(inliers: Tensor, outliers: Tensor) -> Roc:
    """The rates at every threshold, for scores (N,) and (M,).

    >>> roc_curve(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])).true_positive_rate.tolist()
    [0.0, 0.5, 1.0, 1.0]
    """
    inliers, outliers = _sorted(inliers, "inliers"), _sorted(outliers, "outliers")
    thresholds = torch.cat((inliers, outliers)).unique().flip(0)
    above_all = thresholds.new_full((1,), torch.inf)
    return Roc(
        _share_at_least(inliers, thresholds),
        _share_at_least(outliers, thresholds),
        torch.cat((above_all, thresholds)),
    )


def area_under_curve(inliers: Tensor, outliers: Tensor) -> float:
    """Probability that an outlier scores higher than an inlier; equal scores count half.

    >>> area_under_curve(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    inliers, outliers = _sorted(inliers, "inliers"), _sorted(outliers, "outliers")
    below = torch.searchsorted(inliers, outliers)
    at_most = torch.searchsorted(inliers, outliers, right=True)
    return int((below + at_most).sum()) / (2 * len(inliers) * len(outliers))


def false_positive_rate_at(inliers: Tensor, outliers: Tensor, true_positive_rate: float = 0.95) -> float:
    """Lowest share of inliers called outliers at a threshold that finds at least this share of the outliers.

    >>> false_positive_rate_at(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.5
    """
    if not 0 <= true_positive_rate <= 1:
        raise CandidError(f"The true positive rate must be from 0 to 1, not {true_positive_rate}.")
    curve = roc_curve(inliers, outliers)
    return curve.false_positive_rate[curve.true_positive_rate >= true_positive_rate].min().item()


def detection_figures(inliers: Tensor, outliers: Tensor) -> dict[str, float]:
    """Area under the curve, and false positives when 95 % of the outliers are found."""
    return {
        "auc": area_under_curve(inliers, outliers),
        "fpr95": false_positive_rate_at(inliers, outliers, 0.95),
    }


def _sorted(scores: Tensor, name: str) -> Tensor:
    if scores.ndim != 1 or not len(scores):
        raise CandidError(
            f"Scores of {name} must be (images,) of at least one image, not {tuple(scores.shape)}."
        )
    if scores.isnan().any():
        raise CandidError(f"Some scores of {name} are NaN: they can't be ranked.")
    return scores.double().sort().values


def _share_at_least(ordered: Tensor, thresholds: Tensor) -> Tensor:
    counts = len(ordered) - torch.searchsorted(ordered, thresholds)
    return torch.cat((counts.new_zeros(1), counts)).double() / len(ordered)

"""ROC curves: how well a score separates outliers (the positives) from inliers; it rises with outlyingness.

The curve is scikit-learn's. The area is computed from scipy's ranks instead of ``roc_auc_score``: these count
pairs of images exactly, while the trapezoids of ``roc_auc_score`` differ in the last digits and refuse
infinite scores.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import norm, rankdata
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


def auc_interval(ordinary: Tensor, other: Tensor, level: float = 0.95) -> tuple[float, float]:
    """Return an interval of the area under the curve, for scores (N,) and (M,) of independent images.

    See :func:`placement_interval`.

    >>> low, high = auc_interval(torch.arange(100), torch.arange(100) + 50)
    >>> round(low, 3), round(high, 3)
    (0.823, 0.913)
    """
    return placement_interval(placements(ordinary, other), level)


def placements(inliers: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of outliers above each inlier (N,), and of inliers below each outlier (M,).

    Ties count half. Both have the area under the curve as their mean.

    >>> [each.tolist() for each in placements(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))]
    [[1.0, 0.75], [0.75, 1.0]]
    """
    n, m = len(inliers), len(outliers)
    ranks = rankdata(_together(inliers, outliers))
    above = 1 - (ranks[:n] - rankdata(ranks[:n])) / m
    below = (ranks[n:] - rankdata(ranks[n:])) / n
    return torch.from_numpy(above), torch.from_numpy(below)


def paired_placements(inliers: Tensor, outliers: Tensor, rows: Tensor) -> Tensor:
    """Return one number per image (N,) for sets that come from the same N images; their mean is the area.

    Image i moves the area by (number i - area) / N, through its inlier and all its outliers.

    Args:
        inliers: the scores of n of the images as they are.
        outliers: the scores of several versions of all images, (versions, N).
        rows: which images the inliers are, (n,).
    """
    above, below = placements(inliers, outliers.flatten())
    area, images = below.mean(), outliers.shape[1]
    found = below.view_as(outliers).mean(0)
    return found.index_add(0, rows, (above - area) * images / len(inliers))


def placement_interval(sets: Sequence[Tensor], level: float = 0.95) -> tuple[float, float]:
    """Return the score interval (Wilson) of an area from ``sets`` of :func:`placements`.

    The variance of the area is the sum of the variances of the sets' means (DeLong). A share of n images has
    the variance A (1 - A) / n, so an area is treated as a share of A (1 - A) / variance images. To estimate
    this number, one image at random, with a placement of 1/2, is added to each set. So an area of 1 has an
    interval, too.

    Args:
        sets: the placements of inliers and of outliers, or those of pairs alone.
        level: the probability that the interval covers the area.

    >>> low, high = placement_interval([torch.ones(100), torch.ones(100)])
    >>> round(low, 3), high
    (0.963, 1.0)
    """
    if not 0 < level < 1:
        raise CandidError(f"The level of an interval must be between 0 and 1, not {level}.")
    area = float(sets[0].mean())
    extra = 0.5 if len(sets) == 2 else 1 - area  # the influences of both sides of a pair add up
    more = [torch.cat((each, each.new_tensor([extra]))) for each in sets]
    variance = sum(float(each.var() / len(each)) for each in more)
    shrunk = sum(float(each.mean()) for each in more) / len(more)
    images = shrunk * (1 - shrunk) / variance if variance > 0 else min(map(len, sets))
    square = float(norm.ppf((1 + level) / 2)) ** 2 / images
    middle = (area + square / 2) / (1 + square)
    half = math.sqrt(square * (max(0.0, area * (1 - area)) + square / 4)) / (1 + square)
    return max(0.0, min(area, middle - half)), min(1.0, max(area, middle + half))


def false_positive_rate_at(inliers: Tensor, outliers: Tensor, true_positive_rate: float = 0.95) -> float:
    """Return the lowest false-positive rate at which at least this share of the outliers is found.

    >>> false_positive_rate_at(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.5
    """
    if not 0 <= true_positive_rate <= 1:
        raise CandidError(f"The true positive rate must be from 0 to 1, not {true_positive_rate}.")
    curve = roc_curve(inliers, outliers)
    return curve.false_positive_rate[curve.true_positive_rate >= true_positive_rate].min().item()


def detection_metrics(inliers: Tensor, outliers: Tensor) -> dict[str, Any]:
    """Return the area under the curve with its interval, and the false-positive rate at 95 % true positives.

    >>> sorted(detection_metrics(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])))
    ['auc', 'fpr95', 'intervals']
    """
    return {
        "auc": area_under_curve(inliers, outliers),
        "fpr95": false_positive_rate_at(inliers, outliers, 0.95),
        "intervals": {"auc": list(auc_interval(inliers, outliers))},
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

"""Metrics of predictions: accuracy, likelihood, temperature, ROC curves, and intervals of all of them.

Scores of ROC curves rise with outlyingness, and outliers are the positives. The curve is scikit-learn's. The
area is computed from scipy's ranks instead of ``roc_auc_score``: these count pairs of images exactly, while
the trapezoids of ``roc_auc_score`` differ in the last digits and refuse infinite scores.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, logsumexp, softmax
from candid._support.randomness import draws

COLDEST, HOTTEST = 1e-3, 1e3
"""The range of temperatures that are fitted."""
_AT_ONCE = 2**20  # numbers in one piece of work: bounds the memory, whatever the number of images


def accuracy(logits: Array, labels: Array) -> float:
    """Share of images whose most probable class is the right one."""
    return float((logits.argmax(1) == labels).mean())


def error_rate(logits: Array, labels: Array) -> float:
    """Share of images whose most probable class is wrong."""
    return float((logits.argmax(1) != labels).mean())


def label_ranks(scores: Array, labels: Array) -> Array:
    """Return the number of classes before the label of each image, (N,); of equal scores, the first wins."""
    check_labels(scores, labels)
    if np.isnan(scores).any():
        raise CandidError("Some scores are NaN: they have no highest ones.")
    of_label = np.take_along_axis(scores, labels[:, None], 1)
    equal_before = (scores == of_label) & (np.arange(scores.shape[1]) < labels[:, None])
    return ((scores > of_label) | equal_before).sum(1)


def measured_uncertainty(posterior: Array, labels: Array) -> Array:
    """Return how uncertain decisions between two classes are on images of the two, (M, M) in float64.

    The mean of ``min(p_i, p_j) / (p_i + p_j)`` over images with the label i or j, from posteriors (N, M); NaN
    where there are no such images. Images without a label (-1) don't count.

    >>> posterior = np.array([[0.6, 0.2, 0.2], [0.1, 0.9, 0.0]])
    >>> measured_uncertainty(posterior, np.array([0, 1]))[0]
    array([0.5  , 0.175, 0.25 ])
    """
    posterior, labels = posterior[labels >= 0].astype(np.float64), labels[labels >= 0]
    classes = posterior.shape[1]
    sums = np.zeros((classes, classes))
    for y in np.unique(labels):
        rows = posterior[labels == y]
        of_label = rows[:, y, None]
        sums[y] = (np.minimum(rows, of_label) / (rows + of_label).clip(min=np.finfo(float).tiny)).sum(0)
    images = np.bincount(labels, minlength=classes)
    with np.errstate(invalid="ignore"):
        return (sums + sums.T) / (images[:, None] + images)


def measured_distances(logits: Array, labels: Array, distances: Array) -> Array:
    """Return how far apart the classes lie along the lines that decide between them, (M, M) in float64.

    A decision between i and j depends on a latent z only through its place on the line through the two means,
    ``t = (l_i - l_j) / |mu_i - mu_j|`` up to a constant, with logits l. The distance is that of the averages
    of t over images of i and over images of j, in standard deviations of a class; 0 if they lie the wrong way
    round, NaN without images of one of the two. Of latents that the mixture describes it is |mu_i - mu_j|.

    Args:
        logits: of images of known classes, (N, M).
        labels: their classes, (N,).
        distances: |mu_i - mu_j|, (M, M).

    >>> logits = np.array([[2.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    >>> measured_distances(logits, np.array([0, 0, 1]), np.array([[0.0, 2.0], [2.0, 0.0]]))
    array([[0., 2.],
           [2., 0.]])
    """
    classes = logits.shape[1]
    averages = np.full((classes, classes), math.nan)
    for y in np.unique(labels):
        averages[y] = logits[labels == y].astype(np.float64).mean(0)
    ahead = averages.diagonal()[:, None] - averages  # of the true class, on average
    measured = np.divide(ahead + ahead.T, distances, out=np.zeros_like(ahead), where=distances > 0)
    return measured.clip(min=0)


def label_losses(logits: Array, labels: Array) -> Array:
    """Return -log p(right class | x) of each image in nats, (N,) in float64."""
    wide = logits.astype(np.float64)
    return logsumexp(wide - np.take_along_axis(wide, labels[:, None], 1))


def cross_entropy(logits: Array, labels: Array) -> float:
    """Mean of -log p(right class | x), in nats."""
    return float(label_losses(logits, labels).mean())


def bits_per_dimension(log_density: Array, dimensions: int) -> float:
    """Mean of -log2 p(x) / D, of 8-bit images."""
    return -float(log_density.mean()) / (dimensions * math.log(2))


def check_labels(scores: Array, labels: Array) -> None:
    """Refuse what is not one row of scores (N, M) and one class number (N,) for each of some images."""
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise CandidError(
            f"Predictions must be (images, classes) and labels (images,), not {scores.shape} and "
            f"{labels.shape}."
        )
    if not scores.size:
        raise CandidError("There are no predictions to evaluate: give at least one image and one class.")
    if labels.dtype != np.int64:
        raise CandidError(f"Labels must be class numbers of type int64, not {labels.dtype}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= scores.shape[1]:
        wrong = low if low < 0 else high
        raise CandidError(
            f"Label {wrong} is none of the {scores.shape[1]} classes, 0 to {scores.shape[1] - 1}."
        )


def mean_entropy(posterior: Array) -> float:
    """Return the mean entropy of posteriors (N, M), in nats.

    >>> mean_entropy(np.array([[1.0, 0.0], [1.0, 0.0]]))
    0.0
    """
    logs = np.log(posterior, out=np.zeros(posterior.shape), where=posterior > 0)
    return 0.0 - float((posterior * logs).sum(1).mean())


def fit_temperature(logits: Array, labels: Array) -> float:
    """Return the temperature T, from 0.001 to 1000, that minimises the cross-entropy of softmax(logits / T).

    With d = logits - logits[label] and b = 1 / T, the loss log sum exp(b d) is convex in b, so its slope,
    the mean of sum softmax(b d) d, has one root. T is 1 if it makes no difference.

    >>> logits, labels = np.array([[2.0, 0.0]] * 4), np.array([0, 0, 0, 1])
    >>> round(fit_temperature(logits, labels), 6)  # 2 / log 3: three of four are right
    1.820478
    """
    check_labels(logits, labels)
    if not np.isfinite([logits.min(), logits.max()]).all():
        raise CandidError("Some logits are NaN or infinite: no temperature fits them.")

    def margins() -> Iterator[Array]:
        rows = max(1, _AT_ONCE // logits.shape[1])
        for start in range(0, len(labels), rows):
            part = logits[start : start + rows].astype(np.float64)
            yield part - np.take_along_axis(part, labels[start : start + rows, None], 1)

    def slope(log_b: float) -> float:
        return sum(float((softmax(math.exp(log_b) * d) * d).sum()) for d in margins())

    if not any(d.any() for d in margins()):
        return 1.0
    low, high = -math.log(HOTTEST), -math.log(COLDEST)
    if slope(high) <= 0:
        return COLDEST
    if slope(low) >= 0:
        return HOTTEST
    from scipy.optimize import brentq

    return math.exp(-brentq(slope, low, high, xtol=1e-12))


def log_odds(logits: Array) -> Array:
    """Return log p / (1 - p) of the most probable class, (N, M) to (N,): it orders images as p does.

    Unlike p it is not rounded to 1, so confident images are not tied.

    >>> log_odds(np.array([[0.0, 0.0], [100.0, 0.0]])).tolist()
    [0.0, 100.0]
    """
    rest = logits.astype(np.float64)  # a copy
    top = logits.argmax(1)[:, None]
    highest = np.take_along_axis(rest, top, 1)[:, 0]
    np.put_along_axis(rest, top, -np.inf, 1)
    return highest - logsumexp(rest)


class Interval(NamedTuple):
    """A metric on these images, and the range in which it may lie on others of their kind."""

    value: float
    low: float
    high: float


def mean_interval(values: Array, resamples: int = 1000, seed: int = 0, level: float = 0.95) -> Interval:
    """Return the mean of one value per image (N,), with its bootstrap interval.

    >>> mean_interval(np.array([3.0, 3.0]))
    Interval(value=3.0, low=3.0, high=3.0)
    """
    if values.ndim != 1 or not len(values):
        raise CandidError(f"One value per image is needed, (images,), not {values.shape}.")
    if not np.isfinite(values).all():
        raise CandidError("Some values are NaN or infinite: they have no mean.")
    n, columns = len(values), values.astype(np.float64)[:, None]
    (interval,) = bootstrap_intervals(columns, lambda sums: sums / n, resamples, seed, level)
    assert interval is not None
    return interval


def share_interval(hits: Array, level: float = 0.95) -> Interval:
    """Return the share of images that are hits (N,), with its exact binomial interval.

    >>> value, low, high = share_interval(np.array([True, True, True]))
    >>> value, round(low, 9), high
    (1.0, 0.292401774, 1.0)
    """
    if hits.ndim != 1 or not len(hits):
        raise CandidError(f"One value per image is needed, (images,), not {hits.shape}.")
    return binomial_interval(int(hits.sum()), len(hits), level)


def binomial_interval(hits: int, n: int, level: float) -> Interval:
    """Return Clopper and Pearson's interval of a share."""
    from scipy.stats import binomtest

    low, high = binomtest(hits, n).proportion_ci(level, method="exact")
    return Interval(hits / n, float(low), float(high))


def bootstrap_intervals(
    per_image: Array, metrics: Callable[[Array], Array], resamples: int, seed: int, level: float
) -> list[Interval | None]:
    """Return percentile intervals of metrics (..., F), functions of the sums (..., K) of ``per_image``.

    None for a metric that is NaN; resamples in which it is NaN are left out. Resampling adds noise, which
    moves a maximum or an absolute value up, so an interval is widened where it would miss the value.
    """
    if resamples < 1 or not 0 < level < 1:
        raise CandidError("A bootstrap needs at least one resample and a level between 0 and 1.")
    values = metrics(per_image.sum(0))
    resampled = metrics(_resampled_sums(per_image, resamples, seed))
    intervals: list[Interval | None] = []
    for value, column in zip(values.tolist(), resampled.T, strict=True):
        column = column[~np.isnan(column)]
        if math.isnan(value) or not len(column):
            intervals.append(None)
            continue
        low, high = np.quantile(column, ((1 - level) / 2, (1 + level) / 2)).tolist()
        intervals.append(Interval(value, min(low, value), max(high, value)))
    return intervals


def _resampled_sums(per_image: Array, resamples: int, seed: int) -> Array:
    """Return sums of ``per_image`` (N, K) over N images drawn with replacement, (R, K).

    How often each image is drawn, (R, N), times ``per_image``, for some resamples at a time.
    """
    n, random = len(per_image), draws(seed)
    sums, at_once = np.empty((resamples, per_image.shape[1])), max(1, _AT_ONCE // n)
    for start in range(0, resamples, at_once):
        part = sums[start : start + at_once]
        times = [np.bincount(random.integers(n, n), minlength=n) for _ in part]
        part[:] = np.array(times, np.float64) @ per_image
    return sums


class Roc(NamedTuple):
    """The rates at every threshold, from (0, 0) to (1, 1): an image is positive from the threshold on."""

    false_positive_rate: Array
    """Share of inliers that are flagged, (T,)."""
    true_positive_rate: Array
    """Share of outliers that are flagged, (T,)."""
    thresholds: Array
    """Every distinct score in falling order, (T,); the first one is infinite and flags no image."""


def roc_curve(inliers: Array, outliers: Array) -> Roc:
    """Return the rates at every threshold, for scores (N,) and (M,).

    >>> roc_curve(np.array([0.0, 1.0]), np.array([1.0, 2.0])).true_positive_rate.tolist()
    [0.0, 0.5, 1.0, 1.0]
    """
    from sklearn import metrics

    values, ranks = np.unique(_together(inliers, outliers), return_inverse=True)  # ranks are always finite
    positive = np.arange(len(ranks)) >= len(inliers)
    false, true, _ = metrics.roc_curve(positive, ranks, drop_intermediate=False)
    return Roc(false, true, np.append(np.inf, values[::-1]))


def area_under_curve(inliers: Array, outliers: Array) -> float:
    """Return the probability that an outlier scores higher than an inlier; equal scores count half.

    >>> area_under_curve(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    0.875
    """
    from scipy.stats import rankdata

    ranks = rankdata(_together(inliers, outliers))[len(inliers) :]
    m = len(outliers)
    return float((ranks.sum() - m * (m + 1) / 2) / (len(inliers) * m))


def auc_interval(inliers: Array, outliers: Array, level: float = 0.95) -> tuple[float, float]:
    """Return an interval of the area under the curve, for scores (N,) and (M,) of independent images.

    See :func:`placement_interval`.

    >>> low, high = auc_interval(np.arange(100), np.arange(100) + 50)
    >>> round(low, 3), round(high, 3)
    (0.823, 0.913)
    """
    return placement_interval(placements(inliers, outliers), level)


def placements(inliers: Array, outliers: Array) -> tuple[Array, Array]:
    """Return the share of outliers above each inlier (N,), and of inliers below each outlier (M,).

    Ties count half. Both have the area under the curve as their mean.

    >>> [shares.tolist() for shares in placements(np.array([0.0, 1.0]), np.array([1.0, 2.0]))]
    [[1.0, 0.75], [0.75, 1.0]]
    """
    from scipy.stats import rankdata

    n, m = len(inliers), len(outliers)
    ranks = rankdata(_together(inliers, outliers))
    above = 1 - (ranks[:n] - rankdata(ranks[:n])) / m
    below = (ranks[n:] - rankdata(ranks[n:])) / n
    return above, below


def paired_placements(inliers: Array, outliers: Array, rows: Array) -> Array:
    """Return one number per image (N,) for sets that come from the same N images; their mean is the area.

    Image i moves the area by (number i - area) / N, through its inlier and all its outliers.

    Args:
        inliers: the scores of n of the images as they are.
        outliers: the scores of several versions of all images, (versions, N).
        rows: which images the inliers are, (n,).
    """
    above, below = placements(inliers, outliers.reshape(-1))
    area, images = below.mean(), outliers.shape[1]
    influences = below.reshape(outliers.shape).mean(0)
    np.add.at(influences, rows, (above - area) * images / len(inliers))
    return influences


def placement_interval(sets: Sequence[Array], level: float = 0.95) -> tuple[float, float]:
    """Return the score interval (Wilson) of an area from ``sets`` of :func:`placements`.

    The variance of the area is the sum of the variances of the sets' means (DeLong). A share of n images has
    the variance A (1 - A) / n, so an area is treated as a share of A (1 - A) / variance images. To estimate
    this number, one image at random, with a placement of 1/2, is added to each set. So an area of 1 has an
    interval, too.

    Args:
        sets: the placements of inliers and of outliers, or those of pairs alone.
        level: the probability that the interval covers the area.

    >>> low, high = placement_interval([np.ones(100), np.ones(100)])
    >>> round(low, 3), high
    (0.963, 1.0)
    """
    if not 0 < level < 1:
        raise CandidError(f"The level of an interval must be between 0 and 1, not {level}.")
    from scipy.special import ndtri

    area = float(sets[0].mean())
    extra = 0.5 if len(sets) == 2 else 1 - area  # the influences of both sides of a pair add up
    extended = [np.append(shares, extra) for shares in sets]
    variance = sum(float(shares.var(ddof=1) / len(shares)) for shares in extended)
    shrunk = sum(float(shares.mean()) for shares in extended) / len(extended)
    images = shrunk * (1 - shrunk) / variance if variance > 0 else min(map(len, sets))
    square = float(ndtri((1 + level) / 2)) ** 2 / images
    middle = (area + square / 2) / (1 + square)
    half = math.sqrt(square * (max(0.0, area * (1 - area)) + square / 4)) / (1 + square)
    return max(0.0, min(area, middle - half)), min(1.0, max(area, middle + half))


def false_positive_rate_at(inliers: Array, outliers: Array, true_positive_rate: float = 0.95) -> float:
    """Return the lowest false-positive rate at which at least this share of the outliers is found.

    >>> false_positive_rate_at(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    0.5
    """
    if not 0 <= true_positive_rate <= 1:
        raise CandidError(f"The true positive rate must be from 0 to 1, not {true_positive_rate}.")
    curve = roc_curve(inliers, outliers)
    return float(curve.false_positive_rate[curve.true_positive_rate >= true_positive_rate].min())


def detection_metrics(inliers: Array, outliers: Array) -> dict[str, Any]:
    """Return the area under the curve with its interval, and the false-positive rate at 95 % true positives.

    >>> sorted(detection_metrics(np.array([0.0, 1.0]), np.array([1.0, 2.0])))
    ['auc', 'fpr95', 'intervals']
    """
    return {
        "auc": area_under_curve(inliers, outliers),
        "fpr95": false_positive_rate_at(inliers, outliers, 0.95),
        "intervals": {"auc": list(auc_interval(inliers, outliers))},
    }


def _together(inliers: Array, outliers: Array) -> Array:
    """Return all scores, inliers first, in float64."""
    for name, scores in (("inliers", inliers), ("outliers", outliers)):
        if scores.ndim != 1 or not len(scores):
            raise CandidError(
                f"Scores of {name} must be (images,) of at least one image, not {scores.shape}."
            )
        if np.isnan(scores).any():
            raise CandidError(f"Some scores of {name} are NaN: they can't be ranked.")
    return np.concatenate((inliers, outliers), dtype=np.float64)

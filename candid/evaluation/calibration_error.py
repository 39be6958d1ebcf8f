"""Calibration error: are 80 % of the predictions with a posterior of 80 % correct?

Two conventions are in use. The paper counts every class's posterior of every image as one prediction
(``all_bins``); most others count only the most probable class of each image (``top_bins``).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.inference.metrics import Interval, binomial_interval, bootstrap_intervals, check_labels

CRITICAL = 0.997
"""The confidence at which the paper calls a prediction confident."""
BINS = 15
"""Number of bins of the calibration errors; the paper does not state its own."""
_AT_ONCE = 2**18  # numbers in one piece of work: bounds the memory, whatever the number of images


class Bins(NamedTuple):
    """Predictions by their confidence: bin k of n holds [k/n, (k+1)/n), and the last one also 1.

    Empty bins are zero in all columns.
    """

    count: Array  # type: ignore[assignment]  # hides tuple.count
    """Number of predictions, (B,) in int64."""
    confidence: Array
    """Mean confidence, (B,)."""
    accuracy: Array
    """Share of predictions that are correct, (B,)."""

    @property
    def errors(self) -> Array:
        """Poisson standard errors of the accuracy, sqrt(number right, at least 1) / count, (B,)."""
        right = (self.count * self.accuracy).clip(min=1)
        return np.where(self.count > 0, np.sqrt(right) / self.count.clip(min=1), 0.0)


def all_bins(posterior: Array, labels: Array, bins: int = BINS) -> Bins:
    """Return bins in which every class's posterior (N, M) is a prediction, correct if it is the label (N,).

    >>> all_bins(np.array([[0.75, 0.25]]), np.array([0]), bins=2).accuracy.tolist()
    [0.0, 1.0]
    """
    _check(posterior, labels, bins)
    return _bins_of(_every_class(posterior, labels, bins).sum(0))


def top_bins(posterior: Array, labels: Array, bins: int = BINS) -> Bins:
    """Return bins in which only the most probable class of each image is a prediction.

    >>> top_bins(np.array([[0.75, 0.25]]), np.array([0]), bins=2).count.tolist()
    [0, 1]
    """
    _check(posterior, labels, bins)
    return _bins_of(_top_class(posterior, labels, bins).sum(0))


def expected_calibration_error(bins: Bins) -> float:
    """Return the mean of |confidence - accuracy| over the bins, weighted by their counts.

    >>> bins = top_bins(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1]))
    >>> expected_calibration_error(bins)
    0.5
    """
    return float(_expected(bins))


def calibration_metrics(
    posterior: Array,
    labels: Array,
    bins: int = BINS,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Interval | None]:
    """Return ``ece``, ``mce`` and ``oce`` of all classes' posteriors and ``top1_ece``, with intervals.

    Those of binned errors are bootstrapped: they say how much a metric varies from one set of images to
    another. They do not correct its bias: noise in a bin counts as miscalibration, so the binned errors of a
    perfect model are above zero, and their intervals too. ``oce``, the overconfidence error, is the share of
    wrong ones among the posteriors of at least 0.997, divided by the share 0.003 that these allow. It has an
    exact binomial interval: of a few confident predictions, none may be wrong. It is None if there are none.

    >>> errors = calibration_metrics(np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]), np.array([0, 1, 1]))
    >>> round(errors["oce"].value, 2)
    166.67
    """
    _check(posterior, labels, bins)
    parts = _every_class(posterior, labels, bins), _top_class(posterior, labels, bins)

    def errors(sums: Array) -> Array:
        every, top = np.moveaxis(sums.reshape(*sums.shape[:-1], 2, 3, bins), -3, 0)
        both = _bins_of(every), _bins_of(top)
        return np.stack((_expected(both[0]), _maximum(both[0]), _expected(both[1])), -1)

    per_image = np.concatenate([part.reshape(len(labels), -1) for part in parts], 1)
    ece, mce, top1_ece = bootstrap_intervals(per_image, errors, resamples, seed, level)
    oce = _overconfidence(posterior, labels, level)
    return {"ece": ece, "mce": mce, "oce": oce, "top1_ece": top1_ece}


def _check(posterior: Array, labels: Array, bins: int) -> None:
    check_labels(posterior, labels)
    if bins < 1:
        raise CandidError(f"At least one bin is needed, not {bins}.")
    sums_to_one = abs(posterior.sum(1) - 1) <= 1e-4  # false for NaN
    if not sums_to_one.all() or posterior.min() < 0:
        raise CandidError(
            "Posteriors must be probabilities that sum to 1 for each image: use the softmax of the logits."
        )


def _every_class(posterior: Array, labels: Array, bins: int) -> Array:
    sums = np.empty((len(labels), 3, bins))
    for rows, p, right in _pieces(posterior, labels):
        sums[rows] = _binned(p, right, bins)
    return sums


def _top_class(posterior: Array, labels: Array, bins: int) -> Array:
    predicted = posterior.argmax(1)[:, None]
    confidence = np.take_along_axis(posterior, predicted, 1)
    return _binned(confidence.astype(np.float64), predicted == labels[:, None], bins)


def _pieces(posterior: Array, labels: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Yield some images at a time: which, their posteriors in float64, and which are correct, (n, M)."""
    classes = np.arange(posterior.shape[1])
    at_once = max(1, _AT_ONCE // len(classes))
    for start in range(0, len(labels), at_once):
        rows = slice(start, start + at_once)
        yield rows, posterior[rows].astype(np.float64), labels[rows, None] == classes


def _binned(confidence: Array, right: Array, bins: int) -> Array:
    """Count, sum of confidences and number right of each image's predictions (n, M) by bin, (n, 3, B)."""
    n = len(confidence)
    inner_edges = np.arange(1, bins) / bins
    places = np.searchsorted(inner_edges, confidence, side="right") + bins * np.arange(n)[:, None]
    terms = (None, confidence.reshape(-1), right.reshape(-1))
    sums = [np.bincount(places.reshape(-1), term, n * bins).reshape(n, bins) for term in terms]
    return np.stack(sums, 1).astype(np.float64)


def _bins_of(sums: Array) -> Bins:
    """Return bins from sums over images, (..., 3, B)."""
    count, confidence, right = np.moveaxis(sums, -2, 0)
    return Bins(count.astype(np.int64), confidence / count.clip(min=1), right / count.clip(min=1))


def _expected(bins: Bins) -> Array:
    gaps = abs(bins.confidence - bins.accuracy)
    expected: Array = (bins.count * gaps).sum(-1) / bins.count.sum(-1)
    return expected


def _maximum(bins: Bins) -> Array:
    maximum: Array = abs(bins.confidence - bins.accuracy).max(-1)
    return maximum


def _overconfidence(posterior: Array, labels: Array, level: float) -> Interval | None:
    """Return the overconfidence error with its exact interval; None if no prediction is confident."""
    confident = wrong = 0
    for _, p, right in _pieces(posterior, labels):
        confident += int((p >= CRITICAL).sum())
        wrong += int(((p >= CRITICAL) & ~right).sum())
    if not confident:
        return None
    return Interval(*(share / (1 - CRITICAL) for share in binomial_interval(wrong, confident, level)))

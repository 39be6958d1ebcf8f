"""Calibration error: are 80 % of the predictions with a posterior of 80 % correct?

Two conventions are in use. The paper counts every class's posterior of every image as one prediction
(``all_bins``); most others count only the most probable class of each image (``top_bins``).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.intervals import Interval, binomial_interval, bootstrap_intervals
from candid.inference.metrics import check_labels

CRITICAL = 0.997
"""The confidence at which the paper calls a prediction confident."""
BINS = 15
"""Number of bins of the calibration errors; the paper does not state its own."""
_AT_ONCE = 2**18  # numbers in one piece of work: bounds the memory, whatever the number of images


class Bins(NamedTuple):
    """Predictions by their confidence: bin k of n holds [k/n, (k+1)/n), and the last one also 1.

    Empty bins are zero in all columns.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """Number of predictions, (B,) in int64."""
    confidence: Tensor
    """Mean confidence, (B,)."""
    accuracy: Tensor
    """Share of predictions that are correct, (B,)."""

    @property
    def errors(self) -> Tensor:
        """Poisson standard errors of the accuracy, sqrt(number right, at least 1) / count, (B,)."""
        right = (self.count * self.accuracy).clamp(min=1)
        return torch.where(self.count > 0, right.sqrt() / self.count.clamp(min=1), 0.0)


def all_bins(posterior: Tensor, labels: Tensor, bins: int = BINS) -> Bins:
    """Return bins in which every class's posterior (N, M) is a prediction, correct if it is the label (N,).

    >>> all_bins(torch.tensor([[0.75, 0.25]]), torch.tensor([0]), bins=2).accuracy.tolist()
    [0.0, 1.0]
    """
    _check(posterior, labels, bins)
    return _bins_of(_every_class(posterior, labels, bins).sum(0))


def top_bins(posterior: Tensor, labels: Tensor, bins: int = BINS) -> Bins:
    """Return bins in which only the most probable class of each image is a prediction.

    >>> top_bins(torch.tensor([[0.75, 0.25]]), torch.tensor([0]), bins=2).count.tolist()
    [0, 1]
    """
    _check(posterior, labels, bins)
    return _bins_of(_top_class(posterior, labels, bins).sum(0))


def expected_calibration_error(bins: Bins) -> float:
    """Return the mean of |confidence - accuracy| over the bins, weighted by their counts.

    >>> bins = top_bins(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    >>> expected_calibration_error(bins)
    0.5
    """
    return _expected(bins).item()


def overconfidence_error(posterior: Tensor, labels: Tensor, critical: float = CRITICAL) -> float | None:
    """Return the error rate of confident predictions divided by the rate that they allow; None without any.

    The share of wrong ones among the posteriors of at least ``critical``, over 1 - ``critical``.

    >>> posterior = torch.tensor([[1.0, 0.0], [0.875, 0.125], [0.5, 0.5]])
    >>> overconfidence_error(posterior, torch.tensor([0, 1, 1]), critical=0.75)
    2.0
    """
    _check(posterior, labels)
    if not 0 <= critical < 1:
        raise CandidError(f"The critical confidence must be at least 0 and below 1, not {critical}.")
    sums = _sure(posterior, labels, critical).sum(0)
    return _overconfidence(sums, critical).item() if sums[0] else None


def calibration_metrics(
    posterior: Tensor,
    labels: Tensor,
    bins: int = BINS,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Interval | None]:
    """Return ``ece``, ``mce`` and ``oce`` of all classes' posteriors and ``top1_ece``, with intervals.

    Those of binned errors are bootstrapped: they say how much a figure varies from one set of images to
    another. They do not correct its bias: noise in a bin counts as miscalibration, so the binned errors of a
    perfect model are above zero, and their intervals too. ``oce`` has an exact binomial interval: of a few
    confident predictions, none may be wrong. It is None if no posterior reaches 0.997.
    """
    _check(posterior, labels, bins)
    parts = _every_class(posterior, labels, bins), _top_class(posterior, labels, bins)

    def figures(sums: Tensor) -> Tensor:
        every, top = (_bins_of(part) for part in sums.unflatten(-1, (2, 3, bins)).unbind(-3))
        return torch.stack((_expected(every), _maximum(every), _expected(top)), -1)

    per_image = torch.cat([part.flatten(1) for part in parts], 1)
    ece, mce, top1_ece = bootstrap_intervals(per_image, figures, resamples, seed, level)
    oce = _overconfidence_interval(_sure(posterior, labels, CRITICAL).sum(0), CRITICAL, level)
    return {"ece": ece, "mce": mce, "oce": oce, "top1_ece": top1_ece}


def _check(posterior: Tensor, labels: Tensor, bins: int = 1) -> None:
    check_labels(posterior, labels)
    if bins < 1:
        raise CandidError(f"At least one bin is needed, not {bins}.")
    sums_to_one = (posterior.sum(1) - 1).abs() <= 1e-4  # false for NaN
    if not sums_to_one.all() or posterior.min() < 0:
        raise CandidError(
            "Posteriors must be probabilities that sum to 1 for each image: use logits.softmax(1)."
        )


def _every_class(posterior: Tensor, labels: Tensor, bins: int) -> Tensor:
    sums = posterior.new_empty(len(labels), 3, bins, dtype=torch.float64)
    for rows, p, right in _pieces(posterior, labels):
        sums[rows] = _binned(p, right, bins)
    return sums


def _top_class(posterior: Tensor, labels: Tensor, bins: int) -> Tensor:
    confidence, predicted = posterior.max(1, keepdim=True)
    return _binned(confidence.double(), predicted == labels[:, None], bins)


def _sure(posterior: Tensor, labels: Tensor, critical: float) -> Tensor:
    """Return the confident predictions of each image, and the wrong ones among them, (N, 2)."""
    sums = posterior.new_empty(len(labels), 2, dtype=torch.float64)
    for rows, p, right in _pieces(posterior, labels):
        sure = p >= critical
        sums[rows] = torch.stack((sure.sum(1), (sure & ~right).sum(1)), 1).double()
    return sums


def _pieces(posterior: Tensor, labels: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some images at a time: which, their posteriors in float64, and which are correct, (n, M)."""
    classes = torch.arange(posterior.shape[1], device=posterior.device)
    at_once = max(1, _AT_ONCE // len(classes))
    for start in range(0, len(labels), at_once):
        rows = slice(start, start + at_once)
        yield rows, posterior[rows].double(), labels[rows, None] == classes


def _binned(confidence: Tensor, right: Tensor, bins: int) -> Tensor:
    """Count, sum of confidences and number right of each image's predictions (n, M) by bin, (n, 3, B)."""
    inner_edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    bin_of = torch.bucketize(confidence.contiguous(), inner_edges, right=True)
    terms = torch.stack((torch.ones_like(confidence), confidence, right.double()), 1)
    sums = terms.new_zeros(len(terms), 3, bins)
    return sums.scatter_add_(2, bin_of[:, None].expand_as(terms), terms)


def _bins_of(sums: Tensor) -> Bins:
    """Return bins from sums over images, (..., 3, B)."""
    count, confidence, right = sums.unbind(-2)
    return Bins(count.long(), confidence / count.clamp(min=1), right / count.clamp(min=1))


def _expected(bins: Bins) -> Tensor:
    gaps = (bins.confidence - bins.accuracy).abs()
    return (bins.count * gaps).sum(-1) / bins.count.sum(-1)


def _maximum(bins: Bins) -> Tensor:
    return (bins.confidence - bins.accuracy).abs().amax(-1)


def _overconfidence(sums: Tensor, critical: float) -> Tensor:
    """Return the OCE; NaN if no prediction is confident."""
    sure, wrong = sums.unbind(-1)
    return wrong / sure / (1 - critical)


def _overconfidence_interval(sums: Tensor, critical: float, level: float) -> Interval | None:
    """Return the exact interval; None if no prediction is confident."""
    sure, wrong = map(int, sums)
    if not sure:
        return None
    return Interval(*(share / (1 - critical) for share in binomial_interval(wrong, sure, level)))

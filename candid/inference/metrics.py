"""Accuracy, likelihood, entropy and temperature: pure functions of a model's predictions."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor

from candid._support.errors import CandidError

COLDEST, HOTTEST = 1e-3, 1e3
"""The range of temperatures that are fitted."""
_AT_ONCE = 2**18  # numbers in one piece of work: bounds the memory, whatever the number of images


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of images whose most probable class is the right one."""
    return (logits.argmax(1) == labels).double().mean().item()


def error_rate(logits: Tensor, labels: Tensor) -> float:
    """Share of images whose most probable class is wrong."""
    return (logits.argmax(1) != labels).double().mean().item()


def top_k_accuracy(scores: Tensor, labels: Tensor, k: int) -> float:
    """Share of images whose label is among the k highest scores; of equal scores, the first class wins.

    >>> scores = torch.tensor([[0.1, 0.3, 0.6], [0.5, 0.3, 0.2]])
    >>> top_k_accuracy(scores, torch.tensor([1, 2]), k=2)
    0.5
    """
    classes = scores.shape[-1]
    if not 1 <= k <= classes:
        raise CandidError(
            f"Top-{k} accuracy is not defined for {classes} classes: choose k from 1 to {classes}."
        )
    return (label_ranks(scores, labels) < k).double().mean().item()


def label_ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the label of each image, (N,); of equal scores, the first class does."""
    check_labels(scores, labels)
    if scores.isnan().any():
        raise CandidError("Some scores are NaN: they have no highest ones.")
    own = scores.gather(1, labels[:, None])
    equal_before = (scores == own) & (torch.arange(scores.shape[1], device=scores.device) < labels[:, None])
    return ((scores > own) | equal_before).sum(1)


def measured_uncertainty(posterior: Tensor, labels: Tensor) -> Tensor:
    """Return how uncertain decisions between two classes are on images of the two, (M, M) in float64.

    The mean of ``min(p_i, p_j) / (p_i + p_j)`` over images with the label i or j, from posteriors (N, M); NaN
    where there are no such images. Images without a label (-1) don't count.

    >>> posterior = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.9, 0.0]])
    >>> measured_uncertainty(posterior, torch.tensor([0, 1]))[0]
    tensor([0.5000, 0.1750, 0.2500], dtype=torch.float64)
    """
    posterior, labels = posterior[labels >= 0].double(), labels[labels >= 0]
    sums = posterior.new_zeros(posterior.shape[1], posterior.shape[1])
    for y in labels.unique().tolist():
        rows = posterior[labels == y]
        own = rows[:, y, None]
        sums[y] = (torch.minimum(rows, own) / (rows + own).clamp(min=torch.finfo(rows.dtype).tiny)).sum(0)
    images = labels.bincount(minlength=len(sums))
    return (sums + sums.T) / (images[:, None] + images)


def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean of -log p(right class | x), in nats."""
    return F.cross_entropy(logits.double(), labels).item()


def bits_per_dimension(log_density: Tensor, dimensions: int) -> float:
    """Mean of -log2 p(x) / D, of 8-bit images."""
    return -log_density.mean().item() / (dimensions * math.log(2))


def check_labels(scores: Tensor, labels: Tensor) -> None:
    """Refuse what is not one row of scores (N, M) and one class number (N,) for each of some images."""
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        shapes = f"{tuple(scores.shape)} and {tuple(labels.shape)}"
        raise CandidError(f"Predictions must be (images, classes) and labels (images,), not {shapes}.")
    if not scores.numel():
        raise CandidError("There are no predictions to evaluate: give at least one image and one class.")
    if labels.dtype != torch.int64:
        raise CandidError(f"Labels must be class numbers of type int64, not {labels.dtype}.")
    low, high = (int(label) for label in labels.aminmax())
    if low < 0 or high >= scores.shape[1]:
        wrong = low if low < 0 else high
        raise CandidError(
            f"Label {wrong} is none of the {scores.shape[1]} classes, 0 to {scores.shape[1] - 1}."
        )


def mean_entropy(posterior: Tensor) -> float:
    """Return the mean entropy of posteriors (N, M), in nats.

    >>> mean_entropy(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    0.0
    """
    return float(torch.special.entr(posterior).sum(1).mean())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature T, from 0.001 to 1000, that minimises the cross-entropy of softmax(logits / T).

    With d = logits - logits[label] and b = 1 / T, the loss log sum exp(b d) is convex in b, so its slope,
    the mean of sum softmax(b d) d, has one root. T is 1 if it makes no difference.

    >>> logits, labels = torch.tensor([[2.0, 0.0]]).expand(4, 2), torch.tensor([0, 0, 0, 1])
    >>> round(fit_temperature(logits, labels), 6)  # 2 / log 3: three of four are right
    1.820478
    """
    check_labels(logits, labels)
    if not torch.stack(logits.aminmax()).isfinite().all():
        raise CandidError("Some logits are NaN or infinite: no temperature fits them.")

    def margins() -> Iterator[Tensor]:
        rows = max(1, _AT_ONCE // logits.shape[1])
        for part, y in zip(logits.split(rows), labels.split(rows), strict=True):
            yield part.double() - part.gather(1, y[:, None]).double()

    def slope(log_b: float) -> float:
        return sum(((math.exp(log_b) * d).softmax(1) * d).sum().item() for d in margins())

    if not any(d.any() for d in margins()):
        return 1.0
    low, high = -math.log(HOTTEST), -math.log(COLDEST)
    if slope(high) <= 0:
        return COLDEST
    if slope(low) >= 0:
        return HOTTEST
    return math.exp(-brentq(slope, low, high, xtol=1e-12))


def log_odds(logits: Tensor) -> Tensor:
    """Return log p / (1 - p) of the most probable class, (N, M) to (N,): it orders images as p does.

    Unlike p it is not rounded to 1, so confident images are not tied.

    >>> log_odds(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()
    [0.0, 100.0]
    """
    logits = logits.double()
    top, at = logits.max(1, keepdim=True)
    return top[:, 0] - logits.scatter(1, at, -torch.inf).logsumexp(1)

"""Accuracy and likelihood: pure functions of a model's predictions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from candid._support.errors import CandidError


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of images whose most probable class is the right one."""
    return (logits.argmax(1) == labels).double().mean().item()


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

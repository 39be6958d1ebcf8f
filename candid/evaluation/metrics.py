"""Accuracy, likelihood, calibration: pure functions of a model's predictions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of images whose most probable class is the right one."""
    return (logits.argmax(1) == labels).double().mean().item()


def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean of -log p(right class | x), in nats."""
    return F.cross_entropy(logits.double(), labels).item()


def bits_per_dimension(log_density: Tensor, dimensions: int) -> float:
    """Mean of -log2 p(x) / D, of 8-bit images."""
    return -log_density.mean().item() / (dimensions * math.log(2))


def expected_calibration_error(posterior: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Mean distance between confidence and accuracy, over equal-width bins of the confidence.

    Bin k of n holds the confidences in (k/n, (k+1)/n]: a confidence of exactly 1 is in the last bin.

    >>> expected_calibration_error(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    0.5
    """
    confidence, predicted = posterior.double().max(dim=1)
    right = (predicted == labels).double()
    inner_edges = torch.arange(1, bins, dtype=torch.float64) / bins
    bin_of = torch.bucketize(confidence, inner_edges)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, confidence - right)
    return (gaps.abs().sum() / len(labels)).item()

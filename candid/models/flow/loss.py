"""The information-bottleneck loss of a generative classifier."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid.models.flow.mixture import log_standard_normal


class Losses(NamedTuple):
    """Scalars: the weighted sum to minimise, and its two parts in nats."""

    total: Tensor
    L_X: Tensor
    """-log q(v) per dimension, of the normalised image v: how well the model describes images."""
    L_Y: Tensor
    """Cross-entropy of the class posterior: how well it separates classes."""


def information_bottleneck_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    beta: float,
    label_smoothing: float = 0.05,
    generator: torch.Generator | None = None,
) -> Losses:
    """``(L_X + beta L_Y) / (1 + beta)``; ``beta = 0`` is L_X alone and ``inf`` L_Y alone.

    ::

        L_X = -(logsumexp_y(log p(z|y) + log p(y)) + log_det) / D
        L_Y = -sum_y t_y log p(y|z),   t = (1 - label_smoothing) onehot(y) + label_smoothing / M

    averaged over the batch (Ardizzone et al., 2020; with the signs that the paper's print lost).

    Args:
        model: a :class:`~candid.GenerativeClassifier`, bare or wrapped in DistributedDataParallel.
        x: images in [0, 1], (B, C, H, W).
        y: labels, (B,).
        beta: the weight of the classification loss.
        label_smoothing: the share of each label that is spread over all classes.
        generator: where the dequantisation noise of training comes from.

    Returns:
        The total loss, L_X and L_Y, each averaged over the batch.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> losses = information_bottleneck_loss(model, torch.rand(4, 1, 8, 8), torch.arange(4), beta=1)
    >>> losses.total.isclose((losses.L_X + losses.L_Y) / 2).item()
    True
    """
    if not beta >= 0:
        raise CandidError(f"'beta' must be zero, a positive number or inf, not {beta}.")
    if not 0 <= label_smoothing <= 1:
        raise CandidError(f"'label_smoothing' must lie in [0, 1], not {label_smoothing}.")
    z, log_det, logits = model(x, generator)
    log_density = log_standard_normal(z) + logits.logsumexp(1) + log_det
    l_x = -log_density.mean() / z.shape[1]
    l_y = F.cross_entropy(logits, y, label_smoothing=label_smoothing)
    if math.isinf(beta):
        return Losses(l_y, l_x, l_y)
    weight_x = 1 / (1 + beta)
    return Losses(weight_x * l_x + (1 - weight_x) * l_y if beta else l_x, l_x, l_y)

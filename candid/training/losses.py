"""What a batch costs, and what a model gets right."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid.data.loader import NamedBatch
from candid.inference.predictions import predict_batches
from candid.models.flow.loss import Losses, information_bottleneck_loss
from candid.models.protocol import Model
from candid.training.options import TrainConfig


def losses_of(model: nn.Module, x: Tensor, y: Tensor, config: TrainConfig, noise: torch.Generator) -> Losses:
    """The information-bottleneck loss, or for a baseline the same cross-entropy alone."""
    if not config.baseline:
        return information_bottleneck_loss(model, x, y, config.beta, config.label_smoothing, noise)
    l_y = F.cross_entropy(model(x), y, label_smoothing=config.label_smoothing)
    return Losses(l_y, torch.zeros_like(l_y), l_y)


def sums_over(model: Model, batches: Iterable[NamedBatch]) -> Tensor:
    """Images that are right, cross-entropies, log densities (0 if it has none): sums, (3,) in float64."""
    found = predict_batches(model, batches)
    right = (found.logits.argmax(1) == found.labels).sum()
    entropy = F.cross_entropy(found.logits.double(), found.labels, reduction="sum")
    total = torch.zeros(()) if found.log_density is None else found.log_density.sum()
    return torch.stack([right.double(), entropy, total.double()])

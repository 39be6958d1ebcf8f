"""The loss of a batch, and what a model gets right on validation images."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid.data.loader import NamedBatch
from candid.inference.metrics import bits_per_dimension
from candid.inference.predictions import to_float
from candid.models.flow.loss import Losses, information_bottleneck_loss
from candid.models.protocol import Model
from candid.training.options import TrainOptions

Row = dict[str, float]


def losses_of(
    model: nn.Module, x: Tensor, y: Tensor, options: TrainOptions, noise: torch.Generator
) -> Losses:
    """Return the information-bottleneck loss; for a ResNet, the same cross-entropy alone."""
    if not options.baseline:
        return information_bottleneck_loss(model, x, y, options.beta, options.label_smoothing, noise)
    l_y = F.cross_entropy(model(x), y, label_smoothing=options.label_smoothing)
    return Losses(l_y, torch.zeros_like(l_y), l_y)


@torch.inference_mode()
def sums_over(model: Model, batches: Iterable[NamedBatch]) -> Tensor:
    """Return sums over images: right ones, cross-entropies, log densities (or 0), (3,) in float64."""
    frozen = model.frozen()
    logits, labels, densities = [torch.zeros(0, len(model.class_names))], [torch.zeros(0).long()], []
    for images, y, _ in batches:
        outputs = frozen.outputs(to_float(images, model.device))
        logits.append(outputs.logits.cpu())
        labels.append(y)
        if outputs.log_density_terms is not None:
            densities.append(outputs.log_density_terms.cpu().sum(1))
    scores, y = torch.cat(logits), torch.cat(labels)
    right = (scores.argmax(1) == y).sum()
    entropy = F.cross_entropy(scores.double(), y, reduction="sum")
    total = torch.cat(densities).sum() if densities else torch.zeros(())
    return torch.stack([right.double(), entropy, total.double()])


def validation_metrics(sums: Tensor, model: Model, bits_offset: float | None, beta: float) -> Row:
    """Return loss, accuracy, cross-entropy and bits/dim from the means of what :func:`sums_over` sums."""
    accuracy, entropy, log_density = sums.unbind()
    metrics = {"accuracy": float(accuracy), "cross_entropy": float(entropy)}
    if bits_offset is None:
        return {"loss": float(entropy), **metrics}
    metrics["bits_per_dim"] = bits_per_dimension(log_density, model.dimensions)
    l_x = (metrics["bits_per_dim"] - bits_offset) * math.log(2)
    loss = float(entropy) if math.isinf(beta) else (l_x + beta * float(entropy)) / (1 + beta)
    return {"loss": loss, **metrics}


def training_metrics(losses: list[float], bits_offset: float | None) -> Row:
    """Return mean losses of steps (loss, L_X, L_Y) under the names and in the units that people read."""
    loss, l_x, l_y = losses
    row = {"loss": loss, "cross_entropy": l_y}
    return row if bits_offset is None else row | {"bits_per_dim": l_x / math.log(2) + bits_offset}

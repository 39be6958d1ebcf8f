"""One pass of a model over a split; every figure is a function of it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from candid.baseline import ResNet
from candid.classifier import GenerativeClassifier


class Predictions(NamedTuple):
    """What a model says of N images; on the CPU."""

    labels: Tensor
    """(N,)."""
    logits: Tensor
    """(N, M)."""
    log_density: Tensor | None
    """log p(x) of the 8-bit image in nats, (N,) in float64; None for a baseline."""


@torch.inference_mode()
def predict_batches(
    model: GenerativeClassifier | ResNet, batches: Iterable[tuple[Tensor, Tensor]]
) -> Predictions:
    """``model``, in evaluation mode, on batches of 8-bit images (B, C, H, W) and labels (B,)."""
    labels, logits, densities = [], [], []
    device = model.image_mean.device
    if isinstance(model, GenerativeClassifier):
        model = model.frozen()
    for images, y in batches:
        x = to_float(images, device)
        if isinstance(model, GenerativeClassifier):
            outputs = model(x)
            logits.append(outputs.logits.cpu())
            densities.append(model.log_density_of(outputs).cpu())
        else:
            logits.append(model.logits(x).cpu())
        labels.append(y)
    if not labels:
        density = torch.empty(0).double() if isinstance(model, GenerativeClassifier) else None
        return Predictions(torch.empty(0, dtype=torch.long), torch.empty(0, model.config.classes), density)
    return Predictions(torch.cat(labels), torch.cat(logits), torch.cat(densities) if densities else None)


def to_float(images: Tensor, device: torch.device | str) -> Tensor:
    """8-bit images to floats in [0, 1] on ``device``."""
    return images.to(device, non_blocking=True).float() / 255

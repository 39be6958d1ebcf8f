"""The optimiser and its learning rate."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from candid.training.config import TrainConfig


def build_optimiser(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """SGD with momentum or AdamW; weight decay on convolution weights alone."""
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if id(p) in convolutions], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if id(p) not in convolutions], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.momentum, 0.99), fused=True)


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int, val_losses: Sequence[float]) -> float:
    """The learning rate of a step: a function of its number and of the epochs' validation losses.

    One-cycle: up along a line over the share ``burn_in`` of the run, down to zero along a cosine. Plateau:
    up over ``burn_in`` epochs, then constant, divided by 10 at each plateau.
    """
    if config.schedule == "plateau":
        rise = min(1.0, (step + 1) / max(1.0, config.burn_in * steps_per_epoch))
        return config.learning_rate * rise / 10 ** min(config.coolings, plateaus(val_losses, config.patience))
    steps = config.epochs * steps_per_epoch
    top = config.burn_in * steps
    if step < top:
        return config.learning_rate * (step + 1) / (top + 1)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - top) / (steps - top)))


def plateaus(losses: Sequence[float], patience: int) -> int:
    """How many times ``patience`` epochs went by without a loss below all earlier ones.

    >>> plateaus([3.0, 2.0, 2.1, 2.2, 1.9, 1.8, 1.8, 1.8], patience=2)
    2
    """
    best, since, count = math.inf, 0, 0
    for loss in losses:
        since = 0 if loss < best else since + 1
        best = min(best, loss)
        if since == patience:
            count, since = count + 1, 0
    return count


def is_over(config: TrainConfig, val_losses: Sequence[float]) -> bool:
    """A plateau schedule ends early: at the first plateau after the last cooling."""
    return config.schedule == "plateau" and plateaus(val_losses, config.patience) > config.coolings

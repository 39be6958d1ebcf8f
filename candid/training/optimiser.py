"""The optimiser and its learning rate."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from candid.models.flow.coupling import ActNorm
from candid.models.flow.mixture import LatentMixture
from candid.training.options import TrainOptions


def build_optimiser(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Return SGD with momentum or AdamW, with weight decay on convolution weights alone.

    Each group has a ``share`` of the learning rate: :func:`set_learning_rate`.
    """
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d)}
    means = {id(p) for m in model.modules() if isinstance(m, LatentMixture) for p in m.parameters()}
    scales = {id(m.gamma) for m in model.modules() if isinstance(m, ActNorm)}
    groups: dict[str, dict[str, Any]] = {
        "convolutions": {"params": [], "weight_decay": options.weight_decay, "share": 1.0},
        "means": {"params": [], "weight_decay": 0.0, "share": options.means_rate},
        "scales": {"params": [], "weight_decay": 0.0, "share": options.scales_rate},
        "others": {"params": [], "weight_decay": 0.0, "share": 1.0},
    }
    for p in model.parameters():
        if p.requires_grad:
            kinds = {"convolutions": convolutions, "means": means, "scales": scales}
            kind = next((kind for kind, members in kinds.items() if id(p) in members), "others")
            groups[kind]["params"].append(p)
    used = [group for group in groups.values() if group["params"]]
    if options.optimiser == "sgd":
        return torch.optim.SGD(used, lr=options.learning_rate, momentum=options.momentum, fused=True)
    return torch.optim.AdamW(used, lr=options.learning_rate, betas=(options.momentum, 0.99), fused=True)


def clip_gradients(model: nn.Module, options: TrainOptions) -> Tensor:
    """Scale the gradient down to the norm ``clip``; return the norm that it had."""
    clipped: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_free = name.startswith("mixture.") and not options.clip_means
        (others if is_free else clipped).append(parameter)
    norm = nn.utils.clip_grad_norm_(clipped, options.clip)
    return norm + nn.utils.get_total_norm([p.grad for p in others if p.grad is not None])


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group to ``rate`` times its share."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["share"]


def learning_rate(
    options: TrainOptions, step: int, steps_per_epoch: int, val_losses: Sequence[float]
) -> float:
    """Return the learning rate of a step: a function of its number and of the epochs' validation losses.

    One-cycle: up along a line over the share ``warmup`` of the run, down to zero along a cosine. Plateau:
    up over ``warmup`` epochs, then constant, divided by 10 at each plateau.
    """
    if options.schedule == "plateau":
        rise = min(1.0, (step + 1) / max(1.0, options.warmup * steps_per_epoch))
        return (
            options.learning_rate
            * rise
            / 10 ** min(options.lr_decays, plateaus(val_losses, options.patience))
        )
    steps = options.epochs * steps_per_epoch
    top = options.warmup * steps
    if step < top:
        return options.learning_rate * (step + 1) / (top + 1)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - top) / (steps - top)))


def plateaus(losses: Sequence[float], patience: int) -> int:
    """Return how many times ``patience`` epochs went by without a loss below all earlier ones.

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


def is_over(options: TrainOptions, val_losses: Sequence[float]) -> bool:
    """Return whether a plateau schedule ends early: at the first plateau after the last decay."""
    return options.schedule == "plateau" and plateaus(val_losses, options.patience) > options.lr_decays


def first_nonfinite_gradient(model: nn.Module) -> str:
    """Return the name of the first parameter whose gradient is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return name
    return "all parameters together"

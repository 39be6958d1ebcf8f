"""What a run needs before its first step: data, model, first scales."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid._support.numbers import use_threads
from candid._support.progress import Progress
from candid._support.randomness import generator
from candid.data.datasets import Dataset, open_dataset
from candid.data.images import Preprocessing
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.coupling import ActNorm
from candid.models.flow.means import restore
from candid.models.resnet import ResNet, ResNetConfig
from candid.training.loader import Plan, training_batches
from candid.training.options import TrainOptions

if TYPE_CHECKING:
    from lightning_fabric import Fabric

import math
from collections.abc import Sequence

from candid.models.flow.mixture import LatentMixture

Network = GenerativeClassifier | ResNet
FIRST_IMAGES = 128


@dataclass(frozen=True)
class Setup:
    """What a run needs before its first step."""

    options: TrainOptions
    fabric: "Fabric"
    data: Dataset
    preprocessing: Preprocessing
    plan: Plan
    model: Network

    @classmethod
    def of(cls, options: TrainOptions, fabric: "Fabric", progress: Progress) -> "Setup":
        """Open the data, divide it into batches and build the model."""
        data, preprocessing = open_data(options, progress)
        parts = fabric.world_size * options.grad_accumulation
        plan = Plan(len(data.train), options.batch, parts, options.seed)
        model = build_model(options, data.class_names)
        if fabric.device.type == "cpu":
            use_threads(model)
        return cls(options, fabric, data, preprocessing, plan, model)


def open_data(options: TrainOptions, progress: Progress) -> tuple[Dataset, Preprocessing]:
    """Return the data of the run, checked, and the preprocessing of its model."""
    flow = options.model_config(classes=2).flow
    preprocessing = Preprocessing(flow.channels, flow.height, flow.width, options.crop, options.flip)
    data = open_dataset(
        options.data,
        holdout=options.holdout,
        split_seed=options.split_seed,
        split=options.split,
        val_spec=options.val_data,
        epoch_images=options.epoch_images,
        classes=options.model.get("classes"),
        only=options.only,
    )
    return data.preprocess(preprocessing, options.skip_bad, progress), preprocessing


def build_model(options: TrainOptions, class_names: tuple[str, ...]) -> Network:
    """Return the model that ``options`` describes, new or from its ``start``, in training mode."""
    layout = options.model_config(len(class_names))
    names = [*class_names, *map(str, range(len(class_names), layout.classes))]
    model: Any
    if options.start is not None:
        model = checkpoint.load(options.start, options.memory)
        model.held_out = {}  # of other weights than it will have
        if len(class_names) > model.config.classes:
            raise CandidError(
                f"The data has {len(class_names)} classes, more than the {model.config.classes} of "
                f"'{options.start}': train a new model, or use fewer class folders."
            )
        if "network" not in model.can or ("invert" in model.can) == options.baseline:
            raise CandidError(f"'{options.start}' is not the kind of model to train: check --baseline.")
        flow = layout.flow
        if model.image_shape != (flow.channels, flow.height, flow.width):
            raise CandidError(
                f"'{options.start}' takes images of {' x '.join(map(str, model.image_shape))}, not of "
                f"{flow.channels} x {flow.height} x {flow.width}: choose its --preset."
            )
        model.class_names = _continued(model.class_names, class_names, options.start)
        if not options.baseline and (model.config.circle or not model.config.planar):
            restore(model)  # the end of the training refits it
    elif options.baseline:
        model = ResNet(ResNetConfig.matching(layout), names, seed=options.seed)
    else:
        model = GenerativeClassifier(layout, names, options.memory, seed=options.seed)
        if options.means_start == "blocks":
            model.mixture.start_in_blocks()
        elif options.means_start == "pooled":
            model.mixture.start_without_rest()
    if options.means_only:
        model.flow.requires_grad_(False)
    if options.compile:
        (model if options.baseline else model.flow).compile()
    return model


def _continued(known: tuple[str, ...], data: tuple[str, ...], start: str) -> tuple[str, ...]:
    """Return the class names: the model's own, which must be the data's, unless it has only numbers."""
    own = known[: len(data)]
    if own != tuple(map(str, range(len(own)))) and own != data:
        raise CandidError(
            f"The data's classes ({_shown(data)}) are not those of '{start}' ({_shown(own)}), in this order: "
            "give data with the same class folders, or train a new model."
        )
    return (*data, *known[len(data) :])


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


@torch.no_grad()
def start_actnorm(setup: Setup) -> None:
    """Scale every channel to unit variance on a first batch, the same in every process."""
    plan = setup.plan
    if setup.options.baseline:
        return
    model = cast(GenerativeClassifier, setup.model)
    batches = training_batches(setup.data.train, setup.preprocessing, replace(plan, parts=1), 0, 1, range(1))
    images, _ = next(batches)
    v = model.normalise(in_unit_range(images[:FIRST_IMAGES], "cpu"), generator(plan.seed, 0, 2))
    for _, layer in model.flow.leaves():
        if isinstance(layer, ActNorm):
            layer.start_from(v)
        v, _ = layer(v)


def batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the batch-norm layers of ``model``."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def in_unit_range(images: Tensor, device: torch.device | str) -> Tensor:
    """Return 8-bit images as floats in [0, 1] on ``device``."""
    return images.to(device, non_blocking=True).float() / 255


def build_optimiser(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Return SGD with momentum or AdamW, with weight decay on convolution weights and the rest of the means.

    Each group has a ``share`` of the learning rate: :func:`set_learning_rate`.
    """
    convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d)}
    mixtures = [m for m in model.modules() if isinstance(m, LatentMixture)]
    means = {id(p) for m in mixtures for p in m.parameters()}
    has_own = options.rest_rate is not None or options.rest_decay > 0
    rest = {id(p) for m in mixtures for p in m.rest() if has_own}
    rest_rate = options.means_rate if options.rest_rate is None else options.rest_rate
    scales = {id(m.gamma) for m in model.modules() if isinstance(m, ActNorm)}
    groups: dict[str, dict[str, Any]] = {
        "convolutions": {"params": [], "weight_decay": options.weight_decay, "share": 1.0},
        "means": {"params": [], "weight_decay": 0.0, "share": options.means_rate},
        "rest": {"params": [], "weight_decay": options.rest_decay, "share": rest_rate},
        "scales": {"params": [], "weight_decay": 0.0, "share": options.scales_rate},
        "others": {"params": [], "weight_decay": 0.0, "share": 1.0},
    }
    for p in model.parameters():
        if p.requires_grad:
            kinds = {"convolutions": convolutions, "rest": rest, "means": means, "scales": scales}
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

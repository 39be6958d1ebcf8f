"""What a run needs before its first step: data, model, first scales."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from candid._support.errors import CandidError
from candid._support.progress import Progress
from candid._support.randomness import generator
from candid._support.threads import use_threads
from candid.data.datasets import Dataset, open_dataset
from candid.data.images import Preprocessing
from candid.data.loader import Plan, training_batches
from candid.inference.predictions import to_float
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.coupling import ActNorm
from candid.models.flow.span import restore
from candid.models.resnet import ResNet, ResNetConfig
from candid.training.options import TrainOptions

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Model = GenerativeClassifier | ResNet
FIRST_IMAGES = 128


@dataclass(frozen=True)
class Setup:
    """What a run needs before its first step."""

    options: TrainOptions
    fabric: "Fabric"
    data: Dataset
    preprocessing: Preprocessing
    plan: Plan
    model: Model

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


def build_model(options: TrainOptions, class_names: tuple[str, ...]) -> Model:
    """Return the model that ``options`` describes, new or from its ``start``, in training mode."""
    layout = options.model_config(len(class_names))
    names = [*class_names, *map(str, range(len(class_names), layout.classes))]
    model: Model
    if options.start is not None:
        model = checkpoint.load_any(options.start, options.memory)
        model.held_out = {}  # of other weights than it will have
        if len(class_names) > model.config.classes:
            raise CandidError(
                f"The data has {len(class_names)} classes, more than the {model.config.classes} of "
                f"'{options.start}': train a new model, or use fewer class folders."
            )
        if isinstance(model, ResNet) != options.baseline:
            raise CandidError(f"'{options.start}' is not the kind of model to train: check --baseline.")
        flow = layout.flow
        if model.image_shape != (flow.channels, flow.height, flow.width):
            raise CandidError(
                f"'{options.start}' takes images of {' x '.join(map(str, model.image_shape))}, not of "
                f"{flow.channels} x {flow.height} x {flow.width}: choose its --preset."
            )
        model.class_names = _continued(model.class_names, class_names, options.start)
        if isinstance(model, GenerativeClassifier) and not model.config.planar:
            restore(model)  # the end of the training refits it
    elif options.baseline:
        model = ResNet(ResNetConfig.beside(layout), names, seed=options.seed)
    else:
        model = GenerativeClassifier(layout, names, options.memory, seed=options.seed)
        if options.means_start == "blocks":
            model.mixture.start_in_blocks()
    if options.means_only:
        assert isinstance(model, GenerativeClassifier)
        model.flow.requires_grad_(False)
    if options.compile:
        (model if isinstance(model, ResNet) else model.flow).compile()
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
    model, plan = setup.model, setup.plan
    if isinstance(model, ResNet):
        return
    batches = training_batches(setup.data.train, setup.preprocessing, replace(plan, parts=1), 0, 1, range(1))
    images, _ = next(batches)
    v = model.normalise(to_float(images[:FIRST_IMAGES], "cpu"), generator(plan.seed, 0, 2))
    for _, layer in model.flow.leaves():
        if isinstance(layer, ActNorm):
            layer.start_from(v)
        v, _ = layer(v)


def batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the batch-norm layers of ``model``."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]

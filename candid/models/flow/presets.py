"""The configuration of a generative classifier, and the named ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from candid._support.config import check_fields, check_range
from candid._support.errors import CandidError, did_you_mean
from candid.models.flow.backbone import FlowConfig
from candid.models.flow.mixture import check_planar, check_priors

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ClassifierConfig:
    """Everything that rebuilds a classifier; it is stored with the weights.

    >>> flow = FlowConfig(3, 32, 32, blocks=(2, 2), widths=(16, 32), entry="none")
    >>> ClassifierConfig(flow, classes=3, priors=(0.5, 0.25, 0.25)).rank is None
    True
    """

    flow: FlowConfig
    classes: int
    rank: int | None = None
    """Number of prototypes of the means beyond the constant coefficients; None: one per class (full rank)."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from the image in [0, 1]: one number per channel, or one for all."""
    std: tuple[float, ...] = (0.25,)
    """The number that the image is then divided by."""
    priors: tuple[float, ...] | None = None
    """Class priors that sum to one; None: uniform."""
    planar: bool = False
    """Whether all means lie in one plane, so that it can be drawn; there is no rank then."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, 1, 10_000_000, "classes", *(["rank"] if self.rank is not None else []))
        for key in ("mean", "std"):
            if len(getattr(self, key)) not in (1, self.flow.channels):
                raise CandidError(
                    f"'{key}' needs one number or one a channel ({self.flow.channels}), "
                    f"not {len(getattr(self, key))}."
                )
        if min(self.std) <= 0:
            raise CandidError(f"'std' must be positive, not {min(self.std)}.")
        check_priors(self.priors, self.classes)
        check_planar(self.planar, self.rank)


PRESETS: Mapping[str, ClassifierConfig] = {
    "imagenet": ClassifierConfig(
        FlowConfig(3, 224, 224, blocks=(3, 4, 6, 3), widths=(64, 128, 256, 512)),
        classes=1000,
        rank=128,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    "tiny": ClassifierConfig(
        FlowConfig(3, 64, 64, blocks=(2, 3, 3), widths=(48, 64, 96), entry_width=32),
        classes=200,
        rank=32,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    "cifar": ClassifierConfig(
        FlowConfig(3, 32, 32, blocks=(2, 3, 3), widths=(32, 64, 96), entry="none", clamp=2.0),
        classes=10,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
    ),
    "digits": ClassifierConfig(
        FlowConfig(
            1,
            8,
            8,
            blocks=(1, 2, 1),
            widths=(24, 48, 64),
            entry="none",
            pointwise_width=16,
            mixing="permutation",
        ),
        classes=10,
        mean=(0.3,),
        std=(0.38,),
    ),
}


def preset(name: str, **changes: Any) -> ClassifierConfig:
    """Return the preset ``name`` with keys of its classifier or flow part changed.

    >>> preset("cifar", classes=100, rank=16, mixing="permutation").flow.mixing
    'permutation'
    """
    if name not in PRESETS:
        raise CandidError(f"There is no preset '{name}': {did_you_mean(name, PRESETS)}")
    config = PRESETS[name]
    own, flow = ({field.name for field in fields(part)} for part in (config, config.flow))
    for key in changes:
        if key not in own | flow:
            raise CandidError(f"Presets have no key '{key}': {did_you_mean(key, own | flow)}")
    inner = {key: value for key, value in changes.items() if key in flow}
    outer = {key: value for key, value in changes.items() if key in own}
    return replace(config, **{"flow": replace(config.flow, **inner), **outer})


def checked_names(names: Sequence[str] | None, classes: int) -> tuple[str, ...]:
    """Return one name per class; the class numbers if ``names`` is None."""
    checked = tuple(map(str, range(classes)) if names is None else names)
    if not all(isinstance(name, str) and name.strip() for name in checked):
        raise CandidError("Class names must be text that is not empty: check all of them.")
    if len(checked) != classes:
        raise CandidError(f"There are {classes} classes but {len(checked)} class names: give one a class.")
    if len(set(checked)) < classes:
        twice = next(name for i, name in enumerate(checked) if name in checked[:i])
        raise CandidError(f"Two classes have the name '{twice[:60]}': give each class its own name.")
    return checked


def check_batch(x: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise an error unless ``x`` is a batch of float images of this ``shape`` (C, H, W) in [0, 1]."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = getattr(x, "dtype", type(x).__name__)
        raise CandidError(f"Images must be float tensors in [0, 1], not {given}: divide 8-bit ones by 255.")
    expected, found = (" x ".join(map(str, s)) for s in (shape, x.shape))
    if tuple(x.shape) == shape:
        raise CandidError(f"The model takes batches: give a single {expected} image as x[None].")
    if tuple(x.shape[1:]) != shape or not len(x):
        raise CandidError(
            f"The model takes a batch of {expected} images (channels x height x width), "
            f"not a tensor of {found or 'no dimensions'}: resize or crop them first."
        )
    if not x.is_meta and x.max() > 20:
        raise CandidError(
            f"The images reach {float(x.max()):.4g} where white is 1: divide 8-bit pixels by 255."
        )

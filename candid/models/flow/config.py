"""The configuration of a generative classifier, checked as soon as it is made; it needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from candid._support.errors import CandidError, did_you_mean
from candid._support.options import check_fields, check_range

Mixing = Literal["orthogonal", "permutation"]
Memory = Literal["plain", "inverse"]


@dataclass(frozen=True)
class FlowConfig:
    """The layout of the invertible network. The defaults are those of the released ImageNet models.

    >>> FlowConfig(3, 32, 32, blocks=(2, 2), widths=(16, 32), entry="none").dimensions
    3072
    """

    channels: int
    """Channels of the image."""
    height: int
    width: int
    blocks: tuple[int, ...]
    """Coupling blocks per stage; each stage but the first begins with a downsampling block."""
    widths: tuple[int, ...]
    """Inner width of the bottleneck subnets, one number per stage."""
    entry: Literal["3x3", "7x7", "none"] = "3x3"
    """The first, downsampling coupling: two 3 x 3 convolutions (released) or one of 7 x 7 (the text)."""
    entry_width: int = 64
    """Inner width of the first coupling."""
    pointwise_width: int = 48
    """Inner width of the 1 x 1 coupling after the Haar pooling."""
    preactivation: bool = True
    """Whether a bottleneck begins with batch norm and ReLU (released): it is then blind to half of its
    input's range, which few channels can't make up for."""
    mixing: Mixing = "orthogonal"
    actnorm: Literal["paper", "released"] = "paper"
    dct: Literal["orthonormal", "released"] = "orthonormal"
    clamp: float = 0.7
    """Largest absolute log-scale of a coupling."""
    span: tuple[int, int] | None = None
    """The numbers of directions and prototypes of the last layer of a refitted model; None: it has none."""
    pooling: Literal["haar", "none"] = "haar"
    """none: for vectors, (C, 1, 1): no Haar pooling, one stage, and subnets that see one position."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(
            self, 1, 65_536, "channels", "height", "width", "widths", "entry_width", "pointwise_width"
        )
        check_range(self, 1, 1000, "blocks")
        if not 1 <= len(self.blocks) == len(self.widths) <= 16:
            raise CandidError(
                "'blocks' and 'widths' need one entry for each of 1 to 16 stages, "
                f"not {len(self.blocks)} and {len(self.widths)}."
            )
        if self.span is not None:
            check_range(self, 0, 10_000_000, "span")
        if self.clamp <= 0:
            raise CandidError(f"'clamp' must be positive, not {self.clamp}.")
        if self.entry != "none" and self.channels < 2:
            raise CandidError(
                "A downsampling entry splits the channels and needs at least 2: "
                "for one-channel images set entry = 'none'."
            )
        if self.pooling == "none" and (self.halvings or self.height * self.width > 1):
            raise CandidError(
                "pooling = 'none' is for vectors: set height = width = 1 and entry = 'none', and one stage."
            )
        if self.height % self.downsampling or self.width % self.downsampling:
            raise CandidError(
                f"Images of {self.height} x {self.width} can't be halved {self.halvings} times: "
                f"height and width must be multiples of {self.downsampling}, or use fewer stages."
            )
        if self.dct == "released" and self.height != self.width:
            raise CandidError("The released DCT scaling is for square images: set dct = 'orthonormal'.")

    @property
    def halvings(self) -> int:
        return (self.entry != "none") + (self.pooling == "haar") + (len(self.blocks) - 1)

    @property
    def downsampling(self) -> int:
        return 2**self.halvings

    @property
    def dimensions(self) -> int:
        """The length D of the latent: as many numbers as the image has."""
        return self.channels * self.height * self.width

    @property
    def constant_coefficients(self) -> int:
        """The channels C before the DCT: the first C latent numbers are the mean-pooled features."""
        return self.channels * 4**self.halvings


@dataclass(frozen=True)
class ClassifierConfig:
    """Everything that rebuilds a classifier; it is stored with the weights.

    >>> flow = FlowConfig(3, 32, 32, blocks=(2, 2), widths=(16, 32), entry="none")
    >>> ClassifierConfig(flow, classes=3, priors=(0.5, 0.25, 0.25)).rank is None
    True
    """

    flow: FlowConfig
    """The invertible network."""
    classes: int
    """Number of classes."""
    rank: int | None = None
    """Number of prototypes of the means beyond the constant coefficients; None: one per class (full rank),
    0: no means beyond them."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from the image in [0, 1]: one number per channel, or one for all."""
    std: tuple[float, ...] = (0.25,)
    """The number that the image is then divided by."""
    priors: tuple[float, ...] | None = None
    """Class priors that sum to one; None: uniform."""
    planar: bool = False
    """Whether all means lie in one plane, so that it can be drawn; there is no rank then."""
    circle: bool = False
    """Whether planar means lie on a circle: one radius, and an angle for each class."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, 1, 10_000_000, "classes")
        if self.rank is not None:
            check_range(self, 0, 10_000_000, "rank")
        for key in ("mean", "std"):
            if len(getattr(self, key)) not in (1, self.flow.channels):
                raise CandidError(
                    f"'{key}' needs one number or one a channel ({self.flow.channels}), "
                    f"not {len(getattr(self, key))}."
                )
        if min(self.std) <= 0:
            raise CandidError(f"'std' must be positive, not {min(self.std)}.")
        check_priors(self.priors, self.classes)
        check_planar(self.planar, self.rank, self.circle)


def check_planar(planar: bool, rank: int | None, circle: bool = False) -> None:
    """Raise an error if a planar mixture is given a rank (a plane has its own), or a circle has no plane."""
    if circle and not planar:
        raise CandidError("Means on a 'circle' lie in a plane: set planar = true, or leave circle out.")
    if planar and rank is not None:
        raise CandidError(f"'planar' means have no 'rank': leave rank = {rank} out, or planar.")


def check_priors(priors: Sequence[float] | None, classes: int) -> None:
    """Raise an error unless the priors are one positive number per class and sum to one."""
    if priors is None:
        return
    if len(priors) != classes:
        raise CandidError(
            f"There are {classes} classes but {len(priors)} class priors: give one prior per class."
        )
    if min(priors) <= 0 or not math.isclose(math.fsum(priors), 1.0, rel_tol=1e-6):
        raise CandidError(
            "Class priors must be positive and sum to one: divide the class counts by their sum."
        )


VECTOR = "vector"
"""The preset for features in place of pixels."""


def vector_flow(features: int, couplings: int = 4, width: int = 512) -> FlowConfig:
    """Return the network of the preset ``vector``, for this number of features.

    >>> vector_flow(1408).dimensions
    1408
    """
    layout: dict[str, Any] = {"entry": "none", "pooling": "none", "mixing": "permutation"}
    return FlowConfig(features, 1, 1, blocks=(couplings,), widths=(width,), **layout)


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


PRESETS: dict[str, ClassifierConfig] = {}
"""The named configurations."""
RECIPE_OF_PRESET: dict[str, str] = {}
"""The recipe that each one is trained by, if no other is named."""


def register_preset(name: str, config: ClassifierConfig, recipe: str) -> None:
    """Add a preset: all it takes is one call in this file, and the recipe."""
    PRESETS[name], RECIPE_OF_PRESET[name] = config, recipe


register_preset(
    "imagenet",
    ClassifierConfig(
        FlowConfig(3, 224, 224, blocks=(3, 4, 6, 3), widths=(64, 128, 256, 512)),
        classes=1000,
        rank=128,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    recipe="imagenet",
)
register_preset(
    "tiny",
    ClassifierConfig(
        FlowConfig(3, 64, 64, blocks=(2, 3, 3), widths=(48, 64, 96), entry_width=32),
        classes=200,
        rank=32,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    recipe="tiny-imagenet",
)
register_preset(
    "cifar",
    ClassifierConfig(
        FlowConfig(3, 32, 32, blocks=(2, 3, 3), widths=(32, 64, 96), entry="none", clamp=2.0),
        classes=10,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
    ),
    recipe="cifar10-quick",
)
register_preset(
    "digits",
    ClassifierConfig(
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
    recipe="digits",
)


def preset(name: str, **changes: Any) -> ClassifierConfig:
    """Return the preset ``name`` with keys of its classifier or flow part changed.

    >>> preset("cifar", classes=100, rank=16, mixing="permutation").flow.mixing
    'permutation'
    """
    if name not in PRESETS:
        raise CandidError(f"There is no preset '{name}': {did_you_mean(name, PRESETS)}")
    config = PRESETS[name]
    outside, flow = ({field.name for field in fields(part)} for part in (config, config.flow))
    for key in changes:
        if key not in outside | flow:
            raise CandidError(f"Presets have no key '{key}': {did_you_mean(key, outside | flow)}")
    inner = {key: value for key, value in changes.items() if key in flow}
    outer = {key: value for key, value in changes.items() if key in outside}
    return replace(config, **{"flow": replace(config.flow, **inner), **outer})

"""The configuration of a generative classifier, checked as soon as it is made; it needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from candid._support.config import check_fields, check_range
from candid._support.errors import CandidError

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
        if self.height % self.downsampling or self.width % self.downsampling:
            raise CandidError(
                f"Images of {self.height} x {self.width} can't be halved {self.halvings} times: "
                f"height and width must be multiples of {self.downsampling}, or use fewer stages."
            )
        if self.dct == "released" and self.height != self.width:
            raise CandidError("The released DCT scaling is for square images: set dct = 'orthonormal'.")

    @property
    def halvings(self) -> int:
        return (self.entry != "none") + 1 + (len(self.blocks) - 1)

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
        check_planar(self.planar, self.rank)


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


def check_planar(planar: bool, rank: int | None) -> None:
    """Raise an error if a planar mixture is given a rank: a plane has its own."""
    if planar and rank is not None:
        raise CandidError(f"'planar' means have no 'rank': leave rank = {rank} out, or planar.")


def check_priors(priors: Sequence[float] | None, classes: int) -> None:
    """Raise an error unless the priors are one positive number per class and sum to one."""
    if priors is None:
        return
    if len(priors) != classes:
        raise CandidError(f"There are {classes} classes but {len(priors)} class priors: give one a class.")
    if min(priors) <= 0 or not math.isclose(math.fsum(priors), 1.0, rel_tol=1e-6):
        raise CandidError(
            "Class priors must be positive and sum to one: divide the class counts by their sum."
        )

"""The invertible network: an entry, Haar pooling, stages of coupling blocks, DCT pooling."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from candid._support.config import check_fields, check_range
from candid._support.errors import CandidError
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    CoefficientScale,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
)
from candid.models.flow.invertible import Chain, Invertible
from candid.models.flow.pooling import DCTPooling, HaarPooling
from candid.models.flow.subnets import bottleneck, low_resolution_entry, pointwise, strided_entry

Mixing = Literal["orthogonal", "permutation"]


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


def build_flow(config: FlowConfig) -> Chain:
    """Return the network of ``config``, initialised from torch's default generator.

    >>> tiny = FlowConfig(channels=1, height=4, width=4, blocks=(1, 1), widths=(4, 4), entry="none")
    >>> z, log_det = build_flow(tiny)(torch.rand(2, 1, 4, 4))
    >>> z.shape
    torch.Size([2, 16])
    """
    layers: dict[str, Invertible] = {}
    channels = config.channels
    if config.entry != "none":
        kernel = int(config.entry[0])
        strided = partial(strided_entry, width=config.entry_width, kernel=kernel, output_gain=0.1)
        low = partial(low_resolution_entry, width=config.entry_width, output_gain=0.1)
        layers["entry"] = _block(
            config, DownsamplingCoupling(channels, strided, low, config.clamp), 4 * channels
        )
        channels *= 4
    layers["haar"] = HaarPooling()
    channels *= 4
    one_pixel = partial(pointwise, width=config.pointwise_width)
    layers["pointwise"] = _block(config, AffineCoupling(channels, one_pixel, config.clamp), channels)
    for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True), start=1):
        subnet = partial(bottleneck, width=width, preactivation=config.preactivation)
        for block in range(1, blocks + 1):
            coupling: Invertible
            if stage > 1 and block == 1:
                strided, low = partial(subnet, stride=2, output_gain=0.1), partial(subnet, output_gain=0.1)
                coupling = DownsamplingCoupling(channels, strided, low, config.clamp)
                channels *= 4
            else:
                coupling = AffineCoupling(channels, subnet, config.clamp)
            layers[f"stage{stage}_block{block}"] = _block(config, coupling, channels)
    height, width = (side // config.downsampling for side in (config.height, config.width))
    layers["dct"] = DCTPooling(channels, height, width)
    if config.dct == "released":
        layers["dct_scale"] = CoefficientScale(released_dct_scale(height))
    return Chain(layers)


def _block(config: FlowConfig, coupling: Invertible, channels: int) -> Chain:
    mixing = OrthogonalMixing if config.mixing == "orthogonal" else Permutation
    return Chain(
        {
            "coupling": coupling,
            "actnorm": ActNorm(channels, config.actnorm),
            "mixing": mixing(channels),
        }
    )


def released_dct_scale(size: int) -> Tensor:
    """Return the released models' cosine coefficients divided by orthonormal ones, (size * size,).

    Their DCT has rows of squared norm 4 N (constant) and 2 N along each axis and is divided by
    4 (N + 1): the constant is scaled by N / (N + 1), a factor 1 / sqrt 2 more for each non-constant axis.
    """
    axis = torch.full((size,), 0.5**0.5, dtype=torch.float64)
    axis[0] = 1
    return torch.outer(axis, axis).flatten() * size / (size + 1)

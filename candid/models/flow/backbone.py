"""The invertible network: an entry, Haar pooling, stages of coupling blocks, DCT pooling."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from candid.models.flow.config import FlowConfig
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    CoefficientScale,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
)
from candid.models.flow.invertible import Chain, Invertible
from candid.models.flow.network import full_precision
from candid.models.flow.pooling import DCTPooling, HaarPooling
from candid.models.flow.subnets import bottleneck, low_resolution_entry, perceptron, pointwise, strided_entry


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
    if config.pooling == "haar":
        layers["haar"] = HaarPooling()
        channels *= 4
        one_pixel = partial(pointwise, width=config.pointwise_width)
        layers["pointwise"] = _block(config, AffineCoupling(channels, one_pixel, config.clamp), channels)
    for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True), start=1):
        subnet = partial(bottleneck, width=width, preactivation=config.preactivation)
        if config.pooling == "none":
            subnet = partial(perceptron, width=width)
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
    if config.span is not None:
        directions, prototypes = config.span
        layers["span"] = SpanScaling(directions, config.constant_coefficients, config.dimensions, prototypes)
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


class SpanScaling(Invertible):
    """Scale flat latents about a centre within R directions, and shift them there: (B, D) -> (B, D).

    ``z' = z + U ((1 / s - 1) c + g)`` with the coordinates ``c = U^T z - c_0``; ``log |det| = -R log s``.
    The R orthonormal columns of U are factored like the class means: R x C numbers for the constant
    coefficients, and combinations of K prototypes for the D - C others. A new layer is the identity.

    Args:
        directions: R.
        constant: C, the number of constant coefficients.
        dimensions: D, the length of z.
        prototypes: K.

    >>> layer = SpanScaling(directions=2, constant=4, dimensions=16, prototypes=3)
    >>> z = torch.randn(5, 16)
    >>> layer(z)[0].equal(z)
    True
    """

    constant: Tensor
    weights: Tensor
    prototypes: Tensor
    centre: Tensor
    shift: Tensor
    log_scale: Tensor

    def __init__(self, directions: int, constant: int, dimensions: int, prototypes: int) -> None:
        super().__init__()
        self.register_buffer("constant", torch.zeros(directions, constant))
        self.register_buffer("weights", torch.zeros(directions, prototypes))
        self.register_buffer("prototypes", torch.zeros(prototypes, dimensions - constant))
        self.register_buffer("centre", torch.zeros(directions))
        self.register_buffer("shift", torch.zeros(directions))
        self.register_buffer("log_scale", torch.zeros(()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SpanScaling":
        """Make U orthonormal to the last digit again when it is widened, by Newton steps."""
        digits_before = torch.finfo(self.constant.dtype).bits
        super()._apply(fn, recurse)
        if torch.finfo(self.constant.dtype).bits > digits_before:
            gram = self.prototypes @ self.prototypes.T
            for _ in range(2):
                products = self.constant @ self.constant.T + self.weights @ gram @ self.weights.T
                step = 1.5 * torch.eye(len(products)).to(products) - 0.5 * products
                self.constant, self.weights = step @ self.constant, step @ self.weights
                self.centre = step @ self.centre
        return self

    def coordinates(self, z: Tensor) -> Tensor:
        """Return ``c = U^T z - c_0``, (B, R)."""
        constant = self.constant.shape[1]
        with full_precision(z):
            rest = (z[:, constant:] @ self.prototypes.T) @ self.weights.T
            return z[:, :constant] @ self.constant.T + rest - self.centre

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = self.coordinates(x) * torch.expm1(-self.log_scale) + self.shift
        return self._moved(x, step), self._log_det(x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        step = self.coordinates(z) * torch.expm1(self.log_scale) - self.log_scale.exp() * self.shift
        return self._moved(z, step), -self._log_det(z)

    def _moved(self, z: Tensor, step: Tensor) -> Tensor:
        """Return ``z + U step`` for steps (B, R)."""
        with full_precision(z):
            return z + torch.cat((step @ self.constant, (step @ self.weights) @ self.prototypes), 1)

    def _log_det(self, z: Tensor) -> Tensor:
        return (-len(self.shift) * self.log_scale).to(z.dtype).expand(z.shape[0])

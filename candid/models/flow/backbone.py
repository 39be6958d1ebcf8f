"""The invertible network: an entry, Haar pooling, stages of coupling blocks, DCT pooling."""

from functools import partial

import torch
from torch import Tensor

from candid.models.flow.chain import Chain
from candid.models.flow.config import FlowConfig
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    CoefficientScale,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
)
from candid.models.flow.invertible import Invertible
from candid.models.flow.pooling import DCTPooling, HaarPooling
from candid.models.flow.span_layer import SpanScaling
from candid.models.flow.subnets import bottleneck, low_resolution_entry, pointwise, strided_entry


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

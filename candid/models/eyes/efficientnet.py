"""EfficientNet-Lite (Tan and Le, 2019) without its batch norms, which are folded into the convolutions."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid.models.eyes.registry import EyeInfo

EPSILON = 1e-3
"""Of the batch norms."""
SHIFT, SCALE = 127, 128
"""The network takes (8-bit pixel - SHIFT) / SCALE."""
STD_EPSILON = 1e-12
"""Added to variances of maps, so that the standard deviation of a constant map has a gradient."""


class Conv(NamedTuple):
    """A convolution with its batch norm folded in, and perhaps a ReLU6 behind it."""

    name: str
    """The name of its weights."""
    stride: int
    groups: int
    activation: bool


@dataclass(frozen=True)
class Block:
    """Convolutions one after the other; the input is added to the result if ``residual``."""

    convs: tuple[Conv, ...]
    residual: bool


class Layout(NamedTuple):
    """The whole network: stem, blocks and the convolution before pooling."""

    stem: Conv
    blocks: tuple[Block, ...]
    head: Conv


class EfficientNetLite(nn.Module):
    """The network, with fixed weights. It maps images in [0, 1] to the maps of its stages.

    Args:
        weights: the published weights, from :func:`read_weights`.
        info: strides and stages.
    """

    def __init__(self, weights: dict[str, Tensor], info: EyeInfo) -> None:
        super().__init__()
        self.info, self.layout = info, _layout(weights, info)
        for conv, norm in _norms(self.layout):
            for part, tensor in zip(("weight", "bias"), _folded(weights, conv.name, norm), strict=True):
                self.register_buffer(f"{_key(conv)}_{part}", tensor)

    def parameters_of(self, conv: Conv) -> tuple[Tensor, Tensor]:
        """Return the folded weight and bias of a convolution."""
        return self.get_buffer(f"{_key(conv)}_weight"), self.get_buffer(f"{_key(conv)}_bias")

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the maps of the stages, before any activation, each (B, C, h, w)."""
        x = self._conv((images * 255 - SHIFT) / SCALE, self.layout.stem)
        kept = []
        for number, block in enumerate(self.layout.blocks):
            start = x
            for conv in block.convs:
                x = self._conv(x, conv)
            x = x + start if block.residual else x
            if number in self.info.stages:
                kept.append(x)
        return kept

    def pooled(self, maps: list[Tensor]) -> Tensor:
        """Return the mean-pooled features that the network's own classifier reads, (B, 1280)."""
        return self.last_maps(maps).mean((2, 3))

    def last_maps(self, maps: list[Tensor]) -> Tensor:
        """Return the last maps of the network from those of its stages, (B, 1280, h, w)."""
        return self._conv(maps[-1], self.layout.head)

    def _conv(self, x: Tensor, conv: Conv) -> Tensor:
        weight, bias = self.parameters_of(conv)
        kernel = weight.shape[-1]
        across, down = (_same(side, kernel, conv.stride) for side in (x.shape[3], x.shape[2]))
        x = F.conv2d(F.pad(x, (*across, *down)), weight, bias, conv.stride, groups=conv.groups)
        return F.relu6(x) if conv.activation else x


def statistics(maps: list[Tensor]) -> Tensor:
    """Return the mean and the standard deviation over positions of each channel, (B, 2 x channels).

    The order is: means of the first maps, their standard deviations, means of the second, ...

    >>> statistics([torch.tensor([[[[1.0, 3.0]]]])])
    tensor([[2., 1.]])
    """
    found = []
    for each in maps:
        variance, mean = torch.var_mean(each, (2, 3), correction=0)
        found += [mean, (variance + STD_EPSILON).sqrt()]
    return torch.cat(found, 1)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the published weights; no code in the file is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever it likes for a damaged file
        raise CandidError(
            f"'{path}' can't be read as weights ({error}): install its package again."
        ) from error


def _layout(weights: dict[str, Tensor], info: EyeInfo) -> Layout:
    blocks = []
    for number, stride in enumerate(info.strides):
        name = f"_blocks.{number}."
        depthwise = weights[f"{name}_depthwise_conv.weight"]
        expand = f"{name}_expand_conv" in {key.rpartition(".")[0] for key in weights}
        convs = (
            *((Conv(f"{name}_expand_conv", 1, 1, True),) if expand else ()),
            Conv(f"{name}_depthwise_conv", stride, len(depthwise), True),
            Conv(f"{name}_project_conv", 1, 1, False),
        )
        channels = weights[f"{convs[0].name}.weight"].shape[1] if expand else len(depthwise)
        residual = stride == 1 and channels == len(weights[f"{name}_project_conv.weight"])
        blocks.append(Block(convs, residual))
    return Layout(Conv("_conv_stem", 2, 1, True), tuple(blocks), Conv("_conv_head", 1, 1, True))


def _norms(layout: Layout) -> list[tuple[Conv, str]]:
    """Return each convolution with the name of the batch norm behind it."""
    found = [(layout.stem, "_bn0"), (layout.head, "_bn1")]
    for number, block in enumerate(layout.blocks):
        names = ("_bn0", "_bn1", "_bn2")[-len(block.convs) :]
        found += [(conv, f"_blocks.{number}.{name}") for conv, name in zip(block.convs, names, strict=True)]
    return found


def _folded(weights: dict[str, Tensor], conv: str, norm: str) -> tuple[Tensor, Tensor]:
    def part(name: str) -> Tensor:
        return weights[f"{norm}.{name}"].double()

    scale = part("weight") / (part("running_var") + EPSILON).sqrt()
    weight = weights[f"{conv}.weight"].double() * scale[:, None, None, None]
    return weight.float(), (part("bias") - part("running_mean") * scale).float()


def _key(conv: Conv) -> str:
    return conv.name.strip("_").replace(".", "_")


def _same(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after a side: TensorFlow's SAME, the odd pixel comes at the end."""
    total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
    return total // 2, total - total // 2

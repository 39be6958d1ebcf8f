"""The networks inside the couplings; they are never inverted, so they can be any networks.

Layouts of the released models: bottlenecks in pre-activation order with one more 1 x 1 projection
than a ResNet's, because the flow has fewer channels than a ResNet at most resolutions.

``output_gain`` scales the initial weights of the last convolution. The shift of a plain coupling is
damped by its gain of 0.1, that of a downsampling coupling is not: its subnets start at 0.1 instead,
or a new network would be so ill-conditioned that its inverse loses digits.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from candid.models.flow.fused import can_fuse, norm_relu_conv, scale_relu_conv
from candid.models.flow.network import full_precision, is_autocast


def bottleneck(
    channels_in: int,
    channels_out: int,
    width: int,
    stride: int = 1,
    output_gain: float = 1.0,
    preactivation: bool = True,
) -> nn.Sequential:
    """BN-ReLU-conv four times: 1 x 1 to ``width``, 3 x 3, 1 x 1 to 4 ``width``, 1 x 1 to the output.

    Without ``preactivation``, the first convolution sees the input as it is.
    """
    return _initialised(
        *(_norm_relu(channels_in) if preactivation else ()),
        _conv(channels_in, width, 1),
        *_norm_relu(width),
        _conv(width, width, 3, stride),
        *_norm_relu(width),
        _conv(width, 4 * width, 1),
        *_norm_relu(4 * width),
        _conv(4 * width, channels_out, 1, bias=True),
        output_gain=output_gain,
    )


def pointwise(channels_in: int, channels_out: int, width: int) -> nn.Sequential:
    """Return two 1 x 1 convolutions, which see one pixel."""
    return _initialised(
        _conv(channels_in, width, 1, bias=True),
        nn.ReLU(inplace=True),
        _conv(width, channels_out, 1, bias=True),
    )


def perceptron(channels_in: int, channels_out: int, width: int) -> nn.Sequential:
    """Return two hidden layers of ``width`` for vectors, (B, C, 1, 1)."""
    layers = _initialised(
        _conv(channels_in, width, 1, bias=True),
        nn.ReLU(inplace=True),
        _conv(width, width, 1, bias=True),
        nn.ReLU(inplace=True),
        _conv(width, channels_out, 1, bias=True),
    )
    return Perceptron(*layers)


def strided_entry(
    channels_in: int, channels_out: int, width: int, kernel: int = 3, output_gain: float = 1.0
) -> nn.Sequential:
    """The network's first look at the pixels: two 3 x 3 convolutions or one of 7 x 7, with stride 2."""
    out = _conv(width, channels_out, 1, bias=True)
    if kernel != 3:
        look = _conv(channels_in, width, kernel, stride=2)
        return _initialised(look, *_norm_relu(width), out, output_gain=output_gain)
    look = _conv(channels_in, width, 3)
    again = _conv(width, width, 3, stride=2)
    layers = _initialised(look, *_norm_relu(width), again, *_norm_relu(width), out, output_gain=output_gain)
    return FullResolutionEntry(*layers)


def low_resolution_entry(
    channels_in: int, channels_out: int, width: int, output_gain: float = 1.0
) -> nn.Sequential:
    """The entry's second subnet, after the downsampling."""
    out = _conv(width, channels_out, 1)
    return _initialised(_conv(channels_in, width, 3), *_norm_relu(width), out, output_gain=output_gain)


class Subnet(nn.Sequential):
    """Layers one after another; in training, norm, ReLU and convolution are one operation."""

    def forward(self, x: Tensor) -> Tensor:
        return _run(list(self), x)


def _run(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    while layers:
        match layers:
            case nn.BatchNorm2d() as norm, nn.ReLU(), nn.Conv2d() as conv, *layers if can_fuse(x, norm, conv):
                x = norm_relu_conv(x, norm, conv)
            case layer, *layers:
                x = layer(x)
    return x


class Perceptron(Subnet):
    """Layers for vectors, (B, C, 1, 1): as matrix products, 1 x 1 convolutions take half of the time."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self:
            match layer:
                case nn.Conv2d():
                    x = F.linear(x, layer.weight.flatten(1), layer.bias)
                case _:
                    x = layer(x)
        return x[:, :, None, None]


class FullResolutionEntry(Subnet):
    """Convolution, batch norm, ReLU, strided convolution, and the rest.

    Its activations at the image's own resolution are by far the largest of the whole network. While
    ``frugal`` is set, they are recomputed image by image in the backward pass, and exist for one image
    at a time; batch norm's statistics are gathered the same way, with the same gradients.
    """

    frugal = False

    def forward(self, x: Tensor) -> Tensor:
        look, norm, _, again, *rest = self
        if not (self.frugal and type(norm) is nn.BatchNorm2d):
            return super().forward(x)
        assert isinstance(look, nn.Conv2d)
        assert isinstance(again, nn.Conv2d)
        images = x.split(1)
        scale, shift = _as_affine(norm, *_statistics(look, norm, images))

        def up_to_the_halving(image: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            if is_autocast(image):
                return again(F.relu(look(image) * scale[:, None, None] + shift[:, None, None], inplace=True))
            return scale_relu_conv(look(image), scale, shift, again)

        return _run(rest, torch.cat([_recomputed(up_to_the_halving, i, scale, shift) for i in images]))


def _statistics(look: nn.Conv2d, norm: nn.BatchNorm2d, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel of ``look(images)`` as ``norm`` uses them, differentiable.

    A convolution is linear in its patches p: the mean is W E[p], the variance diag(W cov(p) W^T).
    """
    if not norm.training:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return norm.running_mean, norm.running_var

    def moments(image: Tensor) -> tuple[Tensor, Tensor]:
        patches = F.unfold(image, look.kernel_size, padding=int(look.padding[0]), stride=look.stride)[0]
        mean = patches.mean(1, keepdim=True)
        centred = patches - mean
        return mean[:, 0], centred @ centred.T / patches.shape[1]

    with full_precision(images[0]):
        pairs = [_recomputed(moments, image) for image in images]
        means, covariances = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        apart = means - means.mean(0)
        covariance = covariances.mean(0) + apart.T @ apart / len(images)
        weight = look.weight.flatten(1)
        return weight @ means.mean(0), ((weight @ covariance) * weight).sum(1)


def _as_affine(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    scale = norm.weight * (variance + norm.eps).rsqrt()
    return scale, norm.bias - mean * scale


_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Module:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=bias)


def _norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels, momentum=0.05), nn.ReLU(inplace=True)


def _initialised(*layers: nn.Module, output_gain: float = 1.0) -> nn.Sequential:
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    for conv in convolutions:
        if not conv.weight.is_meta:  # there torch would load its compiler to draw nothing
            nn.init.kaiming_normal_(conv.weight)
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
    with torch.no_grad():
        convolutions[-1].weight.mul_(output_gain)
    return Subnet(*layers)


def normal(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return normally distributed numbers."""
    empty = torch.empty(shape, dtype=dtype)
    return empty if empty.is_meta else empty.normal_()


def uniform(*shape: int) -> Tensor:
    """Return numbers between 0 and 1."""
    empty = torch.empty(shape)
    return empty if empty.is_meta else empty.uniform_()

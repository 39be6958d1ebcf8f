"""The networks inside the couplings; they are never inverted, so anything goes here.

Layouts of the released models: bottlenecks in pre-activation order with one more 1 x 1 projection
than a ResNet's, because the flow has fewer channels than a ResNet at most resolutions.
"""

from torch import nn


def bottleneck(channels_in: int, channels_out: int, width: int, stride: int = 1) -> nn.Sequential:
    """BN-ReLU-conv four times: 1 x 1 to ``width``, 3 x 3, 1 x 1 to 4 ``width``, 1 x 1 to the output."""
    return _initialised(
        *_norm_relu(channels_in),
        _conv(channels_in, width, 1),
        *_norm_relu(width),
        _conv(width, width, 3, stride),
        *_norm_relu(width),
        _conv(width, 4 * width, 1),
        *_norm_relu(4 * width),
        _conv(4 * width, channels_out, 1, bias=True),
    )


def pointwise(channels_in: int, channels_out: int, width: int) -> nn.Sequential:
    """Two 1 x 1 convolutions: it sees one pixel."""
    return _initialised(
        _conv(channels_in, width, 1, bias=True),
        nn.ReLU(inplace=True),
        _conv(width, channels_out, 1, bias=True),
    )


def strided_entry(channels_in: int, channels_out: int, width: int, kernel: int = 3) -> nn.Sequential:
    """The network's first look at the pixels: two 3 x 3 convolutions or one of 7 x 7, with stride 2."""
    if kernel == 3:
        look = [_conv(channels_in, width, 3), *_norm_relu(width), _conv(width, width, 3, stride=2)]
    else:
        look = [_conv(channels_in, width, kernel, stride=2)]
    return _initialised(*look, *_norm_relu(width), _conv(width, channels_out, 1, bias=True))


def low_resolution_entry(channels_in: int, channels_out: int, width: int) -> nn.Sequential:
    """The entry's second subnet, after the downsampling."""
    return _initialised(
        _conv(channels_in, width, 3), *_norm_relu(width), _conv(width, channels_out, 1)
    )


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Module:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=bias)


def _norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels, momentum=0.05), nn.ReLU(inplace=True)


def _initialised(*layers: nn.Module) -> nn.Sequential:
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)

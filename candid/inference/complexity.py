"""How long an image is when it is compressed without loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

HEADER = 4
"""Bits that name the code of a row: a Rice parameter of 0 to 6, no bits at all, or plain bytes."""
SCALES = (1, 2, 4)
SMALLEST_SIDE = 4
"""Of an image that is shrunk."""


def code_lengths_by_scale(images: Tensor) -> Tensor:
    """:func:`code_lengths` of 8-bit images (B, C, H, W), and of them shrunk to 1/2 and 1/4, (B, S).

    Where neighbours are averages of each other, as in blurred, enlarged or compressed images, the lengths do
    not fall with the scale as they do elsewhere. Scales that leave less than four pixels a side are left out.

    >>> code_lengths_by_scale(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 3])
    """
    smallest = min(images.shape[-2:])
    scales = [scale for scale in SCALES if scale == 1 or smallest // scale >= SMALLEST_SIDE]
    shrunk = (F.avg_pool2d(images.float(), scale).round().to(torch.uint8) for scale in scales[1:])
    return torch.stack([code_lengths(each) for each in (images, *shrunk)], dim=1)


def code_lengths(images: Tensor) -> Tensor:
    """Bits of each 8-bit image (B, C, H, W) in a simple lossless code, (B,) in float64.

    Colours are coded as differences from green; a pixel as its difference, modulo 256, from what its
    left, upper and upper left neighbours predict (the median predictor of JPEG-LS); each row of a channel
    in the Rice code that suits it best. It is computed here rather than by an image library, so that a
    length stays the same on every machine: p-values compare it with lengths that a model carries.

    >>> grey = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    >>> noise = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    >>> (code_lengths(grey) < 600).item(), (code_lengths(noise) > 8 * 3072).item()
    (True, True)
    """
    pixels = images.contiguous().to(torch.int16)
    if pixels.shape[1] == 3:
        red, green, blue = pixels.unbind(1)
        pixels = torch.stack((green, red - green, blue - green), 1) & 255
    code = _folded(pixels - _predicted(pixels))
    width = code.shape[-1]
    quotients = code.sum(-1, dtype=torch.int32)
    bits = (8 * width * (quotients > 0)).to(torch.int32)
    for parameter in range(7):
        bits = torch.minimum(bits, quotients + (1 + parameter) * width)
        quotients = (code >> (parameter + 1)).sum(-1, dtype=torch.int32)
    return (bits + HEADER).sum((1, 2)).double()


def _predicted(pixels: Tensor) -> Tensor:
    """From the neighbours that were coded before; outside the image all is 0, left of it as above."""
    up = torch.zeros_like(pixels)
    up[..., 1:, :] = pixels[..., :-1, :]
    left, corner = torch.empty_like(pixels), torch.empty_like(pixels)
    left[..., 1:], left[..., 0] = pixels[..., :-1], up[..., 0]
    corner[..., 1:], corner[..., 0] = up[..., :-1], up[..., 0]
    lower, upper = torch.minimum(left, up), torch.maximum(left, up)
    return torch.clamp(left + up - corner, lower, upper)


def _folded(difference: Tensor) -> Tensor:
    """Modulo 256 to 0, 1, 2, ...: 0, -1, 1, -2, 2, ..."""
    centred = ((difference + 128) & 255) - 128
    return (centred << 1) ^ (centred >> 15)

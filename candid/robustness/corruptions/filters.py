"""Linear filters of batches of images (B, C, H, W), with the borders that the published corruptions have."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Border = Literal["edge", "mirror", "mirror edge"]
"""What continues a b c to the left: a a a, c b (the edge is the axis), b a (the edge is seen twice)."""


def truncated(levels: Tensor) -> Tensor:
    """Return whole levels of 0 to 255, rounded down, but not because of float32's own rounding.

    >>> truncated(torch.tensor([-3.0, 6.9, 6.99999, 300.0]))
    tensor([  0.,   6.,   7., 255.])
    """
    return (levels + 2**-8).clamp_(0, 255).floor_()


def framed(images: Tensor, rows: int, columns: int, border: Border) -> Tensor:
    """Return images with this many more rows above and below and columns left and right.

    >>> framed(torch.tensor([[[[1, 2, 3]]]]), 0, 2, "mirror")
    tensor([[[[3, 2, 1, 2, 3, 2, 1]]]])
    >>> framed(torch.tensor([[[[1, 2, 3]]]]), 0, 2, "mirror edge")
    tensor([[[[2, 1, 1, 2, 3, 3, 2]]]])
    """
    for dim, by in ((2, rows), (3, columns)):
        if by:
            size = images.shape[dim]
            outside = torch.cat((torch.arange(-by, 0), torch.arange(size, size + by)))
            frame = images.index_select(dim, _inside(outside, size, border).to(images.device))
            before, after = frame.chunk(2, dim)
            images = torch.cat((before, images, after), dim)
    return images


def _inside(index: Tensor, size: int, border: Border) -> Tensor:
    if border == "edge":
        return index.clamp(0, size - 1)
    axis = 0 if border == "mirror" else 1
    period = max(1, 2 * (size - 1 + axis))
    return (index % period).minimum((-index - axis) % period)


def gaussian_blur(images: Tensor, sigma: float, truncate: float, border: Border) -> Tensor:
    """Convolve with a Gaussian of ``sigma`` pixels, cut off at ``truncate`` sigmas.

    >>> gaussian_blur(torch.eye(3)[None, None], 0.4, 2.0, "edge")[0, 0, 0]
    tensor([0.9225, 0.0759, 0.0016])
    """
    reach = int(truncate * sigma + 0.5)
    if not reach:
        return images
    taps = _bell(reach, sigma)
    for dim in (2, 3):
        size = images.shape[dim]
        wide = framed(images, *((reach, 0) if dim == 2 else (0, reach)), border)
        images = wide.narrow(dim, 0, size) * taps[0].item()
        for i, tap in enumerate(taps[1:].tolist(), start=1):
            images.add_(wide.narrow(dim, i, size), alpha=tap)
    return images


def _bell(reach: int, sigma: float) -> Tensor:
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=torch.float64) / sigma) ** 2)
    return weights / weights.sum()


def convolved(images: Tensor, kernel: Tensor, border: Border) -> Tensor:
    """Convolve with a square ``kernel`` (2r + 1, 2r + 1), by Fourier transforms."""
    height, width = images.shape[2:]
    reach = len(kernel) // 2
    wide = framed(images, reach, reach, border)
    size = list(wide.shape[2:])
    spectrum = torch.fft.rfft2(wide) * torch.fft.rfft2(kernel.to(images), s=size)
    full: Tensor = torch.fft.irfft2(spectrum, s=size)
    return full[..., 2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]


def disk(radius: float, softness: float) -> Tensor:
    """Return the picture of a point out of focus: a softened disk of ``radius`` pixels that sums to 1.

    >>> (disk(1, 0.1) * 5).round()[1:4, 1:4]
    tensor([[0., 1., 0.],
            [1., 1., 1.],
            [0., 1., 0.]], dtype=torch.float64)
    """
    margin = 1 if radius <= 8 else 2  # of the softening kernel, as published
    reach = int(radius) + margin
    at = torch.arange(-reach, reach + 1)
    inside = (at[:, None] ** 2 + at**2 <= radius**2).double()
    soft = _bell(margin, softness)
    kernel = F.conv2d(inside[None, None], torch.outer(soft, soft)[None, None], padding=margin)[0, 0]
    return kernel / kernel.sum()


def streaked(images: Tensor, angles: Tensor, radius: float, sigma: float) -> Tensor:
    """Return each image smeared one way along its angle (radians), 2 ``radius`` pixels far.

    out(p) = sum_i w_i x(p + i (cos angle, sin angle), rounded), with w_i a Gaussian of ``sigma`` pixels,
    i >= 0. What lies outside is the edge.
    """
    reach = 2 * max(1, round(radius))
    fading = _bell(reach, sigma)[reach:]
    weights = (fading / fading.sum()).tolist()
    steps, angles = torch.arange(reach + 1), angles.cpu()[:, None]
    down = torch.ceil(steps * torch.sin(angles) - 0.5).long()  # (B, taps)
    right = torch.ceil(steps * torch.cos(angles) - 0.5).long()
    height, width = images.shape[2:]
    rows, columns = int(down.abs().max()), int(right.abs().max())
    wide = framed(images, rows, columns, "edge")
    out = torch.zeros_like(images)
    tops, lefts = (down + rows).tolist(), (right + columns).tolist()
    for image, source, ys, xs in zip(out, wide, tops, lefts, strict=True):
        for weight, y, x in zip(weights, ys, xs, strict=True):
            image.add_(source[:, y : y + height, x : x + width], alpha=weight)
    return out


def zoomed(images: Tensor, factor: float) -> Tensor:
    """Return the middle of each image, enlarged to the size of the image.

    >>> zoomed(torch.arange(16.0).view(1, 1, 4, 4), 2.0)[0, 0, 0]
    tensor([5.0000, 5.3333, 5.6667, 6.0000])
    """
    height, width = images.shape[2:]
    rows, columns = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - rows) // 2, (width - columns) // 2
    return enlarged(images[..., top : top + rows, left : left + columns], factor, height, width)


def enlarged(images: Tensor, factor: float, height: int, width: int) -> Tensor:
    """Return the middle of each image enlarged ``factor`` times, bilinear, (B, C, height, width)."""
    size = [max(height, round(images.shape[2] * factor)), max(width, round(images.shape[3] * factor))]
    large = F.interpolate(images, size=size, mode="bilinear", align_corners=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return large[..., top : top + height, left : left + width]

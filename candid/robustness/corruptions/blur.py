"""Blurs; images (B, C, H, W) are floats in levels of 0 to 255, lengths are pixels."""

import math

import torch
from torch import Tensor

from candid.robustness.corruptions.filters import convolved, disk, gaussian_blur, streaked, truncated, zoomed
from candid.robustness.corruptions.noise import Generators, uniform
from candid.robustness.corruptions.registry import corruption


@corruption(  # radius, softness
    "blur", short="Defocus", alexnet=0.82, number=3, lengths=(0, 1),
    parameters={
        224: ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        64: ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        32: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    },
)  # fmt: skip
def defocus_blur(images: Tensor, _: Generators, radius: float, softness: float) -> Tensor:
    """Convolution with a disk of ``radius``, softened by a Gaussian."""
    return convolved(images, disk(radius, softness), "mirror")


@corruption(  # sigma, reach, passes
    "blur", short="Glass", alexnet=0.826, number=4, lengths=(0, 1),
    parameters={
        224: ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        64: ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        32: ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    },
)  # fmt: skip
def glass_blur(images: Tensor, generators: Generators, sigma: float, reach: float, passes: float) -> Tensor:
    """Pixels taken from places up to ``reach`` away, ``passes`` times, between two Gaussian blurs."""
    reach = max(1, round(reach))
    blurred = truncated(gaussian_blur(images, sigma, 4.0, "edge"))
    height, width = images.shape[2:]
    places = 2 * reach * uniform(generators, int(passes), height, width, device=images.device)
    down = places.floor()
    right = (2 * reach * (places - down)).floor_()  # the same number says both
    source = _scattered(down[:, 0] - reach, right[:, 0] - reach, reach)
    for each in range(1, int(passes)):
        source = source.gather(1, _scattered(down[:, each] - reach, right[:, each] - reach, reach))
    flat = blurred.flatten(2)
    scattered = flat.gather(2, source[:, None].expand_as(flat)).view_as(images)
    return gaussian_blur(scattered, sigma, 4.0, "edge")


def _scattered(down: Tensor, right: Tensor, reach: int) -> Tensor:
    """Where each pixel comes from after one pass, as places in the flat image, (B, H W).

    The published pass goes through the pixels from the last to the first and overwrites each by the one at
    its offset, which may have been overwritten before: then the chain of sources is followed to its end.
    """
    height, width = down.shape[1:]
    here = torch.arange(height * width, device=down.device).view(height, width)
    inner = torch.zeros_like(here, dtype=torch.bool)
    inner[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    source = torch.where(inner, here + (down * width + right).long(), here).flatten(1)
    overwritten = (down > 0) | (down == 0) & (right > 0)  # before its turn, the source was
    follow = (inner & overwritten).flatten(1)
    while follow.any():
        further = source.gather(1, source)
        follow, source = follow & follow.gather(1, source), torch.where(follow, further, source)
    return source


@corruption(  # radius, sigma
    "blur", short="Motion", alexnet=0.786, number=5, lengths=(0, 1),
    parameters={
        224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    },
)  # fmt: skip
def motion_blur(images: Tensor, generators: Generators, radius: float, sigma: float) -> Tensor:
    """A smear along a direction within 45 degrees of the horizontal, fading with ``sigma``."""
    angles = (uniform(generators) - 0.5) * math.pi / 2
    return streaked(images, angles, radius, sigma)


@corruption(  # zooms, step
    "blur", short="Zoom", alexnet=0.798, number=6,
    parameters={
        224: ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
        64: ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        32: ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
    },
)  # fmt: skip
def zoom_blur(images: Tensor, _: Generators, zooms: float, step: float) -> Tensor:
    """The mean of the image and of ``zooms`` images enlarged 1, 1 + step, 1 + 2 step, ... times."""
    images = images.contiguous(memory_format=torch.channels_last)  # twice as fast to enlarge
    total = 2 * images
    for i in range(1, int(zooms)):
        total += zoomed(images, 1 + i * step)
    return total / (zooms + 1)

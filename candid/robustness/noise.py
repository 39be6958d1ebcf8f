"""Noise, and the random numbers of all corruptions; images (B, C, H, W) are floats in levels of 0 to 255.

Every image draws from a generator of its own, on the CPU: its numbers depend neither on the other images of
its batch nor on the device.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

Generators = Sequence[Generator]


def uniform(generators: Generators, *shape: int, device: torch.device | None = None) -> Tensor:
    """Numbers in [0, 1), (B, *shape).

    >>> uniform([torch.Generator().manual_seed(0)], 2, 3).shape
    torch.Size([1, 2, 3])
    """
    return torch.stack([torch.rand(shape, generator=each) for each in generators]).to(device)


def normal(generators: Generators, *shape: int, device: torch.device | None = None) -> Tensor:
    """Standard normal numbers, (B, *shape)."""
    return torch.stack([torch.randn(shape, generator=each) for each in generators]).to(device)


def gaussian_noise(images: Tensor, generators: Generators, deviation: float) -> Tensor:
    """Normal numbers of 255 ``deviation`` added to every value."""
    noise = normal(generators, *images.shape[1:], device=images.device)
    return noise.mul_(255 * deviation).add_(images)


def shot_noise(images: Tensor, generators: Generators, photons: float) -> Tensor:
    """Photon counts: Poisson(x photons / 255), scaled back; the fewer photons, the noisier."""
    rates = (images * (photons / 255)).cpu()
    counts = [torch.poisson(rate, generator=each) for rate, each in zip(rates, generators, strict=True)]
    return torch.stack(counts).mul_(255 / photons).to(images.device)


def impulse_noise(images: Tensor, generators: Generators, share: float) -> Tensor:
    """A ``share`` of the values, each channel on its own, becomes 0 or 255 with equal chances."""
    u = uniform(generators, *images.shape[1:], device=images.device)
    return images.masked_fill(u < share, 255.0).masked_fill(u < share / 2, 0.0)

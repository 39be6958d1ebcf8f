"""Noise, and the random numbers of all corruptions; images (B, C, H, W) are floats in levels of 0 to 255.

Every image draws from a generator of its own, on the CPU: its numbers depend neither on the other images of
its batch nor on the device.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Generator, Tensor

from candid.robustness.corruptions.registry import corruption

Generators = Sequence[Generator]


def uniform(generators: Generators, *shape: int, device: torch.device | None = None) -> Tensor:
    """Draw numbers in [0, 1), (B, *shape).

    >>> uniform([torch.Generator().manual_seed(0)], 2, 3).shape
    torch.Size([1, 2, 3])
    """
    return torch.stack([torch.rand(shape, generator=each) for each in generators]).to(device)


def normal(generators: Generators, *shape: int, device: torch.device | None = None) -> Tensor:
    """Draw standard normal numbers, (B, *shape)."""
    return torch.stack([torch.randn(shape, generator=each) for each in generators]).to(device)


@corruption(  # standard deviation, as a share of 255
    "noise", short="Gauss.", alexnet=0.886, number=0,
    parameters={
        224: (0.08, 0.12, 0.18, 0.26, 0.38),
        64: (0.04, 0.08, 0.12, 0.15, 0.18),
        32: (0.04, 0.06, 0.08, 0.09, 0.1),
    },
)  # fmt: skip
def gaussian_noise(images: Tensor, generators: Generators, deviation: float) -> Tensor:
    """Normal numbers of 255 ``deviation`` added to every value."""
    noise = normal(generators, *images.shape[1:], device=images.device)
    return noise.mul_(255 * deviation).add_(images)


@corruption(  # photons at full brightness
    "noise", short="Shot", alexnet=0.894, number=1,
    parameters={
        224: (60, 25, 12, 5, 3),
        64: (250, 100, 50, 30, 15),
        32: (500, 250, 100, 75, 50),
    },
)  # fmt: skip
def shot_noise(images: Tensor, generators: Generators, photons: float) -> Tensor:
    """Photon counts: Poisson(x photons / 255), scaled back; the fewer photons, the noisier."""
    share, other = (table.to(images.device) for table in _walker_tables(photons))
    columns = share.shape[1]
    places = columns * uniform(generators, *images.shape[1:], device=images.device)
    column = places.floor()
    cell = (images * columns + column).long()
    counts = torch.where(places - column < share.view(-1)[cell], column, other.view(-1)[cell])
    return counts * (255 / photons)


@cache
def _walker_tables(photons: float) -> tuple[Tensor, Tensor]:
    """Poisson distributions of the rates level photons / 255, for Walker's alias method, (256, columns) each.

    A count is drawn as a column c with equal chances: it is c with the chance ``share``, else ``other``.
    torch.poisson takes three times as long.
    """
    columns = math.ceil(photons + 8 * math.sqrt(photons)) + 20
    counts = torch.arange(columns, dtype=torch.float64)
    rates = torch.arange(256, dtype=torch.float64)[:, None] * photons / 255
    chances = torch.exp(torch.xlogy(counts, rates) - rates - torch.lgamma(counts + 1))
    shares = (columns * chances / chances.sum(1, keepdim=True)).tolist()
    others = []
    for row in shares:
        other = list(range(columns))
        scarce = [c for c in other if row[c] < 1]
        plenty = [c for c in other if row[c] > 1]
        while scarce and plenty:
            other[scarce[-1]] = plenty[-1]
            row[plenty[-1]] -= 1 - row[scarce.pop()]
            if row[plenty[-1]] < 1:
                scarce.append(plenty.pop())
        others.append(other)
    return torch.tensor(shares), torch.tensor(others, dtype=torch.float32)


@corruption(  # share of values
    "noise", short="Impulse", alexnet=0.923, number=2,
    parameters={
        224: (0.03, 0.06, 0.09, 0.17, 0.27),
        64: (0.01, 0.02, 0.05, 0.08, 0.14),
        32: (0.01, 0.02, 0.03, 0.05, 0.07),
    },
)  # fmt: skip
def impulse_noise(images: Tensor, generators: Generators, share: float) -> Tensor:
    """A ``share`` of the values, each channel on its own, becomes 0 or 255 with equal chances."""
    u = uniform(generators, *images.shape[1:], device=images.device)
    return torch.where(u < share, 255.0 * (u >= share / 2), images)

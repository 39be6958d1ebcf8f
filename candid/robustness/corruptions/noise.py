"""Noise, and the random numbers of all corruptions; images (B, C, H, W) are floats in levels of 0 to 255.

Every image draws from a generator of its own: its numbers do not depend on the other images of its batch.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from candid._support.numbers import Array
from candid.robustness.corruptions import corruption

Generators = Sequence[np.random.Generator]


def uniform(generators: Generators, *shape: int) -> Array:
    """Draw numbers in [0, 1), (B, *shape) in float32.

    >>> uniform([np.random.default_rng(0)], 2, 3).shape
    (1, 2, 3)
    """
    return np.stack([random.random(shape, np.float32) for random in generators])


def normal(generators: Generators, *shape: int) -> Array:
    """Draw standard normal numbers, (B, *shape) in float32."""
    return np.stack([random.standard_normal(shape, np.float32) for random in generators])


@corruption(  # standard deviation, as a share of 255
    "noise", short="Gauss.", alexnet=0.886, number=0,
    parameters={
        224: (0.08, 0.12, 0.18, 0.26, 0.38),
        64: (0.04, 0.08, 0.12, 0.15, 0.18),
        32: (0.04, 0.06, 0.08, 0.09, 0.1),
    },
)  # fmt: skip
def gaussian_noise(images: Array, generators: Generators, deviation: float) -> Array:
    """Normal numbers of 255 ``deviation`` added to every value."""
    noise = normal(generators, *images.shape[1:])
    noise *= 255 * deviation
    noise += images
    return noise


@corruption(  # photons at full brightness
    "noise", short="Shot", alexnet=0.894, number=1,
    parameters={
        224: (60, 25, 12, 5, 3),
        64: (250, 100, 50, 30, 15),
        32: (500, 250, 100, 75, 50),
    },
)  # fmt: skip
def shot_noise(images: Array, generators: Generators, photons: float) -> Array:
    """Photon counts: Poisson(x photons / 255), scaled back; the fewer photons, the noisier."""
    share, other = _walker_tables(photons)
    columns = share.shape[1]
    places = columns * uniform(generators, *images.shape[1:])
    column = np.floor(places)
    cell = (images * columns + column).astype(np.int32)
    counts = np.where(places - column < share.reshape(-1).take(cell), column, other.reshape(-1).take(cell))
    return counts * np.float32(255 / photons)


@cache
def _walker_tables(photons: float) -> tuple[Array, Array]:
    """Poisson distributions of the rates level photons / 255, for Walker's alias method, (256, columns) each.

    A count is drawn as a column c with equal chances: it is c with the chance ``share``, else ``other``.
    numpy's own Poisson numbers take several times as long.
    """
    from scipy.special import gammaln, xlogy

    columns = math.ceil(photons + 8 * math.sqrt(photons)) + 20
    counts = np.arange(columns)
    rates = np.arange(256)[:, None] * photons / 255
    chances = np.exp(xlogy(counts, rates) - rates - gammaln(counts + 1))
    shares = (columns * chances / chances.sum(1, keepdims=True)).tolist()
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
    return np.array(shares, np.float32), np.array(others, np.float32)


@corruption(  # share of values
    "noise", short="Impulse", alexnet=0.923, number=2,
    parameters={
        224: (0.03, 0.06, 0.09, 0.17, 0.27),
        64: (0.01, 0.02, 0.05, 0.08, 0.14),
        32: (0.01, 0.02, 0.03, 0.05, 0.07),
    },
)  # fmt: skip
def impulse_noise(images: Array, generators: Generators, share: float) -> Array:
    """A ``share`` of the values, each channel on its own, becomes 0 or 255 with equal chances."""
    u = uniform(generators, *images.shape[1:])
    return np.where(u < share, np.where(u < share / 2, np.float32(0), np.float32(255)), images)

"""Random numbers by name: the same key gives the same numbers in any process, at any time.

Nothing random is carried from one training step to the next, so a run that was killed has no generator
to restore. :func:`draws` gives the integers and permutations of torch's generator without torch, so that
splits, folds and halves do not depend on whether torch is installed.
"""

from typing import TYPE_CHECKING

import numpy as np

from candid._support.numbers import Array

if TYPE_CHECKING:
    import torch


def seed_of(*key: int) -> int:
    """Return the seed of a key, 63 bits."""
    (seed,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(seed >> np.uint64(1))


def generator(*key: int, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Return a generator of torch that is seeded by all of ``key``: for networks.

    >>> import torch
    >>> torch.equal(torch.rand(2, generator=generator(0, 7)), torch.rand(2, generator=generator(0, 7)))
    True
    """
    import torch

    return torch.Generator(device).manual_seed(seed_of(*key))


class Draws:
    """Random integers from the Mersenne Twister that torch has on a CPU, drawn in the same way."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.MT19937()
        self._bits._legacy_seeding(seed % 2**32)

    def permutation(self, n: int) -> Array:
        """Return a random order of n numbers: ``torch.randperm(n)``, (n,) int64.

        >>> draws(0).permutation(4)
        array([3, 1, 0, 2])
        """
        order = list(range(n))
        steps = self._bits.random_raw(max(n - 1, 0)) % np.arange(n, 1, -1, dtype=np.uint64)
        for i, step in enumerate(steps.tolist()):
            order[i], order[i + step] = order[i + step], order[i]
        return np.array(order, np.int64)

    def integers(self, high: int, size: int) -> Array:
        """Return ``size`` numbers from 0 to ``high - 1``: ``torch.randint(high, (size,))``, int64.

        Args:
            high: at most 2^28; torch draws larger numbers in a different way.
            size: how many.
        """
        return (self._bits.random_raw(size) % np.uint64(high)).astype(np.int64)

    def words(self, size: int) -> Array:
        """Return ``size`` random words of 64 bits: ``torch.empty(size).random_(-(2**63), None)``, int64."""
        high, low = self._bits.random_raw(2 * size).reshape(size, 2).T
        return (high << np.uint64(32) | low).view(np.int64)

    @property
    def numpy(self) -> np.random.Generator:
        """The same source as a generator of numpy: for normal and other numbers."""
        return np.random.Generator(self._bits)


def draws(*key: int) -> Draws:
    """Return random integers and permutations that are fixed by ``key``."""
    return Draws(seed_of(*key))


def hashed(words: Array, *key: int) -> Array:
    """Return a random word for each word and ``key``, uint64: the finaliser of SplitMix64.

    >>> hashed(np.array([1, 1, 2], np.uint64), 0) % np.uint64(5)
    array([1, 1, 0], dtype=uint64)
    """
    x = words.astype(np.uint64) + np.uint64(seed_of(*key))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))

"""Permutations and integers without torch are those of torch, on which stored splits and keys rest."""

import numpy as np
import pytest
import torch

from candid._support.randomness import draws, generator

SIZES = (0, 1, 2, 3, 10, 31, 100, 624, 625, 1000, 5000)


@pytest.mark.parametrize("seed", range(30))
def test_draws_are_those_of_torch(seed: int) -> None:
    size = SIZES[seed % len(SIZES)] + seed
    for key in ((seed,), (seed, 7), (2**40 + seed, 3, seed)):
        ours, theirs = draws(*key), generator(*key)
        for high in (2, 15, 256, 1000, size + 1, 2**28 - 1):
            assert np.array_equal(ours.permutation(size), torch.randperm(size, generator=theirs))
            assert np.array_equal(ours.integers(high, size), torch.randint(high, (size,), generator=theirs))
            assert int(ours.integers(high, 1)[0]) == int(torch.randint(high, (), generator=theirs))


@pytest.mark.parametrize("size", SIZES)
def test_words_are_those_of_torch(size: int) -> None:
    ours, theirs = draws(size, 1), generator(size, 1)
    for _ in range(2):
        words = torch.empty(size, dtype=torch.int64).random_(-(2**63), None, generator=theirs)
        assert np.array_equal(ours.words(size), words)


def test_permutations_are_fixed_for_ever() -> None:
    random = draws(3, 1)
    assert random.permutation(10).tolist() == [1, 7, 3, 6, 9, 0, 8, 5, 2, 4]
    assert random.permutation(5).tolist() == [1, 4, 0, 3, 2]
    assert random.integers(1000, 4).tolist() == [110, 776, 227, 741]

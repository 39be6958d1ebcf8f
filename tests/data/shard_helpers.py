"""A small set of tar shards, and how its tests read it."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from candid._support.numbers import Array
from candid.data.images import Preprocessing
from candid.data.shards import ShardSplit
from candid.training.loader import Plan, training_batches
from tests.data.helpers import pixels, write_shard

PREPROCESSING = Preprocessing(3, 10, 12)
AUGMENTED = Preprocessing(3, 10, 12, "resized", flip=True)
SIZES = [7, 5, 6, 4, 8, 6]
SEED_OF = {pixels(seed).transpose(2, 0, 1).tobytes(): seed for seed in range(60)}
Batches = list[tuple[Tensor, Tensor]]


def write_shards(folder: Path) -> Path:
    """36 training images in six shards, then 9 and 2 for validation, 5 for testing."""
    start = 0
    names = [f"train-{i}.tar" for i in range(6)] + ["val-0.tar", "val-1.tar", "test.tar"]
    for name, size in zip(names, [*SIZES, 9, 2, 5], strict=True):
        write_shard(folder / name, range(start, start + size))
        start += size
    return folder


def seeds(batches: Iterable[tuple[Tensor | Array, Tensor | Array]]) -> list[int]:
    """Which pictures the batches show, by their pixels; their labels must fit."""
    found = []
    for images, labels in batches:
        assert images.shape[1:] == (3, 10, 12)
        assert np.asarray(images).dtype == np.uint8
        for image, label in zip(images, labels, strict=True):
            found.append(SEED_OF[np.asarray(image).tobytes()])
            assert found[-1] % 3 == label
    return found


def load(
    split: object,
    start: int = 0,
    stop: int = 14,
    *,
    preprocessing: Preprocessing = PREPROCESSING,
    batch: int = 6,
    processes: int = 1,
    rank: int = 0,
    accumulate: int = 1,
    seed: int = 0,
    workers: int = 0,
) -> Batches:
    assert isinstance(split, ShardSplit)
    plan = Plan(len(split), batch, processes * accumulate, seed)
    parts = range(rank * accumulate, (rank + 1) * accumulate)
    return [(x, y) for x, y in training_batches(split, preprocessing, plan, start, stop, parts, workers)]


def same(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )

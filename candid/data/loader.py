"""Batches for training and evaluation: which images, in which order, loaded by whom."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.data import shards
from candid.data.augment import NUMBERS
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit, Batch, IndexedSplit, NamedBatch, ShardSplit, Split

Request = tuple[int | None, Tensor]
"""The epoch, None for no augmentation, and the indices of the images."""


@dataclass(frozen=True)
class Plan:
    """Which images each training step sees: a function of the seed alone, however many processes share it.

    A step's global batch is cut into ``parts`` of equal size; process r takes the parts
    r * parts / processes and on, one after the other.
    """

    images: int
    batch: int
    parts: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch > self.images:
            raise CandidError(
                f"A batch of {self.batch} is larger than the {self.images} training images: make it smaller."
            )
        if self.batch % self.parts:
            raise CandidError(
                f"A batch of {self.batch} can't be shared equally by {self.parts} processes or parts: "
                f"use a multiple of {self.parts}."
            )

    @property
    def steps_per_epoch(self) -> int:
        """What does not fill a last batch is left out; which images these are changes with the epoch."""
        return self.images // self.batch

    def requests(self, start: int, stop: int, parts: range) -> Iterator[Request]:
        """What the owner of ``parts`` loads for the steps ``start`` to ``stop``."""
        size = self.batch // self.parts
        order, order_epoch = torch.empty(0), -1
        for step in range(start, stop):
            epoch, batch = divmod(step, self.steps_per_epoch)
            if epoch != order_epoch:
                order = torch.randperm(self.images, generator=generator(self.seed, epoch, 0))
                order_epoch = epoch
            for part in parts:
                first = batch * self.batch + part * size
                yield epoch, order[first : first + size]


class _Fetcher(TorchDataset[Batch | CandidError]):
    """Loads a whole batch at once; runs in a worker if there are any."""

    def __init__(self, split: IndexedSplit, preprocessing: Preprocessing, seed: int) -> None:
        self.split, self.preprocessing, self.seed = split, preprocessing, seed

    def __getitem__(self, request: Request) -> Batch | CandidError:
        epoch, indices = request
        numbers = None if epoch is None else _numbers(self.seed, epoch, len(self.split))[indices]
        try:
            return self.split.batch(indices, self.preprocessing, numbers), self.split.labels[indices]
        except CandidError as error:
            return error


def _raising(batches: Iterable[Batch | CandidError]) -> Iterator[Batch]:
    """``batches``; an error among them is raised, with its own message instead of a worker's traceback."""
    error = None
    for batch in batches:
        if isinstance(batch, CandidError):
            error = batch
            break
        yield batch
    del batches  # ends the workers now; a traceback would keep them
    if error is not None:
        raise error


@lru_cache(maxsize=1)
def _numbers(seed: int, epoch: int, images: int) -> Tensor:
    return torch.rand(images, NUMBERS, generator=generator(seed, epoch, 1))


class _Requests:
    def __init__(self, requests: Iterator[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def _load(
    split: IndexedSplit, preprocessing: Preprocessing, seed: int, requests: Iterator[Request], workers: int
) -> Iterator[Batch]:
    workers = 0 if isinstance(split, ArraySplit) else workers  # memory is faster than another process
    loader = DataLoader(
        _Fetcher(split, preprocessing, seed),
        batch_size=None,
        sampler=_Requests(requests),
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )
    return _raising(iter(loader))


def training_batches(
    split: Split,
    preprocessing: Preprocessing,
    plan: Plan,
    start: int,
    stop: int,
    parts: range,
    workers: int = 0,
) -> Iterator[Batch]:
    """One batch for each of ``parts`` in each step from ``start`` to ``stop``, shuffled and augmented."""
    if isinstance(split, ShardSplit):
        return shards.shard_training_batches(split, preprocessing, plan, start, stop, parts, workers)
    return _load(split, preprocessing, plan.seed, plan.requests(start, stop, parts), workers)


def evaluation_batches(
    split: Split, preprocessing: Preprocessing, batch: int, rank: int = 0, world: int = 1, workers: int = 0
) -> Iterator[Batch]:
    """The images of ``split`` in their order, without augmentation; each of ``world`` processes gets a share.

    That is every ``world``-th batch from ``rank`` on, so that batches are the same for any ``world``.
    Of tar shards, each process gets other images, in an order of their own.
    """
    return ((x, y) for x, y, _ in named_batches(split, preprocessing, batch, rank, world, workers))


def named_batches(
    split: Split, preprocessing: Preprocessing, batch: int, rank: int = 0, world: int = 1, workers: int = 0
) -> Iterator[NamedBatch]:
    """:func:`evaluation_batches`, each with what its images are called."""
    if isinstance(split, ShardSplit):
        return shards.shard_evaluation_batches(split, preprocessing, batch, rank, world, workers)
    own = [part for part in torch.arange(len(split)).split(batch)[rank::world] if len(part)]
    requests: Iterator[Request] = ((None, part) for part in own)
    loaded = _load(split, preprocessing, 0, requests, workers)
    return ((x, y, split.named(part)) for part, (x, y) in zip(own, loaded, strict=True))

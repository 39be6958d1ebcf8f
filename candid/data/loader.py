"""Batches for training and evaluation: which images, in which order, and which process loads them."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.data.augment import NUMBERS
from candid.data.images import Preprocessing

Batch = tuple[Tensor, Tensor]
"""Images (B, C, H, W) uint8 and labels (B,)."""
NamedBatch = tuple[Tensor, Tensor, tuple[str, ...]]
"""A batch and the names of its images."""
Request = tuple[int | None, Tensor]
"""The epoch (None for no augmentation) and the indices of the images."""
B = TypeVar("B", Batch, NamedBatch)


@dataclass(frozen=True)
class Plan:
    """Decides which images each training step sees. It depends on the seed, not on the number of processes.

    A step's global batch is cut into ``parts`` of equal size. Process r loads the parts from
    r * parts / processes on, one after the other.
    """

    images: int
    batch: int
    parts: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch > self.images:
            raise CandidError(
                f"A batch of {self.batch} is larger than the {self.images} training images: set --batch to "
                f"{self.images} or less."
            )
        if self.batch % self.parts:
            raise CandidError(
                f"A batch of {self.batch} can't be shared equally by {self.parts} processes or parts: "
                f"use a multiple of {self.parts}."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of whole batches. The images that fill none are different in each epoch."""
        return self.images // self.batch

    def requests(self, start: int, stop: int, parts: range) -> Iterator[Request]:
        """Yield what the owner of ``parts`` loads for the steps from ``start`` to ``stop``."""
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


class Batched(Protocol):
    """Images that can be loaded in batches: every split."""

    def training_batches(
        self, preprocessing: Preprocessing, plan: Plan, steps: range, parts: range, workers: int
    ) -> Iterator[Batch]:
        """Yield one batch for each of ``parts`` in each of ``steps``, shuffled and augmented."""

    def named_batches(
        self, preprocessing: Preprocessing, batch: int, rank: int, world: int, workers: int
    ) -> Iterator[NamedBatch]:
        """Yield the share of process ``rank`` among ``world``, without augmentation."""


def training_batches(
    split: Batched,
    preprocessing: Preprocessing,
    plan: Plan,
    start: int,
    stop: int,
    parts: range,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield a batch for each of ``parts`` in each step from ``start`` to ``stop``, shuffled and augmented."""
    return split.training_batches(preprocessing, plan, range(start, stop), parts, workers)


def named_batches(
    split: Batched,
    preprocessing: Preprocessing,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[NamedBatch]:
    """Yield the images of ``split`` in their order, without augmentation, with their labels and names.

    Each of ``world`` processes gets every ``world``-th batch from ``rank`` on, so the batches are the same
    for any ``world``. Tar shards give each process different images, in the order in which they are read.
    """
    return split.named_batches(preprocessing, batch, rank, world, workers)


def evaluation_batches(
    split: Batched,
    preprocessing: Preprocessing,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield the batches of :func:`named_batches` without the names."""
    return ((x, y) for x, y, _ in named_batches(split, preprocessing, batch, rank, world, workers))


class _Fetcher(TorchDataset[Batch | CandidError]):
    """Loads a whole batch at once. It runs in a worker process if there are any."""

    def __init__(self, fetch: Callable[[Tensor, Tensor | None], Batch], images: int, seed: int) -> None:
        self.fetch, self.images, self.seed = fetch, images, seed

    def __getitem__(self, request: Request) -> Batch | CandidError:
        epoch, indices = request
        numbers = None if epoch is None else _numbers(self.seed, epoch, self.images)[indices]
        try:
            return self.fetch(indices, numbers)
        except CandidError as error:  # as an item, because a raised one would contain the worker's traceback
            return error


@lru_cache(maxsize=1)
def _numbers(seed: int, epoch: int, images: int) -> Tensor:
    return torch.rand(images, NUMBERS, generator=generator(seed, epoch, 1))


class _Requests:
    def __init__(self, requests: Iterator[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class _Stream(IterableDataset[Any]):
    """The batches of one reader. It runs in a process of its own if there are workers."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.batches()
        except CandidError as error:
            yield error


def load(
    fetch: Callable[[Tensor, Tensor | None], Batch],
    images: int,
    seed: int,
    requests: Iterator[Request],
    workers: int,
) -> Iterator[Batch]:
    """Yield ``fetch(indices, numbers)`` for each request; ``numbers`` are the random ones of augmentation."""
    return _in_turn([_started(_Fetcher(fetch, images, seed), workers, sampler=_Requests(requests))])


def streams(sources: Sequence[Callable[[], Iterator[B]]], workers: int) -> Iterator[B]:
    """Yield a batch of each source in turn until all have ended.

    Each source has its own loader: one loader with many workers would order the last batches by their speed.
    """
    return _in_turn([_started(_Stream(source), min(1, workers)) for source in sources])


def _started(dataset: TorchDataset[Any], workers: int, **options: Any) -> Iterator[Any]:
    with warnings.catch_warnings():  # the user chose the number of workers
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        loader = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=4 if workers else None,
            **options,
        )
        return iter(loader)


def _in_turn(loaders: Iterable[Iterator[B | CandidError]]) -> Iterator[B]:
    """Yield a batch of each loader in turn. An error among them is raised with its own message."""
    waiting = deque(loaders)
    del loaders
    while waiting:
        batch = next(waiting[0], None)
        if batch is None:
            waiting.popleft()
            continue
        if isinstance(batch, CandidError):
            waiting.clear()  # ends the workers now, because a traceback would keep them alive
            raise batch
        yield batch
        waiting.rotate(-1)


def _unchanged(batch: B) -> B:  # torch would turn tuples into lists
    return batch

"""Batches of images in their order: which images, and which threads load them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Protocol, TypeVar

from candid._support.numbers import Array
from candid.data.images import Preprocessing

NamedBatch = tuple[Array, Array, tuple[str, ...]]
"""Images (B, C, H, W) uint8, labels (B,) int64 and the names of the images."""
AHEAD = 4
"""Batches that each thread loads before they are needed."""
B = TypeVar("B")


class Batched(Protocol):
    """Images that can be loaded in batches: every split."""

    def named_batches(
        self, preprocessing: Preprocessing, batch: int, rank: int, world: int, workers: int
    ) -> Iterator[NamedBatch]:
        """Yield the share of process ``rank`` among ``world``."""


def named_batches(
    split: Batched,
    preprocessing: Preprocessing,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[NamedBatch]:
    """Yield the images of ``split`` in their order, with their labels and names.

    Each of ``world`` processes gets every ``world``-th batch from ``rank`` on, so the batches are the same
    for any ``world``. Tar shards give each process different images, in the order in which they are read.

    Args:
        split: the images.
        preprocessing: how the model sees images.
        batch: images per batch.
        rank: the number of this process.
        world: the number of processes.
        workers: threads that load images before they are needed; with 0, they are loaded when needed.
    """
    return split.named_batches(preprocessing, batch, rank, world, workers)


def loaded(calls: Iterable[Callable[[], B]], workers: int) -> Iterator[B]:
    """Yield the result of each call, in their order, made by ``workers`` threads."""
    if not workers:
        yield from (call() for call in calls)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="candid-loader")
    waiting: deque[Future[B]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_turn(sources: Sequence[Iterator[B]], workers: int) -> Iterator[B]:
    """Yield an item of each source in turn until all have ended; with ``workers``, each has a thread."""
    readers = deque(_read(source, min(1, workers)) for source in sources)
    while readers:
        item = next(readers[0], None)
        if item is None:
            readers.popleft()
            continue
        yield item
        readers.rotate(-1)


def _read(source: Iterator[B], workers: int) -> Iterator[B]:
    for item in loaded(repeat(partial(next, source, None)), workers):
        if item is None:
            return
        yield item

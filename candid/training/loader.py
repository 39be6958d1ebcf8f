"""Batches for training: which images, in which order, and which process loads them."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.randomness import draws, generator
from candid.data.images import Preprocessing
from candid.data.shards import Sample, ShardSplit, decoded, epoch_samples
from candid.data.splits import IndexedSplit, Split

Batch = tuple[Tensor, Tensor]
"""Images (B, C, H, W) uint8 and labels (B,)."""
Request = tuple[int, Array]
"""The epoch and the indices of the images."""


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

    def requests(self, steps: range, parts: range) -> Iterator[Request]:
        """Yield what the owner of ``parts`` loads for these ``steps``."""
        size = self.batch // self.parts
        for step in steps:
            epoch, batch = divmod(step, self.steps_per_epoch)
            for part in parts:
                first = batch * self.batch + part * size
                yield epoch, _order(self.seed, epoch, self.images)[first : first + size]


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, images: int) -> Array:
    return draws(seed, epoch, 0).permutation(images)


@lru_cache(maxsize=1)
def _numbers(seed: int, epoch: int, images: int) -> Tensor:
    return torch.rand(images, NUMBERS, generator=generator(seed, epoch, 1))


def training_batches(
    split: Split,
    preprocessing: Preprocessing,
    plan: Plan,
    start: int,
    stop: int,
    parts: range,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield a batch for each of ``parts`` in each step from ``start`` to ``stop``, shuffled and augmented."""
    steps = range(start, stop)
    if isinstance(split, ShardSplit):
        return _from_shards(split, preprocessing, plan, steps, parts, workers)
    assert isinstance(split, IndexedSplit)
    workers = 0 if split.in_memory else workers  # memory is faster than another process
    fetcher = _Fetcher(split, preprocessing, plan.seed)
    return _in_turn([_started(fetcher, workers, sampler=_Requests(plan.requests(steps, parts)))])


class _Fetcher(TorchDataset[Batch | CandidError]):
    """Loads a whole batch at once. It runs in a worker process if there are any."""

    def __init__(self, split: IndexedSplit, preprocessing: Preprocessing, seed: int) -> None:
        self.split, self.preprocessing, self.seed = split, preprocessing, seed
        # images in memory have no more pixels to crop
        self.crop = "shift" if split.in_memory and preprocessing.crop == "resized" else preprocessing.crop

    def __getitem__(self, request: Request) -> Batch | CandidError:
        epoch, indices = request
        numbers = _numbers(self.seed, epoch, len(self.split))[torch.from_numpy(indices)]
        try:
            images = torch.from_numpy(self.split.batch(indices, self.preprocessing, numbers.numpy()))
        except CandidError as error:  # as an item, because a raised one would contain the worker's traceback
            return error
        images = augmented(images, numbers, self.crop, self.preprocessing.flip)
        return images, torch.from_numpy(self.split.labels[indices])


class _Requests:
    def __init__(self, requests: Iterator[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def _from_shards(
    split: ShardSplit, preprocessing: Preprocessing, plan: Plan, steps: range, parts: range, workers: int
) -> Iterator[Batch]:
    """Yield batches of tar shards.

    The epoch's shuffled shards are dealt to readers, one for each worker of all processes. Each reads its
    own shards again and again until the epoch ends. So the batches depend on the seed and the number of
    readers, but not on the first step.
    """
    processes, rank = plan.parts // len(parts), parts.start // len(parts)
    readers = min(max(1, workers), len(split.urls) // processes)
    if not readers:
        raise CandidError(
            f"{processes} processes can't share {len(split.urls)} training shards: "
            "start fewer, or pack the images into more shards."
        )
    first, last = steps.start * len(parts), steps.stop * len(parts)
    sources = [
        partial(
            _shard_stream,
            split,
            preprocessing,
            plan,
            numbers=range(number, last, readers),
            per_epoch=plan.steps_per_epoch * len(parts),
            reader=rank * readers + number % readers,
            readers=processes * readers,
        )
        for number in range(first, min(first + readers, last))
    ]
    # one loader with many workers would order the last batches by their speed
    return _in_turn([_started(_Stream(source), min(1, workers)) for source in sources])


def _shard_stream(
    split: ShardSplit,
    preprocessing: Preprocessing,
    plan: Plan,
    numbers: range,
    per_epoch: int,
    reader: int,
    readers: int,
) -> Iterator[Batch]:
    """Yield the batches ``numbers`` of a process, all made by one reader."""
    size = plan.batch // plan.parts
    samples: Iterator[Sample] = iter(())
    epoch = -1
    for number in numbers:
        turn = number % per_epoch // numbers.step  # batches of this reader before in this epoch
        if number // per_epoch != epoch:
            epoch = number // per_epoch
            samples = epoch_samples(split, plan.seed, epoch, reader, readers)
            samples = islice(samples, turn * size, None)
        random = torch.rand(size, NUMBERS, generator=generator(plan.seed, epoch, reader, 6, turn))
        images, labels = decoded(list(islice(samples, size)), preprocessing, random.numpy())
        pixels = augmented(torch.from_numpy(images), random, preprocessing.crop, preprocessing.flip)
        yield pixels, torch.from_numpy(labels)


class _Stream(IterableDataset[Any]):
    """The batches of one reader. It runs in a process of its own if there are workers."""

    def __init__(self, batches: Callable[[], Iterator[Batch]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch | CandidError]:
        try:
            yield from self.batches()
        except CandidError as error:
            yield error


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


def _in_turn(loaders: Iterable[Iterator[Batch | CandidError]]) -> Iterator[Batch]:
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


def _unchanged(batch: Any) -> Any:  # torch would turn tuples into lists
    return batch


NUMBERS = 5
"""Uniform numbers per image: two for the position of its crop, one each for flip, area and shape."""


def augmented(images: Tensor, numbers: Tensor, crop: str, flip: bool) -> Tensor:
    """Return training images (B, C, H, W) shifted or jittered, as ``crop`` says, and mirrored if ``flip``."""
    if crop == "shift":
        images = padded_crops(images, numbers, padding=max(1, images.shape[2] // 8))
    if crop == "jitter":
        images = jittered(images, numbers)
    return random_flips(images, numbers) if flip else images


def padded_crops(images: Tensor, numbers: Tensor, padding: int) -> Tensor:
    """Return each image moved by up to ``padding`` pixels; its reflection fills the gap.

    A black frame would be learned by the density.

    >>> padded_crops(torch.arange(9).view(1, 1, 3, 3), torch.tensor([[0.0, 0.99, 0, 0, 0]]), padding=1)
    tensor([[[[4, 3, 4],
              [7, 6, 7],
              [4, 3, 4]]]])
    """
    height, width = images.shape[2:]
    shift = (numbers[:, :2] * (2 * padding + 1)).long() - padding
    columns = _reflected(torch.arange(width) + shift[:, :1], width)  # (B, W)
    rows = _reflected(torch.arange(height) + shift[:, 1:], height)  # (B, H)
    return images[torch.arange(len(images))[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def _reflected(index: Tensor, size: int) -> Tensor:
    period = max(1, 2 * (size - 1))
    return (index % period).minimum(-index % period)


def jittered(
    images: Tensor, numbers: Tensor, angle: float = 0.2, zoom: float = 0.15, shift: float = 0.125
) -> Tensor:
    """Return each image turned by up to ``angle`` (radians), resized by up to 1 + ``zoom``, and moved.

    ``shift`` is the largest move as a share of the image. Its reflection fills the gaps.
    """
    x, y, _, size, turn = (2 * numbers - 1).unbind(1)
    scale = torch.exp(math.log1p(zoom) * size)
    cos, sin = torch.cos(angle * turn) * scale, torch.sin(angle * turn) * scale
    rows = torch.stack([cos, -sin, 2 * shift * x, sin, cos, 2 * shift * y], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)
    return moved.round().to(images.dtype)


def random_flips(images: Tensor, numbers: Tensor) -> Tensor:
    """Return the images, half of them mirrored left to right."""
    mirrored = numbers[:, 2] < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)

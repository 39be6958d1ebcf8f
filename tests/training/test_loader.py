import numpy as np
import pytest
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.datasets import open_dataset
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit, FileSplit, IndexedSplit
from candid.training.loader import Plan, training_batches
from tests.data.helpers import write_folder

PREPROCESSING = Preprocessing(3, 10, 12, "resized", flip=True)
COUNT = 23


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> FileSplit:
    folder = tmp_path_factory.mktemp("photos")
    write_folder(folder / "train", {"cat": 11, "dog": 12}, width=19)
    write_folder(folder / "val", {"cat": 1, "dog": 1})
    train = open_dataset(str(folder)).train
    assert isinstance(train, FileSplit)
    return train


@pytest.fixture
def numbered() -> ArraySplit:
    """Images that show their number, which is their label, too."""
    numbers = np.arange(COUNT)
    return ArraySplit(numbers.astype(np.uint8).reshape(-1, 1, 1, 1).repeat(8, 2).repeat(8, 3), numbers)


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def load(
    split: IndexedSplit,
    start: int = 0,
    stop: int = 5,
    *,
    parts: range = range(1),
    of: int = 1,
    batch: int = 8,
    seed: int = 0,
    workers: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    plan = Plan(len(split), batch, of, seed)
    return [(x, y) for x, y in training_batches(split, PREPROCESSING, plan, start, stop, parts, workers)]


def test_an_epoch_shows_every_image_once(numbered: ArraySplit) -> None:
    plain = Preprocessing(1, 8, 8)
    plan = Plan(COUNT, 1, 1, seed=3)
    batches = list(training_batches(numbered, plain, plan, 0, 2 * COUNT, range(1)))
    labels = [int(y) for _, y in batches]
    assert sorted(labels[:COUNT]) == sorted(labels[COUNT:]) == list(range(COUNT))
    assert labels[:COUNT] != labels[COUNT:]
    assert labels[:COUNT] != sorted(labels[:COUNT])
    assert all((x == y).all() for x, y in batches)


def test_images_that_fill_no_batch_are_others_in_each_epoch(numbered: ArraySplit) -> None:
    plan = Plan(COUNT, 5, 1, seed=0)
    assert plan.steps_per_epoch == 4
    batches = [y for _, y in training_batches(numbered, Preprocessing(1, 8, 8), plan, 0, 40, range(1))]
    epochs = [torch.cat(batches[i : i + 4]).tolist() for i in range(0, 40, 4)]
    left_out = [frozenset(range(COUNT)).difference(epoch) for epoch in epochs]
    assert [len(images) for images in left_out] == [3] * 10
    assert len(set(left_out)) > 5


@pytest.mark.parametrize("parts", [2, 4])
def test_the_parts_of_all_processes_are_the_batch_of_one(photos: FileSplit, parts: int) -> None:
    together = load(photos)
    shared = [load(photos, parts=range(i, i + 1), of=parts) for i in range(parts)]
    for step, (images, labels) in enumerate(together):
        assert torch.equal(torch.cat([batches[step][0] for batches in shared]), images)
        assert torch.equal(torch.cat([batches[step][1] for batches in shared]), labels)


def test_a_process_loads_its_parts_one_after_the_other(photos: FileSplit) -> None:
    both = load(photos, parts=range(2, 4), of=4)
    alone = [load(photos, parts=range(i, i + 1), of=4) for i in (2, 3)]
    assert len(both) == 10
    assert same(both[0::2], alone[0])
    assert same(both[1::2], alone[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_later_start_goes_on_with_the_same_batches(photos: FileSplit, workers: int) -> None:
    everything = load(photos, parts=range(2), of=2)
    assert same(load(photos, start=3, parts=range(2), of=2, workers=workers), everything[6:])


def test_workers_change_nothing(photos: FileSplit) -> None:
    assert same(load(photos, workers=2), load(photos))


def test_seed_and_epoch_change_order_and_augmentation(photos: FileSplit) -> None:
    first = load(photos, 0, 4)
    assert not same(first[:2], first[2:])
    assert not same(load(photos, 0, 2, seed=1), first[:2])
    one = load(photos.subset(np.array([0])), 0, 3, batch=1)
    assert not torch.equal(one[0][0], one[1][0])


@pytest.mark.parametrize("batch", [24, 100])
def test_a_batch_larger_than_the_data_is_refused(batch: int) -> None:
    with pytest.raises(CandidError, match=f"batch of {batch} is larger than the 23 training images"):
        Plan(COUNT, batch, 1, seed=0)


def test_a_batch_that_cannot_be_shared_equally_is_refused() -> None:
    with pytest.raises(CandidError, match="batch of 10 can't be shared equally by 4 .* multiple of 4"):
        Plan(COUNT, 10, 4, seed=0)

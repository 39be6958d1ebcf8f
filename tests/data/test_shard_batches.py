from pathlib import Path

import pytest

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import SILENT
from candid.data import shards as module
from candid.data.datasets import Dataset, open_dataset
from candid.data.images import Preprocessing, decode_batch
from candid.data.shards import ShardSplit
from candid.training.loader import Plan, training_batches
from candid.training.options import TrainOptions
from candid.training.setup import open_data
from tests.data.helpers import evaluation_batches, write_shard
from tests.data.shard_helpers import AUGMENTED, PREPROCESSING, Batches, load, same, seeds


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (4, 0), (1, 2), (4, 1)])
def test_evaluation_shows_every_image_once(data: Dataset, world: int, workers: int) -> None:
    for split, expected in ((data.train, range(36)), (data.val, range(36, 47))):
        batches = [
            list(evaluation_batches(split, PREPROCESSING, 4, rank, world, workers)) for rank in range(world)
        ]
        assert sorted(seed for part in batches for seed in seeds(part)) == [*expected]
        assert max(len(y) for part in batches for _, y in part) <= 4
        assert all(batches)


def test_one_reader_shows_every_image_once_an_epoch(data: Dataset) -> None:
    found = seeds(load(data.train, 0, 12))
    assert sorted(found[:36]) == sorted(found[36:]) == [*range(36)]
    assert found[:36] != found[36:]
    assert found[:36] != sorted(found[:36])
    assert seeds(load(data.train, 0, 6, seed=1)) != found[:36]


def test_every_epoch_starts_with_all_images(folder: Path) -> None:
    short = open_dataset(str(folder), epoch_images=24).train
    found = seeds(load(short, 0, 16))
    assert [len(set(found[i : i + 24])) for i in (0, 24, 48, 72)] == [24, 24, 24, 24]


def test_a_small_buffer_shuffles_too(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER", 4)
    assert isinstance(data.train, ShardSplit)
    one = ShardSplit(data.train.urls[:1], 7, 3)
    assert sorted(seeds(load(one, 0, 7, batch=1))) == [*range(7)]
    firsts = [seeds(load(one, 7 * epoch, 7 * epoch + 1, batch=1))[0] for epoch in range(60)]
    assert set(firsts) == {0, 1, 2, 3}


@pytest.mark.parametrize("workers", [0, 3])
def test_processes_read_different_shards(data: Dataset, workers: int) -> None:
    found = [set(seeds(load(data.train, 0, 6, processes=2, rank=i, workers=workers))) for i in range(2)]
    assert not found[0] & found[1]
    assert min(map(len, found)) > 10


def test_the_same_run_gives_the_same_batches(data: Dataset) -> None:
    first = load(data.train, preprocessing=AUGMENTED, workers=2)
    assert same(load(data.train, preprocessing=AUGMENTED, workers=2), first)
    assert same(
        load(data.train, preprocessing=AUGMENTED, workers=1), load(data.train, preprocessing=AUGMENTED)
    )


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("start", [1, 5, 6, 9, 14])
def test_a_later_start_goes_on_with_the_same_batches(data: Dataset, start: int, accumulate: int) -> None:
    everything = load(data.train, preprocessing=AUGMENTED, accumulate=accumulate)
    rest = load(data.train, start, preprocessing=AUGMENTED, accumulate=accumulate)
    assert len(everything) == 14 * accumulate
    assert same(rest, everything[start * accumulate :])


@pytest.mark.parametrize(("workers", "accumulate", "start"), [(2, 1, 1), (2, 1, 8), (3, 1, 7), (2, 3, 5)])
def test_workers_take_up_their_turns_after_a_later_start(
    data: Dataset, workers: int, accumulate: int, start: int
) -> None:
    def batches(start: int) -> Batches:
        return load(
            data.train,
            start,
            preprocessing=AUGMENTED,
            batch=12,
            processes=2,
            rank=1,
            accumulate=accumulate,
            workers=workers,
        )

    assert same(batches(start), batches(0)[start * accumulate :])


def test_what_is_skipped_is_not_decoded(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counting(sources: list[bytes], *rest: object) -> Array:
        decoded.append(len(sources))
        return decode_batch(sources, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "decode_batch", counting)
    load(data.train, 5, 7)
    assert decoded == [6, 6]


def test_augmentation_differs_between_batches_and_epochs(tmp_path: Path) -> None:
    path = str(write_shard(tmp_path / "train.tar", range(1)))
    split = ShardSplit((path,), 3, 3)
    for preprocessing in (AUGMENTED, Preprocessing(3, 10, 12, "shift", flip=True)):
        images = [
            image.numpy().tobytes() for image, _ in load(split, 0, 12, preprocessing=preprocessing, batch=1)
        ]
        assert len(set(images)) > 6


def test_surplus_workers_are_not_started(data: Dataset) -> None:
    assert isinstance(data.train, ShardSplit)
    two = ShardSplit(data.train.urls[:2], 12, 3)
    assert same(load(two, workers=5), load(two, workers=2))
    assert same(load(two, processes=2, rank=1, workers=2), load(two, processes=2, rank=1))


def test_more_processes_than_shards_are_refused(data: Dataset) -> None:
    with pytest.raises(CandidError, match="7 processes can't share 6 training shards: start fewer"):
        load(data.train, batch=7, processes=7)


def test_a_run_takes_its_shards_from_its_configuration(folder: Path) -> None:
    config = TrainOptions(
        f"{folder}/train-{{0..5}}.tar",
        model={"channels": 3, "height": 16, "width": 16, "classes": 5},
        val_data=f"{folder}/val-0.tar",
        epoch_images=20,
    )
    data, preprocessing = open_data(config, SILENT)
    assert (len(data.train), len(data.val), len(data.class_names)) == (20, 9, 5)
    images, _ = next(training_batches(data.train, preprocessing, Plan(20, 4, 1, 0), 0, 1, range(1)))
    assert images.shape == (4, 3, 16, 16)

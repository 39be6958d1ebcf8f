import os
import warnings
from pathlib import Path

import numpy as np
import pytest

from candid._support.errors import CandidError
from candid.data import splits as module
from candid.data.batches import named_batches
from candid.data.datasets import Dataset, open_dataset, open_images
from candid.data.images import Preprocessing, image_keys
from candid.data.shards import ShardSplit
from candid.data.splits import ArraySplit, FileSplit, seen_in_training, training_keys
from tests.data.helpers import evaluation_batches, picture, write_folder

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


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order(photos: FileSplit, workers: int) -> None:
    batches = list(evaluation_batches(photos, PREPROCESSING, 5, workers=workers))
    assert [len(y) for _, y in batches] == [5, 5, 5, 5, 3]
    everything = np.arange(len(photos))
    assert np.array_equal(np.concatenate([x for x, _ in batches]), photos.batch(everything, PREPROCESSING))
    assert np.array_equal(np.concatenate([y for _, y in batches]), photos.labels)


@pytest.mark.parametrize("world", [2, 3, 30])
def test_processes_share_an_evaluation(numbered: ArraySplit, world: int) -> None:
    preprocessing = Preprocessing(1, 8, 8)
    labels = [
        label
        for rank in range(world)
        for _, y in evaluation_batches(numbered, preprocessing, 4, rank, world)
        for label in y.tolist()
    ]
    assert sorted(labels) == list(range(COUNT))


def test_cached_and_uncached_files_are_evaluated_alike(
    photos: FileSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = Preprocessing(3, 7, 9)
    data = Dataset(photos, photos, None, ("cat", "dog"))
    cached = data.preprocess(preprocessing).train
    monkeypatch.setattr(module, "CACHE_BYTES", 0)
    filed = data.preprocess(preprocessing).train
    assert isinstance(cached, ArraySplit)
    assert isinstance(filed, FileSplit)
    one, other = (list(evaluation_batches(split, preprocessing, 10)) for split in (cached, filed))
    assert len(one) == len(other) == 3
    for batch, again in zip(one, other, strict=True):
        assert np.array_equal(batch[0], again[0]) and np.array_equal(batch[1], again[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_went_bad_is_named_in_one_sentence(tmp_path: Path, workers: int) -> None:
    write_folder(tmp_path / "train", {"cat": 4, "dog": 4})
    write_folder(tmp_path / "val", {"cat": 1, "dog": 1})
    data = open_dataset(str(tmp_path)).preprocess(PREPROCESSING)
    bad = tmp_path / "train" / "dog" / "001.png"
    bad.write_bytes(picture(0)[:80])
    with pytest.raises(CandidError, match=f"^'{bad}' can't be used: ") as caught:
        list(evaluation_batches(data.train, PREPROCESSING, 3, workers=workers))
    assert "Traceback" not in str(caught.value)


def test_keys_of_training_images_find_them_again(tmp_path: Path) -> None:
    preprocessing = Preprocessing(3, 10, 12)
    train = open_images(str(write_folder(tmp_path / "train", {"cat": 5})), preprocessing)
    test = open_images(str(write_folder(tmp_path / "test", {"cat": 4}, start=3)), preprocessing)
    stored = training_keys(train, preprocessing)
    assert stored is not None and stored.dtype == np.int64 and len(stored) == 5
    cached = training_keys(train.preprocess(preprocessing), preprocessing)
    assert cached is not None and np.array_equal(cached, stored)
    keys = np.concatenate([image_keys(images) for images, _, _ in named_batches(test, preprocessing, 2)])
    assert seen_in_training(keys, stored).tolist() == [True, True, False, False]
    assert not seen_in_training(keys, None).any()
    assert training_keys(ShardSplit(("a.tar",), 3, 2), preprocessing) is None


def test_more_workers_than_cores_give_no_warning(tmp_path: Path) -> None:
    split = open_images(str(write_folder(tmp_path, {"cat": 2})), Preprocessing(3, 10, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(named_batches(split, Preprocessing(3, 10, 12), 1, workers=(os.cpu_count() or 1) + 1))

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import SILENT
from candid.data import Crop, SplitRule, splits
from candid.data import datasets as module
from candid.data.datasets import Dataset, open_dataset
from candid.data.formats import PARTS
from candid.data.images import Preprocessing, decode_as
from candid.data.splits import ArraySplit, FileSplit, IndexedSplit
from candid.training.loader import Plan, training_batches
from candid.training.options import TrainOptions
from candid.training.setup import open_data
from tests.data.helpers import encoded, picture, pixels, write_folder, write_shard
from tests.helpers import RecordedProgress

PREPROCESSING = Preprocessing(3, 10, 12)
RULES: tuple[SplitRule, ...] = ("hash", "shuffled")


def files(split: object) -> list[str]:
    assert isinstance(split, FileSplit)
    return [str(path) for path in split.paths]


def labels(split: object) -> list[int]:
    assert isinstance(split, IndexedSplit)
    return split.labels.tolist()


def test_three_folders_are_three_splits(tmp_path: Path) -> None:
    for name, count in (("train", 4), ("val", 3), ("test", 2)):
        write_folder(tmp_path / name, {"cat": count, "dog": count})
    data = open_dataset(str(tmp_path))
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (8, 6, 4)
    assert data.class_names == ("cat", "dog")
    for name in ("train", "val", "test"):
        split = getattr(data, name)
        assert all(Path(path).is_relative_to(tmp_path / name) for path in files(split))
        expected = [("cat", "dog").index(Path(path).parent.name) for path in files(split)]
        assert split.labels.tolist() == expected


def test_folders_of_parts_may_have_capitals(tmp_path: Path) -> None:
    for name in ("Train", "VALID", "Test"):
        write_folder(tmp_path / name, {"cat": 2, "dog": 2})
    data = open_dataset(str(tmp_path))
    assert data.class_names == ("cat", "dog") and data.test is not None
    assert all(Path(path).is_relative_to(tmp_path / "VALID") for path in files(data.val))
    write_folder(tmp_path / "training", {"cat": 2, "dog": 2})
    with pytest.raises(CandidError, match="has the folders Train and training, which all mean the train"):
        open_dataset(str(tmp_path))


def test_a_folder_around_the_class_folders_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "wrap" / "photos", {"cat": 1, "dog": 1})
    with pytest.raises(CandidError, match=r"wrap' has 1 class folder: did you mean '.*wrap/photos'\?"):
        open_dataset(str(tmp_path / "wrap"))


def test_a_test_folder_alone_leaves_validation_to_the_training_images(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 10, "dog": 20})
    write_folder(tmp_path / "test", {"cat": 2, "dog": 2})
    data = open_dataset(str(tmp_path), holdout=0.2, split="shuffled")
    assert (len(data.train), len(data.val)) == (24, 6)
    assert data.test is not None
    assert len(data.test) == 4


def test_class_folders_alone_are_divided_in_three(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 20, "dog": 10})
    for rule in RULES:
        data = open_dataset(str(tmp_path), holdout=0.25, split=rule)
        assert data.test is not None
        if rule == "shuffled":
            assert labels(data.test) == labels(data.val) == [0] * 4 + [1] * 2
        assert set(labels(data.train)) == set(labels(data.val)) == set(labels(data.test)) == {0, 1}
        parts = [set(files(data.train)), set(files(data.val)), set(files(data.test))]
        assert len(set.union(*parts)) == sum(map(len, parts)) == 30


def test_images_that_are_added_move_no_others(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 60, "dog": 40})
    before = open_dataset(str(tmp_path), holdout=0.2)
    shares = [len(before.val) / 80, len(before.test or ()) / 100]
    assert all(0.1 < share < 0.3 for share in shares)
    for name, start in (("cat", 1000), ("dog", 2000)):
        for i in range(30):
            (tmp_path / name / f"{i:03}-more.png").write_bytes(picture(start + i))
    (tmp_path / "cat" / "copy.png").write_bytes((tmp_path / "cat" / "007.png").read_bytes())
    (tmp_path / "dog" / "000.png").rename(tmp_path / "dog" / "renamed.png")
    after = open_dataset(str(tmp_path), holdout=0.2)
    contents = [
        {Path(path).read_bytes(): name for name in PARTS for path in files(getattr(data, name))}
        for data in (before_paths(before, tmp_path), after)
    ]
    assert len(contents[0]) == 100 and len(contents[1]) == 160
    assert all(contents[1][image] == part for image, part in contents[0].items())


def before_paths(data: Dataset, folder: Path) -> Dataset:
    """The data set before a file was renamed, with its new name."""
    old, new = folder / "dog" / "000.png", folder / "dog" / "renamed.png"
    parts = {
        name: FileSplit(tuple(new if path == old else path for path in split.paths), split.labels)
        for name in ("train", "val", "test")
        if isinstance(split := getattr(data, name), FileSplit)
    }
    return Dataset(parts["train"], parts["val"], parts["test"], data.class_names)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 50))
def test_a_training_image_never_becomes_a_test_image(few: int, more: int, seed: int) -> None:
    digests = [bytes([i, seed]) for i in range(few + more)]
    chosen = [
        module._chosen(np.zeros(n, np.int64), 0.05, seed, ["cat"], digests[:n]) for n in (few, few + more)
    ]
    assert 1 <= chosen[0].sum() < few
    assert not (~chosen[0] & chosen[1][:few]).any()


def test_what_is_held_out_depends_on_the_split_seed_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 20, "dog": 10})

    def held_out(seed: int, split_seed: int) -> list[str]:
        changes = {"channels": 3, "height": 16, "width": 16}
        config = TrainOptions(str(tmp_path), model=changes, seed=seed, split_seed=split_seed, crop="resized")
        data, _ = open_data(config, SILENT)
        return files(data.val) + files(data.test)

    assert held_out(0, 0) == held_out(1, 0)
    assert held_out(0, 0) != held_out(0, 1)


def test_one_image_of_each_class_always_stays_in_training(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 3, "dog": 2})
    write_folder(tmp_path / "test", {"cat": 1})
    data = open_dataset(str(tmp_path), holdout=0.99)
    assert labels(data.train) == [0, 1]


@settings(deadline=None, max_examples=10)
@given(only=st.lists(st.sampled_from("0123456789"), min_size=2, max_size=10, unique=True))
def test_some_classes_have_the_parts_that_they_have_among_all(only: list[str]) -> None:
    every, some = open_dataset("digits", split_seed=3), open_dataset("digits", split_seed=3, only=only)
    assert some.class_names == tuple(only)
    for name in ("train", "val", "test"):
        whole, part = getattr(every, name), getattr(some, name)
        kept = [i for i, y in enumerate(whole.labels.tolist()) if str(y) in only]
        assert part.named(np.arange(len(part))) == whole.named(np.array(kept))
        assert [only[y] for y in part.labels.tolist()] == [str(whole.labels[i].item()) for i in kept]
        assert np.array_equal(part.images, whole.images[kept])


def test_some_classes_of_folders_are_chosen_by_name(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_folder(tmp_path / name, {"cat": 2, "cow": 3, "dog": 1})
    data = open_dataset(str(tmp_path), only=("dog", "cat"))
    assert [Path(path).parent.name for path in files(data.train)] == ["cat", "cat", "dog"]
    assert labels(data.train) == labels(data.val) == [1, 1, 0]
    with pytest.raises(CandidError, match="no class 'cats': did you mean 'cat'?"):
        open_dataset(str(tmp_path), only=("dog", "cats"))
    with pytest.raises(CandidError, match="single class"):
        open_dataset(str(tmp_path), only=("dog",))
    with pytest.raises(CandidError, match="'only' names a class twice: dog, dog"):
        TrainOptions(str(tmp_path), only=("dog", "dog"))


def test_shards_come_with_all_classes(tmp_path: Path) -> None:
    write_shard(tmp_path / "any.tar", range(4))
    with pytest.raises(CandidError, match="with all its classes: choose some in folders"):
        open_dataset(str(tmp_path / "any.tar"), only=("0", "1"))


def test_a_class_with_one_image_cannot_be_divided(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 5, "dog": 1})
    with pytest.raises(CandidError, match="'dog' has too few images"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_outside_zero_and_one_is_refused(share: float) -> None:
    with pytest.raises(CandidError, match="between 0 and 1"):
        open_dataset("digits", holdout=share)


def test_images_may_lie_deeper_and_hidden_ones_are_ignored(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 2, "dog": 2})
    write_folder(tmp_path / "val", {"cat": 2, "dog": 2})
    write_folder(tmp_path / "train" / "cat" / "2024" / "may", {"best": 1})
    for hidden in (".git", "__pycache__"):
        write_folder(tmp_path / "train" / hidden, {"x": 1})
    write_folder(tmp_path / "train" / "cat" / ".thumbnails", {"x": 1})
    (tmp_path / "train" / "cat" / "._000.png").write_bytes(b"resource fork")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "dog" / "LOUD.PNG").write_bytes(picture(99))
    data = open_dataset(str(tmp_path))
    assert data.class_names == ("cat", "dog")
    found = [str(Path(path).relative_to(tmp_path / "train")) for path in files(data.train)]
    assert found == [
        "cat/000.png",
        "cat/001.png",
        "cat/2024/may/best/000.png",
        "dog/000.png",
        "dog/001.png",
        "dog/LOUD.PNG",
    ]


def empty(folder: Path) -> None:
    pass


def one_class(folder: Path) -> None:
    write_folder(folder, {"cat": 3})


def empty_class(folder: Path) -> None:
    write_folder(folder, {"cat": 3, "dog": 0})


def unknown_class(folder: Path) -> None:
    write_folder(folder / "train", {"cat": 3, "dog": 3})
    write_folder(folder / "val", {"cat": 3, "dogs": 3})


def no_train(folder: Path) -> None:
    write_folder(folder / "val", {"cat": 3, "dog": 3})
    write_folder(folder / "test", {"cat": 3, "dog": 3})


def empty_val(folder: Path) -> None:
    write_folder(folder / "train", {"cat": 3, "dog": 3})
    (folder / "val").mkdir()


def only_other_files(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        (folder / name / "readme.txt").write_text("no image")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty, "has no class folders: give at least two"),
        (one_class, "has 1 class folder: give at least two"),
        (empty_class, "class folder '.*dog' has no images"),
        (unknown_class, "dogs' is no class of the training images: did you mean 'dog'?"),
        (no_train, "has val and test but no train folder"),
        (empty_val, "val' has no class folders with images"),
        (only_other_files, "class folder '.*cat' has no images"),
    ],
)
def test_a_folder_that_is_no_data_set_says_why(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    with pytest.raises(CandidError, match=message):
        open_dataset(str(tmp_path))


def test_something_else_than_a_folder_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CandidError, match="is a file: name the folder"):
        open_dataset(str(tmp_path / "file"))
    with pytest.raises(CandidError, match="no data set or folder 'digit': name a folder, or use 'digits'"):
        open_dataset("digit")


@pytest.mark.parametrize("option", [{"val_spec": "val.tar"}, {"epoch_images": 10}])
def test_options_of_shards_are_refused_elsewhere(option: dict[str, object]) -> None:
    with pytest.raises(CandidError, match="are for tar shards"):
        open_dataset("digits", **option)  # type: ignore[arg-type]


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Ten images, of which one of train is cut, one is text, and one of val is empty."""
    write_folder(tmp_path / "train", {"cat": 4, "dog": 3})
    write_folder(tmp_path / "val", {"cat": 2, "dog": 1})
    whole = picture(0)
    (tmp_path / "train" / "cat" / "001.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "train" / "dog" / "002.png").write_text("not an image")
    (tmp_path / "val" / "cat" / "000.png").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_the_first_bad_file_stops_by_default(spoilt: Path, crop: Crop) -> None:
    data = open_dataset(str(spoilt))
    with pytest.raises(CandidError, match=r"train/cat/001.png' can't be used: it is cut .* add --skip-bad"):
        data.preprocess(Preprocessing(3, 10, 12, crop))


@pytest.mark.parametrize("crop", ["none", "resized"])
def test_bad_files_are_left_out_and_listed_on_demand(spoilt: Path, crop: Crop) -> None:
    data = open_dataset(str(spoilt)).preprocess(Preprocessing(3, 10, 12, crop), skip_bad=True)
    assert labels(data.train) == [0, 0, 0, 1, 1]
    assert labels(data.val) == [0, 1]
    names = [line.split(": ")[0] for line in data.skipped]
    assert names == [str(spoilt / p) for p in ("train/cat/001.png", "train/dog/002.png", "val/cat/000.png")]
    assert all(": it is " in line for line in data.skipped)
    images = data.train.batch(np.array([1]), PREPROCESSING)
    assert np.array_equal(images[0].transpose(1, 2, 0), pixels(2))


def test_a_class_without_good_images_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 2, "cow": 2, "dog": 1})
    write_folder(tmp_path / "val", {"cat": 2})
    (tmp_path / "train" / "dog" / "000.png").write_bytes(b"")
    with pytest.raises(CandidError, match="'dog' has no training images"):
        open_dataset(str(tmp_path)).preprocess(PREPROCESSING, skip_bad=True)


def test_small_sets_are_decoded_once_and_large_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"cat": 6, "dog": 6}, width=17)
    data = open_dataset(str(tmp_path))
    cached = data.preprocess(PREPROCESSING)
    assert isinstance(cached.train, ArraySplit)
    monkeypatch.setattr(splits, "CACHE_BYTES", 100)
    filed = data.preprocess(PREPROCESSING)
    assert isinstance(filed.train, FileSplit)
    everything = np.arange(len(data.train))
    assert np.array_equal(cached.train.labels, filed.train.labels)
    assert np.array_equal(
        cached.train.batch(everything, PREPROCESSING), filed.train.batch(everything, PREPROCESSING)
    )
    shifted, plan = Preprocessing(3, 10, 12, "shift", flip=True), Plan(len(everything), 2, 1, seed=0)
    for batch, again in zip(
        training_batches(cached.train, shifted, plan, 0, 3, range(1)),
        training_batches(filed.train, shifted, plan, 0, 3, range(1)),
        strict=True,
    ):
        assert np.array_equal(batch[0], again[0]) and np.array_equal(batch[1], again[1])


def test_progress_is_reported_for_every_image(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 6, "dog": 6})
    progress = RecordedProgress()
    open_dataset(str(tmp_path)).preprocess(PREPROCESSING, progress=progress)
    assert [description for description, *_ in progress.loops] == ["reading images"] * 3
    assert sum(total for _, total, *_ in progress.loops) == 12


def array_data(images: Array) -> Dataset:
    labels = np.arange(len(images)) % 2
    split = ArraySplit(images, labels)
    return Dataset(split, split, None, ("a", "b"))


def prepared(images: Array, preprocessing: Preprocessing) -> Array:
    split = array_data(images).preprocess(preprocessing).train
    assert isinstance(split, ArraySplit)
    return split.images


def test_slightly_smaller_images_get_a_frame_of_zeros() -> None:
    images = np.random.default_rng(0).integers(1, 256, (4, 1, 28, 28), dtype=np.uint8)
    framed = prepared(images, Preprocessing(1, 32, 32))
    assert np.array_equal(framed[:, :, 2:30, 2:30], images)
    assert framed.sum() == images.sum()


def test_grey_becomes_colour_and_colour_grey() -> None:
    grey = np.random.default_rng(0).integers(256, size=(4, 1, 8, 8), dtype=np.uint8)
    colours = prepared(grey, Preprocessing(3, 8, 8))
    assert np.array_equal(colours, grey.repeat(3, axis=1))
    assert np.array_equal(prepared(colours, Preprocessing(1, 8, 8)), grey)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(16, 16), (5, 9)])
def test_images_of_another_size_are_resized_like_files(channels: int, size: tuple[int, int]) -> None:
    arrays = [pixels(seed)[:, :, :channels] for seed in range(4)]
    images = np.stack(arrays).transpose(0, 3, 1, 2)
    preprocessing = Preprocessing(channels, *size)
    expected = [decode_as(encoded(Image.fromarray(array.squeeze())), preprocessing, None) for array in arrays]
    assert np.array_equal(prepared(images, preprocessing), np.stack(expected))


def test_a_model_needs_one_or_three_channels() -> None:
    with pytest.raises(CandidError, match="1 or 3 channels"):
        Preprocessing(2, 8, 8)


def test_a_photo_of_the_models_size_is_not_cropped_further() -> None:
    preprocessing = Preprocessing(3, 10, 12, "resized")
    same = decode_as(picture(1), preprocessing, None)
    assert np.array_equal(same.transpose(1, 2, 0), pixels(1))
    larger = decode_as(picture(1, 30, 36), preprocessing, None)
    assert abs(larger.astype(int) - same).max() > 5

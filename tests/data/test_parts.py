from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import SILENT
from candid.data import Part, SplitRule
from candid.data.batches import named_batches
from candid.data.datasets import open_dataset, open_images, open_part
from candid.data.formats import CIFAR_CLASSES
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit, FileSplit, IndexedSplit, Split
from tests.data.helpers import picture, write_folder, write_shard
from tests.data.shard_helpers import PREPROCESSING, seeds, write_shards
from tests.data.test_formats import write_binary_cifar, write_mnist
from tests.helpers import RecordedProgress

DIGITS = tuple("0123456789")
PETS = ("cat", "cow", "dog")


def paths(split: object) -> list[Path]:
    assert isinstance(split, FileSplit)
    return list(split.paths)


def labels(split: Split) -> list[int]:
    assert isinstance(split, IndexedSplit)
    return split.labels.tolist()


def assert_same(one: object, other: object) -> None:
    assert isinstance(one, ArraySplit) and isinstance(other, ArraySplit)
    assert np.array_equal(one.images, other.images) and np.array_equal(one.labels, other.labels)
    assert one.named(np.arange(len(one))) == other.named(np.arange(len(other)))


def classes_of(split: object) -> list[str]:
    return [path.parent.name for path in paths(split)]


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_the_digits_are_divided_as_in_training(part: Part) -> None:
    training = {"data": "digits", "holdout": 0.1, "split_seed": 4}
    found = open_part("digits", DIGITS, part, training)
    assert_same(found.split, getattr(open_dataset("digits", holdout=0.1, split_seed=4), part))
    assert found.part == part
    assert_same(open_part("digits", DIGITS).split, open_dataset("digits").test)
    assert len(open_part("digits", DIGITS, "all").split) == 1797


@pytest.mark.parametrize(
    ("write", "names"), [(write_mnist, ("0", "1", "2", "3")), (write_binary_cifar, CIFAR_CLASSES)]
)
def test_published_sets_have_their_own_test_images(
    write: Callable[[Path], Path], names: tuple[str, ...], tmp_path: Path
) -> None:
    spec, training = str(write(tmp_path)), {"holdout": 0.25, "split_seed": 2}
    data = open_dataset(spec, holdout=0.25, split_seed=2)
    found = open_part(spec, names, None, training)
    assert found.part == "test"
    assert_same(found.split, data.test)
    assert_same(open_part(spec, names, "val", training).split, data.val)
    assert_same(open_part(spec, names, "train", training).split, data.train)


def test_three_folders_are_three_parts(tmp_path: Path) -> None:
    parts: tuple[Part, ...] = ("train", "val", "test")
    for name in parts:
        write_folder(tmp_path / name, {"cat": 2, "dog": 1})
    for name in parts:
        found = open_part(str(tmp_path), PETS, name if name != "test" else None)
        assert found.part == name
        assert paths(found.split) == sorted((tmp_path / name).rglob("*.png"))
        assert labels(found.split) == [0, 0, 2]
    with pytest.raises(CandidError, match="has train and val and test: choose one of them"):
        open_part(str(tmp_path), PETS, "all")


@pytest.mark.parametrize("trained_on_it", [False, True])
def test_without_test_images_those_to_validate_on_are_taken(tmp_path: Path, trained_on_it: bool) -> None:
    training = {"data": str(tmp_path)} if trained_on_it else {}
    write_folder(tmp_path / "val", {"cat": 1, "dog": 1})
    assert open_part(str(tmp_path), PETS, None, training).part == "val"
    for part in ("train", "test"):
        with pytest.raises(CandidError, match=f"has no {part} images: choose val"):
            open_part(str(tmp_path), PETS, part, training)
    write_folder(tmp_path / "train", {"cat": 4, "dog": 4})
    assert open_part(str(tmp_path), PETS, None, training).part == "val"
    with pytest.raises(CandidError, match="has no test images: choose another part of it, such as val"):
        open_part(str(tmp_path), PETS, "test", training)


def test_test_images_alone_leave_validation_to_what_was_held_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 8, "dog": 8})
    write_folder(tmp_path / "test", {"cat": 1, "dog": 1})
    training = {"data": str(tmp_path), "holdout": 0.25, "split_seed": 9}
    found = open_part(str(tmp_path), PETS, "val", training).split
    expected = open_dataset(str(tmp_path), holdout=0.25, split_seed=9, split="shuffled")
    assert paths(found) == paths(expected.val)
    assert len(found) == 4


@pytest.mark.parametrize("part", [None, "val", "train"])
def test_class_folders_are_divided_as_in_training(
    tmp_path: Path, part: Part | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "pets", {"cat": 20, "dog": 10})
    monkeypatch.chdir(tmp_path)
    recorded: dict[str, Any] = {"data": "pets", "holdout": 0.25, "split_seed": 3}
    rules: tuple[SplitRule, ...] = ("hash", "shuffled")
    for rule in rules:
        # models of older versions have no such entry
        training = recorded | ({"split": rule} if rule == "hash" else {})
        found = open_part(f"{tmp_path}/pets/", PETS, part, training)
        assert found.part == (part or "test")
        data = open_dataset("pets", holdout=0.25, split_seed=3, split=rule)
        expected = [tmp_path / path for path in paths(getattr(data, found.part))]
        assert paths(found.split) == expected
        assert classes_of(found.split) == [PETS[label] for label in labels(found.split)]


@pytest.mark.parametrize("training", [None, {}, {"data": "digits"}, {"data": "pets/cat"}])
def test_class_folders_that_a_model_never_saw_are_taken_whole(
    tmp_path: Path, training: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "pets", {"dog": 3, "cow": 3})
    monkeypatch.chdir(tmp_path / "pets")
    for spec in ("../pets", "."):
        found = open_part(spec, PETS, None, training)
        assert (found.part, len(found.split)) == ("all", 6)
    assert len(open_part(".", PETS, "val", {"holdout": 0.5}).split) == 2  # on demand


@settings(deadline=None, max_examples=30)
@given(st.permutations(PETS), st.sets(st.sampled_from(PETS), min_size=1))
def test_labels_are_the_models_whatever_its_order(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], present: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("pets")
    write_folder(folder, dict.fromkeys(present, 1))
    found = open_part(str(folder), names).split
    assert [names[label] for label in labels(found)] == classes_of(found) == sorted(present)


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_model_of_some_classes_is_evaluated_on_those(part: Part) -> None:
    training = {"data": "digits", "split_seed": 4, "only": ["7", "1"]}
    found = open_part("digits", ("7", "1"), part, training).split
    assert_same(found, getattr(open_dataset("digits", split_seed=4, only=("7", "1")), part))


def test_a_model_of_some_classes_takes_what_other_data_has_of_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "pets", {"cat": 1, "cow": 1, "dog": 1})
    training = {"only": ["dog", "emu", "cat"]}
    found = open_part(str(tmp_path / "pets"), training["only"], None, training).split
    assert (classes_of(found), labels(found)) == (["cat", "dog"], [2, 0])
    with pytest.raises(CandidError, match="has a class 'cat', unknown to the model"):
        open_part(str(tmp_path / "pets"), ("bus", "car"), None, {"only": ["bus", "car"]})
    with pytest.raises(CandidError, match="with all its classes"):
        open_part(str(write_shards(tmp_path / "shards")), PETS, None, {"only": list(PETS)})


def test_without_names_the_order_of_classes_counts(tmp_path: Path) -> None:
    nameless = tuple(map(str, range(4)))
    write_folder(tmp_path / "pets", {"cat": 1, "cow": 1, "dog": 1})
    assert labels(open_part(str(tmp_path / "pets"), nameless[:3]).split) == [0, 1, 2]
    with pytest.raises(CandidError, match="3 classes and the model 4 without the same names"):
        open_part(str(tmp_path / "pets"), nameless)
    named = ("zero", "one", "two", "three")
    (tmp_path / "idx").mkdir()
    assert labels(open_part(str(write_mnist(tmp_path / "idx")), named).split)[:5] == [0, 1, 2, 3, 0]
    write_folder(tmp_path / "numbers", {"2": 1, "3": 1})
    assert labels(open_part(str(tmp_path / "numbers"), nameless).split) == [2, 3]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cat", "cow", "dogs"), "has a class 'dog', unknown to the model: did you mean 'dogs'?"),
        (("bus", "plane"), "has a class 'cat', unknown to the model: choose one of bus, plane"),
        (("0", "1"), "has 3 classes and the model 2 without the same names"),
    ],
)
def test_an_unknown_class_is_named_with_a_hint(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    write_folder(tmp_path, {"cat": 1, "cow": 1, "dog": 1})
    with pytest.raises(CandidError) as caught:
        open_part(str(tmp_path), names)
    assert message in str(caught.value)


def test_what_is_no_data_set_says_so(tmp_path: Path) -> None:
    with pytest.raises(CandidError, match="has no class folders: give a folder with"):
        open_part(str(tmp_path), PETS)
    with pytest.raises(CandidError, match="no data set or folder"):
        open_part(str(tmp_path / "nowhere"), PETS)


def shard_labels(split: Split) -> dict[int, int]:
    """By the number of the picture."""
    found = [(int(name.rsplit("/", 1)[1]), int(y)) for _, ys, ns in named_batches(split, PREPROCESSING, 4)
             for y, name in zip(ys, ns, strict=True)]  # fmt: skip
    assert len(found) == len(dict(found)) == len(split)
    return dict(found)


def test_a_folder_of_shards_has_parts(tmp_path: Path) -> None:
    spec = str(write_shards(tmp_path))
    for part, size in ((None, 5), ("test", 5), ("val", 11), ("train", 36)):
        found = open_part(spec, PETS, part)  # type: ignore[arg-type]
        assert (found.part, len(found.split)) == (part or "test", size)
        assert all(label == number % 3 for number, label in shard_labels(found.split).items())
    (tmp_path / "test.tar").unlink()
    assert open_part(spec, PETS).part == "val"
    with pytest.raises(CandidError, match="has no test shards: choose train or val"):
        open_part(spec, PETS, "test")
    with pytest.raises(CandidError, match="label 2, but the classes go from 0 to 1"):
        open_part(spec, PETS[:2])
    one = open_part(f"{spec}/val-{{0..1}}.tar", PETS)
    assert (one.part, len(one.split)) == ("all", 11)


def test_shards_with_a_list_of_classes_get_the_models_labels(tmp_path: Path) -> None:
    spec = str(write_shards(tmp_path))
    (tmp_path / "classes.txt").write_text("dog\ncat\nbird\n")
    found = open_part(spec, ("bird", "cat", "cow", "dog")).split
    assert all(label == (3, 1, 0)[number % 3] for number, label in shard_labels(found).items())
    assert found.fingerprint() != open_part(spec, ("dog", "cat", "bird")).split.fingerprint()
    with pytest.raises(CandidError, match="class 'bird', unknown to the model: choose one of"):
        open_part(spec, PETS)


def test_any_folder_is_a_set_of_images_without_labels(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "er", {"x": 2, ".hidden": 1})
    (tmp_path / "a b.PNG").write_bytes(picture(0))
    (tmp_path / "notes.txt").write_text("no image")
    found = open_images(str(tmp_path), PREPROCESSING)
    expected = ["a b.PNG", "deep/er/x/000.png", "deep/er/x/001.png"]
    assert [str(path.relative_to(tmp_path)) for path in paths(found)] == expected
    assert labels(found) == [-1, -1, -1]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (("train", "val", "test"), "test"),
        (("train", "val"), "val"),
        (("val", "test"), "test val"),
        (("train",), "train"),
    ],
)
def test_of_several_folders_the_test_images_are_taken(
    tmp_path: Path, folders: tuple[str, ...], expected: str
) -> None:
    for name in folders:
        write_folder(tmp_path / name, {"cat": 1})
    found = paths(open_images(str(tmp_path), PREPROCESSING))
    assert found == [tmp_path / name / "cat" / "000.png" for name in expected.split()]


def test_a_data_set_is_a_set_of_images_without_labels(tmp_path: Path) -> None:
    found = open_images(str(write_binary_cifar(tmp_path)), PREPROCESSING)
    test = open_dataset(str(tmp_path)).test
    assert isinstance(test, ArraySplit)
    assert_same(found, replace(test, labels=np.full(20, -1)))
    assert set(labels(open_images("digits", PREPROCESSING))) == {-1}


def test_shards_are_a_set_of_images_without_labels(tmp_path: Path) -> None:
    write_shard(tmp_path / "any.tar", range(40, 50), classes=9)
    found = open_images(str(tmp_path / "any.tar"), PREPROCESSING)
    assert shard_labels(found) == dict.fromkeys(range(40, 50), -1)


@pytest.mark.parametrize("kind", ["uniform-noise", "constant"])
@pytest.mark.parametrize("preprocessing", [Preprocessing(1, 4, 6), Preprocessing(3, 5, 2)])
def test_made_images_are_always_the_same(kind: str, preprocessing: Preprocessing) -> None:
    found = open_images(kind, preprocessing)
    assert isinstance(found, ArraySplit)
    assert (
        found.images.shape == (2000, preprocessing.channels, *preprocessing.size)
        and found.images.dtype == np.uint8
    )
    assert_same(found, open_images(kind, preprocessing))
    assert set(labels(found)) == {-1}
    assert found.image_size() == preprocessing.size
    assert (found.images[:, :, :1, :1] == found.images).all() == (kind == "constant")
    assert found.images.mean() == pytest.approx(127.5, abs=5)
    assert (int(found.images.min()), int(found.images.max())) == (0, 255)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(CandidError, match="has no images: name a folder with some, or one of uniform-noise"):
        open_images(str(tmp_path), PREPROCESSING)
    with pytest.raises(CandidError, match="no data set or folder 'unifrom-noise'"):
        open_images("unifrom-noise", PREPROCESSING)


def numbered(images: int) -> ArraySplit:
    """Images whose label and whose pixel is their number."""
    numbers = np.arange(images)
    return ArraySplit(numbers.astype(np.uint8).reshape(-1, 1, 1, 1), numbers)


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 120))
def test_a_subsample_keeps_images_evenly(images: int, wanted: int) -> None:
    found = labels(numbered(images).subsample(wanted))
    assert len(found) == min(images, wanted)
    assert found[0] == 0
    gaps = {b - a for a, b in zip(found, [*found[1:], images], strict=True)}
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


def test_a_subsample_of_none_is_refused_and_shards_cannot_be_subsampled(tmp_path: Path) -> None:
    split = numbered(5)
    assert split.subsample(None) is split
    with pytest.raises(CandidError, match="at least 1, not 0"):
        split.subsample(0)
    shards = open_images(write_shard(tmp_path / "any.tar", range(4)).as_posix(), PREPROCESSING)
    assert shards.subsample(4) is shards
    with pytest.raises(CandidError, match="leave --images out"):
        shards.subsample(3)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_names_follow_their_images(data: st.DataObject) -> None:
    """Through subsets of subsets, into the batches of any number of processes."""
    split = numbered(data.draw(st.integers(1, 40)))
    if data.draw(st.booleans()):
        split = replace(split, names=tuple(f"n{i}" for i in range(len(split))))
    prefix = "n" if split.names else ""
    for _ in range(data.draw(st.integers(0, 2))):
        chosen = data.draw(st.lists(st.integers(0, len(split) - 1), min_size=1))
        split = split.subset(np.array(chosen))
    world, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    seen = 0
    for rank in range(world):
        for images, ys, names in named_batches(split, Preprocessing(1, 1, 1), size, rank, world):
            assert names == tuple(f"{prefix}{y}" for y in ys.tolist())
            assert images.flatten().tolist() == ys.tolist()
            seen += len(names)
    assert seen == len(split)


@pytest.mark.parametrize("crop", ["none", "resized"])
@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_called_by_their_path_cached_or_not(tmp_path: Path, crop: Any, workers: int) -> None:
    write_folder(tmp_path, {"cat": 4, "cow": 3, "dog": 4})
    (tmp_path / "cow" / "001.png").write_bytes(b"")
    preprocessing = Preprocessing(3, 10, 12, crop)
    split, skipped = open_images(str(tmp_path), preprocessing).subsample(10).load(preprocessing, True, SILENT)
    assert isinstance(split, ArraySplit if crop == "none" else FileSplit) and len(skipped) == 1
    batches = list(named_batches(split, preprocessing, 4, workers=workers))
    names = [name for *_, batch in batches for name in batch]
    number_of = {str(path): i for i, path in enumerate(sorted(tmp_path.rglob("*.png")))}
    images: list[tuple[Array, Array]] = [
        (x, np.array([number_of[name] % 3 for name in batch])) for x, _, batch in batches
    ]
    assert seeds(images) == [number_of[name] for name in names] == [0, 1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_shards_are_called_by_shard_and_key(tmp_path: Path, workers: int) -> None:
    split = open_part(str(write_shards(tmp_path)), PETS, "val").split
    for rank in range(2):
        for images, ys, names in named_batches(split, PREPROCESSING, 4, rank, 2, workers):
            shard = f"{tmp_path}/val-{rank}.tar"
            assert names == tuple(f"{shard}/{seed:05}" for seed in seeds([(images, ys)]))


def told(split: Split, preprocessing: Preprocessing) -> list[str]:
    progress = RecordedProgress()
    split.preprocess(preprocessing, progress=progress, name="test")
    return progress.messages


def test_a_different_size_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 1})
    files = open_images(str(tmp_path), PREPROCESSING)
    assert told(files, Preprocessing(3, 10, 12)) == []
    assert told(files, Preprocessing(3, 12, 10)) == ["test: images of 10 x 12 pixels are fitted to 12 x 10"]
    assert told(numbered(3), Preprocessing(1, 1, 1)) == []
    assert told(numbered(3), Preprocessing(1, 2, 1)) == ["test: images of 1 x 1 pixels are fitted to 2 x 1"]
    photos = ArraySplit(np.zeros((1, 3, 120, 100), np.uint8), np.zeros(1, np.int64))
    assert told(photos, Preprocessing(3, 224, 224)) == []  # photos of one set have all sizes
    assert told(photos, Preprocessing(3, 64, 64)) == [
        "test: images of 120 x 100 pixels are fitted to 64 x 64"
    ]
    shards = open_images(write_shard(tmp_path / "any.tar", range(4)).as_posix(), PREPROCESSING)
    assert shards.image_size() is None
    paths(files)[0].write_bytes(b"no image")
    assert files.image_size() is None
    with pytest.raises(CandidError, match="'test' has no image that can be used"):
        files.preprocess(PREPROCESSING, skip_bad=True, name="test")
    paths(files)[0].unlink()
    assert files.image_size() is None

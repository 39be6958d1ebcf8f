import shutil
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import Tensor

from candid.data import Dataset, Plan, ShardSplit, View, evaluation_batches, open_dataset, training_batches
from candid.data import shards as module
from candid.data.datasets import decode_batch
from candid.data.shards import is_shards, open_shards
from candid.errors import CandidError
from candid.training.config import TrainConfig
from candid.training.setup import open_data
from tests.data.helpers import picture, pixels, write_shard, write_tar

VIEW = View(3, 10, 12)
AUGMENTED = View(3, 10, 12, "resized", flip=True)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def data(folder: Path) -> Dataset:
    return open_dataset(str(folder))


def seeds(batches: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Which pictures the batches show, by their pixels; their labels must fit."""
    found = []
    for images, labels in batches:
        assert images.shape[1:] == (3, 10, 12)
        assert images.dtype == torch.uint8
        for image, label in zip(images, labels, strict=True):
            found.append(SEED_OF[image.numpy().tobytes()])
            assert found[-1] % 3 == label
    return found


def load(
    split: object,
    start: int = 0,
    stop: int = 14,
    *,
    view: View = VIEW,
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
    return [(x, y) for x, y in training_batches(split, view, plan, start, stop, parts, workers)]


def same(one: Batches, other: Batches) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("data/train.tar", True),
        ("data/train-{000..127}.tar", True),
        ("https://example.org/train-{0..9}.tar?x=1", True),
        ("pipe:cat train.tar", True),
        ("digits", False),
        ("some/folder", False),
    ],
)
def test_shards_are_known_by_their_name(spec: str, expected: bool) -> None:
    assert is_shards(spec) is expected


def test_a_folder_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    odd = tmp_path / "photos.tar.d"
    odd.mkdir()
    assert not is_shards(str(odd))
    write_shard(odd / "train.tar", range(3))
    assert is_shards(str(odd))


def test_the_images_of_a_folder_are_counted(folder: Path, data: Dataset) -> None:
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (36, 11, 5)
    assert data.class_names == ("0", "1", "2")
    assert isinstance(data.train, ShardSplit)
    assert data.train.urls == tuple(str(folder / f"train-{i}.tar") for i in range(6))
    assert data.prepared(VIEW) == data


def test_without_val_shards_the_test_shards_are_validated_on(tmp_path: Path) -> None:
    for path in write_shards(tmp_path).glob("val*"):
        path.unlink()
    data = open_dataset(str(tmp_path))
    assert len(data.val) == 5
    assert data.test is None
    (tmp_path / "test.tar").unlink()
    with pytest.raises(CandidError, match="has no images to validate on: .* --val-data"):
        open_dataset(str(tmp_path))


def test_class_names_come_from_a_list(tmp_path: Path) -> None:
    names = write_shards(tmp_path) / "classes.txt"
    names.write_text("tabby cat\nhound\n\ncow\n")
    assert open_dataset(str(tmp_path)).class_names == ("tabby cat", "hound", "cow")
    names.write_text("cat\ndog\n")
    with pytest.raises(CandidError, match="train shards have a label 2, but the classes go from 0 to 1"):
        open_dataset(str(tmp_path))
    names.write_text("cat\ndog\ncow\nnewt\n")
    with pytest.raises(CandidError, match="class 3 has no training images"):
        open_dataset(str(tmp_path))


def test_a_pattern_and_a_single_file_need_validation_shards(folder: Path) -> None:
    for spec, images in ((f"{folder}/train-{{0..2}}.tar", 18), (f"{folder}/train-1.tar", 5)):
        data = open_dataset(spec, val_spec=f"{folder}/val-{{0..1}}.tar")
        assert (len(data.train), len(data.val), data.test) == (images, 11, None)
        with pytest.raises(CandidError, match="--val-data"):
            open_dataset(spec)


def test_training_images_are_not_counted_if_images_and_classes_are_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def labels(url: str) -> Iterator[int]:
        counted.append(Path(url).name)
        yield from (0, 1, 2)

    monkeypatch.setattr(module, "_labels", labels)
    data = open_dataset(str(folder), epoch_images=1000, classes=7)
    assert len(data.train) == 1000
    assert len(data.class_names) == 7
    assert counted == ["val-0.tar", "val-1.tar", "test.tar"]


def test_an_epoch_may_be_shorter_or_longer_than_the_data(folder: Path) -> None:
    assert len(open_dataset(str(folder), epoch_images=12).train) == 12
    long = open_dataset(str(folder), epoch_images=72).train
    assert Counter(seeds(load(long, 0, 12))) == Counter([*range(36)] * 2)
    with pytest.raises(CandidError, match="--epoch-images to 1 or more, not 0"):
        open_dataset(str(folder), epoch_images=0)


@pytest.mark.parametrize("spec", ["http://localhost:9/train.tar", "pipe:cat train-{0..9}.tar", "file:/x.tar"])
def test_urls_need_everything_said(spec: str, folder: Path) -> None:
    with pytest.raises(CandidError, match="add --epoch-images, --set classes=N, --val-data"):
        open_dataset(spec)
    with pytest.raises(CandidError, match="add --set classes=N, --val-data"):
        open_dataset(spec, epoch_images=10)
    with pytest.raises(CandidError, match=r"add --val-data\."):
        open_dataset(spec, epoch_images=10, classes=3)


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["pipe", "file", "http"])
def test_shards_behind_urls_give_the_same_images(folder: Path, server: str, data: Dataset, kind: str) -> None:
    if kind == "http" and shutil.which("curl") is None:
        pytest.skip("curl, which opens http URLs for webdataset, is not installed")
    place = {"pipe": f"pipe:cat {folder}", "file": f"file:{folder}", "http": server}[kind]
    urls = open_dataset(
        f"{place}/train-{{0..5}}.tar", val_spec=f"{place}/val-{{0..1}}.tar", epoch_images=36, classes=3
    )
    assert len(urls.val) == 11
    assert same(load(urls.train, 0, 7), load(data.train, 0, 7))
    assert sorted(seeds(evaluation_batches(urls.val, VIEW, 4))) == [*range(36, 47)]


@pytest.mark.parametrize("spec", ["pipe:cat missing.tar 2>&1", "pipe:exit 3 # .tar", "s3://bucket/x.tar"])
def test_a_url_that_cannot_be_read_is_named(spec: str) -> None:
    with pytest.raises(CandidError, match=f"The shard '{spec}' can't be read: ".replace(".", r"\.")):
        open_dataset(spec, val_spec=spec, epoch_images=5, classes=2)


def test_a_command_that_fails_after_all_images_is_noticed(folder: Path) -> None:
    spec = f"pipe:cat {folder}/train-0.tar; sleep 0.2; exit 3"
    with pytest.raises(CandidError, match="exit 3"):
        open_dataset(spec, val_spec=spec, epoch_images=5, classes=3)


def test_padding_behind_the_end_of_a_shard_does_no_harm(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "padding").write_bytes(bytes(300_000))
    spec = f"pipe:cat {folder}/train-0.tar {tmp_path}/padding"
    data = open_dataset(spec, val_spec=spec, epoch_images=5, classes=3)
    assert sorted(seeds(evaluation_batches(data.val, VIEW, 4))) == [*range(7)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing/train-{0..3}.tar", "There is no shard 'missing/train-0.tar'"),
        ("${UNKNOWN}/train.tar", "can't be listed: .*UNKNOWN"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(spec: str, message: str) -> None:
    with pytest.raises(CandidError, match=message):
        open_dataset(spec, val_spec=spec)


def test_without_webdataset_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(CandidError, match=r"pip install 'candid-vision\[shards\]'"):
        open_dataset(str(folder))


GOOD = {"0.png": picture(0), "0.cls": b"0", "1.png": picture(1), "1.cls": b"1\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a/2.png": picture(2), "a/2.cls": b"cat"},
            "sample 'a/2' of the shard '.*' is bad, it needs",
        ),
        ({"2.png": picture(2), "2.cls": b"-1"}, "sample '2' .* needs a label"),
        ({"2.png": picture(2), "2.cls": b"4"}, "class 2 has no training images"),
    ],
)
def test_bad_labels_are_found_in_counting(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    path = str(write_tar(tmp_path / "train.tar", GOOD | files))
    with pytest.raises(CandidError, match=message):
        open_shards(path, path)


def test_shards_without_labels_are_refused(tmp_path: Path) -> None:
    path = str(write_tar(tmp_path / "train.tar", {"0.png": picture(0)}))
    with pytest.raises(CandidError, match="train shards have no labels"):
        open_shards(path, path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"2.png": picture(2)}, "sample '2' .* needs a label"),
        ({"2.cls": b"1"}, "sample '2' .* has no image"),
        ({"2.png": picture(2), "2.cls": b"2"}, "sample '2' .* its label 2 is not below 2"),
        ({"2.png": picture(2)[:80], "2.cls": b"1"}, "sample '2' .* the image can't be used: it is cut"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples_are_named_in_reading(
    tmp_path: Path, files: dict[str, bytes], message: str, workers: int
) -> None:
    path = str(write_tar(tmp_path / "train.tar", GOOD | files))
    split = ShardSplit((path,), 3, 2)
    with pytest.raises(CandidError, match=message) as caught:
        list(evaluation_batches(split, VIEW, 2, workers=workers))
    assert path in str(caught.value)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(CandidError, match=message):
        load(split, batch=1)


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_every_cut_of_a_shard_is_noticed_in_counting(tmp_path: Path, scheme: str) -> None:
    path = write_shard(tmp_path / "train.tar", range(4))
    with tarfile.open(path) as tar:
        tar.getmembers()
        end = tar.offset
    content = path.read_bytes()
    assert len(open_shards(str(path), f"{scheme}{path}").val) == 4
    cut = tmp_path / "cut.tar"
    for length in range(0, end + 512, 100):
        cut.write_bytes(content[:length])
        with pytest.raises(CandidError, match=f"The shard '{scheme}{cut}' can't be read"):
            open_shards(str(path), f"{scheme}{cut}")


def test_a_cut_shard_is_named_in_reading(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "train.tar", range(4))
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(CandidError, match=f"The shard '{path}' can't be read: unexpected end of data; check"):
        list(evaluation_batches(ShardSplit((str(path),), 4, 3), VIEW, 2))


def test_a_reader_without_images_does_not_search_forever(tmp_path: Path) -> None:
    path = str(write_tar(tmp_path / "train.tar", {}))
    with pytest.raises(CandidError, match="has no images: remove it"):
        load(ShardSplit((path,), 9, 3))


def test_skipping_bad_images_is_refused(data: Dataset) -> None:
    with pytest.raises(CandidError, match="leave --skip-bad out"):
        data.prepared(VIEW, skip_bad=True)


def test_other_files_and_folders_in_a_shard_do_no_harm(tmp_path: Path) -> None:
    files = {"d/0.json": b"{}", "d/0.PNG": picture(0), "d/0.cls": b"0", "._d": b"", "README": b""}
    path = str(write_tar(tmp_path / "train.tar", files | {"d/1.cls": b"1", "d/1.JPEG": picture(1)}))
    data = open_shards(path, path)
    assert (len(data.train), len(data.val)) == (2, 2)
    assert sorted(seeds(evaluation_batches(data.val, VIEW, 2))) == [0, 1]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_shows_every_image_once(data: Dataset, world: int, workers: int) -> None:
    for split, expected in ((data.train, range(36)), (data.val, range(36, 47))):
        batches = [list(evaluation_batches(split, VIEW, 4, rank, world, workers)) for rank in range(world)]
        assert sorted(seed for part in batches for seed in seeds(part)) == [*expected]
        assert max(len(y) for part in batches for _, y in part) <= 4
        assert all(batches)


def test_one_reader_shows_every_image_once_an_epoch(data: Dataset) -> None:
    found = seeds(load(data.train, 0, 12))
    assert sorted(found[:36]) == sorted(found[36:]) == [*range(36)]
    assert found[:36] != found[36:]
    assert found[:36] != sorted(found[:36])
    assert seeds(load(data.train, 0, 6, seed=1)) != found[:36]


def test_every_epoch_starts_anew(folder: Path) -> None:
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
    first = load(data.train, view=AUGMENTED, workers=2)
    assert same(load(data.train, view=AUGMENTED, workers=2), first)
    assert same(load(data.train, view=AUGMENTED, workers=1), load(data.train, view=AUGMENTED))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("start", [1, 5, 6, 9, 14])
def test_a_later_start_goes_on_with_the_same_batches(data: Dataset, start: int, accumulate: int) -> None:
    everything = load(data.train, view=AUGMENTED, accumulate=accumulate)
    rest = load(data.train, start, view=AUGMENTED, accumulate=accumulate)
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
            view=AUGMENTED,
            batch=12,
            processes=2,
            rank=1,
            accumulate=accumulate,
            workers=workers,
        )

    assert same(batches(start), batches(0)[start * accumulate :])


def test_what_is_skipped_is_not_decoded(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counting(sources: list[bytes], *rest: object) -> Tensor:
        decoded.append(len(sources))
        return decode_batch(sources, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "decode_batch", counting)
    load(data.train, 5, 7)
    assert decoded == [6, 6]


def test_augmentation_differs_between_batches_and_epochs(tmp_path: Path) -> None:
    path = str(write_shard(tmp_path / "train.tar", range(1)))
    split = ShardSplit((path,), 3, 3)
    for view in (AUGMENTED, View(3, 10, 12, "shift", flip=True)):
        images = [image.numpy().tobytes() for image, _ in load(split, 0, 12, view=view, batch=1)]
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
    config = TrainConfig(
        f"{folder}/train-{{0..5}}.tar",
        model={"channels": 3, "height": 16, "width": 16, "classes": 5},
        val_data=f"{folder}/val-0.tar",
        epoch_images=20,
    )
    data, view = open_data(config, lambda images, *_: images)
    assert (len(data.train), len(data.val), len(data.class_names)) == (20, 9, 5)
    images, _ = next(training_batches(data.train, view, Plan(20, 4, 1, 0), 0, 1, range(1)))
    assert images.shape == (4, 3, 16, 16)

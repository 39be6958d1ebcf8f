import io
import shutil
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from candid._support.errors import CandidError
from candid.data import shards as module
from candid.data.datasets import Dataset, open_dataset, open_images
from candid.data.shards import ShardSplit, _samples, is_shards, open_shards
from tests.data.helpers import evaluation_batches, picture, write_shard, write_tar
from tests.data.shard_helpers import PREPROCESSING, load, same, seeds, write_shards
from tests.helpers import candid_command


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
    assert data.preprocess(PREPROCESSING) == data


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


@pytest.mark.parametrize("spec", ["http://localhost:9/train.tar", "file:/x.tar"])
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


@pytest.mark.parametrize("kind", ["file", "http"])
def test_shards_behind_urls_give_the_same_images(folder: Path, server: str, data: Dataset, kind: str) -> None:
    if kind == "http" and shutil.which("curl") is None:
        pytest.skip("curl, which opens http URLs for webdataset, is not installed")
    place = {"file": f"file:{folder}", "http": server}[kind]
    specs = f"{place}/train-{{0..5}}.tar", f"{place}/val-{{0..1}}.tar"
    urls = open_dataset(specs[0], val_spec=specs[1], epoch_images=36, classes=3)
    assert len(urls.val) == 11
    assert same(load(urls.train, 0, 7), load(data.train, 0, 7))
    assert sorted(seeds(evaluation_batches(urls.val, PREPROCESSING, 4))) == [*range(36, 47)]


@pytest.mark.parametrize("spec", ["file:missing.tar", "s3://bucket/x.tar"])
def test_a_url_that_cannot_be_read_is_named(spec: str) -> None:
    message = f"The shard '{spec}' can't be read: ".replace(".", r"\.")
    with pytest.raises(CandidError, match=message):
        open_dataset(spec, val_spec=spec, epoch_images=5, classes=2)


def test_padding_behind_the_end_of_a_shard_does_no_harm(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "padded.tar").write_bytes((folder / "train-0.tar").read_bytes() + bytes(300_000))
    spec = f"file:{tmp_path}/padded.tar"
    data = open_dataset(spec, val_spec=spec, epoch_images=5, classes=3)
    assert sorted(seeds(evaluation_batches(data.val, PREPROCESSING, 4))) == [*range(7)]


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
        ({"2.png": picture(2), "2.cls": b"1" + b" " * 20}, "sample '2' .* needs a label"),
        ({"2.png": picture(2), "2.cls": b"99999999999"}, "its label 99999999999 is larger than 999,999"),
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
        list(evaluation_batches(split, PREPROCESSING, 2, workers=workers))
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
    assert len(open_shards(str(path), f"{scheme}{path}")[0]["val"]) == 4
    cut = tmp_path / "cut.tar"
    for length in range(0, end + 512, 100):
        cut.write_bytes(content[:length])
        with pytest.raises(CandidError, match=f"The shard '{scheme}{cut}' can't be read"):
            open_shards(str(path), f"{scheme}{cut}")


def test_a_cut_shard_is_named_in_reading(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "train.tar", range(4))
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(CandidError, match=f"The shard '{path}' can't be read: unexpected end of data; check"):
        list(evaluation_batches(ShardSplit((str(path),), 4, 3), PREPROCESSING, 2))


def test_a_reader_without_images_does_not_search_forever(tmp_path: Path) -> None:
    path = str(write_tar(tmp_path / "train.tar", {}))
    with pytest.raises(CandidError, match="has no images: remove it"):
        load(ShardSplit((path,), 9, 3))


def test_skipping_bad_images_is_refused(data: Dataset) -> None:
    with pytest.raises(CandidError, match="leave --skip-bad out"):
        data.preprocess(PREPROCESSING, skip_bad=True)


def test_other_files_and_folders_in_a_shard_do_no_harm(tmp_path: Path) -> None:
    files = {"d/0.json": b"{}", "d/0.PNG": picture(0), "d/0.cls": b"0", "._d": b"", "README": b""}
    path = str(write_tar(tmp_path / "train.tar", files | {"d/1.cls": b"1", "d/1.JPEG": picture(1)}))
    data = open_dataset(path, val_spec=path)
    assert (len(data.train), len(data.val)) == (2, 2)
    assert sorted(seeds(evaluation_batches(data.val, PREPROCESSING, 2))) == [0, 1]


@pytest.mark.parametrize("pipe", ["pipe:", "{pip}e:", "{x,pipe}:", "PIPE:"])
def test_a_command_is_never_run(
    pipe: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"{pipe}touch {tmp_path}/ran; cat {folder}/train-0.tar"
    train = str(folder / "train-0.tar")
    for specs in ((train, spec), (spec, train), (spec, spec)):
        with pytest.raises(CandidError):
            open_dataset(specs[0], val_spec=specs[1], epoch_images=5, classes=3)
    with pytest.raises(CandidError):
        open_images(spec, PREPROCESSING)
    done = candid_command("train", train, "--val-data", spec, "--out", tmp_path / "run", "--batch=5000")
    assert isinstance(done.exception, CandidError)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipe:touch ran #.tar").write_bytes((folder / "train-0.tar").read_bytes())
    with pytest.raises(CandidError, match="is a command, which is never run: write its output to a file"):
        open_images("pipe:touch ran #.tar", PREPROCESSING)
    assert not (tmp_path / "ran").exists()


def test_large_files_in_small_shards_are_refused_before_they_are_read(tmp_path: Path) -> None:
    shard = tmp_path / "bomb.tar"
    for name in ("0.png", "0.cls"):
        with tarfile.open(shard, "w:gz", compresslevel=1) as tar:
            member = tarfile.TarInfo(name)
            member.size = 300 * 2**20
            tar.addfile(member, ZeroFile())
        with pytest.raises(CandidError, match="'0.*' of 315 MB, more than 210: pack it again"):
            list(_samples([str(shard)], 3))
        with pytest.raises(CandidError, match="of 315 MB"):
            open_dataset(str(shard), val_spec=str(shard))


class ZeroFile(io.RawIOBase):
    """Zeros without an end."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)

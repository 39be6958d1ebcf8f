import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.data import formats
from candid.data.datasets import open_dataset, open_images, open_part
from candid.data.formats import FORMATS, Contents, Format
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit


def idx(values: Array) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, *, ending: str = "", dash: str = "-", train: int = 40, test: int = 10) -> Path:
    pack: Callable[[bytes], bytes] = gzip.compress if ending else bytes
    for prefix, count in (("train", train), ("t10k", test)):
        images = np.arange(count * 12).reshape(count, 3, 4) % 251
        files = {f"images{dash}idx3": images, f"labels{dash}idx1": np.arange(count) % 4}
        for name, values in files.items():
            (folder / f"{prefix}-{name}-ubyte{ending}").write_bytes(pack(idx(values)))
    return folder


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=4), packed=st.booleans())
def test_an_idx_file_comes_back(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], packed: bool
) -> None:
    values = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    path = tmp_path_factory.getbasetemp() / "values-idx"
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    assert np.array_equal(formats.read_idx_file(path), values)


@settings(max_examples=150, deadline=None)
@given(
    start=st.sampled_from(
        [b"", b"\0\0\x08", b"\0\0\x08\x01", b"\0\0\x08\x03", b"\0\0\x08\xff", b"\x1f\x8b\x08"]
    ),
    content=st.binary(max_size=60) | st.builds(bytes, st.integers(0, 1100)),
    packed=st.booleans(),
)
def test_random_bytes_are_an_idx_array_or_refused(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, content: bytes, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "random-idx"
    path.write_bytes(gzip.compress(start + content) if packed else start + content)
    try:
        values = formats.read_idx_file(path)
    except CandidError:
        return
    assert idx(values) == start + content


def test_an_idx_file_without_content_or_with_many_dimensions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(idx(np.zeros((0, 28, 28))))
    with pytest.raises(CandidError, match="is empty or cut"):
        formats.read_idx_file(path)
    path.write_bytes(b"\0\0\x08\xff" + 255 * b"\0\0\0\x01" + b"x")
    with pytest.raises(CandidError, match="has 255 dimensions"):
        formats.read_idx_file(path)


@pytest.mark.parametrize("packed", [False, True])
def test_every_cut_of_an_idx_file_is_refused(tmp_path: Path, packed: bool) -> None:
    whole = idx(np.random.default_rng(0).integers(256, size=(2, 3, 4)))
    content = gzip.compress(whole) if packed else whole
    for length in range(len(content)):
        path = tmp_path / "cut"
        path.write_bytes(content[:length])
        with pytest.raises(CandidError, match="cut"):
            formats.read_idx_file(path)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("dash", ["-", "."])
def test_mnist_files_are_a_data_set(tmp_path: Path, ending: str, dash: str) -> None:
    data = open_dataset(str(write_mnist(tmp_path, ending=ending, dash=dash)), holdout=0.25)
    assert data.test is not None
    assert (len(data.train), len(data.val), len(data.test)) == (32, 8, 10)
    assert data.class_names == ("0", "1", "2", "3")
    assert isinstance(data.test, ArraySplit)
    assert np.array_equal(data.test.images.flatten() % 251, np.arange(120) % 251)
    assert data.test.images.shape == (10, 1, 3, 4)


@pytest.mark.parametrize("name", ["train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"])
def test_half_of_a_pair_of_idx_files_is_refused(tmp_path: Path, name: str) -> None:
    (write_mnist(tmp_path) / name).unlink()
    with pytest.raises(CandidError, match="has only one of .*: add the other"):
        open_dataset(str(tmp_path))


def test_idx_images_and_labels_of_different_number_are_refused(tmp_path: Path) -> None:
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(39)))
    with pytest.raises(CandidError, match=r"\(40, 3, 4\) and \(39,\): they don't belong together"):
        open_dataset(str(tmp_path))


def test_mnist_without_a_test_set_gets_one_from_its_training_images(tmp_path: Path) -> None:
    for path in write_mnist(tmp_path).glob("t10k*"):
        path.unlink()
    data = open_dataset(str(tmp_path))
    assert data.test is not None
    assert len(data.train) + len(data.val) + len(data.test) == 40


PurePickler: Any = vars(pickle)["_Pickler"]


class PythonTwoPickler(PurePickler):  # type: ignore[misc]
    """Writes text and bytes as Python 2 wrote its only string type."""

    def save_string(self, text: str | bytes) -> None:
        content = text.encode("latin1") if isinstance(text, str) else text
        if len(content) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(content)]) + content)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch: ClassVar[Any] = {**PurePickler.dispatch, str: save_string, bytes: save_string}


def python_two_pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    PythonTwoPickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar_batch(seed: int, count: int = 20) -> dict[str, Any]:
    data = np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)
    return {"batch_label": f"batch {seed}", "data": data, "labels": [i % 10 for i in range(count)]}


def write_python_cifar(folder: Path) -> Path:
    for i, name in enumerate([*formats.CIFAR_TRAIN, "test_batch"]):
        (folder / name).write_bytes(python_two_pickle(cifar_batch(i)))
    return folder


def write_binary_cifar(folder: Path) -> Path:
    for i, name in enumerate([*formats.CIFAR_TRAIN, "test_batch"]):
        batch = cifar_batch(i)
        labels = np.array(batch["labels"], dtype=np.uint8)[:, None]
        (folder / f"{name}.bin").write_bytes(np.hstack((labels, batch["data"])).tobytes())
    return folder


@pytest.mark.parametrize("write", [write_python_cifar, write_binary_cifar])
def test_both_versions_of_cifar_load(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    splits, names = formats.read_cifar(write(tmp_path))
    assert names == formats.CIFAR_CLASSES
    train, test = splits["train"], splits["test"]
    assert train.images.shape == (100, 3, 32, 32)
    expected = np.concatenate([cifar_batch(i)["data"] for i in range(5)])
    assert np.array_equal(train.images.reshape(-1, 3072), expected)
    assert np.array_equal(test.images.reshape(-1, 3072), cifar_batch(5)["data"])
    assert train.labels.tolist() == [i % 10 for i in range(100)]
    data = open_dataset(str(tmp_path))
    assert (len(data.train), len(data.val)) == (90, 10)


def test_the_python_two_pickles_of_this_test_have_no_python_three_opcodes(tmp_path: Path) -> None:
    batch = pickle.loads(python_two_pickle(cifar_batch(0)), encoding="bytes")
    assert set(batch) == {b"batch_label", b"data", b"labels"}
    assert b"_codecs" not in python_two_pickle(cifar_batch(0))


@pytest.mark.parametrize("protocol", range(5))
def test_python_batches_written_today_load_too(tmp_path: Path, protocol: int) -> None:
    batch = {key.encode(): value for key, value in cifar_batch(1).items()}
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(batch, protocol=protocol))
    assert np.array_equal(formats._cifar_python(path).images.reshape(-1, 3072), batch[b"data"])


def test_class_names_come_from_the_folder_if_there_are_ten(tmp_path: Path) -> None:
    names = tmp_path / "batches.meta.txt"
    write_binary_cifar(tmp_path)
    names.write_text("a b c d e\nf g h i j\n")
    assert open_dataset(str(tmp_path)).class_names == tuple("abcdefghij")
    names.write_text("a b")
    assert open_dataset(str(tmp_path)).class_names == formats.CIFAR_CLASSES


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "touched"
    content = pickle.dumps({b"data": Malicious(target), b"labels": [1]}, protocol=protocol)
    pickle.loads(content)
    assert target.exists()
    target.unlink()
    (write_python_cifar(tmp_path) / "data_batch_3").write_bytes(content)
    with pytest.raises(CandidError, match=r"wants to run .*: it is no CIFAR-10 batch"):
        open_dataset(str(tmp_path))
    assert not target.exists()


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [-1, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [[1], [2]]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": 1},
        {b"data": np.zeros((0, 3072), np.uint8), b"labels": []},
        {b"data": np.zeros((2, 3000), np.uint8), b"labels": [1, 2]},
        {b"data": "text", b"labels": [1, 2]},
        [1, 2],
        None,
    ],
    ids=str,
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, batch: object) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(CandidError, match="data_batch_1"):
        open_dataset(str(tmp_path))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy's, of a broken array
@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.none() | st.integers(1, 255), old=st.booleans())
def test_a_damaged_python_batch_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, place: float, flip: int | None, old: bool
) -> None:
    batch = cifar_batch(1, count=1)
    new = {key.encode(): value for key, value in batch.items()}
    content = python_two_pickle(batch) if old else pickle.dumps(new)
    at = int(place**8 * len(content)) if len(content) else 0  # most of what can break is at the beginning
    bad = content[:at] if flip is None else content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "data_batch_1"
    path.write_bytes(bad)
    try:
        arrays = formats._cifar_python(path)
    except CandidError as error:
        assert str(path) in str(error) or "wants to run" in str(error)
        return
    assert flip is not None
    assert arrays.images.shape == (1, 3, 32, 32)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=100) | st.builds(bytes, st.sampled_from([3072, 3073, 6146])))
def test_random_bytes_are_binary_cifar_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "data_batch_1.bin"
    path.write_bytes(content)
    if len(content) in (3073, 6146):
        assert len(formats._cifar_binary(path).labels) == len(content) // 3073
    else:
        with pytest.raises(CandidError, match="not a multiple of 3073"):
            formats._cifar_binary(path)


def test_a_label_beyond_the_tenth_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(CandidError, match="ten classes"):
        open_dataset(str(tmp_path))


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_binary_cifar(tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(CandidError, match=r"data_batch_4.bin' is missing"):
        open_dataset(str(tmp_path))


def test_digits_use_the_whole_range_of_grey() -> None:
    digits = formats.read_digits()
    assert digits.images.shape == (1797, 1, 8, 8)
    assert np.array_equal((digits.images // 15)[:, 0], load_digits().images)
    assert np.unique(digits.images).tolist() == list(range(17 * 15))
    assert np.array_equal(formats.read_digits().images, digits.images)


def test_a_new_format_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.npz").touch()
    images = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None, None], (40, 1, 2, 2))
    split = ArraySplit(images, np.arange(40) % 2)
    added = Format(
        recognises=lambda spec: (Path(spec) / "numpy.npz").is_file(),
        read=lambda query: Contents({"train": lambda: split}, ("even", "odd")),
    )
    monkeypatch.setitem(FORMATS, "npz", added)
    data = open_dataset(str(tmp_path))
    assert (len(data.train), len(data.val), data.class_names) == (30, 2, ("even", "odd"))
    assert len(open_part(str(tmp_path), ("odd", "even")).split) == 40
    assert len(open_images(str(tmp_path), Preprocessing(1, 2, 2))) == 40
    with pytest.raises(CandidError, match="tar shards"):
        open_dataset(str(tmp_path), epoch_images=5)

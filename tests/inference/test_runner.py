import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from candid import GenerativeClassifier, ResNet
from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.old_formats import described_pass
from candid.data.batches import named_batches
from candid.data.datasets import open_images, open_part
from candid.data.images import Preprocessing, decode_as, image_keys
from candid.data.splits import ArraySplit, FileSplit
from candid.inference.predictions import Predictions, predict_batches, without_noise
from candid.inference.runner import Runner
from candid.judging.held_out import MEASURES as CODE_LENGTHS
from candid.models import checkpoint
from candid.models.protocol import Outputs
from tests.data.helpers import picture, write_folder, write_shard
from tests.helpers import RecordedProgress, small_classifier
from tests.inference.pass_in_processes import MEASURES, PREPROCESSING, array, counted, distance_to, every_pass
from tests.inference.test_predictions import assert_equal, floats, small_resnet
from tests.training.runs import run

EARLIER = (
    "(1, ClassifierConfig(flow=FlowConfig(channels=3, height=32, width=32, blocks=(3, 5, 5), "
    "widths=(40, 64, 96), entry='none', entry_width=64, pointwise_width=48, preactivation=False, "
    "mixing='orthogonal', actnorm='paper', dct='orthonormal', clamp=2.0, span=(9, 10)), classes=10, "
    "rank=None, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262), priors=None, planar=False), "
    "View(channels=3, height=32, width=32, crop='resized', flip=False), 'key')"
)
"""What names a pass of `cifar10-beta1` in version 0.1."""


def photos(folder: Path) -> FileSplit:
    if not folder.exists():
        write_folder(folder, {"a": 3, "b": 4, "c": 2}, width=30)
    split = open_part(str(folder), "abc").split
    assert isinstance(split, FileSplit)
    return split


def keys(images: Array, outputs: Outputs) -> Array:
    return image_keys(images)


def test_a_pass_has_the_name_that_earlier_versions_gave_it() -> None:
    """Whatever keys the configurations of models got since then."""
    config = checkpoint.load("cifar10-beta1", held_out=False).config
    assert described_pass(1, config, Preprocessing(3, 32, 32, "resized"), "key") == EARLIER


@pytest.mark.parametrize("make", [small_classifier, small_resnet])
@pytest.mark.parametrize("where", ["memory", "files", "files by workers"])
def test_a_pass_is_one_over_the_batches(
    make: Callable[[], GenerativeClassifier | ResNet], where: str, tmp_path: Path
) -> None:
    split = array() if where == "memory" else photos(tmp_path / "photos")
    measures = CODE_LENGTHS if make is small_resnet else MEASURES
    passes = Runner(make(), workers=2 if "workers" in where else 0)
    passes.batch = 4
    found = passes.predictions(split, PREPROCESSING, "test", measures)
    assert_equal(
        found, predict_batches(make(), named_batches(split, PREPROCESSING, 4), {**measures, "keys": keys})
    )


def test_progress_is_shown_by_images() -> None:
    progress = RecordedProgress()
    passes = Runner(small_classifier(), progress=progress)
    passes.batch = 5
    passes.predictions(array(), PREPROCESSING, "test")
    assert [loop[:3] for loop in progress.loops] == [("test", 5, 5)]


def test_a_kept_pass_is_not_made_again(tmp_path: Path) -> None:
    made = Runner(small_classifier(), folder=tmp_path / "new").predictions(
        array(), PREPROCESSING, "a test/1", MEASURES
    )
    again = Runner(small_classifier(), folder=tmp_path / "new")
    calls = counted(again)
    assert made is not None
    assert_equal(again.predictions(array(), PREPROCESSING, "a test/1", MEASURES), made)
    assert_equal(again.predictions(array(), PREPROCESSING, "another name", MEASURES), made)
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith("a-test-1-")
    assert not calls


def test_a_pass_that_cannot_be_kept_is_made_nevertheless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    progress = RecordedProgress()
    passes = Runner(small_classifier(), folder=tmp_path / "file", progress=progress)
    made = Runner(small_classifier()).predictions(array(), PREPROCESSING, "test")
    assert made is not None
    assert_equal(passes.predictions(array(), PREPROCESSING, "test"), made)
    assert len(progress.messages) == 1 and f"can't be cached in '{tmp_path / 'file'}'" in progress.messages[0]


def touched(split: FileSplit) -> FileSplit:
    path = split.paths[3]
    path.write_bytes(path.read_bytes() + b"more")
    return split


OTHERS: dict[str, Callable[[ArraySplit], dict[str, Any]]] = {
    "model": lambda split: {"model": small_classifier(seed=1)},
    "kind of model": lambda split: {"model": small_resnet()},
    "pixels": lambda split: {"split": replace(split, images=split.images ^ 1)},
    "labels": lambda split: {"split": replace(split, labels=split.labels[::-1])},
    "names": lambda split: {"split": replace(split, names=tuple("abcdefghijklmnopqrstuvw"))},
    "fewer images": lambda split: {"split": split.subset(np.arange(22))},
    "preprocessing": lambda split: {"preprocessing": Preprocessing(3, 16, 16)},
    "no fitted score": lambda split: {"measures": CODE_LENGTHS},
    "fitted score": lambda split: {"measures": {"mahalanobis": distance_to(1)}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_anything_else_is_another_pass(other: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {
        "split": array(),
        "preprocessing": PREPROCESSING,
        "name": "test",
        "measures": MEASURES,
    }
    Runner(small_classifier(), folder=tmp_path).predictions(**usual)
    changes = OTHERS[other](array())
    model = changes.pop("model", small_classifier())
    usual["measures"] = CODE_LENGTHS if isinstance(model, ResNet) else usual["measures"]
    passes = Runner(model, folder=tmp_path)
    calls = counted(passes)
    passes.predictions(**{**usual, **changes})
    assert calls
    assert len(list(tmp_path.iterdir())) == 2


def test_files_are_known_by_their_names_sizes_and_dates(tmp_path: Path) -> None:
    for change in (lambda split: split, touched, lambda split: replace(split, labels=split.labels[::-1])):
        Runner(small_classifier(), folder=tmp_path / "kept").predictions(
            change(photos(tmp_path / "photos")), PREPROCESSING, "test"
        )
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_an_image_that_is_replaced_by_one_of_the_same_name_size_and_date_is_noticed(tmp_path: Path) -> None:
    found, progress = [], RecordedProgress()
    for _ in range(2):
        split = photos(tmp_path / "photos")
        runner = Runner(small_classifier(), folder=tmp_path / "kept", progress=progress)
        found.append(runner.predictions(split, PREPROCESSING, "test"))
        path = split.paths[0]
        stat = path.stat()
        others = (picture(seed, width=30) for seed in range(100, 200))
        other = next(each for each in others if len(each) <= stat.st_size)
        path.write_bytes(other.ljust(stat.st_size, b"\0"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert len(progress.messages) == 1 and "images were replaced" in progress.messages[0]


@pytest.mark.parametrize("length", [0, 5, 1000, None])
def test_a_damaged_file_is_made_anew(length: int | None, tmp_path: Path) -> None:
    made = Runner(small_classifier(), folder=tmp_path).predictions(array(), PREPROCESSING, "test")
    assert made is not None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[::-1] if length is None else whole[:length])
    progress = RecordedProgress()
    for _ in range(2):
        passes = Runner(small_classifier(), folder=tmp_path, progress=progress)
        assert_equal(passes.predictions(array(), PREPROCESSING, "test"), made)
    assert progress.messages == [f"'{file}' is damaged or its images were replaced: it is computed again."]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [whole]


def crops_by_hand(larger: Array) -> list[Array]:
    """Of (C, 18, 18)."""
    corners = [larger[:, t : t + 16, s : s + 16] for t, s in ((0, 0), (0, 2), (2, 0), (2, 2), (1, 1))]
    return [*corners, *(corner[:, :, ::-1] for corner in corners)]


def test_ten_crops_are_averaged(tmp_path: Path) -> None:
    model, files = small_classifier(), photos(tmp_path / "photos")
    padded = np.pad(array().images, ((0, 0), (0, 0), (1, 1), (1, 1)), "reflect")
    decoded = [decode_as(path, Preprocessing(3, 18, 18), None) for path in files.paths]
    for split, larger in ((array(), list(padded)), (files, decoded)):
        crops = [floats(np.stack(crops_by_hand(image))) for image in larger]
        truth = torch.stack([model.posterior(each).mean(0) for each in crops]).detach()
        for _ in range(2):  # made and kept
            found = Runner(model, folder=tmp_path / "kept").ten_crops(split, PREPROCESSING, "test")
            assert found is not None
            assert_allclose(np.exp(found), truth, rtol=0, atol=1e-5)


def test_images_that_fill_the_model_are_reflected_wherever_they_are(tmp_path: Path) -> None:
    """Also where their files are too large for the memory: photos alone have pixels beyond the crop."""
    model, files = small_classifier(), photos(tmp_path / "photos")
    view = replace(PREPROCESSING, crop="shift")
    ready = files.preprocess(view)
    assert ready.in_memory and not files.in_memory
    first, second = (Runner(model).ten_crops(split, view, "test") for split in (files, ready))
    assert first is not None and second is not None
    assert_allclose(first, second, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [small_classifier, small_resnet])
def test_published_passes_have_no_noise_in_classification(
    make: Callable[[], GenerativeClassifier | ResNet], tmp_path: Path
) -> None:
    model, files = make().eval(), photos(tmp_path / "photos")
    views = [replace(PREPROCESSING, published=each) for each in ("centre", "ten crops")]
    centre, ten = (floats(np.stack([decode_as(path, view) for path in files.paths])) for view in views)

    def posterior(x: Tensor) -> Tensor:
        """Of an image as it is, which the network sees normalised and nothing else."""
        if isinstance(model, ResNet):
            return model.posterior(x)
        return model.mixture.posterior(model.flow((x - model.image_mean) / model.image_std)[0])

    passes = Runner(model, folder=tmp_path / "kept")
    found = passes.published_predictions(files, PREPROCESSING, "test")
    averaged = passes.ten_crops(files, PREPROCESSING, "test", published=True)
    assert found is not None and averaged is not None
    with torch.inference_mode():
        assert_allclose(found.posterior, posterior(centre), rtol=0, atol=1e-5)
        mean = torch.stack([posterior(crops).mean(0) for crops in ten])
        assert_allclose(np.exp(averaged), mean, rtol=0, atol=1e-5)
        if isinstance(model, GenerativeClassifier):
            assert found.log_density is not None  # these keep the noise
            assert_allclose(found.log_density, model.log_density(centre), rtol=1e-5)
            assert not torch.allclose(model.posterior(centre), posterior(centre), rtol=0, atol=1e-4)
    files_of_own = Runner(model, folder=tmp_path / "kept")
    calls = counted(files_of_own)
    files_of_own.published_predictions(files, PREPROCESSING, "test")
    files_of_own.ten_crops(files, PREPROCESSING, "test", published=True)
    assert not calls  # what was cached is read
    files_of_own.predictions(files, PREPROCESSING, "test")
    files_of_own.ten_crops(files, PREPROCESSING, "test")
    assert len(calls) == 2 and len(list((tmp_path / "kept").iterdir())) == 4  # and not taken for another


def test_a_model_without_noise_leaves_the_model_as_it_is() -> None:
    model, x = small_classifier(), torch.rand(2, 3, 16, 16)
    before = model.logits(x)
    quiet = without_noise(model)
    assert isinstance(quiet, type(model))
    assert not torch.equal(quiet.logits(x), before) and torch.equal(model.logits(x), before)
    resnet = small_resnet()
    assert without_noise(resnet) is resnet


@pytest.mark.parametrize("make", [small_classifier, small_resnet])
def test_features_of_training_images_are_the_models_in_half_precision(
    make: Callable[[], GenerativeClassifier | ResNet],
) -> None:
    model, split = make(), array()
    passes = Runner(model)
    passes.batch = 5
    found = passes.features(split, PREPROCESSING, "train", 100)
    with torch.no_grad():
        x = floats(split.images)
        features = model.features(x) if isinstance(model, ResNet) else model.latent(x)[:, :192]
    assert found is not None and found.columns["features"].dtype == np.float16
    assert_allclose(found.columns["features"], features, rtol=1e-3, atol=1e-5)
    assert np.array_equal(found.labels, split.labels)
    fewer = passes.features(split, PREPROCESSING, "train", 8)
    assert fewer is not None and np.array_equal(fewer.labels, split.labels[:10])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_vanished_is_named_in_one_sentence(kept: bool, workers: int, tmp_path: Path) -> None:
    split = photos(tmp_path / "photos")
    split.paths[5].unlink()
    passes = Runner(small_classifier(), folder=tmp_path / "kept" if kept else None, workers=workers)
    with pytest.raises(CandidError, match=r"photos/b/002.png' can't be used: .*No such file") as caught:
        passes.predictions(split, PREPROCESSING, "test")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "kept").exists()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_folder(folder / "files", {"a": 5, "b": 8, "c": 4}, width=30)
    write_folder(folder / "broken", {"a": 5, "b": 8, "c": 4})
    (folder / "broken" / "b" / "003.png").write_bytes(b"")
    write_shard(folder / "shards" / "train.tar", range(3))
    write_shard(folder / "shards" / "test-0.tar", range(20, 37))
    write_shard(folder / "shards" / "test-1.tar", range(8))
    return folder


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    every_pass(data, folder)
    return folder


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_find_the_same_together(data: Path, alone: Path, processes: int, tmp_path: Path) -> None:
    python = [sys.executable, "-m"]
    torchrun = [*python, "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone", "-m"]
    command = [*(python if processes == 2 else torchrun), "tests.inference.pass_in_processes"]
    process = run(data, tmp_path, str(processes), command=command)
    assert process.returncode == 0, process.stderr
    kept = sorted(path.name for path in alone.glob("*.safetensors"))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == kept
    assert [name.rsplit("-", 1)[0] for name in kept] == [
        "array",
        "files",
        "one",
        "shards",
        "ten-crops-of-array",
    ]
    for name in kept:
        if name.startswith("shards"):
            assert_same_shards(Predictions.load(tmp_path / name), Predictions.load(alone / name))
        else:
            assert (tmp_path / name).read_bytes() == (alone / name).read_bytes()
    truth = torch.load(alone / "0.pt", weights_only=True)
    for rank in range(processes):
        known = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        first = rank == 0
        assert (known["first"], known["has results"]) == (first, [first, first])
        assert known["calls for what was kept"] == 0
        assert known["message"] == truth["message"]
        if first:
            torch.testing.assert_close(known["features"], truth["features"])
        else:
            assert known["features"] is None
    assert "broken/b/003.png' can't be used" in truth["message"]


def assert_same_shards(found: Predictions | None, truth: Predictions | None) -> None:
    """In the order of the names; other processes have other batches, which round otherwise."""
    assert found is not None and truth is not None
    assert found.paths == truth.paths == tuple(sorted(truth.paths))
    assert [path.rsplit("/", 2)[1:] for path in truth.paths] == [
        *(["test-0.tar", f"{i:05}"] for i in range(20, 37)),
        *(["test-1.tar", f"{i:05}"] for i in range(8)),
    ]
    assert found.labels.tolist() == truth.labels.tolist() == [-1] * 25
    assert np.array_equal(found.columns["complexity"], truth.columns["complexity"])
    assert_allclose(found.logits, truth.logits, rtol=1e-4, atol=1e-4)
    terms = "log_density_terms"
    assert_allclose(found.columns[terms], truth.columns[terms], rtol=1e-5)


def test_shards_are_seen_as_the_same_images_in_memory(data: Path, alone: Path) -> None:
    split = open_images(str(data / "shards"), PREPROCESSING)
    (file,) = alone.glob("shards-*")
    found = Predictions.load(file)
    assert found is not None
    rows = {name: row for row, name in enumerate(found.paths)}
    model = small_classifier()
    for images, _, names in named_batches(split, PREPROCESSING, 6):
        logits = model.logits(floats(images)).detach()
        assert_allclose(found.logits[[rows[name] for name in names]], logits, rtol=1e-4, atol=1e-4)

"""Training on photos: what it says, what it caches, how it survives."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import candid
from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import Progress, TrainingDisplay
from candid.inference.predictions import Predictions
from candid.judging.held_out import needed
from candid.models.photo.efficientnet import PackagedEye
from candid.training import features
from candid.training.features import Features
from candid.training.photo_report import DataReport
from candid.training.recipes import photo_options, preset_for
from candid.trust.promises import Levels
from candid.trust.ranking import ALL
from tests.helpers import candid_command
from tests.photo_models import CLASSES, PhotoRun, photo, write_photos
from tests.training.runs import environment

TWO = CLASSES[:2]


class Heard(Progress):
    """Keeps messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def cache(tmp_path: Path, photo_run: PhotoRun) -> Path:
    """A cache with the graph of the eye, which takes a second to build, but without statistics."""
    own = tmp_path / "cache"
    own.mkdir()
    for graph in Path(os.environ["CANDID_CACHE"]).glob("*.onnx"):
        shutil.copy(graph, own)
    return own


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six photos in each of two classes."""
    return write_photos(tmp_path / "photos", TWO, 6)


def bits(folder: Path) -> bytes:
    (file,) = (folder / "model" / "best").glob("weights*")
    return file.read_bytes()


def test_it_says_what_it_understood_and_extracts_nothing_twice(
    photo_run: PhotoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_eye(eye: PackagedEye, images: object) -> None:
        raise AssertionError("an eye was used")

    monkeypatch.setattr(PackagedEye, "statistics", no_eye)
    heard = Heard()
    again = candid.train(photo_run.data, out=tmp_path / "again", progress=heard)
    assert (
        heard.lines[0]
        == "36 photos of 3 classes (12 each) to fit, all of them scored out of fold, 12 to test"
    )
    assert heard.lines[1].startswith("a photo model through the eye 'lite0' (224 pixels, Apache-2.0): about ")
    assert heard.lines[1].endswith("; the statistics of 48 photos are cached already")
    assert bits(again.folder) == bits(Path(photo_run.model))
    assert again.results["test"]["accuracy"] > 0.9
    stored = json.loads((tmp_path / "again" / "results.json").read_text())
    assert stored.items() > again.results.items()  # and a digest


SCRIPT = """
import sys, time
import candid
from candid.training import features

features.CHUNK = 4
if __name__ == "__main__":
    data, out, devices = sys.argv[1:]
    if devices == "1":  # it gets no further than the fourth file
        write, written = features.write_sealed, []

        def write_three(tensors, path):
            written.append(path)
            if len(written) > 3:
                time.sleep(600)
            write(tensors, path)

        features.write_sealed = write_three
    candid.train(data, out=out, devices=int(devices), resume=devices == "2")
"""


def started(data: Path | str, out: Path, cache: Path, devices: int) -> "subprocess.Popen[str]":
    script = out.with_suffix(".py")
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(data), str(out), str(devices)]
    variables = environment(CANDID_CACHE=str(cache))
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


def test_killed_during_extraction_and_resumed_by_two_processes_it_ends_with_the_same_bits(
    photo_run: PhotoRun, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = started(photo_run.data, out, cache, 1)
    while len(list(cache.glob("features/*/*.safetensors"))) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "model").exists()
    assert len(list(cache.glob("features/*/*.safetensors"))) == 3
    process = started(photo_run.data, out, cache, 2)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert bits(out) == bits(Path(photo_run.model))


def test_an_interrupted_run_says_how_to_go_on(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks = tmp_path / "run", iter(range(2))
    see = PackagedEye.statistics

    def interrupted(eye: PackagedEye, images: Array) -> Array:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return see(eye, images)

    monkeypatch.setenv("CANDID_CACHE", str(cache))
    monkeypatch.setattr(features, "CHUNK", 4)
    heard = Heard()
    with monkeypatch.context() as patch:
        patch.setattr(PackagedEye, "statistics", interrupted)
        with pytest.raises(KeyboardInterrupt):
            candid.train(str(photos), out=out, progress=heard)
    assert heard.lines[-1] == f"go on with: candid train --resume --out {out}"
    before = {file: file.stat().st_mtime_ns for file in cache.glob("features/*/*.safetensors")}
    assert len(before) == 2
    candid.train(resume=True, out=out, progress=heard)
    assert any(line.endswith("; the statistics of 8 photos are cached already") for line in heard.lines)
    assert all(file.stat().st_mtime_ns == date for file, date in before.items())


def packed(folder: Path, out: Path) -> None:
    """Pack class folders into a shard, in the order of the names."""
    with tarfile.open(out, "w") as tar:
        for number, file in enumerate(sorted(folder.rglob("*.png"))):
            label = str(CLASSES.index(file.parent.name)).encode()
            for ending, content in (("png", file.read_bytes()), ("cls", label)):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))


def test_tar_shards_give_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    for part, count, start in (("train", 10, 0), ("val", 8, 20)):
        write_photos(tmp_path / "photos" / part, CLASSES, count, start)
        (tmp_path / "shards").mkdir(exist_ok=True)
        packed(tmp_path / "photos" / part, tmp_path / "shards" / f"{part}-0.tar")
    (tmp_path / "shards" / "classes.txt").write_text("\n".join(CLASSES))
    candid.train(str(tmp_path / "photos"), out=tmp_path / "one")
    found = candid.train(str(tmp_path / "shards"), out=tmp_path / "other")
    assert bits(tmp_path / "one") == bits(tmp_path / "other")
    assert found.model().class_names == CLASSES
    assert len(candid.load(tmp_path / "other").held_out["statistic.predicted"]) == 24


def test_the_size_of_most_photos_decides_what_is_trained(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", TWO, 6)
    (tmp_path / "photos" / TWO[0] / "000.png").write_bytes(b"broken")
    photo(TWO[0], 1, 30, 30).save(tmp_path / "photos" / TWO[0] / "001.png")
    assert photo_options({"data": str(tmp_path / "photos")}) is not None
    for kind in TWO:
        (tmp_path / "small" / kind).mkdir(parents=True)
        photo(kind, 0, 20, 20).save(tmp_path / "small" / kind / "0.png")
    assert photo_options({"data": str(tmp_path / "small")}) is None
    assert preset_for(str(tmp_path / "small")) == "cifar"
    assert photo_options({"data": str(tmp_path / "small"), "eye": "lite0"}) is not None


def test_a_broken_photo_is_named_or_left_out_and_a_panorama_is_used(photos: Path, tmp_path: Path) -> None:
    broken = photos / TWO[1] / "009.jpg"
    broken.write_bytes(b"no photo")
    Image.new("RGB", (30_000, 120), "teal").save(photos / TWO[0] / "wide.png")
    with pytest.raises(CandidError, match=r"009\.jpg' can't be used: .* or leave --strict out"):
        candid.train(str(photos), out=tmp_path / "run", strict=True)
    heard = Heard()
    candid.train(str(photos), out=tmp_path / "skipped", progress=heard)
    lines = (tmp_path / "skipped" / "skipped.txt").read_text().splitlines()
    assert len(lines) == 1 and str(broken) in lines[0]
    assert any(line.startswith("left out 1 photo that can't be used") for line in heard.lines)


def test_one_class_or_one_photo_in_a_class(photos: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    (photos / TWO[0]).rename(one)
    with pytest.raises(CandidError, match="1 class folder: give at least two"):
        candid.train(str(photos), out=tmp_path / "run")
    (photos / TWO[0]).mkdir()
    (one / "000.png").rename(photos / TWO[0] / "000.png")
    with pytest.raises(CandidError, match=f"The class '{TWO[0]}' has too few images"):
        candid.train(str(photos), out=tmp_path / "run")
    parts = tmp_path / "parts"
    parts.mkdir()
    photos.rename(parts / "train")
    write_photos(parts / "val", TWO, 2)
    with pytest.raises(CandidError, match=f"The class '{TWO[0]}' has 1 training photo: add more"):
        candid.train(str(parts), out=tmp_path / "run")


def test_photos_that_are_all_alike(photos: Path, tmp_path: Path) -> None:
    same = (photos / TWO[0] / "000.png").read_bytes()
    for file in photos.rglob("*.png"):
        file.write_bytes(same)
    with pytest.raises(CandidError, match="All images look the same to the eye"):
        candid.train(str(photos), out=tmp_path / "run")


def test_other_classes_in_test_than_in_train(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos" / "train", TWO, 3)
    write_photos(tmp_path / "photos" / "test", (TWO[0], "checks"), 2)
    with pytest.raises(CandidError, match="checks' is no class of the training images"):
        candid.train(str(tmp_path / "photos"), out=tmp_path / "run")


def test_a_full_disk_loses_nothing_but_the_cache(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("CANDID_CACHE", str(cache))
    monkeypatch.setattr(features, "write_sealed", full)
    monkeypatch.setattr(features, "CHUNK", 4)
    heard = Heard()
    candid.train(str(photos), out=tmp_path / "run", progress=heard)
    assert sum("No space left on device" in line for line in heard.lines) == 1
    assert candid.load(tmp_path / "run").class_names == TWO


def test_a_damaged_file_of_the_cache_is_computed_again(
    photos: Path, photo_run: PhotoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candid.train(str(photos), out=tmp_path / "one")
    cache = shutil.copytree(os.environ["CANDID_CACHE"], tmp_path / "cache")
    damaged = sorted(cache.glob("features/*/*.safetensors"))
    assert damaged
    for number, file in enumerate(damaged):
        file.write_bytes(file.read_bytes()[: 500 + number])
    monkeypatch.setenv("CANDID_CACHE", str(cache))
    candid.train(str(photos), out=tmp_path / "two")
    assert bits(tmp_path / "one") == bits(tmp_path / "two")


def test_a_folder_with_a_run_is_not_overwritten(photo_run: PhotoRun) -> None:
    before = (Path(photo_run.model) / "model" / "best" / "model.json").read_bytes()
    done = candid_command("train", photo_run.data, "--out", photo_run.model)
    assert "nothing has changed since the last training" in " ".join(done.stderr.split())
    assert (Path(photo_run.model) / "model" / "best" / "model.json").read_bytes() == before
    expected = "add 'resume' (--resume) to continue it, or choose another folder with 'out' (--out)."
    done = candid_command("train", photo_run.data, "--preset", "digits", "--out", photo_run.model)
    assert expected in str(done.exception)


def made_part(name: str, photos: int) -> tuple[Features, Predictions]:
    """Return photos of two classes that a head is right about."""
    labels = np.arange(photos) % 2
    names = tuple(f"{name}/{i:03}.png" for i in range(photos))
    values = np.random.default_rng(photos).normal(size=(photos, 40)).astype(np.float32)
    novelty = np.random.default_rng(photos).normal(size=(photos, 3))
    logits = 6.0 * np.eye(2, dtype=np.float32)[labels]
    found = Predictions(names, labels, logits, np.zeros(2), {"novelty": novelty})
    return Features(names, labels, values, np.arange(photos)), found


def test_the_report_finds_wrong_labels_copies_and_odd_photos() -> None:
    (train, by_fold), (test, by_model) = made_part("train", 60), made_part("test", 20)
    by_fold.logits[7] = [9.0, 0.0]  # of a photo of the second class
    by_model.logits[4] = [0.0, 9.0]
    train.values[32] = 1.001 * train.values[30]
    test.values[5] = train.values[13]
    by_fold.columns["novelty"][22, 2] = 40.0
    report = DataReport.of({"train": train, "test": test}, {"train": by_fold, "test": by_model}, ("a", "b"))
    seen = {(each.kind, each.path, each.label, each.other) for each in report.findings}
    assert seen == {
        ("label", "train/007.png", "b", "a"),
        ("label", "test/004.png", "a", "b"),
        ("duplicate", "train/032.png", "a", "train/030.png"),
        ("leak", "test/005.png", "b", "train/013.png"),
        ("odd", "train/022.png", "a", ""),
    }
    assert report.counts() == {"label": 2, "conflict": 0, "duplicate": 1, "leak": 1, "odd": 1}
    assert report.sentences()[0].startswith("warning: 1 photo nearly equals a photo of another part")
    assert report.sentences()[1].endswith("2 labels that are probably wrong, 1 near-duplicate, 1 odd photo")
    rows = {row["path"]: row for row in csv.DictReader(report.csv().splitlines())}
    assert len(rows) == 5
    wrong, odd, copy = (rows[f"train/{number}.png"] for number in ("007", "022", "032"))
    assert (wrong["given_label"], wrong["predicted_label"], wrong["is_label_issue"]) == ("b", "a", "True")
    assert 0 < float(wrong["label_score"]) < 0.05 and wrong["is_outlier_issue"] == "False"
    assert odd["is_outlier_issue"] == "True" and 0 < float(odd["outlier_score"]) < 0.2
    assert copy["near_duplicate_of"] == "train/030.png" and float(copy["near_duplicate_score"]) < 0.05
    assert "Near-duplicates within a part: 1" in report.html()


def test_the_same_photo_in_two_classes_is_a_warning() -> None:
    (train, by_fold), (test, by_model) = made_part("train", 60), made_part("test", 20)
    train.values[30] = train.values[20] = train.values[41]  # of the classes a, a and b
    test.values[5] = train.values[12]
    report = DataReport.of({"train": train, "test": test}, {"train": by_fold, "test": by_model}, ("a", "b"))
    found = {(each.path, each.label, each.other, each.other_label) for each in report.of_kind("conflict")}
    expected = {("train/041.png", "b", "train/020.png", "a"), ("test/005.png", "b", "train/012.png", "a")}
    assert found == expected
    assert report.counts() == {"label": 0, "conflict": 2, "duplicate": 1, "leak": 0, "odd": 0}
    warning = "warning: 2 photos are in two classes (a and b): one label of each is wrong"
    assert report.sentences()[0].startswith(warning)
    assert "Photos in two classes: 2" in report.html()


def test_few_held_out_photos_and_classes_without_any_cost_no_verdicts(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos" / "train", CLASSES, 8)
    write_photos(tmp_path / "photos" / "val", TWO, 3, start=8)
    write_photos(tmp_path / "photos" / "test", CLASSES[:1], 3, start=12)
    heard = Heard()
    found = candid.train(str(tmp_path / "photos"), out=tmp_path / "run", progress=heard)
    assert "6 held out, fewer than 20: p-values are out of fold, 3 to test" in heard.lines[0]
    assert heard.lines[1].startswith("warning: no held-out photos of stripes: held-out results say nothing")
    assert heard.lines[2].startswith("warning: no test photos of rings and stripes: test results say nothing")
    held_out = needed(candid.load(found.folder))
    assert len(held_out) == 24 and held_out.out_of_fold


def test_levels_of_photos_out_of_fold_are_not_called_proven(photo_run: PhotoRun, tmp_path: Path) -> None:
    held_out = needed(candid.load(photo_run.model))
    sentences = held_out.rule().promises[ALL].sentences()
    for sentence in [each for each in sentences if each.startswith(("Novelty", "Error"))]:
        assert "no bound is proven, since the model has learned from held-out images" in sentence
    promises = held_out.rule(Levels(novelty=0.3, risk=0.4, novelty_promise="confident")).promises[ALL]
    assert promises.risk is not None
    assert "confidence" not in " ".join(promises.sentences())
    write_photos(tmp_path / "photos" / "train", CLASSES, 12)
    write_photos(tmp_path / "photos" / "val", CLASSES, 8, start=12)
    model = candid.train(str(tmp_path / "photos"), out=tmp_path / "run").model()
    held_out = needed(model)
    assert len(held_out) == 24
    assert "proven" not in " ".join(held_out.rule().promises[ALL].sentences())
    taught = candid.teach(model, {"checks": write_photos(tmp_path, ("checks",), 5) / "checks"}).model
    levels = [
        each
        for each in needed(taught).rule().promises[ALL].sentences()
        if each.startswith(("Novelty", "Error"))
    ]
    assert len(levels) == 2 and all("no bound is proven" in sentence for sentence in levels)


def test_options_of_networks_do_not_mix_with_an_eye(photos: Path) -> None:
    with pytest.raises(
        CandidError, match=r"'epochs' \(--epochs\) is for networks that are trained on pixels"
    ):
        candid.train(str(photos), eye="lite0", epochs=3)
    for options in ({"epochs": 3}, {"batch": 8, "workers": 0}, {"precision": "bf16"}):
        with pytest.raises(CandidError, match="trained on pixels: leave it out, or add 'preset'"):
            photo_options({"data": str(photos), **options})


def test_only_what_names_a_network_asks_for_one(photos: Path) -> None:
    data = {"data": str(photos)}
    assert photo_options({**data, "workers": 0, "model": {}, "seed": 3}) is not None
    assert photo_options(data, recipe="cifar") is None
    for network in ({"preset": "tiny"}, {"baseline": True}, {"start": "everyday"}, {"model": {"rank": 2}}):
        assert photo_options({**data, **network, "epochs": 3}) is None
    with pytest.raises(CandidError, match="no option 'zzzzzz': choose one of .* eye, .* priors, .* thumbn"):
        candid.train(str(photos), zzzzzz=3)


def test_a_network_on_photos_says_so(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CandidError, match="A batch of 500 is larger"):
        candid.train(str(photos), preset="tiny", batch=500, progress=TrainingDisplay())
    heard = " ".join(capsys.readouterr().err.split())
    assert "'preset' (--preset) asks for a network that is trained on pixels" in heard

"""Training on more photos than one process can hold."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import candid
from benchmarks.many_photos import WRONG, NumberEye, Numbers
from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.processes import OneProcess
from candid._support.progress import SILENT
from candid.models.photo.head import FOLDS, Division, fit_divided
from candid.training import many_photos
from candid.training.features import Extraction, FeatureCache, Share
from candid.training.options import PhotoOptions
from tests.helpers import RecordedProgress
from tests.photo_models import PhotoRun
from tests.training.runs import environment

PHOTOS, DIMENSIONS, CLASSES = 3000, 40, 5
NAMES = tuple("abcde")


def found_by(processes: int, folder: Path) -> dict[str, Array]:
    """Return what real processes find."""
    folder.mkdir()
    numbers = map(str, (PHOTOS, processes, DIMENSIONS, CLASSES))
    command = [sys.executable, "-m", "benchmarks.many_photos", "--worker", str(folder), *numbers]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((folder / "used.json").read_text())) == processes
    with np.load(folder / "found.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_find_what_one_finds(processes: int, tmp_path: Path) -> None:
    one, several = found_by(1, tmp_path / "one"), found_by(processes, tmp_path / "several")
    assert one.keys() == several.keys()
    for name in ("keys", "held_out", "counts", "findings", "label", "odd", "photos", "accuracy"):
        assert np.array_equal(one[name], several[name]), name
    for name in ("means", "factor", "logits", "novelty", "cross_entropy"):
        np.testing.assert_allclose(several[name], one[name], rtol=1e-8, atol=1e-8, err_msg=name)
    assert len(one["findings"]) > PHOTOS / WRONG - 2


def shares(tmp_path: Path, photos: int = PHOTOS) -> tuple[dict[str, Share], NumberEye]:
    eye = NumberEye(DIMENSIONS, CLASSES)
    extraction = Extraction(eye, FeatureCache(eye, SILENT, tmp_path), OneProcess(), SILENT)
    train = Numbers((), photos, CLASSES)
    return {"train": extraction.share(train), "val": extraction.share(Numbers((), 500, CLASSES))}, eye


def test_the_head_is_that_of_all_photos_and_every_wrong_label_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PhotoOptions(data=".")
    held, eye = shares(tmp_path)
    monkeypatch.setattr(many_photos, "PIECE", 700)
    everything = many_photos.fit_many(held, options, NAMES, eye.groups, OneProcess())
    monkeypatch.setattr(many_photos, "SAMPLE", 600)
    sampled = many_photos.fit_many(held, options, NAMES, eye.groups, OneProcess())
    assert everything is not None and sampled is not None
    train = everything.parts["train"]
    assert len(train) == PHOTOS and len(sampled.parts["train"]) == 600
    folds = everything.head.out_of_fold.folds
    totals = Division.of(train.values, train.labels, CLASSES).totals
    assert sum(each.counts.sum() for each in totals) == PHOTOS == everything.counts.sum()
    assert np.bincount(folds).min() > PHOTOS / FOLDS - 100
    expected = fit_divided(
        train.values,
        train.labels,
        Division(folds, everything.head.totals),
        eye.groups,
    )
    np.testing.assert_array_equal(expected.out_of_fold.logits, everything.head.out_of_fold.logits)
    known, same = everything.head.standardised, sampled.head.standardised
    np.testing.assert_array_equal(known.means, same.means)
    np.testing.assert_array_equal(known.covariance, same.covariance)
    np.testing.assert_allclose(
        sum(each.products for each in totals), sum(each.products for each in everything.head.totals)
    )
    right = (expected.out_of_fold.logits.argmax(1) == train.labels).mean()
    assert everything.results["accuracy"] == pytest.approx(right, abs=1e-12)
    planted = {f"{i:09}" for i in range(0, PHOTOS, WRONG)}
    for whole in (everything, sampled):
        labels = {each.path[-9:] for each in whole.findings if each.kind == "label"}
        assert planted <= labels and len(labels) < PHOTOS / 20


def test_held_out_copies_of_training_photos_are_left_out(tmp_path: Path) -> None:
    held, eye = shares(tmp_path, 300)
    whole = many_photos.fit_many(held, PhotoOptions(data="."), NAMES, eye.groups, OneProcess())
    assert whole is not None
    assert sorted(int(name[-9:]) for name in whole.parts["val"].names) == list(range(300, 500))


def test_a_class_with_few_photos_is_in_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, eye = shares(tmp_path)
    labels = held["train"].labels.copy()
    labels[labels == 4] = 0
    labels[4:100:5] = 4
    train = Share(held["train"].names, labels, held["train"].digests, held["train"].cache)
    monkeypatch.setattr(many_photos, "SAMPLE", 100)
    whole = many_photos.fit_many({"train": train}, PhotoOptions(data="."), NAMES, eye.groups, OneProcess())
    assert whole is not None and "val" not in whole.parts
    counts = np.bincount(whole.parts["train"].labels)
    assert counts[4] == many_photos.LEAST and counts.sum() < 200


def test_a_class_without_photos_is_an_error(tmp_path: Path) -> None:
    held, eye = shares(tmp_path, 300)
    with pytest.raises(CandidError, match="at least three of each class"):
        many_photos.fit_many(held, PhotoOptions(data="."), (*NAMES, "f"), eye.groups, OneProcess())


def test_a_whole_training(photo_run: PhotoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MANY", 40), ("SAMPLE", 24), ("PIECE", 16)):
        monkeypatch.setattr(many_photos, name, value)
    heard = RecordedProgress()
    result = candid.train(photo_run.data, out=tmp_path / "run", progress=heard)
    assert any("with a sample of at most 24 to choose by" in line for line in heard.messages)
    assert result.results["all"]["photos"] == 36
    assert result.results["test"]["accuracy"] > 0.9
    model = candid.load(tmp_path / "run")
    assert model.metadata["head"]["counts"] == [12, 12, 12]
    examined = candid.examine(tmp_path / "run", [str(path) for path in photo_run.photos])
    assert all(each.p_value is not None for each in examined)

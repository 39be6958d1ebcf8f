"""The corruption benchmark: what it measures, caches and writes."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from scipy.special import entr

import candid
from candid._support.errors import CandidError
from candid._support.numbers import Array, softmax
from candid._support.progress import SILENT, Progress
from candid._support.randomness import draws
from candid.data.datasets import open_dataset
from candid.data.images import image_keys, to_float
from candid.data.splits import ArraySplit
from candid.inference.metrics import area_under_curve
from candid.robustness.corruptions.benchmark import CORRUPTIONS, alexnet, corrupt, corrupted
from candid.robustness.corruptions.metrics import CorruptedModel, CorruptionResult, Reference, write_tables
from tests.helpers import RecordedProgress, candid_command

CHOSEN = ("gaussian_noise", "contrast")


def measured(runs: Path, out: Path, progress: Progress = SILENT, **changes: Any) -> CorruptionResult:
    models = changes.pop("models", runs / "own")  # a run folder: its best model is used
    options = {"out": out, "corruptions": CHOSEN, "severities": (1, 5), "workers": 0, **changes}
    found = corrupt(models, "digits", progress, **options)
    assert found is not None
    return found


def test_errors_entropies_and_areas_are_those_of_the_corrupted_images(runs: Path, tmp_path: Path) -> None:
    found = measured(runs, tmp_path)
    (own,) = found
    assert (
        found.reference is None and found.notes[0].topic == "no-mce" and own.name == "own" and own.beta == 1.0
    )
    model = candid.load(runs / "own/model/best")
    test = open_dataset("digits", holdout=0.3).test
    assert isinstance(test, ArraySplit)
    images, labels = test.images, test.labels

    def posterior(pixels: Array) -> Array:
        return softmax(model.outputs(to_float(pixels)).logits.astype(np.float64))

    def log_density(pixels: Array) -> Array:
        terms = model.outputs(to_float(pixels)).log_density_terms
        assert terms is not None
        return terms.sum(1)

    clean = posterior(images)
    assert own.clean_error == pytest.approx((clean.argmax(1) != labels).mean())
    for number, name in ((0, "gaussian_noise"), (11, "contrast")):
        assert list(CORRUPTIONS)[number] == name
        surprises = []
        for i, severity in enumerate((1, 5)):
            parts = [
                corrupted(
                    part,
                    name,
                    severity,
                    draws(0, number, severity, int(image_keys(part).sum()) % 2**63).numpy,
                )
                for part in np.split(images, range(250, len(images), 250))
            ]
            seen = posterior(np.concatenate(parts))
            surprises.append(-log_density(np.concatenate(parts)))
            assert own.errors[name][i] == pytest.approx((seen.argmax(1) != labels).mean(), abs=0.006)
            entropy = float(entr(seen).sum(1).mean())
            assert own.entropies[name][i] == pytest.approx(entropy, abs=1e-3)
        # one-tailed: the lower the density, the more outlying; both severities together
        area = area_under_curve(-log_density(images), np.concatenate(surprises))
        assert own.auc["one-tailed"][name] == pytest.approx(area, abs=1e-3)
    assert own.errors["gaussian_noise"][1] > own.clean_error
    assert set(own.auc["joint"]) == set(CHOSEN) and own.score == "two-tailed"


def test_a_second_benchmark_reads_what_the_first_cached(runs: Path, tmp_path: Path) -> None:
    first = measured(runs, tmp_path)
    cached = {file: file.stat().st_mtime_ns for file in (tmp_path / "predictions").iterdir()}
    assert len(cached) == 5
    next(iter(cached)).unlink()
    progress = RecordedProgress()
    assert measured(runs, tmp_path, progress) == first
    assert len(progress.loops) == 1
    assert measured(runs, tmp_path, seed=1).models != first.models


def test_corruption_errors_are_relative_to_a_baseline(runs: Path, tmp_path: Path) -> None:
    found = measured(runs, tmp_path, baseline=str(runs / "resnet/model/best"))
    (own,), reference = found, found.reference
    assert reference is not None and reference.name == "resnet"
    ratio = sum(own.errors["contrast"]) / 2 / reference.errors["contrast"]
    assert own.corruption_errors(reference)["contrast"] == pytest.approx(ratio)
    relative = (sum(own.errors["contrast"]) / 2 - own.clean_error) / (
        reference.errors["contrast"] - reference.clean
    )
    assert own.relative_errors(reference)["contrast"] == pytest.approx(relative)


def test_alexnet_is_its_own_reference() -> None:
    published = alexnet()
    errors = {name: [error] * 5 for name, error in published.errors.items()}
    swept = CorruptedModel(
        "AlexNet", None, published.clean, 1.0, errors, {name: [1.5] * 5 for name in errors}
    )
    record = swept.to_dict(published)
    assert record["mce"] == pytest.approx(1) and record["relative_mce"] == pytest.approx(1)
    assert record["entropy_increase_nats"] == pytest.approx(0.5) and record["auc"] == {}
    assert record["intervals"] == {"auc": {}, "mean_auc": {}}  # the errors on each image are not known
    shares = np.array([[published.clean, *published.errors.values()]])
    known = replace(swept, by_image=shares.repeat(10, 0)).to_dict(published)["intervals"]
    assert known["mce"] == pytest.approx((1, 1)) and known["relative_mce"] == pytest.approx((1, 1))
    perfect = Reference("perfect", 0.0, dict.fromkeys(errors, 0.0))
    assert swept.to_dict(perfect)["mce"] is None


def test_metrics_have_intervals(runs: Path, tmp_path: Path) -> None:
    models = [runs / "own/model/best", runs / "resnet/model/best"]
    found = measured(runs, tmp_path, models=models, baseline=str(models[1]))
    own, resnet = found.to_dict()
    for name in ("clean_error", "mce", "relative_mce"):
        low, high = own["intervals"][name]
        assert low < own[name] < high
    assert resnet["intervals"]["mce"] == resnet["intervals"]["relative_mce"] == (1, 1)  # always its own
    for score, areas in own["auc"].items():
        intervals = own["intervals"]["auc"][score]
        assert all(intervals[name][0] <= area <= intervals[name][1] for name, area in areas.items())
        low, high = own["intervals"]["mean_auc"][score]
        assert low <= own["mean_auc"][score] <= high
        assert high - low < max(b - a for a, b in intervals.values())
    assert json.loads(json.dumps(own))["intervals"]["mce"] == list(own["intervals"]["mce"])


def test_a_folder_of_corrupted_images_is_read(runs: Path, tmp_path: Path) -> None:
    test = open_dataset("digits", holdout=0.3).test
    assert isinstance(test, ArraySplit)
    for severity in (1, 5):
        changed = corrupted(test.images[:40], "contrast", severity, draws(0).numpy)
        for i, (image, label) in enumerate(zip(changed, test.labels, strict=False)):
            place = tmp_path / "made" / "contrast" / str(severity) / str(int(label))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(place / f"{i}.png")
    made: dict[str, Any] = {"corruptions": ("contrast",), "corrupted": tmp_path / "made"}
    (own,) = measured(runs, tmp_path / "out", part="test", **made)
    model = candid.load(runs / "own/model/best")
    seen = model.outputs(to_float(corrupted(test.images[:40], "contrast", 5, draws(0).numpy)))
    wrong = seen.logits.argmax(1) != test.labels[:40]
    assert own.images == 40 and own.severities == (1, 5)
    assert own.by_image is None and own.auc and not own.auc_intervals  # 40 of 359 images: no pairs
    assert own.errors["contrast"][1] == pytest.approx(wrong.mean(), abs=0.026)


def test_tables_say_the_same_in_every_format(runs: Path, tmp_path: Path) -> None:
    models = [runs / "own/model/best", runs / "resnet/model/best"]
    found = measured(runs, tmp_path, models=models, baseline=str(models[1]))
    files = {file.suffix: file.read_text() for file in write_tables(found, tmp_path)}
    assert files.keys() == {".json", ".csv", ".md", ".tex", ".html"}
    own, resnet = json.loads(files[".json"])
    assert resnet["mce"] == pytest.approx(1) and resnet["model"] == "resnet" and own["reference"] == "resnet"
    rows = list(csv.DictReader(files[".csv"].splitlines()))
    assert len(rows) == 4 and float(rows[0]["error_5"]) == pytest.approx(
        own["errors"]["gaussian_noise"][1], rel=1e-5
    )
    assert float(rows[0]["auc_joint_low"]) <= float(rows[0]["auc_joint"]) <= float(rows[0]["auc_joint_high"])
    area = f"{100 * own['auc']['two-tailed']['gaussian_noise']:.1f}"
    for ending in (".md", ".tex", ".html"):
        assert area in files[ending] and "mean AUC, two-tailed" in files[ending]
        low, high = own["intervals"]["mce"]
        assert f"{100 * own['mce']:.1f} ({100 * low:.1f} to {100 * high:.1f})" in files[ending]
    page = ElementTree.fromstring(files[".html"].split("\n", 1)[1].replace('<meta charset="utf-8">', ""))
    assert len(page.findall(".//tbody/tr")) == 2
    assert files[".tex"].count("\\\\") == 3


def test_mistakes_are_said(runs: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"corruptions": ("fogg",)}, "did you mean 'fog'"),
        ({"severities": (6,)}, "Severity 6 does not exist"),
        ({"severities": ()}, "at least one"),
        ({"images": 0}, "at least 1"),
        ({"score": "two-tail"}, "did you mean 'two-tailed'"),
        ({"score_": "joint"}, "did you mean 'score'"),
        ({"corrupted": tmp_path / "none"}, "no data set or folder"),
    ):
        with pytest.raises(CandidError, match=message):
            measured(runs, tmp_path, **changes)


def test_the_command_prints_a_table_or_json(runs: Path, tmp_path: Path) -> None:
    models = [str(runs / "own/model/best"), str(runs / "resnet/model/best")]
    options = [
        "--corruptions",
        "contrast, fog",
        "--severities",
        "5",
        "--images",
        "50",
        "--out",
        str(tmp_path),
    ]
    done = candid_command("corrupt", *models, "digits", *options, "--workers", "0")
    assert done.exit_code == 0, done.output
    assert "clean error (%)" in done.stdout and "Fog" in done.stdout and "own" in done.stdout
    assert "two-tailed" in done.stdout
    done = candid_command("corrupt", *models, "digits", *options, "--workers", "0", "--json")
    assert [each["model"] for each in json.loads(done.stdout)] == ["own", "resnet"]

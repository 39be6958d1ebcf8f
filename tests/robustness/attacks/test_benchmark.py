"""The attack benchmark: what it measures, caches, writes and refuses to show."""

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import candid
from candid._support.errors import CandidError
from candid.inference.metrics import area_under_curve, share_interval
from candid.judging.held_out import HeldOut
from candid.reports.plots import attacks as attacks_plots
from candid.robustness.attacks.benchmark import CHUNK, attack, attack_tables, write_attack_tables
from candid.robustness.attacks.carlini_wagner import carlini_wagner
from candid.robustness.attacks.metrics import (
    AttackedModel,
    AttackResult,
    median_interval,
    median_log_density,
)
from candid.trust.conformal import TwoTailed
from tests.helpers import candid_command
from tests.training.runs import run, small_config, train

COMMAND = ["attack", "--images", "6", "--steps", "12", "--workers", "0"]


def attacked(runs: Path, out: Path, **changes: Any) -> AttackResult:
    models = changes.pop("models", [runs / "own", runs / "resnet"])
    usual = {"images": CHUNK + 5, "kappa": (0.01,), "d": (0.0, 1000.0), "steps": 12, "workers": 0}
    made = attack(models, "digits", **{**usual, "out": out, **changes})
    assert made is not None
    return made


@pytest.fixture(scope="module")
def kept(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.fixture(scope="module")
def found(runs: Path, kept: Path) -> AttackResult:
    return attacked(runs, kept)


def alone(runs: Path, out: Path, **changes: Any) -> AttackedModel:
    """The only model of a benchmark."""
    (made,) = attacked(runs, out, **changes)
    return made


def test_metrics_are_those_of_the_attacks(runs: Path, found: AttackResult) -> None:
    own, resnet = found
    assert list(own.attacks) == [(0.01, 0.0), (0.01, 1000.0)] and list(resnet.attacks) == [(0.01, 0.0)]
    scene = own.inputs
    assert scene.targets is not None and resnet.inputs.targets is not None
    assert np.array_equal(scene.targets, resnet.inputs.targets) and (scene.targets != scene.labels).all()
    model = candid.load(runs / "own/model/best")
    held_out = HeldOut.of(model)
    assert held_out is not None
    known = held_out.statistics["log_density"]
    first = scene.images[:CHUNK], scene.targets[:CHUNK]
    median = median_log_density(model)
    assert median == pytest.approx(float(np.sort(known)[(len(known) - 1) // 2]) / 64)
    again = carlini_wagner(model, *first, kappa=0.01, median=median, steps=12)  # d is 1000
    result, figures = own.attacks[0.01, 1000.0], own.metrics[1]
    assert np.allclose(result.images[:CHUNK], again.images, atol=1e-5)

    clean, changed = torch.from_numpy(scene.images) / 255, torch.from_numpy(result.images)
    before = model.log_density(clean).detach().numpy()
    after = model.log_density(changed).detach().numpy()
    fooled = (model.predict(changed).numpy() == scene.targets) & ~result.already_misclassified
    assert np.array_equal(fooled, result.success & ~result.already_misclassified) and fooled.any()
    assert figures.already_misclassified == (model.predict(clean).numpy() == scene.targets).sum()
    assert figures.misclassified == (model.predict(clean).numpy() != scene.labels).sum()
    distances = (changed - clean).flatten(1).norm(dim=1).numpy()[fooled]
    assert figures.l2_mean == pytest.approx(float(distances.mean()), rel=1e-4)
    assert figures.per_pixel == pytest.approx(float(distances.mean()) / 8, rel=1e-4)
    confidence = model.posterior(changed).amax(1).detach().numpy()[fooled].mean()
    assert figures.confidence == pytest.approx(float(confidence), abs=1e-4)
    assert figures.bits_before == pytest.approx(-float(before[fooled].mean()) / 64 / math.log(2), rel=1e-4)
    test = TwoTailed().fit(known)
    pairs = test.score(after[fooled])[:, None] - test.score(before[fooled])[None]
    area = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert figures.detection is not None
    assert figures.detection.two_tailed == pytest.approx(float(area), abs=0.005)
    assert own.metrics[0].adaptive_two_tailed == figures.detection.two_tailed
    assert own.metrics[0].adaptive_success == figures.success
    assert resnet.metrics[0].detection is None and resnet.metrics[0].bits_after is None


def test_eight_bit_images_are_measured_as_files(runs: Path, tmp_path: Path, found: AttackResult) -> None:
    own, resnet = found
    for model, name in ((own, "own"), (resnet, "resnet")):
        attack, figures = model.attacks[0.01, 0.0].eight_bit, model.metrics[0].eight_bit
        assert attack is not None and figures is not None and figures.success is not None
        assert figures.success >= (model.metrics[0].success or 0)  # as many as in the few steps of this test
        assert model.inputs.targets is not None
        victim = candid.load(runs / name / "model/best").eval()
        for _ in range(3):
            hits = victim.logits(torch.from_numpy(attack.images)).argmax(1).numpy() == model.inputs.targets
            assert hits[attack.success].all()
            if name == "own":
                victim.noise.uniform_()
    adaptive = own.metrics[1].eight_bit
    assert adaptive is not None and adaptive.detection is not None and adaptive.detection.two_tailed < 0.2
    assert own.metrics[0].eight_bit is not None
    assert own.metrics[0].eight_bit.adaptive_two_tailed == adaptive.detection.two_tailed
    plain = alone(runs, tmp_path, models=runs / "own/model/best", images=5, eight_bit=False)
    assert plain.metrics[0].eight_bit is None and plain.metrics[0].as_file is plain.metrics[0]


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.sampled_from([0.1, 0.2, 0.5, 1.0, math.inf]), min_size=1, max_size=30))
def test_intervals_agree_with_their_definitions(values: list[float]) -> None:
    """The median lies between the k-th smallest and the k-th largest value, with k from the binomial."""
    n = len(values)
    low, high = median_interval(np.array(values))
    ranks = [k for k in range(n // 2 + 1) if sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 0.025]
    ordered = sorted(values)
    assert (low, high) == ((ordered[ranks[-1]], ordered[n - 1 - ranks[-1]]) if ranks else (0.0, math.inf))

    hits = sum(value < 1 for value in values)
    _, low, high = share_interval(np.array(values) < 1)
    above = sum(math.comb(n, i) * low**i * (1 - low) ** (n - i) for i in range(hits, n + 1))
    below = sum(math.comb(n, i) * high**i * (1 - high) ** (n - i) for i in range(hits + 1))
    assert above == pytest.approx(0.025, abs=1e-6) if hits else low == 0
    assert below == pytest.approx(0.025, abs=1e-6) if hits < n else high == 1


def test_the_interval_of_an_area_knows_pairs(found: AttackResult) -> None:
    """An image moves the area through its original and its attacked version: leave each out in turn."""
    own, figures = found.models[0], found.models[0].metrics[0]
    attack, held_out = own.attacks[0.01, 0.0], HeldOut.of(own.model)
    assert held_out is not None and attack.log_density is not None and own.clean.log_density is not None
    fooled = attack.success & ~attack.already_misclassified
    test = TwoTailed().fit(held_out.statistics["log_density"])
    before, after = (test.score(each[fooled]) for each in (own.clean.log_density, attack.log_density))
    n = len(before)
    area = area_under_curve(before, after)
    left = np.arange(n)
    without = [area_under_curve(before[left != i], after[left != i]) for i in range(n)]
    jackknife = math.sqrt((n - 1) / n * sum((each - area) ** 2 for each in without))
    low, high = figures.intervals["two_tailed"]
    assert low < area < high and high - low == pytest.approx(2 * 1.96 * jackknife, rel=0.25)


def test_what_was_stopped_goes_on(runs: Path, kept: Path, found: AttackResult) -> None:
    files = sorted((kept / "attacks").iterdir())
    assert len(files) == 6  # two chunks of three attacks
    cut, gone, *others = files
    times = {file: file.stat().st_mtime_ns for file in others}
    cut.write_bytes(cut.read_bytes()[:100])
    gone.unlink()
    again = attacked(runs, kept)
    assert [each.metrics for each in again] == [each.metrics for each in found]
    assert {file: file.stat().st_mtime_ns for file in others} == times
    assert sorted((kept / "attacks").iterdir()) == files and cut.stat().st_size > 100


def test_other_targets_are_other_attacks(runs: Path, kept: Path, found: AttackResult) -> None:
    before = len(list((kept / "attacks").iterdir()))
    other = alone(runs, kept, models=runs / "resnet/model/best", seed=1, images=CHUNK)
    assert other.inputs.targets is not None and found.models[1].inputs.targets is not None
    assert not np.array_equal(other.inputs.targets, found.models[1].inputs.targets[:CHUNK])
    assert len(list((kept / "attacks").iterdir())) == before + 1


def test_failed_attacks_do_not_count_as_rounded_ones(runs: Path, tmp_path: Path) -> None:
    sure = alone(runs, tmp_path, models=runs / "resnet/model/best", kappa=(30.0,), d=(0.0,), images=5)
    figures, result = sure.metrics[0], sure.attacks[30.0, 0.0]
    assert result.rounded_success.any() and not result.success.any()
    assert figures.success == figures.rounded_success == 0 and figures.l2_mean is None


def test_models_must_see_the_same_images(runs: Path, tmp_path: Path) -> None:
    train(small_config(epochs=1, only=["3", "7"]), tmp_path / "two")
    with pytest.raises(CandidError, match="'own' and 'two'.*separately"):
        attacked(runs, tmp_path, models=[runs / "own/model/best", tmp_path / "two/model/best"])
    assert not (tmp_path / "attacks").exists()


def test_no_detection_without_the_attack_on_it(runs: Path, kept: Path) -> None:
    lone = attacked(runs, kept, d=(0.0,))
    assert [note.topic for note in lone.notes] == ["no-detection"]
    assert all(each.detection is None for model in lone for each in model.metrics)
    text = "".join(file.read_text() for file in write_attack_tables(lone, kept / "lone"))
    records = json.loads((kept / "lone" / "attacks.json").read_text())["metrics"]
    assert all(each["detection"] is None and each["adaptive_two_tailed"] is None for each in records)
    ((head, rows),) = attack_tables(lone).values()
    areas = [i for i, name in enumerate(head) if "AUC" in name or "adaptive" in name or "its success" in name]
    assert len(areas) == 5 and {row[i] for row in rows for i in areas} == {("–", "")}
    assert text.count(" – | – | – | – | – |") == 4  # of real-valued and of 8-bit images
    assert len(attacks_plots.attack_bars(lone.models).axes) == 2


def test_tables_and_figures_say_the_same(runs: Path, kept: Path, found: AttackResult) -> None:
    files = {file.suffix: file.read_text() for file in write_attack_tables(found, kept)}
    written = json.loads(files[".json"])
    assert written["attack"]["steps"] == 12 and written["attack"]["method"] in files[".md"]
    records = written["metrics"]
    assert [each["d"] for each in records] == [0, 1000, 0]
    rounded = records[1]["eight_bit"]
    shown = [
        f"{100 * own['detection']['two_tailed']:.1f} ({' to '.join(f'{100 * e:.1f}' for e in ends)})"
        for own in (records[1], rounded)
        for ends in [own["intervals"]["two_tailed"]]
    ]
    shown += [
        f"{own['l2_median']:#.3g} ({own['intervals']['l2_median'][0]:#.3g}" for own in (records[1], rounded)
    ]
    for ending in (".md", ".tex", ".html"):
        assert all(each in files[ending] for each in shown)
    page = ElementTree.fromstring(files[".html"].split("\n", 1)[1].replace('<meta charset="utf-8">', ""))
    assert len(page.findall(".//tbody/tr")) == 6  # real-valued and 8-bit images of each
    rows = list(csv.DictReader(files[".csv"].splitlines()))
    assert len(rows) == 3 * (CHUNK + 5)
    fooled = [
        float(row["l2"])
        for row in rows[: CHUNK + 5]
        if row["success"] == "1" and row["already_misclassified"] == "0"
    ]
    assert records[0]["l2_mean"] == pytest.approx(sum(fooled) / len(fooled), rel=1e-4)
    as_files = [row["eight_bit_success"] for row in rows[: CHUNK + 5] if row["already_misclassified"] == "0"]
    assert records[0]["eight_bit"]["success"] == pytest.approx(as_files.count("1") / len(as_files))
    ((head, lines),) = attack_tables(found).values()
    assert all(len(line) == len(head) for line in lines)

    perturbation, detection, _ = attacks_plots.attack_bars(found.models).axes
    heights = [patch.get_height() for patch in perturbation.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([each["eight_bit"]["l2_median"] for each in records])
    rates = [text.get_text() for text in detection.texts]
    assert rates == ["no test", *(f"{100 * each['eight_bit']['success']:.0f}" for each in records[:2])]
    assert len(attacks_plots.attack_examples(found.models).axes) == 4 * 3


def test_other_attacks(runs: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"images": 5, "models": runs / "own/model/best"}
    away = alone(runs, tmp_path, **small, untargeted=True)
    assert (
        away.inputs.targets is None
        and (away.attacks[0.01, 0.0].posterior.argmax(1) != away.inputs.labels).all()
    )
    ball = alone(runs, tmp_path, **small, method="projected-gradient", radius=0.3)
    assert list(ball.attacks) == [(0.0, 0.0)] and (ball.attacks[0.0, 0.0].distance <= 0.3 + 1e-6).all()
    assert ball.metrics[0].detection is None
    loose = alone(runs, tmp_path, **small, as_published=True, kappa=(math.inf,))
    assert json.dumps([each.to_dict() for each in loose.metrics], allow_nan=False)


def test_mistakes_are_said(runs: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"kappa": ()}, "at least one"),
        ({"kappa": (-1.0,)}, "'kappa'"),
        ({"d": (math.inf,)}, "'d.*finite"),
        ({"images": 0}, "at least 1"),
        ({"steps": 0}, "'steps'"),
    ):
        with pytest.raises(CandidError, match=message):
            attacked(runs, tmp_path, **changes)
    model = candid.load(runs / "own/model/best")
    model.held_out = {}
    candid.save(model, tmp_path / "uncalibrated")
    unknown: dict[str, Any] = {"models": tmp_path / "uncalibrated", "images": 3}
    with pytest.raises(CandidError, match="no held-out scores.*candid calibrate.*--d 0"):
        attacked(runs, tmp_path, **unknown)
    with pytest.raises(CandidError, match="calibrate it first"):
        median_log_density(model)
    with pytest.raises(CandidError, match="no held-out likelihood to fool"):
        median_log_density(candid.load(runs / "resnet/model/best"))
    lone = alone(runs, tmp_path, **unknown, d=(0.0,))
    assert lone.metrics[0].bits_after is not None


def test_the_command(runs: Path, tmp_path: Path) -> None:
    models = [str(runs / "own/model/best"), str(runs / "resnet/model/best")]
    options = [
        "--kappa",
        "inf",
        "--d",
        "0,66",
        "--out",
        str(tmp_path),
        "--trajectories",
        "2",
        "--towards",
        "3",
    ]
    done = candid_command(*COMMAND, *models, "digits", *options)
    assert done.exit_code == 0, done.output
    for word in ("κ = ∞", "8-bit", "AUC", "resnet"):
        assert word in done.stdout
    drawn = {file.name for file in tmp_path.glob("*.png")}
    assert drawn == {"attacks.png", "examples.png", "trajectories-own.png"}
    done = candid_command(*COMMAND, *models, "digits", *options[:-4], "--json")
    assert {each["kappa"] for each in json.loads(done.stdout)["metrics"]} == {"inf"}
    for arguments, message in (
        (["digits"], "Name one or more models"),
        ([models[0], "digits", "--trajectories", "7"], "at most 6"),
        ([models[0], "digits", "--trajectories", "1", "--towards", "*"], "stands for several"),
        ([models[1], "digits", "--d", "66"], "no held-out likelihood to fool: add 0"),
        ([models[0], "digits", "--kappa", "much"], "--kappa takes numbers"),
    ):
        done = candid_command(*COMMAND, *arguments)
        assert done.exit_code == 2 and message in str(done.exception)


@pytest.mark.slow
def test_two_processes_share_the_images(runs: Path, tmp_path: Path, kept: Path, found: AttackResult) -> None:
    options = ("--kappa", "0.01", "--d", "0", "--steps", "12", "--images", str(CHUNK + 5), "--workers", "0")
    done = run(
        runs / "own/model/best",
        "digits",
        *options,
        "--devices",
        "2",
        "--out",
        tmp_path,
        "--json",
        command=[sys.executable, "-m", "candid", "attack"],
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "attacks.csv").read_text().splitlines()))
    assert [row["image"] for row in rows] == list(found.models[0].inputs.names)
    distances = [float(row["l2"]) for row in rows]
    assert distances == pytest.approx(
        found.models[0].attacks[0.01, 0.0].distance.tolist(), rel=1e-2, abs=1e-4
    )

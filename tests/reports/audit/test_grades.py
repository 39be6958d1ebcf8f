"""Words come from thresholds: what is called good, and what never is."""

from typing import Any

import numpy as np
import pytest

from candid._support.numbers import softmax
from candid.reports.audit import grades
from candid.robustness.attacks.metrics import AttackMetrics
from candid.robustness.corruptions.metrics import CorruptedModel


def metrics(**changes: Any) -> dict[str, Any]:
    own = {
        "images": 1000,
        "accuracy": 0.8,
        "top1_ece": 0.03,
        "oce": 2.0,
        "intervals": {"accuracy": [0.78, 0.82], "top1_ece": [0.02, 0.04], "oce": [0.5, 5.0]},
        "held_out_overlap": 0,
        "false_positives": {"joint": {"0.05": 0.052}},
        "verdicts": {"score": "joint", "n_reference": 999},
        "ood": {},
    }
    return own | changes


def areas(**sets: tuple[float, float]) -> dict[str, Any]:
    """By set, the area of the joint test and of the control."""
    return {
        name: {"joint": {"auc": own}, "code-length": {"auc": control}}
        for name, (own, control) in sets.items()
    }


def attack(success: float | None, **changes: Any) -> AttackMetrics:
    return AttackMetrics(
        model="own", beta=1.0, kappa=0.01, d=0.0, images=20, misclassified=3, already_misclassified=0,
        success=success, rounded_success=success, steps=10.0, most_steps=20, per_pixel=0.001, **changes,
    )  # fmt: skip


def test_accuracy() -> None:
    assert [grades.accuracy(metrics(accuracy=a), 0.1).grade for a in (0.95, 0.75, 0.74)] == [
        "good",
        "fair",
        "poor",
    ]
    assert "one in 5 is wrong" in grades.accuracy(metrics(), 0.1).sentence
    guessing = metrics(accuracy=0.18, intervals={"accuracy": [0.16, 0.2]})
    assert grades.accuracy(guessing, 0.1).grade == "poor"
    assert "guessing" in grades.accuracy(guessing, 0.1).sentence
    assert "none is wrong" in grades.accuracy(metrics(accuracy=1.0), 0.1).sentence
    few = metrics(accuracy=0.8, intervals={"accuracy": [0.44, 0.97]})
    assert grades.accuracy(few, 0.5).grade == "unknown" and not grades.guesses(few, 0.5)
    assert grades.guesses(metrics(accuracy=0.9), grades.chance_of(np.array([0] * 9 + [1])))


def test_calibration() -> None:
    marks = [
        grades.calibration(metrics(top1_ece=e), 0.9, chance).grade
        for e, chance in ((0.02, 0.0), (0.05, 0.01), (0.06, 0.01), (0.06, 0.07))
    ]
    assert marks == ["good", "fair", "poor", "unknown"]
    assert "over-confident, mean confidence 90.0 %" in grades.calibration(metrics(), 0.9, 0).sentence
    assert "under-confident" in grades.calibration(metrics(), 0.7, 0).sentence
    assert "2.0 times as often as this allows (95 % interval: 0.5 to 5.0 times)" in (
        grades.calibration(metrics(), 0.9, 0).sentence
    )
    never = grades.calibration(metrics(oce=0.0), 0.9, 0).sentence
    assert "never wrong here; the true rate may be up to 5.0 times the allowed one" in never
    assert "never very confident" in grades.calibration(metrics(oce=None), 0.9, 0).sentence


def test_the_error_by_chance_shrinks_with_the_number_of_images() -> None:
    posterior = softmax(np.random.default_rng(0).random((40_000, 4)))
    few, many = grades.error_by_chance(posterior[:100]), grades.error_by_chance(posterior)
    assert 0.03 < few < 0.2 and many < 0.01
    assert grades.error_by_chance(np.eye(3)) == 0


def test_false_alarms() -> None:
    kept = grades.false_alarms(metrics())
    assert kept.grade == "good" and "False alarms 5.2 % at a level of 5 %: as promised" in kept.sentence
    many = metrics(false_positives={"joint": {"0.05": 0.085}})
    broken = grades.false_alarms(many)
    assert broken.grade == "poor" and "more than promised" in broken.sentence
    few = grades.false_alarms(many | {"verdicts": {"score": "joint", "n_reference": 199}})
    assert few.grade == "good" and "ranked among 199 held-out ones" in few.sentence
    assert grades.false_alarms(metrics(held_out_overlap=1000)).grade == "unknown"
    rare = metrics(verdicts={"score": "joint", "n_reference": 18}, false_positives={"joint": {"0.05": 0.0}})
    assert grades.false_alarms(rare).grade == "unknown"
    assert grades.most_false_alarms(10_000, 10_000) == pytest.approx(0.058, abs=1e-3)
    assert grades.most_false_alarms(100, 1000) > grades.most_false_alarms(1000, 1000) > 0.05


def test_out_of_distribution() -> None:
    for sets, grade, words in (
        ({"a": (0.9, 0.6)}, "good", "Detected: a (90.0 %)."),
        ({"a": (0.9, 0.95)}, "fair", "no better than by the length of a lossless code: a (90.0 %)"),
        ({"a": (0.9, 0.6), "b": (0.7, 0.5)}, "fair", "Partly detected: b (70.0 %)"),
        (
            {"a": (0.9, 0.6), "b": (0.4, 0.5), "c": (0.5, 0.5)},
            "poor",
            "Not detected: b (40.0 %) and c (50.0 %)",
        ),
    ):
        found = grades.out_of_distribution(metrics(ood=areas(**sets)))
        assert found.grade == grade and words in found.sentence
    assert grades.out_of_distribution(metrics()).grade == "unknown"


def test_corruptions() -> None:
    for error, grade in ((0.15, "good"), (0.25, "fair"), (0.3, "poor")):
        swept = CorruptedModel("own", 1.0, 0.1, 0.5, {"fog": [error, error]}, {"fog": [1.0, 1.0]})
        found = grades.corruptions(swept, "")
        assert found.grade == grade and "worst: fog" in found.sentence and "not known" in found.sentence
    known = CorruptedModel("own", 1.0, 0.1, 0.5, {"fog": [0.2]}, {"fog": [1.0]}, {"joint": {"fog": 0.9}})
    assert "'joint' detects corruptions well" in grades.corruptions(known, "", score="joint").sentence
    assert grades.corruptions(None, "why").sentence == "why"
    guessing = grades.corruptions(known, "", guesses=True)
    assert guessing.grade == "unknown" and "It guesses" in guessing.sentence


@pytest.mark.parametrize("success", [0.0, 0.05, 0.5, 1.0])
def test_attacks_are_never_good(success: float) -> None:
    found = grades.attacks([attack(0.0), attack(success)], "")
    assert found.grade == ("poor" if success > 0.1 else "fair")
    assert ("Don't rely" in found.sentence) == (success > 0.1)
    assert "no likelihood" in found.sentence
    fooled = grades.attacks([attack(success, adaptive_two_tailed=0.01, adaptive_success=0.5)], "")
    assert "lowers its area" in fooled.sentence and "1.0 %" in fooled.sentence


def test_attacks_that_were_not_tried_are_not_known() -> None:
    assert grades.attacks([], "why").sentence == "why"
    assert grades.attacks([attack(None)], "").grade == "unknown"

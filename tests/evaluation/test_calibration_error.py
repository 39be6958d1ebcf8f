import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import betaincinv

from candid._support.errors import CandidError
from candid._support.numbers import Array, softmax
from candid._support.randomness import draws
from candid._support.text import METRICS
from candid.evaluation import calibration_error as calibration
from candid.evaluation.calibration_error import (
    BINS,
    Bins,
    _maximum,
    all_bins,
    calibration_metrics,
    expected_calibration_error,
    top_bins,
)
from candid.inference import metrics
from candid.inference.metrics import Interval, mean_interval, share_interval

PEER = json.loads((Path(__file__).parent / "torchmetrics_errors.json").read_text())

Predictions = tuple[Array, Array, int]


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def predictions_of(confidences: list[float], right: list[bool], classes: int) -> tuple[Array, Array]:
    """Posterior and labels with these confidences of the most probable class, which is class 0."""
    highest = np.array(confidences)[:, None]
    rest = np.repeat((1 - highest) / (classes - 1), classes - 1, axis=1)
    return np.concatenate((highest, rest), 1), np.array([0 if r else 1 for r in right])


def overconfidence(posterior: Array, labels: Array) -> float | None:
    """The overconfidence error."""
    interval = calibration_metrics(posterior, labels, resamples=1)["oce"]
    return None if interval is None else interval.value


def flat(posterior: Array, labels: Array, top: bool) -> tuple[Array, Array]:
    """Confidence of every prediction, and whether it is right."""
    if top:
        return posterior.max(1), (posterior.argmax(1) == labels).astype(np.int64)
    right = labels[:, None] == np.arange(posterior.shape[1])
    return posterior.flatten(), right.flatten().astype(np.int64)


def plain_bins(confidence: Array, right: Array, bins: int) -> list[tuple[int, float, float]]:
    """Count, mean confidence and share right of each bin."""
    table = []
    for k in range(bins):
        inside = (confidence >= k / bins) & ((confidence < (k + 1) / bins) | (k == bins - 1))
        c, r = confidence[inside].tolist(), right[inside].tolist()
        table.append((len(c), math.fsum(c) / len(c), sum(r) / len(r)) if c else (0, 0.0, 0.0))
    return table


@st.composite
def predictions(draw: st.DrawFn) -> Predictions:
    """Posteriors of 2 to 5 classes, many of them 0, 1, on an edge or just below; labels; bins."""
    classes = draw(st.integers(2, 5))
    bins = draw(st.integers(1, 40))
    edges = [k / bins for k in range(1, bins + 1) if k / bins > 1 / classes]
    below = [math.nextafter(edge, 0) for edge in edges if math.nextafter(edge, 0) > 1 / classes]
    usual = st.floats(1 / classes, 1, exclude_min=True)
    confidence = st.sampled_from([1.0, *edges, *below]) | usual
    confidences = draw(st.lists(confidence, min_size=1, max_size=12))
    right = draw(st.lists(st.booleans(), min_size=len(confidences), max_size=len(confidences)))
    return *predictions_of(confidences, right, classes), bins


@settings(deadline=None, max_examples=60)
@given(predictions())
@example((*predictions_of([1.0], [True], 2), 15))
@example((*predictions_of([1.0], [False], 2), 15))
@example((*predictions_of([14 / 25, 0.57], [True, False], 2), 25))
@example((*predictions_of([math.nextafter(11 / 15, 0), 0.75, 11 / 15], [True, True, False], 3), 15))
@example((np.ones((3, 1)), np.zeros(3, np.int64), 15))
def test_bins_and_their_errors_are_the_plain_loops(drawn: Predictions) -> None:
    posterior, labels, n = drawn
    for function, top in ((all_bins, False), (top_bins, True)):
        found = function(posterior, labels, n)
        table = plain_bins(*flat(posterior, labels, top), n)
        np.testing.assert_allclose(np.stack(found, 1), table, rtol=0, atol=1e-12)
        total = sum(count for count, _, _ in table)
        expected = math.fsum(count * abs(c - r) for count, c, r in table) / total
        assert expected_calibration_error(found) == pytest.approx(expected, abs=1e-12)
        assert float(_maximum(found)) == pytest.approx(max(abs(c - r) for _, c, r in table), abs=1e-12)


@pytest.mark.parametrize("case", PEER["cases"])
def test_binned_errors_are_torchmetrics_where_no_confidence_is_1(case: dict[str, Any]) -> None:
    """Its edges are k/n to the last bit only for powers of two."""
    posterior, labels = predictions_of(case["confidences"], case["right"], case["classes"])
    for function, name in ((all_bins, "all"), (top_bins, "top")):
        bins = function(posterior, labels, case["bins"])
        found = expected_calibration_error(bins), float(_maximum(bins))
        assert found == pytest.approx(case[name], abs=1e-9)


@pytest.mark.parametrize("case", PEER["many"])
def test_top_errors_are_torchmetrics_of_many_classes(case: dict[str, Any]) -> None:
    """Which rounds the confidences to float32, so that the agreement is no better."""
    posterior = softmax(np.array(case["logits"], np.float64))
    bins = top_bins(posterior, np.array(case["labels"]))
    found = expected_calibration_error(bins), float(_maximum(bins))
    assert found == pytest.approx(case["top"], abs=1e-6)


def test_a_confidence_of_1_is_in_the_last_bin() -> None:
    """Of two bins; torchmetrics has a third one for 1 alone, which takes the mean of 1 and 1/4."""
    posterior, labels = predictions_of([1.0, 0.75], [False, True], 2)
    bins = top_bins(posterior, labels, bins=2)
    assert bins.count.tolist() == [0, 2]
    assert expected_calibration_error(bins) == (1 + 0.75) / 2 - 1 / 2
    assert PEER["one"] == (1 + 1 / 4) / 2


def test_no_confidence_falls_out_of_the_bins() -> None:
    above_one = np.array([[1 + 1e-7, 0.0]], np.float32)  # as rounding makes it
    assert expected_calibration_error(top_bins(above_one, np.array([1]))) == pytest.approx(1)


def test_memory_layout_does_not_matter(random: np.random.Generator) -> None:
    by_class = softmax(random.normal(size=(5, 40)), axis=0)
    labels = random.integers(5, size=80)[::2]
    truth = calibration_metrics(by_class.T.copy(), labels.copy(), resamples=5)
    assert calibration_metrics(by_class.T, labels, resamples=5) == truth


def test_standard_errors_by_hand() -> None:
    bins = Bins(np.array([0, 4, 20]), np.zeros(3), np.array([0, 0, 0.45]))
    assert bins.errors.tolist() == pytest.approx([0, 1 / 4, 3 / 20], rel=1e-12)


def test_overconfidence_by_hand() -> None:
    posterior, labels = predictions_of(
        [1.0, 0.998, 0.9971, 0.997, 0.9969], [True, False, True, True, False], 3
    )
    assert overconfidence(posterior, labels) == pytest.approx((1 / 4) / 0.003, rel=1e-12)
    assert overconfidence(posterior[4:], labels[4:]) is None


def test_overconfidence_counts_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a critical confidence of 1/4 one image has two sure predictions, one of them wrong."""
    monkeypatch.setattr(calibration, "CRITICAL", 0.25)
    assert overconfidence(np.array([[0.7, 0.3, 0.0]]), np.array([1])) == pytest.approx(0.5 / 0.75)


@pytest.mark.parametrize("bins", [1, 15])
def test_single_precision_and_pieces_change_nothing(
    bins: int, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior = softmax(4 * random.normal(size=(101, 7))).astype(np.float32)
    labels, wide = random.integers(7, size=101), posterior.astype(np.float64)
    whole = all_bins(wide, labels, bins), overconfidence(wide, labels)
    monkeypatch.setattr(calibration, "_AT_ONCE", 20)
    pieces = all_bins(posterior, labels, bins), overconfidence(posterior, labels)
    assert all(np.array_equal(a, b) for a, b in zip(whole[0], pieces[0], strict=True))
    assert whole[1] == pieces[1]


def overconfident(images: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Two classes; the share right is 0.3 below the confidence, everywhere."""
    confidence = 0.8 + 0.2 * random.random(images)
    right = random.random(images) < confidence - 0.3
    return np.stack((confidence, 1 - confidence), 1), (~right).astype(np.int64)


def test_intervals_are_the_plain_loops_over_resamples(random: np.random.Generator) -> None:
    posterior, labels = overconfident(60, random)
    posterior[::7] = [0.9995, 0.0005]
    rows: dict[str, list[float]] = {"ece": [], "mce": [], "top1_ece": []}
    resampled = draws(5)
    for _ in range(50):
        drawn = resampled.integers(60, 60)
        p, y = posterior[drawn], labels[drawn]
        rows["ece"].append(expected_calibration_error(all_bins(p, y, 10)))
        rows["mce"].append(float(_maximum(all_bins(p, y, 10))))
        rows["top1_ece"].append(expected_calibration_error(top_bins(p, y, 10)))
    found = calibration_metrics(posterior, labels, bins=10, resamples=50, seed=5)
    values = {
        "ece": expected_calibration_error(all_bins(posterior, labels, 10)),
        "mce": float(_maximum(all_bins(posterior, labels, 10))),
        "top1_ece": expected_calibration_error(top_bins(posterior, labels, 10)),
    }
    for name, column in rows.items():
        low, high = np.quantile(column, [0.025, 0.975])
        assert found[name] == pytest.approx((values[name], low, high), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(predictions())
def test_intervals_hold_the_value(drawn: Predictions) -> None:
    posterior, labels, bins = drawn
    found = calibration_metrics(posterior, labels, bins, resamples=5)
    assert (found["oce"] is None) == bool((posterior < 0.997).all())
    for interval in found.values():
        assert interval is None or 0 <= interval.low <= interval.value <= interval.high


def clopper_pearson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The exact interval by quantiles of beta distributions."""
    low = float(betaincinv(hits, n - hits + 1, (1 - level) / 2)) if hits else 0.0
    high = float(betaincinv(hits + 1, n - hits, (1 + level) / 2)) if hits < n else 1.0
    return low, high


@pytest.mark.parametrize(("sure", "wrong"), [(1, 0), (1, 1), (9, 0), (40, 3), (500, 500)])
def test_the_interval_of_overconfidence_is_the_exact_binomial_one(sure: int, wrong: int) -> None:
    right = [i >= wrong for i in range(sure)]
    posterior, labels = predictions_of([1.0] * sure + [0.6], [*right, False], 2)
    found = calibration_metrics(posterior, labels)["oce"]
    exact = (wrong / sure, *clopper_pearson(wrong, sure))
    assert found == pytest.approx([p / 0.003 for p in exact], rel=1e-9)


@given(st.integers(1, 60), st.data())
def test_the_interval_of_a_share_is_the_exact_binomial_one(n: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, n))
    found = share_interval(np.arange(n) < hits)
    assert found == pytest.approx((hits / n, *clopper_pearson(hits, n)), abs=1e-9)


def test_intervals_are_reproducible_and_come_in_pieces(
    random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, labels = overconfident(50, random)

    def intervals(seed: int) -> list[Interval | None]:
        means = mean_interval(posterior[:, 0], resamples=40, seed=seed)
        return [*calibration_metrics(posterior, labels, resamples=40, seed=seed).values(), means]

    first = intervals(seed=0)
    assert intervals(seed=0) == first
    assert intervals(seed=1) != first
    for at_once in (1, 100):
        for module in (calibration, metrics):
            monkeypatch.setattr(module, "_AT_ONCE", at_once)
        for a, b in zip(intervals(seed=0), first, strict=True):
            assert a == pytest.approx(b, abs=1e-12)


def test_what_is_printed_names_the_number_of_bins() -> None:
    assert all(f"{BINS} bins" in METRICS[name].label for name in ("ece", "mce", "top1_ece"))


def covers(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high


def test_intervals_of_a_mean_cover_the_truth(random: np.random.Generator) -> None:
    """Accuracy and cross-entropy of a calibrated model of two classes, sure to 80 %."""
    truth = -0.8 * math.log(0.8) - 0.2 * math.log(0.2)
    hits = []
    for seed in range(200):
        right = random.random(200) < 0.8
        accuracies = mean_interval(right, resamples=200, seed=seed)
        losses = mean_interval(np.where(right, -math.log(0.8), -math.log(0.2)), resamples=200, seed=seed)
        hits.append((covers(accuracies, 0.8), covers(losses, truth)))
    assert all(0.90 <= share <= 0.98 for share in np.mean(hits, axis=0))


def test_intervals_of_calibration_errors_cover_the_truth(random: np.random.Generator) -> None:
    """Of predictions that are all too sure by 0.3; of sure ones, 4 times as many are wrong as may be."""
    hits = []
    for seed in range(100):
        posterior, labels = overconfident(500, random)
        sure, wrong = (
            np.array([[0.9975, 0.0025]] * 1000),
            random.random(1000) < 0.012,
        )
        errors = calibration_metrics(posterior, labels, bins=5, resamples=200, seed=seed)
        sures = calibration_metrics(sure, wrong.astype(np.int64), resamples=200, seed=seed)
        hits.append((covers(errors["ece"], 0.3), covers(errors["top1_ece"], 0.3), covers(sures["oce"], 4)))
    assert all(0.88 <= share <= 1 for share in np.mean(hits, axis=0))


def test_a_wider_level_gives_a_wider_interval() -> None:
    narrow, wide = (mean_interval(np.arange(9.0), level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value == 4 < narrow.high < wide.high


GOOD = np.array([[0.5, 0.5], [1.0, 0.0]])
LABELS = np.array([0, 1])


@pytest.mark.parametrize("function", [all_bins, top_bins, calibration_metrics])
@pytest.mark.parametrize(
    ("posterior", "labels", "message"),
    [
        (GOOD[:0], LABELS[:0], "at least one image"),
        (GOOD[:, :0], LABELS, "at least one image and one class"),
        (np.array([[math.nan, 0.5], [1.0, 0.0]]), LABELS, "sum to 1"),
        (np.array([[0.5, 0.5], [1.0, 0.0002]]), LABELS, "sum to 1"),
        (np.array([[0.5, 0.5], [1.5, -0.5]]), LABELS, "softmax of the logits"),
        (GOOD, np.array([0, 2]), "Label 2 is none of the 2 classes"),
        (GOOD, np.array([-1, 0]), "Label -1 is none of the 2 classes"),
        (GOOD, np.array([0.0, 1.0]), "int64"),
        (GOOD, np.array([0]), "not (2, 2) and (1,)"),
        (GOOD[0], LABELS, "not (2,) and (2,)"),
    ],
)
def test_bad_predictions_are_refused(
    function: Callable[[Array, Array], object], posterior: Array, labels: Array, message: str
) -> None:
    with pytest.raises(CandidError) as caught:
        function(posterior, labels)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_bins(GOOD, LABELS, 0), "At least one bin"),
        (lambda: calibration_metrics(GOOD, LABELS, resamples=0), "at least one resample"),
        (lambda: mean_interval(np.ones(3), level=1.0), "level between 0 and 1"),
        (lambda: mean_interval(np.ones(0)), "One value per image"),
        (lambda: mean_interval(GOOD), "One value per image"),
        (lambda: mean_interval(np.array([1.0, math.inf])), "NaN or infinite"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        call()

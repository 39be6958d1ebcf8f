"""Selective metrics against brute force, identities and simulations."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from candid._support.errors import CandidError
from candid._support.numbers import Array, softmax
from candid.evaluation.selective import (
    RULES,
    Judged,
    areas,
    paired_difference,
    risk_coverage,
    selective_metrics,
    sentences,
    table,
)
from candid.inference.metrics import log_odds
from candid.trust.verdict import Verdict

IMAGES = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=40)


def columns(images: list[tuple[int, bool]]) -> tuple[Array, Array]:
    confidence, right = zip(*images, strict=True)
    return np.array(confidence, np.float64), np.array(right)


@given(IMAGES)
@settings(max_examples=60, deadline=None)
def test_augrc_is_an_auroc_in_disguise(images: list[tuple[int, bool]]) -> None:
    confidence, right = columns(images)
    found, a, n = risk_coverage(confidence, right), right.mean(), len(right)
    auroc = roc_auc_score(right, confidence) if 0 < a < 1 else 0.0
    expected = (1 - auroc) * a * (1 - a) + (1 - a) ** 2 / 2 + (1 - a) / (2 * n)
    assert found.augrc == pytest.approx(expected, abs=1e-12)
    assert found.risk[-1] == pytest.approx(1 - a)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_areas_are_means_over_the_orders_of_equal_images(images: list[tuple[int, bool]]) -> None:
    """Brute force: every order of the images that has falling confidences."""
    found, n = risk_coverage(*columns(images)), len(images)
    risks = []
    for order in permutations(images):
        if all(order[i][0] >= order[i + 1][0] for i in range(n - 1)):
            errors = np.cumsum([not right for _, right in order])
            risks.append((np.mean(errors / np.arange(1, n + 1)), np.mean(errors / n)))
    assert (found.aurc, found.augrc) == pytest.approx(tuple(np.mean(risks, axis=0)))


def test_the_intervals_of_areas_cover_what_they_should() -> None:
    """Of 100 draws of 300 images, the areas of a large set lie inside 86 intervals or more."""
    random, inside = np.random.default_rng(0), np.zeros(2)
    everyone = random.random(40_000)
    true = risk_coverage(everyone, random.random(40_000) < everyone)
    for seed in range(100):
        confidence = random.random(300)
        found = areas(confidence, random.random(300) < confidence, seed)
        inside += [each.low <= value <= each.high for each, value in zip(found, true[2:], strict=True)]
    assert (inside >= 86).all()


def test_equal_confidences_do_not_make_an_interval_narrow() -> None:
    right = np.arange(300) % 3 > 0
    low, high = areas(np.zeros(300), right)[0][1:]
    assert 0.04 < 1 / 3 - low < 0.07 and 0.04 < high - 1 / 3 < 0.07  # 1.96 (2 / 9 / 300)^(1/2) = 0.053


def test_the_paired_difference_covers_the_truth() -> None:
    """Images of two rules: both accept some, each accepts others; right with the shares p and q."""
    random, inside = np.random.default_rng(0), 0
    for _ in range(400):
        only, both = 60, 200
        first = np.arange(both + 2 * only) < both + only
        second = (np.arange(both + 2 * only) < both) | ~first
        chances = np.repeat((0.97, 0.95, 0.85), (both, only, only))
        found = paired_difference(first, second, random.random(len(chances)) < chances)
        inside += found.low <= (0.95 - 0.85) * only / (both + only) <= found.high
    assert binomtest(inside, 400, 0.95, "less").pvalue > 0.01  # no fewer than promised
    assert inside < 400


def test_a_difference_of_equal_rules_is_zero_and_unequal_sets_are_refused() -> None:
    accepted = np.array([True, False])
    assert paired_difference(accepted, accepted, accepted) == (0, 0, 0)
    with pytest.raises(CandidError, match="equally large sets"):
        paired_difference(accepted, np.array([True, True]), accepted)


def test_verdicts_and_plain_thresholds_are_counted_by_hand() -> None:
    confidence = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    right = np.array([True, True, False, True, True, False])
    kinds: list[Verdict] = ["novel", "accept", "ambiguous", "accept", "accept", "ambiguous"]
    foreign = {"fish": Judged(np.array([9.0, 0.1, 3.5]), ["novel", "accept", "ambiguous"])}
    found = selective_metrics(confidence, right, kinds, foreign)
    verdicts, plain, alone = (found[rule] for rule in RULES)
    assert (verdicts["coverage"], verdicts["accepted"], verdicts["ambiguous"]) == (0.5, 1.0, 0.0)
    assert (plain["coverage"], plain["accepted"]) == (0.5, 2 / 3)  # images 1, 2 and 3
    assert (alone["coverage"], alone["accepted"]) == (0.5, 2 / 3)  # images 0, 1 and 2
    assert plain["threshold"] == 1 / (1 + np.exp(-2.0)) and alone["threshold"] == 1 / (1 + np.exp(-3.0))
    assert [rule["foreign"]["fish"] for rule in (verdicts, plain, alone)] == [1 / 3, 1 / 3, 2 / 3]
    exact = binomtest(3, 6).proportion_ci(method="exact")
    assert verdicts["intervals"]["coverage"] == pytest.approx([exact.low, exact.high])
    assert found["difference"]["value"] == pytest.approx(1 / 3)
    assert found["novel"]["images"] == found["novel"]["right"] == 1
    assert found["novel"]["difference"]["value"] == 0
    assert found["curve"]["novel_last"][0] == 0 and len(found["curve"]["risk"]) == 6
    assert "alone accepts 1 images that are called novel" in sentences(found)[1]
    assert [row[0] for row in table(found, "test")] == [
        "accepted of test",
        "right of accepted",
        "right of ambiguous",
        "accepted of fish",
        "right of accepted, less plain",
        "AUGRC",
        "AURC",
    ]
    assert table(found, "test")[4][3].startswith("+0.00 (")  # no -0.00


def test_a_clear_difference_is_named_and_the_cost_of_the_novelty_cut_stands_apart() -> None:
    confidence = np.linspace(1, 0, 400)
    kinds: list[Verdict] = [*["novel"] * 100, *["ambiguous"] * 100, *["accept"] * 200]  # type: ignore[list-item]
    late = np.arange(400) >= 200
    (first, second) = sentences(selective_metrics(confidence, late, kinds))
    assert "are better than those of a plain confidence threshold" in first
    assert "100 images" in second and "0 % of them are right" in second
    assert "differs by -50.00" in second  # right: 100 of 200 that are not novel, none of the first 200
    assert "are worse than" in sentences(selective_metrics(confidence, ~late, kinds))[0]


def test_nothing_accepted_is_said() -> None:
    found = selective_metrics(np.array([1.0]), np.array([True]), ["novel"], {})
    assert found["verdicts"]["accepted"] is None and found["difference"] is None
    assert sentences(found) == ["No image is accepted."] and len(table(found)) == 5
    assert sentences(selective_metrics(np.array([1.0]), np.array([True]))) == []


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(CandidError, match="one confidence and one flag"):
        risk_coverage(np.ones(2), np.ones(3, bool))


def test_log_odds_order_images_as_posteriors_do() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    posterior = softmax(logits.astype(np.float64)).max(1)
    np.testing.assert_allclose(log_odds(logits), np.log(posterior / (1 - posterior)), rtol=1e-7, atol=1e-7)

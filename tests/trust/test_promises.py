"""Promises hold on many draws, agree with their definitions, and advice that is followed works."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from candid import CandidError
from candid.trust.promises import LISTED, needed_images, no_promise, start, walk
from candid.trust.verdict import NOTHING, Promises, cross_conformal_bound, level, rounded_up
from experiments.promises import by_bisection, by_walk, kept, oracle

SETS = 400


def brute_force(confidence: np.ndarray, wrong: np.ndarray, risk: float, delta: float) -> float | None:
    """The threshold of the walk, from its definition."""
    found = None
    for threshold in sorted(set(confidence.tolist()), reverse=True):
        accepted = confidence >= threshold
        m = int(accepted.sum())
        if m < start(len(confidence), risk, delta):
            continue
        if binom.cdf(wrong[accepted].sum(), m, risk) > delta:
            return found
        found = threshold
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 200), st.sampled_from([0.02, 0.1, 0.3]), st.booleans())
def test_the_walk_is_its_definition(seed: int, n: int, risk: float, tied: bool) -> None:
    random = np.random.default_rng(seed)
    confidence = random.random(n)
    if tied:
        confidence = confidence.round(1)
    wrong = random.random(n) > 0.7 + 0.3 * confidence
    found, expected = walk(confidence, wrong, risk), brute_force(confidence, wrong, risk, 0.05)
    assert (None if found is None else found.threshold) == expected
    if found is not None:
        accepted = confidence >= found.threshold
        assert (found.accepted, found.errors) == (accepted.sum(), wrong[accepted].sum())
        shuffle = random.permutation(n)
        assert walk(confidence[shuffle], wrong[shuffle], risk) == found


def sure(random: np.random.Generator, n: int) -> np.ndarray:
    """Probabilities that n images are right, above 1/2 and mostly near 1."""
    return 1 - random.random(n) ** 3 / 2


@pytest.mark.parametrize("risk", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("kind", ["perfect", "overconfident", "tied", "random"])
def test_the_risk_promise_holds(kind: str, risk: float) -> None:
    """Of many held-out sets, at most a share delta promises a risk that the rule does not keep."""
    random, delta, wrong_promises, made = np.random.default_rng(1), 0.05, 0, 0

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        right = sure(random, n).round(2) if kind == "tied" else sure(random, n)
        confidence = 1 - (1 - right) ** 3 if kind == "overconfident" else right
        return confidence, np.full(n, 0.88) if kind == "random" else right

    confidence, right = draw(200_000)
    for _ in range(SETS):
        known, chances = draw(600)
        found = walk(known, random.random(600) > chances, risk, delta)
        if found is not None:
            made += 1
            wrong_promises += 1 - right[confidence >= found.threshold].mean() > risk
    assert wrong_promises <= binom.ppf(0.999, SETS, delta)
    if kind == "random":
        assert wrong_promises == made
    elif risk > 0.02:
        assert made > 0.9 * SETS


def test_the_start_is_fixed_by_numbers_alone() -> None:
    for n, risk in ((1000, 0.05), (300, 0.1), (3000, 0.01)):
        first = start(n, risk)
        errors = binom.ppf(0.05, first, risk) - 1
        assert needed_images(risk, int(errors)) == first <= 0.25 * n
        assert needed_images(risk, int(errors) + 1) > 0.25 * n
    assert start(100, 0.01) == needed_images(0.01) == 299
    assert walk(np.ones(298), np.zeros(298, bool), 0.01) is None
    assert walk(np.ones(299), np.zeros(299, bool), 0.01) is not None
    with pytest.raises(CandidError, match="must be n numbers"):
        walk([0.5, math.nan], [False, False], 0.1)


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0.001, 0.5))
def test_levels_are_those_of_the_beta_distribution(n: int, asked: float) -> None:
    on_average = level(asked, 0.01, n)
    assert on_average.in_force == max(asked, 1 / (n + 1)) and on_average.proven == on_average.in_force
    rank = math.floor(on_average.in_force * (n + 1) + 1e-9)
    assert rank / (n + 1) <= on_average.in_force + 1e-12
    if rank <= n:
        assert on_average.upper == pytest.approx(beta.ppf(0.95, rank, n + 1 - rank), rel=1e-9)
    confident = level(asked, 0.01, n, "confident")
    rank = round(confident.cut * (n + 1))
    assert confident.in_force >= asked and rank >= 1
    assert beta.cdf(confident.in_force, rank, n + 1 - rank) >= 0.95 - 1e-9
    if rank < n:
        assert beta.cdf(confident.in_force, rank + 1, n - rank) < 0.95
    if confident.in_force > asked:  # then it is the smallest
        assert (1 - confident.in_force) ** n == pytest.approx(0.05)


def test_levels_with_few_images_are_named() -> None:
    few = Promises("energy", 20, level(0.01, 0.01, 20), level(None, 0.05, 20))
    assert few.novelty.in_force == pytest.approx(1 / 21)
    (raised,) = few.raised()
    assert "novelty is 4.76 % instead of 1 %" in raised
    assert few.sentences()[0] == raised and "on average over held-out sets" in few.sentences()[1]
    many = Promises("energy", 1000, level(0.01, 0.01, 1000, "confident"), level(None, 0.05, 1000))
    assert many.novelty.cut == 5 / 1001 and not many.raised()
    assert "with 95 % confidence for this model" in many.sentences()[0]
    assert level(0.01, 0.01, 298, "confident").in_force > 0.01 == level(0.01, 0.01, 299, "confident").in_force
    crossed = Promises("energy", 180, level(0.05, 0.01, 180, folds=5), level(None, 0.05, 180))
    assert crossed.novelty.proven == pytest.approx(0.1 + 0.95 * 8 / 185)
    assert "proven is at most 14.1 %" in crossed.sentences()[0]
    saturated = Promises("energy", 20, level(0.45, 0.01, 20, folds=5), level(None, 0.05, 20))
    assert saturated.novelty.proven == 1 and "learned" not in " ".join(saturated.sentences())
    assert "no bound is proven with so few held-out images" in saturated.sentences()[0]
    learned = replace(saturated, out_of_fold=True)
    assert "since the model has learned from held-out images" in learned.sentences()[0]
    assert learned.plain().endswith("; no bound is proven.")
    found = replace(many, fdr_proven=False)  # of a rate of false discoveries that nobody asked for
    assert "proven" not in found.plain() and replace(found, fdr=0.1).plain().endswith("no bound is proven.")


@given(st.floats(1e-6, 0.99))
def test_levels_are_rounded_up(share: float) -> None:
    assert share <= rounded_up(share) <= 1.2 * share


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "Of ordinary photos, at most 5 % are called novel and at most 4 % get an answer without their "
            "true class, on average.",
        ),
        (
            {"fdr": 0.1},
            "Of ordinary photos, at most 4 % get an answer without their true class, on average. At "
            "most 10 % of what is called novel is ordinary, on average.",
        ),
        ({"error": NOTHING}, "Of ordinary photos, at most 5 % are called novel, on average."),
        ({"error": NOTHING, "fdr": 0.1}, "At most 10 % of what is called novel is ordinary, on average."),
        (
            {"novelty": level(0.05, 0.05, 400, "average", 5)},
            "Of ordinary photos, about 5 % are called novel and "
            "at most 4 % get an answer without their true class, on average.",
        ),
    ],
)
def test_the_plain_line_says_which_level_holds_how(changes: dict[str, Any], expected: str) -> None:
    promises = Promises("joint", 400, level(0.05, 0.05, 400), level(0.04, 0.05, 400))
    assert replace(promises, **changes).plain() == expected


def test_the_cross_conformal_bound_covers_dependent_folds() -> None:
    """Two folds of 49 whose p-values, i / 50, add up to 10 / 50 whenever they are low: each is valid."""
    first = np.arange(1, 51)
    second = np.where(first < 10, 10 - first, first)
    assert sorted(second) == first.tolist()
    p = (1 + (first - 1) + (second - 1)) / (98 + 1)
    assert 0.1 < (p <= 0.1).mean() <= cross_conformal_bound(0.1, 98, 2) < 0.22


def test_what_can_be_promised_instead_can_be_promised() -> None:
    random = np.random.default_rng(0)
    right = sure(random, 1000)
    wrong = random.random(1000) > right
    assert walk(right, wrong, 0.002) is None
    said = no_promise(right, wrong, 0.002, 0.05, 1000, 2000)
    assert "A risk of 0.2 % can't be promised with 2000 held-out images" in said
    assert f"takes at least {2 * needed_images(0.002):,} held-out images" in said
    offered = float(said.split("by risk ")[1].split(" ")[0])
    delta = float(said.split("and delta ")[1].split(" ")[0])
    assert offered in LISTED and delta == 0.05 / 4 and walk(right, wrong, offered, delta) is not None
    hopeless = no_promise(right, np.ones(1000, bool), 0.1, 0.05, 1000, 1000)
    assert "leave risk out" in hopeless and "fewer errors" in hopeless


def test_the_estimate_of_images_is_enough_on_average() -> None:
    """With errors as frequent as before, many sets of the estimated size promise the risk."""
    random = np.random.default_rng(0)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        right = random.uniform(0, 1, n) ** 0.05
        return right, random.random(n) > right

    right, wrong = draw(400)
    said = no_promise(right, wrong, 0.01, 0.05, 400, 400)
    assert walk(right, wrong, 0.01) is None and ", about " in said
    size = int(said.split(", about ")[-1].split(" ")[0].replace(",", ""))
    promised = [walk(*draw(size), 0.01) is not None for _ in range(40)]
    assert size < 100_000 and sum(promised) >= 12


def test_the_experiment_compares_with_the_oracle_and_with_bisection() -> None:
    random = np.random.default_rng(0)
    right = sure(random, 4000)
    wrong = random.random(4000) > right
    order = np.argsort(-right)
    risks = wrong[order].cumsum() / np.arange(1, 4001)
    assert oracle(right, wrong, 0.05) == (np.flatnonzero(risks <= 0.05)[-1] + 1) / 4000
    ours, theirs = (kept(right, wrong, 0.05, method, 200, 500) for method in (by_walk, by_bisection))
    assert theirs.coverage < ours.coverage < oracle(right, wrong, 0.05)
    assert max(ours.broken, theirs.broken) <= binom.ppf(0.999, 200, 0.05) / 200
    threshold = by_bisection(right[:500], wrong[:500], 0.05)
    assert threshold is not None
    accepted = right[:500] >= threshold
    assert binom.cdf(wrong[:500][accepted].sum(), accepted.sum(), 0.05) < 0.05 / 9

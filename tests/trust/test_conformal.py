import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.trust.conformal import (
    DensityOfStates,
    Detector,
    OneTailed,
    ScalarDetector,
    TwoTailed,
    Typicality,
    TypicalSet,
    p_values,
)
from candid.trust.ranking import ALL, Ranking
from candid.trust.scores import Score, waic
from tests.trust.validity import assert_valid_p_values

Scalar = type[ScalarDetector]
SCALAR: list[Scalar] = [OneTailed, Typicality, TwoTailed]
PValue = Callable[[Array, Array], Array]
SCORES = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6, width=32)  # whole numbers make ties
EIGHTHS = st.integers(-30, 30).map(lambda k: k / 8)  # ties, and sums without rounding
HELD_OUT = st.lists(EIGHTHS, min_size=1, max_size=20)
scalar = pytest.mark.parametrize("detector", SCALAR)


def double(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)


def plain_one_tailed(t: float, held_out: list[float]) -> float:
    return (1 + sum(h <= t for h in held_out)) / (len(held_out) + 1)


def plain_typicality(t: float, held_out: list[float]) -> float:
    new, *old = map(Fraction, [t, *held_out])
    mean = sum(old, new) / (len(old) + 1)
    return (1 + sum(abs(h - mean) >= abs(new - mean) for h in old)) / (len(old) + 1)


def plain_two_tailed(t: float, held_out: list[float]) -> float:
    return min(1, 2 * plain_one_tailed(t, held_out), 2 * plain_one_tailed(-t, [-h for h in held_out]))


PLAIN = {OneTailed: plain_one_tailed, Typicality: plain_typicality, TwoTailed: plain_two_tailed}


@settings(deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=8), st.lists(SCORES, max_size=20))
def test_p_values_are_the_definitions(scores: list[float], calibration: list[float]) -> None:
    truth = [(1 + sum(c >= s for c in calibration)) / (len(calibration) + 1) for s in scores]
    assert p_values(np.array(scores), np.array(calibration)).tolist() == truth


def test_an_outlier_gets_the_smallest_p_value_and_any_shape_is_kept() -> None:
    p = p_values(np.array([[9.0, -9.0], [0.0, float("inf")]]), np.array([2.0, -1.0, 1.0]))
    assert p.tolist() == [[0.25, 1.0], [0.75, 0.25]]


@scalar
@settings(deadline=None)
@given(st.lists(EIGHTHS, max_size=8), HELD_OUT)
def test_detectors_are_the_plain_loops(detector: Scalar, values: list[float], held_out: list[float]) -> None:
    found = detector().fit(double(held_out)).p_value(double(values))
    assert found.dtype == np.float64
    assert found.tolist() == [PLAIN[detector](t, held_out) for t in values]


@settings(deadline=None)
@given(SCORES, st.lists(SCORES, min_size=1, max_size=20))
def test_rounding_makes_no_p_value_of_typicality_smaller(t: float, held_out: list[float]) -> None:
    found = Typicality().fit(double(held_out)).p_value(double([t])).item()
    assert found >= plain_typicality(t, held_out)


@settings(deadline=None)
@given(SCORES, SCORES)
def test_two_values_are_equally_far_from_their_mean(t: float, held_out: float) -> None:
    assert Typicality().fit(double([held_out / 3])).p_value(double([t / 7])).item() == 1


def excess(p_value: PValue, scores: Array) -> int:
    """Exchangeable values: each is equally likely to be the new one, so P(p <= t) is a share of them.

    How many more p-values there are at or below some t than a valid test may have.
    """
    n = len(scores)
    p = np.concatenate([p_value(scores[i : i + 1], scores[np.arange(n) != i]) for i in range(n)])
    return max(int((p <= t).sum()) - round(t * n) for t in p.tolist())


def p_value_of(detector: Callable[[], Detector]) -> PValue:
    return lambda statistic, held_out: detector().fit(held_out).p_value(statistic)


@pytest.mark.parametrize("function", [p_values, *map(p_value_of, SCALAR)])
@settings(deadline=None)
@given(scores=st.lists(SCORES, min_size=2, max_size=20))
def test_p_values_are_valid_whichever_value_is_the_new_one(function: PValue, scores: list[float]) -> None:
    assert excess(function, np.array(scores)) <= 0


def plug_in_typicality(statistic: Array, held_out: Array) -> Array:
    return p_values(np.abs(statistic - held_out.mean()), np.abs(held_out - held_out.mean()))


@pytest.mark.parametrize("n", [1, 3, 10])
def test_a_mean_of_the_held_out_alone_would_not_be_valid(n: int, generator: np.random.Generator) -> None:
    sets = generator.normal(size=(60, n + 1))
    assert max(excess(plug_in_typicality, scores) for scores in sets) > 0
    assert max(excess(p_value_of(Typicality), scores) for scores in sets) <= 0


@scalar
@pytest.mark.parametrize("ties", [False, True])
def test_p_values_are_uniform_on_draws(detector: Scalar, ties: bool, generator: np.random.Generator) -> None:
    draws = generator.normal(size=(800, 20))
    draws = draws.round() if ties else draws
    p = np.concatenate([detector().fit(row[1:]).p_value(row[:1]) for row in draws])
    levels = [k / 10 for k in range(1, 11)]
    assert_valid_p_values(p, levels, uniform=not ties)


def test_the_check_on_draws_finds_an_invalid_p_value(generator: np.random.Generator) -> None:
    p = np.concatenate([plug_in_typicality(row[:1], row[1:]) for row in generator.normal(size=(800, 4))])
    with pytest.raises(AssertionError):
        assert_valid_p_values(p, [0.25, 0.5, 0.75])


@scalar
@pytest.mark.parametrize("n", [1, 2, 50])
def test_equal_values_are_all_typical(detector: Scalar, n: int) -> None:
    fitted = detector().fit(np.full((n,), 0.1))
    assert fitted.p_value(np.full((3,), 0.1)).tolist() == [1, 1, 1]
    far = fitted.score(np.array([-0.4, -1.4]))
    assert far[0] < far[1] < math.inf


@scalar
@settings(deadline=None)
@given(HELD_OUT, st.floats(0.001, 0.999) | st.sampled_from([0.05, 0.1, 0.25, 0.29, 0.5]), st.data())
def test_the_accepted_interval_is_that_of_the_p_values(
    detector: Scalar, held_out: list[float], alpha: float, data: st.DataObject
) -> None:
    fitted = detector().fit(double(held_out))
    low, high = fitted.accepted(alpha)
    assert low <= high
    margin = 1e-4 * max([1.0, *(abs(end) for end in (low, high) if math.isfinite(end))])  # ends are rounded
    if high - low < 2 * margin or max(map(abs, held_out)) > 1e6:
        return
    inside = data.draw(st.floats(max(low, -1e9) + margin, min(high, 1e9) - margin))
    below = data.draw(st.floats(-1e9, low - margin)) if low > -math.inf else inside
    above = data.draw(st.floats(high + margin, 1e9)) if high < math.inf else inside
    accepted = (fitted.p_value(double([inside, below, above])) > alpha).tolist()
    assert accepted == [True, low == -math.inf, high == math.inf]


def test_one_held_out_image_is_a_limit_only_for_one_tail() -> None:
    """Two values are equally far from their mean, and each is the lower or the upper half."""
    accepted = [detector().fit(np.array([3.0])).accepted(0.6) for detector in SCALAR]
    assert accepted == [(3, math.inf), (-math.inf, math.inf), (-math.inf, math.inf)]


@pytest.mark.parametrize("detector", [OneTailed, TwoTailed])
@settings(deadline=None)
@given(HELD_OUT, st.lists(EIGHTHS, min_size=2))
def test_p_values_fall_with_the_score(detector: Scalar, held_out: list[float], values: list[float]) -> None:
    fitted = detector().fit(double(held_out))
    score, p = fitted.score(double(values)), fitted.p_value(double(values))
    higher = score[:, None] > score
    assert (p[:, None] <= p)[higher].all()


@settings(deadline=None)
@given(HELD_OUT, st.lists(EIGHTHS, min_size=2))
def test_p_values_of_typicality_fall_on_either_side_of_the_mean(
    held_out: list[float], values: list[float]
) -> None:
    fitted, mean = Typicality().fit(double(held_out)), sum(held_out) / len(held_out)
    for side in (-1, 1):
        t = double([v for v in values if side * (v - mean) > 0])
        outwards = t[fitted.score(t).argsort()]
        assert (np.diff(fitted.p_value(outwards)) <= 0).all()
    assert np.allclose(fitted.score(double(values)), np.abs(double(values) - mean))


def test_on_an_asymmetric_distribution_the_tests_err_equally_often_in_different_places(
    generator: np.random.Generator,
) -> None:
    """As the paper's figure of the three tests shows, at its level of 0.1."""
    uniform = generator.random((5, 40_000))
    held_out, fresh = np.split(np.log(uniform).sum(0), 2)  # minus a gamma variable
    zones = {}
    for detector in SCALAR:
        fitted = detector().fit(held_out)
        low, high = fitted.accepted(0.1)
        below, above = ((fresh < low).mean().item(), (fresh > high).mean().item())
        assert below + above == pytest.approx(0.1, abs=0.01)
        assert below + above == pytest.approx((fitted.p_value(fresh) <= 0.1).mean(), abs=1e-12)
        zones[detector] = below, above
    assert zones[OneTailed][1] == 0
    assert zones[TwoTailed] == pytest.approx((0.05, 0.05), abs=0.01)
    assert zones[Typicality][0] > 0.07 and 0 < zones[Typicality][1] < 0.03


@pytest.mark.parametrize("side", [-1, 1])
def test_one_tail_misses_outliers_that_are_too_probable(side: int, generator: np.random.Generator) -> None:
    values = generator.normal(size=(3, 500))
    held_out, typical, outliers = values[0], values[1], values[2] + 6 * side
    is_outlier = np.arange(1000) >= 500
    area = {
        detector: roc_auc_score(
            is_outlier, detector().fit(held_out).score(np.concatenate((typical, outliers)))
        )
        for detector in SCALAR
    }
    assert (area[OneTailed] > 0.99) if side < 0 else (area[OneTailed] < 0.01)
    assert area[Typicality] > 0.99 and area[TwoTailed] > 0.99


def test_scores_of_two_tails_by_hand() -> None:
    fitted = TwoTailed().fit(double([-2.0, 0.0, 0.0, 2.0]))
    unit = math.sqrt(2)
    scores = fitted.score(double([-2 - 3 * unit, -2, -1, 0, 1.5, 2, 2 + unit, math.inf]))
    expected = double([4, 1, 1 - 2 * 0.5 / 3, 0, 1 - 2 * 0.25 / 3, 1, 2, math.inf])
    np.testing.assert_allclose(scores, expected, rtol=1e-7, atol=1e-9)


@scalar
def test_an_infinite_density_is_as_far_out_as_it_gets(detector: Scalar) -> None:
    fitted = detector().fit(np.arange(20.0))
    least = {OneTailed: 1 / 21, Typicality: 1 / 21, TwoTailed: 2 / 21}[detector]
    assert fitted.p_value(np.array([-math.inf])).item() == least
    assert fitted.score(np.array([-math.inf])).item() == math.inf


def test_waic_is_mean_minus_variance_over_models(generator: np.random.Generator) -> None:
    densities = 1000 * generator.normal(size=(40, 5))
    for row, found in zip(densities.tolist(), waic(densities).tolist(), strict=True):
        mean = sum(row) / 5
        assert found == pytest.approx(mean - sum((v - mean) ** 2 for v in row) / 5, rel=1e-9)
    assert waic(np.array([[-1.0, -math.inf], [math.inf, math.inf]])).tolist() == [-math.inf] * 2


def ranking(held_out: Array, groups: Array, detector: Scalar) -> Ranking:
    """Held-out images with a statistic, in groups."""
    return Ranking(Score("any", "new", (), detector), {}, held_out, groups, groups)


def test_each_group_has_its_detector_and_others_share(generator: np.random.Generator) -> None:
    held_out = generator.normal(size=79)
    groups = generator.permutation(np.array([7] * 20 + [3] * 40 + [2] * 19))
    statistic, asked = generator.normal(size=30), np.tile([7, ALL, 2, 3, 7], 6)
    p = ranking(held_out, groups, Typicality).p_values(statistic, asked)
    for group in (7, ALL, 2, 3):
        alone = Typicality().fit(held_out if group == ALL else held_out[groups == group])
        assert np.array_equal(p[asked == group], alone.p_value(statistic[asked == group]))
    assert ranking(held_out, groups, Typicality).p_values(statistic[:0], asked[:0]).shape == (0,)


def test_p_values_within_groups_are_valid_in_each_large_group(generator: np.random.Generator) -> None:
    """Half the images are of class 0 and low; one in ten is of class 2, small and the highest of all."""
    p, found = [], []
    for _ in range(1000):
        classes = generator.choice(3, 41, p=[0.5, 0.4, 0.1])
        statistic = 10 * classes + (1.0 + classes) * generator.normal(size=41)
        large = np.isin(classes, np.flatnonzero(np.bincount(classes[1:], minlength=3) >= 10))
        groups = np.where(large, classes, ALL)
        p.append(ranking(-statistic[1:], groups[1:], OneTailed).p_values(-statistic[:1], groups[:1]))
        found.append(classes[0])
    p_value, of_class = np.concatenate(p), np.stack(found)
    levels = [0.05, 0.1, 0.2, 0.5, 0.8]
    for c in (0, 1):
        assert_valid_p_values(p_value[of_class == c], levels)
    with pytest.raises(AssertionError):  # a small group that is ranked among all images
        assert_valid_p_values(p_value[of_class == 2], levels)
    for t in levels:
        bound = t * 0.9 + min(t, 0.1)
        assert (p_value <= t).mean() <= bound + 4 * (bound * (1 - bound) / 1000) ** 0.5


@scalar
@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (np.empty(0), "needs at least 1 held-out images, not 0"),
        (np.array([1.0, math.nan]), "1 of 2 images is NaN"),
        (np.array([1.0, -math.inf]), "infinite"),
        (np.ones((4, 2)), r"shape \(N,\), not \(4, 2\)"),
        (np.array(1.0), r"shape \(N,\), not \(\)"),
    ],
)
def test_bad_held_out_values_are_refused(detector: Scalar, held_out: Array, message: str) -> None:
    with pytest.raises(CandidError, match=message):
        detector().fit(held_out)


@scalar
def test_bad_use_is_refused(detector: Scalar) -> None:
    fitted = detector().fit(np.arange(9.0))
    for ask in (fitted.score, fitted.p_value):
        with pytest.raises(CandidError, match="is NaN"):
            ask(np.array([math.nan]))
        with pytest.raises(CandidError, match="shape"):
            ask(np.ones((3, 1)))
    for alpha in (0, 1, -0.1, math.nan):
        with pytest.raises(CandidError, match="'alpha' must be above 0"):
            fitted.accepted(alpha)
    for ask in (detector().score, detector().p_value):
        with pytest.raises(CandidError, match="call fit first"):
            ask(np.ones(1))
    with pytest.raises(CandidError, match="call fit first"):
        detector().accepted(0.1)


def test_bad_ensembles_are_refused() -> None:
    with pytest.raises(CandidError, match="at least 2 models, not 1"):
        waic(np.ones((5, 1)))
    with pytest.raises(CandidError, match="1 of 5 images is NaN"):
        waic(np.where(np.arange(5)[:, None] == 1, math.nan, 1.0))
    with pytest.raises(CandidError, match=r"shape \(N, d\)"):
        waic(np.ones(5))


@pytest.mark.parametrize("value", [1e160, -1e300, math.inf])
def test_a_held_out_value_that_drowns_all_others_is_refused(value: float) -> None:
    rows = np.random.default_rng(0).normal(size=(100, 2))
    rows[3, 1] = value
    for detector, held_out in ((DensityOfStates(), rows), (TypicalSet(), rows), (TwoTailed(), rows[:, 1])):
        with pytest.raises(CandidError, match="1 statistics of held-out images are infinite or beyond 1e"):
            detector.fit(held_out)

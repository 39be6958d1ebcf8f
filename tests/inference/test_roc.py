import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn import metrics

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.inference.metrics import (
    area_under_curve,
    auc_interval,
    detection_metrics,
    false_positive_rate_at,
    paired_placements,
    placement_interval,
    placements,
    roc_curve,
)

FINITE = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6)  # whole numbers make ties
SCORES = st.lists(FINITE, min_size=1, max_size=25)
WITH_INFINITE = st.lists(FINITE | st.sampled_from([math.inf, -math.inf, 0.0, -0.0]), min_size=1, max_size=12)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@settings(deadline=None, max_examples=60)
@given(SCORES, SCORES)
@example([0.0], [0.0])
@example([1.0], [0.0])
@example([0.0], [1.0])
@example([2.0] * 5, [2.0] * 3)
def test_everything_is_sklearns(inliers: list[float], outliers: list[float]) -> None:
    positive, scores = [0] * len(inliers) + [1] * len(outliers), inliers + outliers
    false, true, thresholds = metrics.roc_curve(positive, scores, drop_intermediate=False)
    curve = roc_curve(np.array(inliers), np.array(outliers))
    np.testing.assert_allclose(curve.false_positive_rate, false, rtol=0, atol=1e-12)
    np.testing.assert_allclose(curve.true_positive_rate, true, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    area = metrics.roc_auc_score(positive, scores)
    assert area_under_curve(np.array(inliers), np.array(outliers)) == pytest.approx(area, abs=1e-9)
    for rate in (0.0, 0.3, 0.95, 1.0):
        found = false_positive_rate_at(np.array(inliers), np.array(outliers), rate)
        assert found == pytest.approx(min(false[true >= rate]), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(WITH_INFINITE, WITH_INFINITE)
def test_infinite_scores_are_ranked(inliers: list[float], outliers: list[float]) -> None:
    wins = sum((o > i) + 0.5 * (o == i) for i in inliers for o in outliers)
    area = area_under_curve(np.array(inliers), np.array(outliers))
    assert area == wins / (len(inliers) * len(outliers))
    curve = roc_curve(np.array(inliers), np.array(outliers))
    steps = list(zip(*(rate.tolist() for rate in curve), strict=True))
    assert steps[0] == (0, 0, math.inf)
    assert steps[-1][:2] == (1, 1)
    assert [t for _, _, t in steps[1:]] == sorted({*inliers, *outliers}, reverse=True)
    for false, true, threshold in steps[1:]:
        assert false == sum(i >= threshold for i in inliers) / len(inliers)
        assert true == sum(o >= threshold for o in outliers) / len(outliers)
    assert np.trapezoid(curve.true_positive_rate, curve.false_positive_rate) == pytest.approx(area)


def test_a_rate_that_is_met_exactly_counts() -> None:
    """19 of 20 outliers are 95 %; the last one lies below all inliers."""
    outliers = np.array([-1.0, *[5.0] * 19])
    assert false_positive_rate_at(np.array([0.0, 4.0, 6.0, 7.0]), outliers) == 0.5
    assert false_positive_rate_at(np.array([0.0, 4.0, 6.0, 7.0]), outliers[:19]) == 1


def test_area_is_exact_on_many_images(random: np.random.Generator) -> None:
    """Separate halves by construction: a float32 count of the 4e10 pairs would be off."""
    scores = random.permutation(400_000).astype(np.float32)
    odd, even = scores[scores % 2 == 1], scores[scores % 2 == 0]
    assert area_under_curve(even, odd) == (200_000 * 200_001 / 2) / 200_000**2


def test_figures_of_any_memory_layout() -> None:
    inliers, outliers = np.array([[0.0, 1.0], [1.0, 2.0]]).T
    interval = list(auc_interval(inliers, outliers))
    expected = {"auc": 0.875, "fpr95": 0.5, "intervals": {"auc": interval}}
    assert detection_metrics(inliers, outliers) == expected


@settings(deadline=None, max_examples=60)
@given(WITH_INFINITE, WITH_INFINITE, st.floats(0.01, 0.999))
@example([0.0], [1.0], 0.95)
@example([0.0], [0.0], 0.95)
@example([1.0] * 3, [0.0] * 4, 0.95)
def test_an_interval_is_wilsons_with_delongs_variance(
    inliers: list[float], outliers: list[float], level: float
) -> None:
    """From all pairs, as DeLong, DeLong and Clarke-Pearson define it, with one more image at random."""
    wins = np.array([[(o > i) + 0.5 * (o == i) for o in outliers] for i in inliers])
    area, sides = wins.mean(), [np.append(wins.mean(1), 0.5), np.append(wins.mean(0), 0.5)]
    for found, side in zip(placements(np.array(inliers), np.array(outliers)), sides, strict=True):
        np.testing.assert_allclose(found, side[:-1], rtol=0, atol=1e-12)
    variance = sum(np.var(side, ddof=1) / len(side) for side in sides)
    share = (sides[0].mean() + sides[1].mean()) / 2
    number = share * (1 - share) / variance if variance > 1e-20 else min(len(inliers), len(outliers))
    low, high = auc_interval(np.array(inliers), np.array(outliers), level)
    assert 0 <= low <= area + 1e-12 and area - 1e-12 <= high <= 1
    for end in (low, high):  # Wilson: the ends are shares that the one found is just compatible with
        assert (area - end) ** 2 == pytest.approx(
            norm.ppf((1 + level) / 2) ** 2 * end * (1 - end) / number, abs=1e-9
        )


def test_the_variance_is_that_of_hanley_and_mcneil_for_exponential_scores(
    random: np.random.Generator,
) -> None:
    """Their formula is exact there: with rates 1 and 1/4, the area is 4/5."""
    area, n, m = 0.8, 4000, 3000
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = math.sqrt((area * (1 - area) + (m - 1) * (q1 - area**2) + (n - 1) * (q2 - area**2)) / (n * m))
    low, high = auc_interval(random.exponential(size=n), 4 * random.exponential(size=m))
    assert (high - low) / (2 * 1.96) == pytest.approx(spread, rel=0.05)


def normal(n: int, m: int, shift: float, random: np.random.Generator) -> tuple[Array, Array]:
    return random.normal(size=n), random.normal(size=m) + shift


def tied(n: int, m: int, share: float, random: np.random.Generator) -> tuple[Array, Array]:
    """Half of the inliers and a share of the outliers have a score of 1, the others 0."""
    inliers, outliers = random.random(n) < 0.5, random.random(m) < share
    return inliers.astype(np.float64), outliers.astype(np.float64)


def hidden(n: int, m: int, share: float, random: np.random.Generator) -> tuple[Array, Array]:
    """A share of the outliers are like inliers; the others are far away."""
    inliers, outliers = normal(n, m, 0.0, random)
    return inliers, np.where(random.random(m) < share, outliers, outliers + 20)


@pytest.mark.parametrize(
    ("draw", "number", "truth"),
    [
        (normal, 0.0, 0.5),
        (normal, 1.0, norm.cdf(1 / math.sqrt(2))),
        (normal, 3.0, norm.cdf(3 / math.sqrt(2))),
        (tied, 0.9, 0.7),
        (hidden, 0.1, 0.95),
    ],
)
@pytest.mark.parametrize(("n", "m"), [(100, 100), (200, 30)])
def test_intervals_cover_the_true_area(
    draw: Callable[..., tuple[Array, Array]],
    number: float,
    truth: float,
    n: int,
    m: int,
    random: np.random.Generator,
) -> None:
    intervals = [auc_interval(*draw(n, m, number, random)) for _ in range(400)]
    hits = np.mean([low <= truth <= high for low, high in intervals])
    assert (0.92 if m == 100 else 0.9) <= hits
    assert hits <= 0.975 or truth > 0.9  # of few errors, the interval is wider than it has to be


def versions(images: int, random: np.random.Generator) -> tuple[Array, Array]:
    """The scores of images, and of two versions of each that depend on it."""
    own = random.normal(size=images)
    return own, own + 1 + 0.3 * random.normal(size=(2, images))


def test_intervals_of_versions_of_the_same_images_cover_the_true_area(random: np.random.Generator) -> None:
    """A random image against a version of another: the shift is 1, the variance 1 + 1 + 0.09."""
    truth, n = norm.cdf(1 / math.sqrt(2.09)), 100
    rows = np.arange(n)
    hits, widths = [], []
    for _ in range(2000):
        own, others = versions(n, random)
        low, high = placement_interval([paired_placements(own, others, rows)])
        hits.append(low <= truth <= high)
        widths.append((high - low) / np.subtract(*auc_interval(own, others.flatten())[::-1]))
    assert 0.92 <= np.mean(hits) <= 0.98
    assert np.mean(widths) < 0.6  # pairs move together, which leaves less to chance


def test_paired_placements_are_influences(random: np.random.Generator) -> None:
    """Their mean is the area, and an image left out changes it by its own share."""
    own, others = versions(200, random)
    rows = np.flatnonzero(random.random(200) < 0.7)
    found = paired_placements(own[rows], others, rows)
    area = area_under_curve(own[rows], others.flatten())
    assert float(found.mean()) == pytest.approx(area, abs=1e-12)
    for image in (int(rows[0]), next(i for i in range(200) if i not in rows)):
        kept = np.arange(200) != image
        without = area_under_curve(own[rows[rows != image]], others[:, kept].flatten())
        assert area - without == pytest.approx(float(found[image] - area) / 200, abs=2e-4)


@pytest.mark.parametrize("level", [0.0, 1.0, math.nan])
def test_a_level_lies_between_0_and_1(level: float) -> None:
    with pytest.raises(CandidError, match="between 0 and 1"):
        auc_interval(np.array([0.0]), np.array([1.0]), level)


@pytest.mark.parametrize(
    "function", [roc_curve, area_under_curve, auc_interval, false_positive_rate_at, detection_metrics]
)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([]), "at least one image"),
        (np.array([[1.0]]), "(1, 1)"),
        (np.array([0.0, math.nan]), "NaN"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    function: Callable[[Array, Array], object], bad: Array, message: str
) -> None:
    good = np.array([0.0, 1.0])
    with pytest.raises(CandidError) as caught:
        function(bad, good)
    assert message in str(caught.value) and "inliers" in str(caught.value)
    with pytest.raises(CandidError) as caught:
        function(good, bad)
    assert message in str(caught.value) and "outliers" in str(caught.value)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_is_from_0_to_1(rate: float) -> None:
    with pytest.raises(CandidError, match="from 0 to 1"):
        false_positive_rate_at(np.array([0.0]), np.array([1.0]), rate)

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.roc import area_under_curve, detection_metrics, false_positive_rate_at, roc_curve

FINITE = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6)  # whole numbers make ties
SCORES = st.lists(FINITE, min_size=1, max_size=25)
WITH_INFINITE = st.lists(FINITE | st.sampled_from([math.inf, -math.inf, 0.0, -0.0]), min_size=1, max_size=12)


def tensor(scores: list[float]) -> Tensor:
    return torch.tensor(scores, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(SCORES, SCORES)
@example([0.0], [0.0])
@example([1.0], [0.0])
@example([0.0], [1.0])
@example([2.0] * 5, [2.0] * 3)
def test_everything_is_sklearns(inliers: list[float], outliers: list[float]) -> None:
    positive, scores = [0] * len(inliers) + [1] * len(outliers), inliers + outliers
    false, true, thresholds = metrics.roc_curve(positive, scores, drop_intermediate=False)
    curve = roc_curve(tensor(inliers), tensor(outliers))
    np.testing.assert_allclose(curve.false_positive_rate, false, rtol=0, atol=1e-12)
    np.testing.assert_allclose(curve.true_positive_rate, true, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    area = metrics.roc_auc_score(positive, scores)
    assert area_under_curve(tensor(inliers), tensor(outliers)) == pytest.approx(area, abs=1e-9)
    for rate in (0.0, 0.3, 0.95, 1.0):
        found = false_positive_rate_at(tensor(inliers), tensor(outliers), rate)
        assert found == pytest.approx(min(false[true >= rate]), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(WITH_INFINITE, WITH_INFINITE)
def test_infinite_scores_are_ranked(inliers: list[float], outliers: list[float]) -> None:
    wins = sum((o > i) + 0.5 * (o == i) for i in inliers for o in outliers)
    area = area_under_curve(tensor(inliers), tensor(outliers))
    assert area == wins / (len(inliers) * len(outliers))
    curve = roc_curve(tensor(inliers), tensor(outliers))
    steps = list(zip(*(rate.tolist() for rate in curve), strict=True))
    assert steps[0] == (0, 0, math.inf)
    assert steps[-1][:2] == (1, 1)
    assert [t for _, _, t in steps[1:]] == sorted({*inliers, *outliers}, reverse=True)
    for false, true, threshold in steps[1:]:
        assert false == sum(i >= threshold for i in inliers) / len(inliers)
        assert true == sum(o >= threshold for o in outliers) / len(outliers)
    assert torch.trapezoid(curve.true_positive_rate, curve.false_positive_rate).item() == pytest.approx(area)


def test_a_rate_that_is_met_exactly_counts() -> None:
    """19 of 20 outliers are 95 %; the last one lies below all inliers."""
    outliers = torch.tensor([-1.0, *[5.0] * 19])
    assert false_positive_rate_at(torch.tensor([0.0, 4.0, 6.0, 7.0]), outliers) == 0.5
    assert false_positive_rate_at(torch.tensor([0.0, 4.0, 6.0, 7.0]), outliers[:19]) == 1


def test_area_is_exact_on_many_images(generator: torch.Generator) -> None:
    """Separate halves by construction: a float32 count of the 4e10 pairs would be off."""
    scores = torch.randperm(400_000, generator=generator).float()
    odd, even = scores[scores % 2 == 1], scores[scores % 2 == 0]
    assert area_under_curve(even, odd) == (200_000 * 200_001 / 2) / 200_000**2


def test_figures_of_any_memory_layout() -> None:
    inliers, outliers = torch.tensor([[0.0, 1.0], [1.0, 2.0]], dtype=torch.float64).unbind(1)
    assert detection_metrics(inliers, outliers) == {"auc": 0.875, "fpr95": 0.5}


@pytest.mark.parametrize("function", [roc_curve, area_under_curve, false_positive_rate_at, detection_metrics])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([]), "at least one image"),
        (torch.tensor([[1.0]]), "(1, 1)"),
        (torch.tensor([0.0, math.nan]), "NaN"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    function: Callable[[Tensor, Tensor], object], bad: Tensor, message: str
) -> None:
    good = torch.tensor([0.0, 1.0])
    with pytest.raises(CandidError) as caught:
        function(bad, good)
    assert message in str(caught.value) and "inliers" in str(caught.value)
    with pytest.raises(CandidError) as caught:
        function(good, bad)
    assert message in str(caught.value) and "outliers" in str(caught.value)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_is_from_0_to_1(rate: float) -> None:
    with pytest.raises(CandidError, match="from 0 to 1"):
        false_positive_rate_at(torch.tensor([0.0]), torch.tensor([1.0]), rate)

"""Trends by beta, rank correlations with confusions, and how local heatmaps are."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from candid import GenerativeClassifier
from candid.models.flow.means import rescale
from experiments.locality import STATES, locality
from experiments.similarity import confusions
from experiments.similarity import rank_correlation as with_confusions
from experiments.trends import rank_correlation
from tests.helpers import randomise


def test_a_trend_is_the_rank_correlation_with_beta() -> None:
    values = [3.0, 1.0, 2.0, 5.0, 4.0]
    betas = [0, 1, 2, 16, math.inf]
    certain = [(beta, value, None) for beta, value in zip(betas, values, strict=True)]
    expected = spearmanr(range(5), values).statistic
    assert rank_correlation(certain) == pytest.approx((expected,) * 3)
    wide = [(beta, value, (value - 9, value + 9)) for beta, value, _ in certain]
    value, low, high = rank_correlation(wide)
    assert value == pytest.approx(expected) and low < 0 and high > 0.8


def test_closeness_is_compared_with_confusions_in_both_directions() -> None:
    random = np.random.default_rng(0)
    labels = np.arange(600) % 6
    distances = np.abs(labels[:6, None] - labels[:6]).astype(float)
    near = np.clip(labels + random.integers(-2, 3, 600), 0, 5)
    shares = confusions(labels, near, 6)
    for i, j in ((0, 1), (2, 5)):
        mistakes = ((labels == i) & (near == j)).sum() + ((labels == j) & (near == i)).sum()
        assert shares[i, j] == shares[j, i] == mistakes / 200
    found, backwards = (with_confusions(each, labels, near) for each in (distances, -distances))
    assert found["low"] <= found["value"] <= found["high"] and found["value"] > 0.7
    assert backwards["value"] == pytest.approx(-found["value"])


def test_the_refit_makes_heatmaps_less_local() -> None:
    model = randomise(GenerativeClassifier.from_preset("cifar"), strength=0.05).eval()
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    after, before = (locality(model, images)[state] for state in STATES)
    assert after == before
    rescale(model, 2.0)
    after, drawn = (locality(model, images)[state] for state in STATES)
    assert drawn == pytest.approx(before, rel=1e-3)
    assert after.evidence > drawn.evidence and after.ratio > drawn.ratio

"""What measurements of levels are made of: exact bands, paired differences, skipped classes."""

import numpy as np
import pytest
from scipy.stats import betabinom

from candid._support.numbers import Array
from candid.trust.bets import FrequencyBets
from experiments.drift import class_wealth, log_wealth, sequential
from experiments.levels import band
from experiments.photo_levels import Judged, compared


def test_the_band_of_one_set_is_a_beta_binomial_quantile_and_that_of_many_is_narrower() -> None:
    assert band([(200, 99, 0.05)]) == pytest.approx(betabinom.ppf(0.95, 200, 5, 95) / 200)
    sums = betabinom.rvs(200, 5, 95, size=(20_000, 10), random_state=0).sum(1)
    assert band([(200, 99, 0.05)] * 10) == pytest.approx(np.quantile(sums, 0.95) / 2000, abs=0.001)
    assert band([(200, 18, 0.05)]) == 0  # too few to call anything novel


def test_a_plain_threshold_is_compared_among_images_that_are_not_novel() -> None:
    def flags(*rows: int) -> Array:
        return np.isin(np.arange(6), rows)

    confidence = np.array([0.99, 0.9, 0.8, 0.7, 0.6, 0.5])
    unknown = flags(0), flags(1), confidence
    found = compared([Judged(flags(1, 3), flags(0), confidence, flags(0, 1, 3), unknown)])
    assert (found.accepted, found.novel, found.wrong) == pytest.approx((1 / 3, 1 / 6, 0))
    assert (found.plain_wrong, found.alone_wrong) == (0.5, 0)  # images 1 and 2; images 0 and 1
    assert found.difference[0] == 0.5
    # of the unknown ones 0, 1 and 2 are above 0.8, and 1 is novel; 0 and 1 are above 0.9
    assert (found.unknown, found.plain_unknown, found.alone_unknown) == pytest.approx((1 / 6, 1 / 3, 1 / 3))


def test_a_watch_of_classes_that_skips_is_one_of_the_other_images() -> None:
    random = np.random.default_rng(1)
    classes, u = random.integers(0, 4, (3, 90)), random.random((3, 60))
    bets = FrequencyBets(np.ones(4))
    np.testing.assert_allclose(
        class_wealth(classes, 30, bets, u), log_wealth(bets, sequential(classes, 30, u))
    )
    with_skipped = np.insert(classes, 45, 4, axis=1)
    skipped = class_wealth(with_skipped, 30, bets, np.insert(u, 15, 0.5, axis=1))
    np.testing.assert_allclose(
        np.delete(skipped, 15, 1), log_wealth(bets, sequential(classes, 30, u)), atol=1e-12
    )
    np.testing.assert_allclose(skipped[:, 15], skipped[:, 14])

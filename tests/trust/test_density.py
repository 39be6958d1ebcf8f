import math
import tracemalloc

import numpy as np
import pytest
from scipy.stats import gaussian_kde

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.randomness import draws as keyed
from candid.trust import conformal
from candid.trust.conformal import (
    DensityDetector,
    DensityOfStates,
    KernelDensity,
    TypicalSet,
    p_values,
)
from tests.trust.validity import assert_valid_p_values

Joint = type[DensityDetector]
detectors = pytest.mark.parametrize("detector", [TypicalSet, DensityOfStates])


def correlated(n: int, d: int, generator: np.random.Generator) -> Array:
    mixing = np.eye(d) + np.tril(np.ones((d, d)), -1)
    rows = generator.normal(size=(n, d)) @ mixing
    return rows * np.logspace(-3, 3, d) - 1000


def first_half(rows: Array) -> Array:
    return rows[keyed(0).permutation(len(rows))[: len(rows) // 2]]


@pytest.mark.parametrize("d", [1, 2, 5])
def test_densities_are_scipys(d: int, generator: np.random.Generator) -> None:
    held_out, rows = correlated(300, d, generator), correlated(50, d, generator)
    fit_to = first_half(held_out)
    joint = np.asarray(-gaussian_kde(fit_to.T).logpdf(rows.T))
    columns = np.asarray(sum(-gaussian_kde(fit_to[:, i]).logpdf(rows[:, i]) for i in range(d)))
    np.testing.assert_allclose(DensityOfStates().fit(held_out).score(rows), joint, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(TypicalSet().fit(held_out).score(rows), columns, rtol=1e-9, atol=1e-9)


@detectors
def test_p_values_are_ranks_among_the_other_half(detector: Joint, generator: np.random.Generator) -> None:
    held_out, rows = correlated(41, 2, generator), correlated(30, 2, generator)
    fitted = detector().fit(held_out)
    ranked = held_out[keyed(0).permutation(41)[20:]]
    assert np.array_equal(fitted.p_value(rows), p_values(fitted.score(rows), fitted.score(ranked)))


def draws(kind: str, repeats: int, n: int, generator: np.random.Generator) -> Array:
    rows = generator.normal(size=(repeats, n, 2))
    match kind:
        case "rounded":
            return rows.round()
        case "line":
            return rows[..., :1] * np.array([1.0, -3.0]) + 0.1
        case "half constant":
            return rows * np.array([1.0, 0.0]) + 0.1
    return rows


@detectors
@pytest.mark.parametrize("kind", ["plain", "rounded", "line", "half constant"])
@pytest.mark.parametrize("n", [2, 21])
def test_p_values_are_valid(detector: Joint, kind: str, n: int, generator: np.random.Generator) -> None:
    rows = draws(kind, 250, n + 1, generator)
    p = np.concatenate([detector().fit(row[1:]).p_value(row[:1]) for row in rows])
    ranks = n - n // 2 + 1
    assert_valid_p_values(p, [k / ranks for k in range(1, ranks + 1)], uniform=kind == "plain")


def test_ranks_among_the_rows_of_the_density_would_not_be_valid(generator: np.random.Generator) -> None:
    p = []
    for rows in generator.normal(size=(250, 21, 2)):
        estimate = KernelDensity(rows[1:])
        p.append(p_values(estimate.negative_log(rows[:1]), estimate.negative_log(rows[1:])))
    with pytest.raises(AssertionError):
        assert_valid_p_values(np.concatenate(p), [k / 20 for k in range(1, 20)])


@detectors
@pytest.mark.parametrize("n", [2, 5, 100])
def test_equal_rows_are_typical_and_others_are_not(detector: Joint, n: int) -> None:
    row = np.array([[0.1, -1e5, 3.0]])
    fitted = detector().fit(row.repeat(n, 0))
    assert fitted.p_value(row.repeat(7, 0)).tolist() == [1] * 7
    assert fitted.p_value(row + np.array([0.0, 0.0, 0.1])).item() == 1 / (n - n // 2 + 1)


@detectors
def test_a_held_out_image_seen_again_has_the_same_rank_alone_and_in_company(
    detector: Joint, generator: np.random.Generator
) -> None:
    """Sums and products of matrices round a row differently in different company: ties survive that."""
    held_out = correlated(200, 8, generator)
    held_out[:, 7] = held_out[:, 0] + held_out[:, 6]
    fitted = detector().fit(held_out)
    together = fitted.p_value(held_out)
    assert np.array_equal(np.concatenate([fitted.p_value(row[None]) for row in held_out]), together)
    ranked = keyed(0).permutation(200)[100:]
    assert sorted(together[ranked].tolist()) == [k / 101 for k in range(2, 102)]


def test_an_image_may_be_typical_in_each_statistic_and_not_in_both(generator: np.random.Generator) -> None:
    first, noise = generator.normal(size=(2, 2000))
    held_out = np.stack((first, first + 0.1 * noise), 1)
    outlier = np.array([[1.0, -1.0]])
    assert TypicalSet().fit(held_out).p_value(outlier) > 0.1
    assert DensityOfStates().fit(held_out).p_value(outlier) == 1 / 1001


def test_an_image_off_a_line_is_far_out(generator: np.random.Generator) -> None:
    first = generator.normal(size=200)
    fitted = DensityOfStates().fit(np.stack((first, 2 * first, np.full((200,), 7.0)), 1))
    p = fitted.p_value(np.array([[0.5, 1.0, 7.0], [0.5, 1.1, 7.0], [0.5, 1.0, 7.1]]))
    assert p[0] > 0.1 and p[1] == p[2] == 1 / 101


@detectors
def test_scores_far_away_rise_with_the_square_of_the_distance(
    detector: Joint, generator: np.random.Generator
) -> None:
    fitted = detector().fit(correlated(100, 3, generator))
    direction = np.array([[1.0, -1.0, 2.0]])
    far = fitted.score(
        np.concatenate([direction * distance for distance in (1e8, 2e8, 1e30)]).astype(np.float64)
    )
    assert far[1] / far[0] == pytest.approx(4, rel=1e-3)
    assert far[2] / far[0] == pytest.approx(1e44, rel=1e-3)
    limits = np.array([[math.inf, -math.inf, 0], [1e308, -1e308, 1e308]], dtype=np.float64)
    assert np.isfinite(fitted.score(limits)).all()
    assert fitted.p_value(limits).tolist() == [1 / 51] * 2


@detectors
def test_chunks_change_nothing(
    detector: Joint, generator: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted, rows = detector().fit(correlated(40, 3, generator)), correlated(30, 3, generator)
    whole = fitted.score(rows)
    for chunk in (1, 7 * 20):
        monkeypatch.setattr(conformal, "CHUNK", chunk)
        np.testing.assert_allclose(fitted.score(rows), whole, rtol=1e-12, atol=0)
    assert fitted.score(rows[:0]).shape == fitted.p_value(rows[:0]).shape == (0,)


@detectors
def test_memory_is_bounded(detector: Joint, generator: np.random.Generator) -> None:
    fitted, rows = detector().fit(correlated(4000, 2, generator)), correlated(4000, 2, generator)
    tracemalloc.start()
    fitted.score(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 8 * conformal.CHUNK < 8 * 4000 * 2000


@detectors
def test_the_same_held_out_images_give_the_same_detector(
    detector: Joint, generator: np.random.Generator
) -> None:
    held_out, rows = correlated(40, 2, generator), correlated(30, 2, generator)
    assert np.array_equal(detector().fit(held_out).score(rows), detector().fit(held_out).score(rows))


@detectors
def test_bad_input_is_refused(detector: Joint) -> None:
    fitted = detector().fit(np.tile(np.eye(2), (5, 1)))
    with pytest.raises(CandidError, match="call fit first"):
        detector().p_value(np.ones((2, 2)))
    with pytest.raises(CandidError, match="fitted to 2 statistics per image, not to 3"):
        fitted.score(np.ones((2, 3)))
    for bad, message in [
        (np.ones((1, 2)), "at least 2 held-out images, not 1"),
        (np.ones((0, 2)), "at least 2 held-out images, not 0"),
        (np.ones((9, 0)), "shape"),
        (np.ones(9), r"shape \(N, d\), not \(9,\)"),
        (np.array([[1.0, math.nan], [math.nan, math.nan], [0.0, 0.0]]), "2 of 3 images is NaN"),
        (np.array([[1.0, math.inf], [0.0, 0.0]]), "infinite"),
    ]:
        with pytest.raises(CandidError, match=message):
            detector().fit(bad)

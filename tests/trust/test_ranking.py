"""Combined p-values are their definition, exact at every level, whatever the scores and their dependence."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.trust import ranking
from candid.trust.ranking import Combined, CombinedRanks, combination
from candid.trust.scores import SCORES, Columns
from tests.trust.validity import assert_valid_p_values

ROWS = st.integers(1, 3).flatmap(  # small whole numbers make ties
    lambda parts: st.tuples(
        st.lists(st.lists(st.integers(0, 5), min_size=parts, max_size=parts), min_size=1, max_size=12),
        st.lists(st.lists(st.integers(-1, 6), min_size=parts, max_size=parts), min_size=1, max_size=4),
    )
)


def term(p: float) -> float:
    return math.tan(math.pi * (0.5 - min(p, 0.9)))


def plain_p_value(held_out: list[list[int]], new: list[int]) -> float:
    """By the definition: all images, the new one included, are ranked in every score, then by the sum.

    Where the new image has the score of another, it does not make that one less extreme: p can only grow.
    """
    n, parts = len(held_out) + 1, range(len(new))

    def p(row: list[int], j: int) -> float:
        return (sum(other[j] >= row[j] for other in held_out) + (row is new or new[j] > row[j])) / n

    sums = [sum(term(p(row, j)) for j in parts) for row in [*held_out, new]]
    return sum(each >= sums[-1] - 1e-9 for each in sums) / n


def double(rows: list[list[int]]) -> Array:
    return np.array(rows, dtype=np.float64)


@settings(deadline=None, max_examples=150)
@given(ROWS)
def test_p_values_are_the_definition(rows: tuple[list[list[int]], list[list[int]]]) -> None:
    held_out, new = rows
    found = CombinedRanks(double(held_out)).p_values(double(new))
    assert found.tolist() == [plain_p_value(held_out, row) for row in new]
    assert all(
        (p * (len(held_out) + 1)) == pytest.approx(round(p * (len(held_out) + 1))) for p in found.tolist()
    )
    assert found.min() >= 1 / (len(held_out) + 1) and found.max() <= 1


@settings(deadline=None, max_examples=60)
@given(ROWS)
def test_order_does_not_matter(rows: tuple[list[list[int]], list[list[int]]]) -> None:
    held_out, new = double(rows[0]), double(rows[1])
    p = CombinedRanks(held_out).p_values(new)
    order = np.random.default_rng(0).permutation(len(held_out))
    assert np.array_equal(CombinedRanks(held_out[order]).p_values(new[::-1]), p[::-1])
    for parts in permutations(range(held_out.shape[1])):
        assert np.array_equal(CombinedRanks(held_out[:, parts]).p_values(new[:, parts]), p)


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(0, 2), st.integers(1, 4))
def test_a_higher_score_never_has_a_higher_p_value(
    rows: tuple[list[list[int]], list[list[int]]], part: int, more: int
) -> None:
    held_out, new = double(rows[0]), double(rows[1])
    higher = new.copy()
    higher[:, part % new.shape[1]] += more
    ranks = CombinedRanks(held_out)
    assert (ranks.p_values(higher) <= ranks.p_values(new)).all()
    assert (ranks.statistic(higher) >= ranks.statistic(new)).all()


def correlated(runs: int, n: int, shared: float, seed: int) -> Array:
    """Scores of n images in each run, (runs, n, 3), one with ties, that have something in common."""
    random = np.random.default_rng(seed)
    common = shared**0.5 * random.normal(size=(runs, n, 1))
    scores = common + (1 - shared) ** 0.5 * random.normal(size=(runs, n, 3))
    scores[..., 1] = (2 * scores[..., 1]).round()
    return scores


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_p_values_are_valid_with_ties_and_dependence(shared: float) -> None:
    runs = correlated(4000, 100, shared, 0)
    p = np.concatenate([CombinedRanks(run[1:]).p_values(run[:1]) for run in runs])
    assert_valid_p_values(p, (0.01, 0.05, 0.1, 0.5))


def test_false_alarms_of_a_set_stay_in_the_exact_band() -> None:
    """Over 200 splits, as one count of false alarms among the new images of a split is distributed."""
    images, held_out = 600, 399
    for level in (0.01, 0.05, 0.1):
        k = int(level * (held_out + 1))
        low, high = betabinom(images - held_out, k, held_out + 1 - k).interval(0.99)
        counts = []
        for run in correlated(200, images, 0.5, 1):
            p = CombinedRanks(run[:held_out]).p_values(run[held_out:])
            counts.append(int((p <= level).sum()))
        assert np.mean(counts) <= level * (images - held_out) * 1.1
        assert np.mean([low <= count <= high for count in counts]) > 0.95


def test_the_rule_is_a_bounded_cauchy_sum() -> None:
    p = np.array([[0.001, 0.5, 0.9], [0.001, 0.5, 1.0]], dtype=np.float64)
    expected = math.tan(math.pi * 0.499) + math.tan(-math.pi * 0.4)
    assert combination(p).tolist() == pytest.approx([expected, expected])
    assert combination(np.ones((1, 1))).item() == pytest.approx(-3.0777, abs=1e-4)


def test_one_part_is_the_usual_p_value_up_to_its_upper_end() -> None:
    held_out, new = np.random.default_rng(0).normal(size=(2, 50, 1))
    p = CombinedRanks(held_out).p_values(new)
    usual = (1 + (new <= held_out.T).sum(1)) / 51
    assert np.array_equal(p[usual <= 0.9], usual[usual <= 0.9])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out, new = correlated(2, 40, 0.3, 2)
    ranks = CombinedRanks(held_out)
    whole = ranks.p_values(new)
    monkeypatch.setattr(ranking, "CHUNK", 100)
    assert np.array_equal(ranks.p_values(new), whole)
    assert np.array_equal(CombinedRanks(ranks.held_out).p_values(new), whole)
    assert len(ranks.p_values(new[:0])) == 0


def test_infinite_scores_are_the_farthest_out() -> None:
    ranks = CombinedRanks(correlated(1, 99, 0.3, 3)[0])
    assert ranks.p_values(np.array([[math.inf] * 3, [-math.inf] * 3])).tolist() == [0.01, 1.0]


def test_the_detector_is_the_ranks() -> None:
    held_out, new = correlated(2, 60, 0.3, 4)
    detector, ranks = Combined().fit(held_out), CombinedRanks(held_out)
    assert np.array_equal(detector.p_value(new), ranks.p_values(new))
    assert np.array_equal(detector.score(new), ranks.statistic(new))
    assert (detector.n_reference, detector.smallest_p_value) == (60, 1 / 61)
    assert np.array_equal(Combined().restored(detector.state()).p_value(new), ranks.p_values(new))


def test_wrong_scores_are_refused_in_one_sentence() -> None:
    ranks = CombinedRanks(np.zeros((9, 2)))
    with pytest.raises(CandidError, match="of 2 scores per image, not of 3"):
        ranks.p_values(np.zeros((1, 3)))
    with pytest.raises(CandidError, match="NaN"):
        ranks.p_values(np.full((1, 2), math.nan))
    with pytest.raises(CandidError, match="infinite"):
        CombinedRanks(np.full((9, 2), math.inf))
    with pytest.raises(CandidError, match="call fit first"):
        Combined().p_value(np.zeros((1, 2)))


def test_default_parts_are_known_scores_of_the_columns_there_are() -> None:
    score = SCORES["combined"]
    for columns in ({"logits": np.zeros((1, 2))}, {"logits": np.zeros((1, 2)), "features": np.zeros((1, 3))}):
        parts = score.parts(columns)
        assert len(parts) > 1 and all(SCORES[part].is_available(Columns(columns)) for part in parts)
    assert not score.is_available({"features": np.zeros((1, 3))})

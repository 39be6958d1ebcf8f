"""Combined p-values are their definition, exact at every level, whatever the scores and their dependence."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.trust import combined
from candid.trust.combined import Combined, CombinedRanks, combination, parts_for
from candid.trust.feature_scores import COLUMN_SCORES
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
    """By the definition: all images, the new one included, are ranked in every score, then by the sum."""
    bag = [*held_out, new]
    n = len(bag)
    sums = [sum(term(sum(other[j] >= row[j] for other in bag) / n) for j in range(len(new))) for row in bag]
    return sum(each >= sums[-1] - 1e-9 for each in sums) / n


def double(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@settings(deadline=None, max_examples=150)
@given(ROWS)
def test_p_values_are_the_definition(rows: tuple[list[list[int]], list[list[int]]]) -> None:
    held_out, new = rows
    found = CombinedRanks.fit(double(held_out)).p_values(double(new))
    assert found.tolist() == [plain_p_value(held_out, row) for row in new]
    assert all(
        (p * (len(held_out) + 1)) == pytest.approx(round(p * (len(held_out) + 1))) for p in found.tolist()
    )
    assert found.min() >= 1 / (len(held_out) + 1) and found.max() <= 1


@settings(deadline=None, max_examples=60)
@given(ROWS)
def test_order_does_not_matter(rows: tuple[list[list[int]], list[list[int]]]) -> None:
    held_out, new = double(rows[0]), double(rows[1])
    p = CombinedRanks.fit(held_out).p_values(new)
    order = torch.randperm(len(held_out), generator=generator(0))
    assert torch.equal(CombinedRanks.fit(held_out[order]).p_values(new.flip(0)), p.flip(0))
    for parts in permutations(range(held_out.shape[1])):
        assert torch.equal(CombinedRanks.fit(held_out[:, parts]).p_values(new[:, parts]), p)


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(0, 2), st.integers(1, 4))
def test_a_higher_score_never_has_a_higher_p_value(
    rows: tuple[list[list[int]], list[list[int]]], part: int, more: int
) -> None:
    held_out, new = double(rows[0]), double(rows[1])
    higher = new.clone()
    higher[:, part % new.shape[1]] += more
    ranks = CombinedRanks.fit(held_out)
    assert (ranks.p_values(higher) <= ranks.p_values(new)).all()
    assert (ranks.statistic(higher) >= ranks.statistic(new)).all()


def correlated(runs: int, n: int, shared: float, seed: int) -> Tensor:
    """Scores of n images in each run, (runs, n, 3), one with ties, that have something in common."""
    random = generator(seed)
    common = shared**0.5 * torch.randn(runs, n, 1, generator=random)
    scores = common + (1 - shared) ** 0.5 * torch.randn(runs, n, 3, generator=random)
    scores[..., 1] = (2 * scores[..., 1]).round()
    return scores


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_p_values_are_valid_with_ties_and_dependence(shared: float) -> None:
    runs = correlated(4000, 100, shared, 0)
    p = torch.cat([CombinedRanks.fit(run[1:]).p_values(run[:1]) for run in runs])
    assert_valid_p_values(p, (0.01, 0.05, 0.1, 0.5))


def test_false_alarms_of_a_set_stay_in_the_exact_band() -> None:
    """Over 200 splits, as one count of false alarms among the new images of a split is distributed."""
    images, held_out = 600, 399
    for level in (0.01, 0.05, 0.1):
        k = int(level * (held_out + 1))
        low, high = betabinom(images - held_out, k, held_out + 1 - k).interval(0.99)
        counts = []
        for run in correlated(200, images, 0.5, 1):
            p = CombinedRanks.fit(run[:held_out]).p_values(run[held_out:])
            counts.append(int((p <= level).sum()))
        assert np.mean(counts) <= level * (images - held_out) * 1.1
        assert np.mean([low <= count <= high for count in counts]) > 0.95


def test_the_rule_is_a_bounded_cauchy_sum() -> None:
    p = torch.tensor([[0.001, 0.5, 0.9], [0.001, 0.5, 1.0]], dtype=torch.float64)
    expected = math.tan(math.pi * 0.499) + math.tan(-math.pi * 0.4)
    assert combination(p).tolist() == pytest.approx([expected, expected])
    assert combination(torch.ones(1, 1)).item() == pytest.approx(-3.0777, abs=1e-4)


def test_one_part_is_the_usual_p_value_up_to_its_upper_end() -> None:
    held_out, new = torch.randn(2, 50, 1, generator=generator(0))
    p = CombinedRanks.fit(held_out).p_values(new)
    usual = (1 + (new <= held_out.T).sum(1)).double() / 51
    assert torch.equal(p[usual <= 0.9], usual[usual <= 0.9])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out, new = correlated(2, 40, 0.3, 2)
    ranks = CombinedRanks.fit(held_out)
    whole = ranks.p_values(new)
    monkeypatch.setattr(combined, "CHUNK", 100)
    assert torch.equal(ranks.p_values(new), whole)
    assert torch.equal(CombinedRanks.from_state(ranks.state()).p_values(new), whole)
    assert len(ranks.p_values(new[:0])) == 0


def test_infinite_scores_are_the_farthest_out() -> None:
    ranks = CombinedRanks.fit(correlated(1, 99, 0.3, 3)[0])
    assert ranks.p_values(torch.tensor([[math.inf] * 3, [-math.inf] * 3])).tolist() == [0.01, 1.0]


def test_the_detector_is_the_ranks() -> None:
    held_out, new = correlated(2, 60, 0.3, 4)
    detector, ranks = Combined().fit(held_out), CombinedRanks.fit(held_out)
    assert torch.equal(detector.p_value(new), ranks.p_values(new))
    assert torch.equal(detector.score(new), ranks.statistic(new))
    assert (detector.n_reference, detector.smallest_p_value) == (60, 1 / 61)
    assert torch.equal(Combined().from_tensors(detector.to_tensors()).p_value(new), ranks.p_values(new))


def test_wrong_scores_are_refused_in_one_sentence() -> None:
    ranks = CombinedRanks.fit(torch.zeros(9, 2))
    with pytest.raises(CandidError, match="of 2 scores .* not of 3"):
        ranks.p_values(torch.zeros(1, 3))
    with pytest.raises(CandidError, match="NaN"):
        ranks.p_values(torch.full((1, 2), math.nan))
    with pytest.raises(CandidError, match="infinite"):
        CombinedRanks.fit(torch.full((9, 2), math.inf))
    with pytest.raises(CandidError, match="call fit first"):
        Combined().p_value(torch.zeros(1, 2))


def test_default_parts_are_known_scores_of_the_columns_there_are() -> None:
    for columns in (("logits",), ("logits", "features")):
        parts = parts_for(columns)
        assert all(set(COLUMN_SCORES[part].columns) <= set(columns) for part in parts)
    with pytest.raises(CandidError, match="needs the column 'logits'"):
        parts_for(("features",))

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from candid.evaluation import p_values, typicality_p_values

SCORES = st.integers(-3, 3).map(float) | st.floats(-1e6, 1e6, width=32)  # whole numbers make ties


@given(st.lists(SCORES, min_size=1, max_size=8), st.lists(SCORES, max_size=20))
def test_p_values_are_the_definitions(scores: list[float], calibration: list[float]) -> None:
    truth = [(1 + sum(c >= s for c in calibration)) / (len(calibration) + 1) for s in scores]
    assert p_values(torch.tensor(scores), torch.tensor(calibration)).tolist() == truth


@pytest.mark.parametrize("function", [p_values, typicality_p_values])
@given(scores=st.lists(SCORES, min_size=1, max_size=20))
def test_p_values_are_valid_whichever_score_is_the_new_one(
    function: Callable[[Tensor, Tensor], Tensor], scores: list[float]
) -> None:
    """Exchangeable scores: each is equally likely to be the new one, so this share is P(p <= t)."""
    everything = torch.tensor(scores)
    others = [everything[torch.arange(len(scores)) != i] for i in range(len(scores))]
    p = torch.stack([function(s, rest) for s, rest in zip(everything, others, strict=True)])
    for t in p.tolist():
        assert int((p <= t).sum()) <= round(t * len(scores))


def draw(ties: bool, repeats: int, images: int, generator: torch.Generator) -> Tensor:
    scores = torch.randn(repeats, images, generator=generator)
    return scores.round() if ties else scores


@pytest.mark.parametrize("ties", [False, True])
def test_p_values_are_valid_on_draws(ties: bool, generator: torch.Generator) -> None:
    repeats, n = 4000, 19
    scores = draw(ties, repeats, n + 1, generator)
    p = torch.stack([p_values(row[0], row[1:]) for row in scores])
    for k in range(1, n + 1):
        t = k / (n + 1)
        share, noise = float((p <= t + 1e-9).double().mean()), 4 * (t * (1 - t) / repeats) ** 0.5
        assert share <= t + noise
        if not ties:
            assert share >= t - noise  # without ties the bound is met


def test_an_outlier_gets_the_smallest_p_value_and_any_shape_is_kept() -> None:
    p = p_values(torch.tensor([[9.0, -9.0], [0.0, float("inf")]]), torch.tensor([2.0, -1.0, 1.0]))
    assert p.tolist() == [[0.25, 1.0], [0.75, 0.25]]

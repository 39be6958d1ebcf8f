import math

import pytest
import torch
from scipy.stats import gaussian_kde
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator as keyed
from candid.trust import detectors as detectors_module
from candid.trust.detectors import (
    DensityDetector,
    DensityOfStates,
    KernelDensity,
    TypicalSet,
    p_values,
)
from candid.trust.per_class import PerClass
from tests.helpers import LargestTensor
from tests.trust.validity import assert_valid_p_values

Joint = type[DensityDetector]
detectors = pytest.mark.parametrize("detector", [TypicalSet, DensityOfStates])


def correlated(n: int, d: int, generator: torch.Generator) -> Tensor:
    mixing = torch.eye(d).double() + torch.ones(d, d).double().tril(-1)
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64) @ mixing
    return rows * torch.logspace(-3, 3, d) - 1000


def first_half(rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), generator=keyed(0))[: len(rows) // 2]]


@pytest.mark.parametrize("d", [1, 2, 5])
def test_densities_are_scipys(d: int, generator: torch.Generator) -> None:
    held_out, rows = correlated(300, d, generator), correlated(50, d, generator)
    fit_to = first_half(held_out)
    joint = torch.from_numpy(-gaussian_kde(fit_to.T).logpdf(rows.T))
    columns = torch.from_numpy(sum(-gaussian_kde(fit_to[:, i]).logpdf(rows[:, i]) for i in range(d)))
    torch.testing.assert_close(DensityOfStates().fit(held_out).score(rows), joint, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(TypicalSet().fit(held_out).score(rows), columns, rtol=1e-9, atol=1e-9)


@detectors
def test_p_values_are_ranks_among_the_other_half(detector: Joint, generator: torch.Generator) -> None:
    held_out, rows = correlated(41, 2, generator), correlated(30, 2, generator)
    fitted = detector().fit(held_out)
    ranked = held_out[torch.randperm(41, generator=keyed(0))[20:]]
    assert torch.equal(fitted.p_value(rows), p_values(fitted.score(rows), fitted.score(ranked)))


def draws(kind: str, repeats: int, n: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(repeats, n, 2, generator=generator)
    match kind:
        case "rounded":
            return rows.round()
        case "line":
            return rows[..., :1].expand(-1, -1, 2) * torch.tensor([1.0, -3.0]) + 0.1
        case "half constant":
            return rows * torch.tensor([1.0, 0.0]) + 0.1
    return rows


@detectors
@pytest.mark.parametrize("kind", ["plain", "rounded", "line", "half constant"])
@pytest.mark.parametrize("n", [2, 21])
def test_p_values_are_valid(detector: Joint, kind: str, n: int, generator: torch.Generator) -> None:
    rows = draws(kind, 250, n + 1, generator)
    p = torch.cat([detector().fit(row[1:]).p_value(row[:1]) for row in rows])
    ranks = n - n // 2 + 1
    assert_valid_p_values(p, [k / ranks for k in range(1, ranks + 1)], uniform=kind == "plain")


def test_ranks_among_the_rows_of_the_density_would_not_be_valid(generator: torch.Generator) -> None:
    p = []
    for rows in torch.randn(250, 21, 2, generator=generator, dtype=torch.float64):
        estimate = KernelDensity(rows[1:])
        p.append(p_values(estimate.negative_log(rows[:1]), estimate.negative_log(rows[1:])))
    with pytest.raises(AssertionError):
        assert_valid_p_values(torch.cat(p), [k / 20 for k in range(1, 20)])


@detectors
@pytest.mark.parametrize("n", [2, 5, 100])
def test_equal_rows_are_typical_and_others_are_not(detector: Joint, n: int) -> None:
    row = torch.tensor([[0.1, -1e5, 3.0]])
    fitted = detector().fit(row.expand(n, 3))
    assert fitted.p_value(row.expand(7, 3)).tolist() == [1] * 7
    assert fitted.p_value(row + torch.tensor([0.0, 0.0, 0.1])).item() == 1 / (n - n // 2 + 1)


@detectors
def test_a_held_out_image_seen_again_has_the_same_rank_alone_and_in_company(
    detector: Joint, generator: torch.Generator
) -> None:
    """Sums and products of matrices round a row differently in different company: ties survive that."""
    held_out = correlated(200, 8, generator)
    held_out[:, 7] = held_out[:, 0] + held_out[:, 6]
    fitted = detector().fit(held_out)
    together = fitted.p_value(held_out)
    assert torch.equal(torch.cat([fitted.p_value(row[None]) for row in held_out]), together)
    ranked = torch.randperm(200, generator=keyed(0))[100:]
    assert sorted(together[ranked].tolist()) == [k / 101 for k in range(2, 102)]


def test_an_image_may_be_typical_in_each_statistic_and_not_in_both(generator: torch.Generator) -> None:
    first, noise = torch.randn(2, 2000, generator=generator)
    held_out = torch.stack((first, first + 0.1 * noise), 1)
    outlier = torch.tensor([[1.0, -1.0]])
    assert TypicalSet().fit(held_out).p_value(outlier) > 0.1
    assert DensityOfStates().fit(held_out).p_value(outlier) == 1 / 1001


def test_an_image_off_a_line_is_far_out(generator: torch.Generator) -> None:
    first = torch.randn(200, generator=generator)
    fitted = DensityOfStates().fit(torch.stack((first, 2 * first, torch.full((200,), 7.0)), 1))
    p = fitted.p_value(torch.tensor([[0.5, 1.0, 7.0], [0.5, 1.1, 7.0], [0.5, 1.0, 7.1]]))
    assert p[0] > 0.1 and p[1] == p[2] == 1 / 101


@detectors
def test_scores_far_away_rise_with_the_square_of_the_distance(
    detector: Joint, generator: torch.Generator
) -> None:
    fitted = detector().fit(correlated(100, 3, generator))
    direction = torch.tensor([[1.0, -1.0, 2.0]])
    far = fitted.score(torch.cat([direction * distance for distance in (1e8, 2e8, 1e30)]).double())
    assert far[1] / far[0] == pytest.approx(4, rel=1e-3)
    assert far[2] / far[0] == pytest.approx(1e44, rel=1e-3)
    limits = torch.tensor([[math.inf, -math.inf, 0], [1e308, -1e308, 1e308]], dtype=torch.float64)
    assert fitted.score(limits).isfinite().all()
    assert fitted.p_value(limits).tolist() == [1 / 51] * 2


@detectors
def test_chunks_change_nothing(
    detector: Joint, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted, rows = detector().fit(correlated(40, 3, generator)), correlated(30, 3, generator)
    whole = fitted.score(rows)
    for chunk in (1, 7 * 20):
        monkeypatch.setattr(detectors_module, "CHUNK", chunk)
        torch.testing.assert_close(fitted.score(rows), whole, rtol=1e-12, atol=0)
    assert fitted.score(rows[:0]).shape == fitted.p_value(rows[:0]).shape == (0,)


@detectors
def test_memory_is_bounded(detector: Joint, generator: torch.Generator) -> None:
    fitted, rows = detector().fit(correlated(2000, 2, generator)), correlated(1000, 2, generator)
    with LargestTensor() as largest:
        fitted.score(rows)
    assert largest.numel <= detectors_module.CHUNK < 1000 * 1000


@detectors
def test_the_same_held_out_images_give_the_same_detector(detector: Joint, generator: torch.Generator) -> None:
    held_out, rows = correlated(40, 2, generator), correlated(30, 2, generator)
    assert torch.equal(detector().fit(held_out).score(rows), detector().fit(held_out).score(rows))


@detectors
def test_there_can_be_one_for_each_class(detector: Joint, generator: torch.Generator) -> None:
    classes = torch.arange(200) % 2
    rows = torch.randn(200, 2, generator=generator) + 20 * classes[:, None]
    fitted = PerClass(detector).fit(rows, classes)
    p = fitted.p_value(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    assert p[0] > 0.1 and p[1] == 1 / 51


@detectors
def test_bad_input_is_refused(detector: Joint) -> None:
    fitted = detector().fit(torch.eye(2).repeat(5, 1))
    with pytest.raises(CandidError, match="call fit first"):
        detector().p_value(torch.ones(2, 2))
    with pytest.raises(CandidError, match="fitted to 2 statistics an image, not to 3"):
        fitted.score(torch.ones(2, 3))
    for bad, message in [
        (torch.ones(1, 2), "at least 2 held-out images, not 1"),
        (torch.ones(0, 2), "at least 2 held-out images, not 0"),
        (torch.ones(9, 0), "shape"),
        (torch.ones(9), r"shape \(N, d\), not \(9,\)"),
        (torch.tensor([[1.0, math.nan], [math.nan, math.nan], [0.0, 0.0]]), "2 of 3 images is NaN"),
        (torch.tensor([[1.0, math.inf], [0.0, 0.0]]), "infinite"),
    ]:
        with pytest.raises(CandidError, match=message):
            detector().fit(bad)

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from candid._support.errors import CandidError
from candid.trust.detectors import TwoTailed
from candid.trust.verdict import Verdict, class_sets, ratios, verdicts

LEVELS = st.floats(0.05, 0.95) | st.sampled_from([0.05, 0.1, 0.25, 0.5])
TWELFTHS = st.integers(0, 12).map(lambda k: k / 12)  # make ties
POSTERIORS = st.integers(1, 4).flatmap(
    lambda m: st.lists(st.lists(TWELFTHS, min_size=m, max_size=m), min_size=1, max_size=6)
)
REPEATS = 800
HELD_OUT = st.lists(TWELFTHS | st.floats(0, 1), min_size=19, max_size=40)


def double(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None)
@given(POSTERIORS, HELD_OUT, LEVELS)
def test_class_sets_are_the_plain_loops(
    posterior: list[list[float]], held_out: list[float], error: float
) -> None:
    found = class_sets(double(posterior), double(held_out), error)
    for row, members in zip(posterior, found.tolist(), strict=True):
        shares = [p / max(row) if max(row) else 1 for p in row]
        agree = [(1 + sum(q <= r for q in held_out)) / (len(held_out) + 1) > error for r in shares]
        assert members == agree


@settings(deadline=None)
@given(POSTERIORS, HELD_OUT, LEVELS, LEVELS, st.data())
def test_verdicts_follow_from_p_values_and_sets(
    posterior: list[list[float]], held_out: list[float], novelty: float, error: float, data: st.DataObject
) -> None:
    p = [data.draw(st.just(novelty) | st.floats(0, 1)) for _ in posterior]
    found = verdicts(double(posterior), double(p), double(held_out), novelty, error)
    sets = class_sets(double(posterior), double(held_out), error)
    for row, p_value, members, verdict in zip(posterior, p, sets, found, strict=True):
        if p_value <= novelty:
            assert verdict == Verdict("novel", ())
            continue
        named = members.nonzero().flatten().tolist()
        assert verdict.classes == tuple(sorted(named, key=lambda y: (-row[y], y)))
        assert verdict.kind == ("accept" if len(named) == 1 else "ambiguous")


def images(repeats: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Posteriors of overlapping classes, overconfident and with ties; labels; log p(x)."""
    labels = torch.randint(3, (repeats, n), generator=generator)
    logits = 4 * torch.randn(repeats, n, 3, generator=generator)
    logits.scatter_add_(2, labels[..., None], torch.full((repeats, n, 1), 5.0))
    posterior = (20 * logits.softmax(2)).round() / 20
    return posterior, labels, torch.randn(repeats, n, generator=generator)


def mistakes(
    n: int, novelty: float, error: float, truth_seen: bool, generator: torch.Generator
) -> tuple[float, float, float]:
    """Shares of images called novel, of sets without the true class, and of verdicts that do not name it."""
    repeats = REPEATS
    posterior, labels, log_density = images(repeats, n + 1, generator)
    novel = missed = unnamed = 0
    for x, y, density in zip(posterior, labels, log_density, strict=True):
        calibration = ratios(x[1:]).gather(1, y[1:, None])[:, 0] if truth_seen else torch.ones(n)
        p = TwoTailed().fit(density[1:]).p_value(density[:1])
        (verdict,) = verdicts(x[:1], p, calibration, novelty, error)
        novel += verdict.kind == "novel"
        missed += not class_sets(x[:1], calibration, error)[0, y[0]]
        unnamed += int(y[0]) not in verdict.classes
    return novel / repeats, missed / repeats, unnamed / repeats


def noise(level: float) -> float:
    return 4 * math.sqrt(level * (1 - level) / REPEATS)


@pytest.mark.parametrize(("n", "novelty", "error"), [(39, 0.05, 0.1), (9, 0.2, 0.3), (19, 0.5, 0.05)])
def test_both_levels_hold(n: int, novelty: float, error: float, generator: torch.Generator) -> None:
    novel, missed, unnamed = mistakes(n, novelty, error, True, generator)
    assert novelty - noise(novelty) <= novel <= novelty + noise(novelty)
    assert missed <= error + noise(error)
    assert unnamed <= novelty + error + noise(novelty + error)


def test_the_check_finds_sets_that_are_too_small(generator: torch.Generator) -> None:
    """Ratios of 1, as if all answers were right: what an overconfident model thinks of itself."""
    _, missed, _ = mistakes(39, 0.05, 0.1, False, generator)
    assert missed > 0.1 + noise(0.1)


def test_what_an_image_is_called() -> None:
    held_out = torch.linspace(0.3, 1, 199)
    posterior = torch.tensor([[0.0, 0.97, 0.03], [0.1, 0.4, 0.5], [0.4, 0.2, 0.4], [0.05, 0.21, 0.05]])
    found = verdicts(posterior, torch.tensor([0.5, 0.011, 1.0, 0.9]).double(), held_out)
    assert found == [
        ("accept", (1,)),
        ("ambiguous", (2, 1)),
        ("ambiguous", (0, 2, 1)),
        ("accept", (1,)),  # its posterior is low, but far above those of the others
    ]
    assert verdicts(posterior[:1], torch.tensor([0.01]).double(), held_out) == [("novel", ())]
    undecided = torch.full((1, 100), 0.01)
    assert verdicts(undecided, torch.ones(1), undecided[0].repeat(2)) == [("ambiguous", tuple(range(100)))]
    assert verdicts(posterior[:0], torch.empty(0), held_out) == []


def test_confidence_that_is_too_low_for_the_risk_makes_ambiguous_and_names_the_runner_up() -> None:
    posterior = torch.tensor([[0.05, 0.95, 0], [0.1, 0.2, 0.7], [0.9, 0.04, 0.06], [0, 0, 1]])
    p_value, held_out = torch.tensor([1, 1, 1, 0.01]), torch.full((100,), 0.7)
    confident = torch.tensor([True, False, False, False])
    assert verdicts(posterior, p_value, held_out, confident=confident) == [
        ("accept", (1,)),
        ("ambiguous", (2, 1)),
        ("ambiguous", (0, 2)),
        ("novel", ()),
    ]


@pytest.mark.parametrize("level", [0.001, 0.01, 0.05, 1 / 3, 0.07])
@pytest.mark.parametrize("name", ["novelty", "error"])
def test_too_few_held_out_images_are_refused_with_the_number_that_is_needed(name: str, level: float) -> None:
    def ask(n: int) -> list[Verdict]:
        levels = {"novelty": 0.5, "error": 0.5} | {name: level}
        images = torch.tensor([[0.4, 0.6]]), torch.tensor([1.0]), torch.full((n,), 0.5)
        return verdicts(*images, levels["novelty"], levels["error"])

    needed = math.ceil(1 / level) - 1
    with pytest.raises(CandidError, match=f"With {needed - 1} held-out .* at least {needed},"):
        ask(needed - 1)
    ask(needed)


GOOD = torch.tensor([[0.4, 0.6], [1.0, 0.0]]), torch.tensor([0.5, 1.0]), torch.full((200,), 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda posterior, p, held_out: (posterior[0], p, held_out), r"shape \(N, M\)"),
        (lambda posterior, p, held_out: (posterior[:, :0], p, held_out), r"shape \(N, M\)"),
        (lambda posterior, p, held_out: (posterior, p, held_out[None]), r"shape \(N, M\)"),
        (lambda posterior, p, held_out: (posterior.logit(), p, held_out), "not logits"),
        (lambda posterior, p, held_out: (posterior * math.nan, p, held_out), "between 0 and 1"),
        (lambda posterior, p, held_out: (posterior, p, held_out - 1), "between 0 and 1"),
        (lambda posterior, p, held_out: (posterior, p[:1], held_out), "p-values of 2 images"),
        (lambda posterior, p, held_out: (posterior, p * math.nan, held_out), "p-values of 2 images"),
        (lambda posterior, p, held_out: (posterior, p, held_out[:0]), "With 0 held-out images"),
    ],
)
def test_bad_input_is_refused(
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], message: str
) -> None:
    with pytest.raises(CandidError, match=message):
        verdicts(*change(*GOOD))


@pytest.mark.parametrize("level", [0, 1, -0.1, 2, math.nan])
def test_levels_are_probabilities(level: float) -> None:
    with pytest.raises(CandidError, match="'error' must be above 0 and below 1"):
        verdicts(*GOOD, error=level)
    with pytest.raises(CandidError, match="'novelty' must be above 0 and below 1"):
        verdicts(*GOOD, novelty=level)

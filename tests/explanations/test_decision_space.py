"""Decision spaces keep distances, circles hold what they say, and captions say what is shown."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from candid import ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid.explanations.decision_space import MASS, DecisionSpace, decision_spaces, summarise
from candid.models.protocol import Outputs
from candid.trust.verdict import Kind
from tests.explanations.mixtures import latents, mixture_model, outputs_for


@settings(max_examples=25, deadline=None)
@given(
    classes=st.integers(2, 8),
    scale=st.floats(0.01, 20),
    spread=st.floats(0, 10),
    skew=st.floats(0.05, 0.95),
    seed=st.integers(0, 1000),
)
def test_distances_and_odds_are_kept(
    classes: int, scale: float, spread: float, skew: float, seed: int
) -> None:
    priors = (skew, *([(1 - skew) / (classes - 1)] * (classes - 1)))
    model = mixture_model(classes, priors=priors, scale=scale, seed=seed)
    z = latents(model, 2, spread, seed)
    logits = model.mixture.logits(z).detach()
    for image, space in zip(range(2), decision_spaces(model, outputs_for(model, z)), strict=True):
        first, second = space.classes[:2]
        assert list(space.posterior) == sorted(space.posterior, reverse=True)
        means = model.mixture.means(torch.tensor(space.classes)).detach()
        q, _ = torch.linalg.qr(means.T)  # the span of the means
        for i, mean in enumerate(means):
            shown = math.hypot(space.along - space.means_along[i], space.away) if i < 2 else None
            true = float(((z[image] - mean) @ q).norm())
            assert shown is None or shown == pytest.approx(true, rel=1e-6, abs=1e-6)
        odds = math.log(priors[first] / priors[second])
        shown_odds = -space.distance * space.along + odds
        assert shown_odds == pytest.approx(float(logits[image, first] - logits[image, second]), abs=1e-6)
        assert space.boundary == pytest.approx(odds / space.distance, rel=1e-5, abs=1e-6)


def test_circles_hold_90_percent_in_both_directions() -> None:
    model = mixture_model(classes=6, scale=2.0)
    n = 1500
    z = model.mixture.means(torch.zeros(n, dtype=torch.long)).detach() + latents(model, n)
    ranked = torch.linspace(1, 0, 6).double().expand(n, -1)  # the same classes span the space for all
    spaces = decision_spaces(model, Outputs(ranked, z[:, :0], None, z))
    along = sum(abs(s.along - s.means_along[0]) <= s.half_width for s in spaces) / n
    away = sum(s.away <= s.half_height for s in spaces) / n
    error = 4 * math.sqrt(MASS * (1 - MASS) / n)
    assert along == pytest.approx(MASS, abs=error)
    assert away == pytest.approx(MASS, abs=error)


def test_equal_means_two_classes_and_the_last_of_few() -> None:
    model = mixture_model(classes=2, scale=0.0)
    (space,) = decision_spaces(model, outputs_for(model, latents(model, 1)))
    assert space.distance == 0 and space.boundary == 0 and math.isfinite(space.along + space.away)
    assert summarise(space, ("a", "b")).kind == "ambiguous"
    resnet = ResNet(ResNetConfig(height=32, width=32, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    with pytest.raises(CandidError, match="from a ResNet"):
        decision_spaces(resnet, outputs_for(model, latents(model, 1)))  # type: ignore[arg-type]
    one = mixture_model(classes=1)
    with pytest.raises(CandidError, match="at least two classes"):
        decision_spaces(one, outputs_for(one, latents(one, 1)))


def space(posterior: tuple[float, float], distance: float) -> DecisionSpace:
    half = distance / 2
    return DecisionSpace((0, 1), posterior, 0.1, 1.0, (-half, half), (0.0, 0.0), 1.645, 2.789, 0.0)


@pytest.mark.parametrize(
    ("shown", "verdict", "kind", "words"),
    [
        (space((0.99, 0.01), 4), None, "confident", ["'cat' (99 %)", "next is 'dog' (1 %)"]),
        (space((0.999, 0.001), 4), None, "confident", ["'cat' (99.9 %)", "(0.1 %)"]),
        (space((0.7, 0.2), 4), "accept", "confident", ["70 %"]),
        (space((0.6, 0.4), 1.68), "ambiguous", "ambiguous", ["1.7", "20 %"]),
        (space((0.6, 0.4), 8), None, "several interpretations", ["8.0", "0.0032 %", "both"]),
        (space((0.99, 0.01), 4), "novel", "novel", ["don't trust", "p = 0.001"]),
    ],
)
def test_captions_say_which_of_the_four_cases_it_is(
    shown: DecisionSpace, verdict: Kind | None, kind: str, words: list[str]
) -> None:
    p_value = None if verdict is None else 0.001 if verdict == "novel" else 0.4
    summary = summarise(shown, ("cat", "dog"), p_value, verdict)
    assert summary.kind == kind
    assert all(word in summary.sentence for word in words), summary.sentence
    assert ("typical (p = 0.4)" in summary.sentence) == (p_value == 0.4)

"""Decision spaces keep distances, regions hold what they say, and captions say what is shown."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from scipy.stats import chi, norm

from candid import ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid.explanations.decision_space import MASS, DecisionSpace, decision_spaces, region, summarise
from candid.explanations.options import Regions
from candid.explanations.similarity import Pair, expected_uncertainty
from candid.models.protocol import Outputs
from candid.reports.plots.examine import draw_decision_space
from candid.trust.verdict import Verdict
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


@pytest.mark.parametrize("top", [2, 3, 5])
def test_the_drawn_regions_hold_90_percent_of_their_class(top: int) -> None:
    model = mixture_model(classes=6, scale=2.0)
    n = 3000
    for y in (0, 1):  # the first and the second region
        z = model.mixture.means(torch.full((n,), y)).detach() + latents(model, n, seed=y)
        ranked = np.tile(np.linspace(1, 0, 6), (n, 1))  # the same classes span the space for all
        latent = z.numpy()
        spaces = decision_spaces(model, Outputs(ranked, latent[:, :0], None, latent), top)
        share = sum(space.inside[y] for space in spaces) / n
        assert share == pytest.approx(MASS, abs=4 * math.sqrt(MASS * (1 - MASS) / n))


def drawn_axes(shown: DecisionSpace) -> Axes:
    axes = Figure().subplots()
    draw_decision_space(axes, shown, ("cat", "dog"))
    return axes


def test_the_drawn_ellipse_is_the_region() -> None:
    shown = space((0.6, 0.4), 2.0)
    axes = drawn_axes(shown)
    ellipses = [patch for patch in axes.patches if isinstance(patch, Ellipse) and patch.get_fill()]
    assert len(ellipses) == 2
    for along in np.linspace(-4, 4, 17).tolist():
        for away in (0.1, 1.0, 3.0, 3.5):
            point = replace(shown, along=along, away=away)
            centred = [(along - ellipse.center[0], away - ellipse.center[1]) for ellipse in ellipses]
            drawn = [
                (2 * x / ellipse.width) ** 2 + (2 * y / ellipse.height) ** 2 <= 1
                for (x, y), ellipse in zip(centred, ellipses, strict=True)
            ]
            assert tuple(drawn) == point.inside


def test_the_region_has_equal_shares_in_both_directions() -> None:
    assert region(2)[0] == pytest.approx(region(2)[1])  # both directions are normal
    assert region(2)[0] == pytest.approx(math.sqrt(-2 * math.log(1 - MASS)))  # a disc
    for n in (3, 5, 40):
        width, height = region(n)
        assert 2 * norm.cdf(width) - 1 == pytest.approx(chi.cdf(height, n - 1), abs=1e-9)
    assert region(1)[0] == pytest.approx(norm.ppf(0.95))


def test_the_papers_circles_hold_90_percent_in_each_direction() -> None:
    assert region(5, "paper") == pytest.approx((1.645, 2.789), abs=5e-4)
    model = mixture_model(classes=6)
    z = latents(model, 20)
    ours, theirs = (
        decision_spaces(model, outputs_for(model, z), regions=regions) for regions in get_args(Regions)
    )
    for our, their in zip(ours, theirs, strict=True):
        assert (their.half_width, their.half_height) == region(5, "paper")
        assert (our.along, our.away, our.means_along) == (their.along, their.away, their.means_along)
        assert summarise(our, tuple("abcdef")).kind == summarise(their, tuple("abcdef")).kind
        assert "circle" in summarise(their, tuple("abcdef")).sentence or sum(their.posterior[:2]) < 2 / 3
    legend = drawn_axes(replace(space((0.6, 0.4), 2.5), regions="paper")).get_legend()
    assert legend is not None
    assert "circle holds 90 % of its class in each direction" in legend.get_title().get_text()
    with pytest.raises(CandidError, match="There are no regions 'round'"):
        decision_spaces(model, outputs_for(model, z), regions="round")  # type: ignore[arg-type]


def test_what_lies_outside_of_the_span_is_measured_there() -> None:
    model = mixture_model(classes=6, size=(8, 8))
    means = model.mixture.means(torch.arange(6)).detach()
    across = torch.linalg.svd(means)[2][6]  # one of the directions outside of all means
    z = means[:1] + 7 * across
    (shown,) = decision_spaces(model, outputs_for(model, z))
    (same,) = decision_spaces(model, outputs_for(model, means[:1]))
    assert shown.outside == pytest.approx(7) and same.outside == pytest.approx(0, abs=1e-6)
    assert shown.outside_expected == pytest.approx(math.sqrt(64 - 5))
    assert (shown.along, shown.away) == pytest.approx((same.along, same.away), abs=1e-6)
    assert shown.posterior == pytest.approx(same.posterior)
    many = decision_spaces(model, outputs_for(model, means[:1] + latents(model, 300)))
    assert sum(each.outside_ratio for each in many) / 300 == pytest.approx(1, abs=0.03)


def test_equal_means_and_what_has_no_decision_space() -> None:
    model = mixture_model(classes=2, scale=0.0)
    (space,) = decision_spaces(model, outputs_for(model, latents(model, 1)))
    assert space.distance == 0 and space.boundary == 0 and math.isfinite(space.along + space.away)
    assert summarise(space, ("a", "b")).kind == "ambiguous"
    resnet = ResNet(ResNetConfig(height=32, width=32, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    with pytest.raises(CandidError, match="from a ResNet"):
        decision_spaces(resnet, outputs_for(model, latents(model, 1)))
    one = mixture_model(classes=1)
    with pytest.raises(CandidError, match="at least two classes"):
        decision_spaces(one, outputs_for(one, latents(one, 1)))


def space(
    posterior: tuple[float, float], distance: float, verdict: Verdict | None = None, along: float = 0.1
) -> DecisionSpace:
    half = distance / 2
    p_value = None if verdict is None else 0.001 if verdict == "novel" else 0.4
    return DecisionSpace(
        *((0, 1), posterior, along, 1.0, (-half, half), (0.0, 0.0), *region(5), 0.0, 66.0, 55.0),
        p_value,
        verdict,
    )


@pytest.mark.parametrize(
    ("shown", "kind", "words"),
    [
        (space((0.99, 0.01), 4, along=-2), "confident", ["'cat' (99 %)", "(1 %)", "region of 'cat' only"]),
        (space((0.999, 0.001), 4, along=-9), "confident", ["99.9 %", "(0.1 %)", "away from 'dog'"]),
        (space((0.7, 0.2), 4, "accept"), "confident", ["70 %", "regions of both"]),
        (space((0.6, 0.4), 1.68, "ambiguous"), "ambiguous", ["1.7", "20 %", "similar", "regions of both"]),
        (space((0.6, 0.4), 2.5), "several interpretations", ["2.5", "11 %", "usually separates"]),
        (space((0.4, 0.3), 2.5), "several interpretations", ["or another class (30 %)"]),
        (space((0.4, 0.2), 1.0), "several interpretations", ["no two classes together"]),
        (space((0.6, 0.4), 12), "several interpretations", ["outside of the 90 % regions of both"]),
        (space((0.99, 0.01), 4, "novel"), "novel", ["don't trust", "p = 0.001", "3,025 dir", "1.20 times"]),
    ],
)
def test_captions_say_which_of_the_four_cases_it_is(
    shown: DecisionSpace, kind: str, words: list[str]
) -> None:
    summary = summarise(shown, ("cat", "dog"))
    assert summary.kind == kind
    assert all(word in summary.sentence for word in words), summary.sentence
    assert ("typical (p = 0.4)" in summary.sentence) == (shown.p_value == 0.4)


@pytest.mark.parametrize(("measured", "named"), [(None, False), (0.15, False), (0.08, True), (0.31, True)])
def test_a_measured_uncertainty_is_named_where_it_differs(measured: float | None, named: bool) -> None:
    pair = Pair(0, 1, 1.68, float(expected_uncertainty(1.68)), measured)
    sentence = summarise(space((0.6, 0.4), 1.68), ("cat", "dog"), pair).sentence
    assert ("measured on held-out images" in sentence) == named
    assert not named or f"{100 * measured:.0f} %)" in sentence  # type: ignore[operator]


def test_the_measured_distance_decides_whether_classes_are_similar() -> None:
    """Not that of the drawn means, which may be near while the classes are far apart."""
    for of_means, measured, kind in ((1.5, 3.0, "several interpretations"), (3.0, 1.5, "ambiguous")):
        pair = Pair(0, 1, measured, float(expected_uncertainty(measured)))
        summary = summarise(space((0.6, 0.4), of_means), ("cat", "dog"), pair)
        assert (summary.kind, pair.similar) == (kind, kind == "ambiguous")
        assert f"at a measured distance of {measured:.1f} standard deviations" in summary.sentence


def test_the_figure_names_novelty_outside_of_the_drawing() -> None:
    for verdict, word in (("novel", "this image (novel)"), ("accept", "this image")):
        shown = space((0.99, 0.01), 2.5, verdict)  # type: ignore[arg-type]
        axes = drawn_axes(shown)
        legend = axes.get_legend()
        assert legend is not None and word in [text.get_text() for text in legend.get_texts()]
        assert "1.20 × the expected distance" in axes.get_title()
        assert f"p = {shown.p_value}" in axes.get_title()
        (star,) = [line for line in axes.lines if line.get_marker() == "*"]
        assert (star.get_markerfacecolor() == "white") == (verdict == "novel")


@settings(max_examples=50, deadline=None)
@given(
    shares=st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
    distance=st.floats(0, 6),
    verdict=st.sampled_from([None, "ambiguous"]),
)
def test_no_sentence_speaks_of_two_classes_if_a_third_is_elsewhere(
    shares: list[float], distance: float, verdict: Verdict | None
) -> None:
    posterior = tuple(sorted((share / sum(shares) for share in shares), reverse=True))
    shown = replace(space((1, 0), distance, verdict), classes=tuple(range(5)), posterior=posterior)
    sentence = summarise(shown, tuple("abcde")).sentence
    words = ("the two", "both", "between them", "only")
    if 1 - sum(posterior[:2]) >= 1 / 3:
        assert all(f"'{name}'" in sentence for name in "abcde")
        assert not any(word in sentence for word in words)
    else:
        assert any(word in sentence for word in words) or "away from" in sentence

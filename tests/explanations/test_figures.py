"""Figures of images and latents: labelled, nothing cut off, whatever the classes are called."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from candid import GenerativeClassifier
from candid._support.numbers import Array
from candid.data.images import to_float
from candid.explanations.counterfactual import counterfactual, interpolate, samples
from candid.explanations.decision_space import decision_spaces, summarise
from candid.explanations.explainer import Explanation
from candid.explanations.heatmaps import heatmaps
from candid.judging.examine import Evidence
from candid.reports.plots import examine as examine_plots
from candid.reports.plots import latent as latent_plots
from candid.reports.plots import style
from candid.trust.verdict import Examination
from tests.explanations.mixtures import decided_classifier
from tests.reports.test_plots import check_nothing_is_cut_off

LONG = "a class, whose name is much too long, and costs $5 or $\\undefined$"
NAMES = (LONG, "dog", "\udcff odd")


@pytest.fixture(scope="module")
def model() -> GenerativeClassifier:
    return decided_classifier()


@pytest.fixture(scope="module")
def image() -> Array:
    return np.random.default_rng(1).integers(40, 216, (3, 16, 16), dtype=np.uint8)


def texts(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def check(figure: Figure, tmp_path: Path) -> str:
    style.save(figure, tmp_path / "figure.png", svg=True)
    check_nothing_is_cut_off(figure)
    return texts(figure)


@pytest.mark.parametrize("kind", ["accept", "ambiguous", "novel", None])
def test_a_page_shows_what_was_found(
    model: GenerativeClassifier, image: Array, kind: Any, tmp_path: Path
) -> None:
    outputs = model.outputs(to_float(image[None]))
    p_value = None if kind is None else 0.003
    (space,) = decision_spaces(model, outputs)
    space = replace(space, p_value=p_value, verdict=kind)
    fitting = {"accept": 1, "novel": 0}.get(kind, 2)
    examined = Examination(
        f"{'long' * 40}.png",
        {NAMES[y]: share for y, share in zip(space.classes, space.posterior, strict=True)},
        p_value,
        p_value,
        kind,
        None if kind is None else tuple(NAMES[y] for y in space.classes[:fitting]),
        log_density=-9.0,
        evidence=Evidence(image, outputs),
    )
    y = space.classes[-1]
    changed = counterfactual(model, image, y, 0.4) if kind == "ambiguous" else None
    summary = summarise(space, NAMES)
    (maps,) = heatmaps(model, outputs)
    explanation = Explanation(maps, space, summary, changed)
    shown = check(examine_plots.examination(examined, explanation, NAMES), tmp_path)
    for word in (
        "posterior (%)",
        "σ",
        "saliency",
        "nats",
        "this image",
        "dog",
        f"{100 * space.posterior[0]:.0f} %",
    ):
        assert word in shown, word
    assert ("p = 0.003" in shown) == (kind is not None)
    assert ("moved towards" in shown) == (changed is not None)


def test_single_figures_are_labelled(model: GenerativeClassifier, image: Array, tmp_path: Path) -> None:
    outputs = model.outputs(to_float(image[None]))
    (space,) = decision_spaces(model, outputs)
    (maps,) = heatmaps(model, outputs, top=2)
    assert "saliency" in check(examine_plots.heatmaps(image, maps, NAMES), tmp_path)
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    examine_plots.draw_decision_space(figure.subplots(), space, NAMES)
    assert "distance from it (σ)" in check(figure, tmp_path)
    found = counterfactual(model, image, space.classes[-1], 0.4)
    shown = check(latent_plots.counterfactual(found, NAMES), tmp_path)
    assert "grey levels" in shown and "target 40 %" in shown and "original" in shown
    shown = check(latent_plots.counterfactuals([found, found], NAMES), tmp_path)
    assert "has 40 %" in shown and shown.count(" %") >= 14
    between = interpolate(model, image, image[:, :, ::-1].copy(), steps=4)
    shown = check(latent_plots.interpolation([between, between], NAMES), tmp_path)
    assert shown.count("%") >= 8
    drawn = samples(model, [0, 1, 2], (0.5, 1.0), n=2)
    shown = check(latent_plots.samples(drawn, NAMES, (0.5, 1.0)), tmp_path)
    assert "T = 0.5" in shown and "T = 1" in shown


def test_the_map_that_is_drawn_is_the_one_that_was_found(model: GenerativeClassifier, image: Array) -> None:
    (maps,) = heatmaps(model, model.outputs(to_float(image[None])), top=2)
    figure = examine_plots.heatmaps(image, maps, NAMES)
    drawn = [axes.images[-1].get_array() for axes in figure.axes if len(axes.images) == 2]
    assert len(drawn) == 3
    assert maps.saliency is not None
    np.testing.assert_allclose(np.array(drawn[0]), maps.saliency)
    np.testing.assert_allclose(np.array(drawn[2]), maps.values[1])
    scales = [axes.images[-1].get_clim() for axes in figure.axes if len(axes.images) == 2][1:]
    assert scales[0] == scales[1] and scales[0][0] == -scales[0][1]

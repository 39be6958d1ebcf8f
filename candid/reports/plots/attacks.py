"""Attacked models: bars over beta, and what attacked images look like."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from candid._support.text import number
from candid.reports.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    STYLE,
    VERMILION,
    label,
    legend,
    picture_of,
    round_down,
    short_path,
)
from candid.robustness.attacks.benchmark import AttackedModel
from candid.robustness.attacks.metrics import VISIBLE, AttackMetrics

COLOURS = (BLUE, ORANGE, VERMILION, GREEN, PURPLE, SKY)


@rc_context(STYLE)
def attack_bars(found: Sequence[AttackedModel]) -> Figure:
    """The paper's bars: a row for each kappa; perturbation, detection and uncertainty over the models.

    A model has a bar for each d. Above the bars of the detection is the attack's success rate; there is no
    detection without attacks that fool it.
    """
    everything = [figures for model in found for figures in model.metrics]
    kappas = list(dict.fromkeys(each.kappa for each in everything))
    ds = list(dict.fromkeys(each.d for each in everything))
    detection = any(each.detection for each in everything)
    columns = 2 + detection
    size = (1.6 + 3.4 * columns + 0.25 * len(found) * columns, 0.9 + 2.3 * len(kappas))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(kappas), columns, squeeze=False)
    for row, kappa in zip(grid, kappas, strict=True):
        perturbation, *middle, uncertainty = row
        own = [each for each in everything if each.kappa == kappa]
        _bars(perturbation, found, own, ds, lambda each: _scaled(each.per_pixel, 255))
        visible = perturbation.axhline(255 * VISIBLE, color=BLACK, linestyle=":")
        perturbation.set_ylabel(f"κ = {number(kappa)}\nRMS (levels of 255)")
        for axes in middle:
            _bars(axes, found, own, ds, lambda each: each.detection and 100 * each.detection.two_tailed)
            _success(axes, found, own, ds)
            axes.axhline(50, color=GREY, linewidth=1)
            axes.set(ylim=(0, 118), yticks=(0, 25, 50, 75, 100), ylabel="two-tailed AUC (%)")
        _bars(uncertainty, found, own, ds, lambda each: _scaled(each.confidence, -100, 100))
        uncertainty.set(ylim=(0, 100), ylabel="1 − confidence (%)")
    titles = [
        "mean perturbation",
        *["detection\n(above: success rate, %)"] * detection,
        "uncertainty of the wrong class",
    ]
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    visible.set_label("visible from about here")
    names = {0.0: "d = 0: the decision alone"}
    handles: list[Any] = [
        Patch(color=COLOURS[i % len(COLOURS)], label=names.get(d, f"d = {d:g}: the detection, too"))
        for i, d in enumerate(ds)
    ]
    legend(figure, [*handles, visible])
    return figure


def _scaled(value: float | None, factor: float, offset: float = 0) -> float | None:
    return None if value is None else offset + factor * value


def _places(found: Sequence[AttackedModel], own: Sequence[AttackMetrics], ds: Sequence[float]) -> Any:
    """Yield each attack, where its bar stands, and the colour of its d."""
    width = 0.8 / len(ds)
    for i, model in enumerate(found):
        mine = [each for each in own if each.model == model.name]
        for k, each in enumerate(mine):
            place = i + (k - (len(mine) - 1) / 2) * width
            yield each, place, width, COLOURS[ds.index(each.d) % len(COLOURS)]


def _bars(
    axes: Axes, found: Sequence[AttackedModel], own: Sequence[AttackMetrics], ds: Sequence[float], height: Any
) -> None:
    for each, place, width, colour in _places(found, own, ds):
        value = height(each)
        if value is not None:
            axes.bar(place, value, 0.92 * width, color=colour)
    axes.set_xticks(range(len(found)), [fill(name, 10) for name in _names(found)], fontsize=SMALL)
    axes.set_xlim(-0.6, len(found) - 0.4)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _success(
    axes: Axes, found: Sequence[AttackedModel], own: Sequence[AttackMetrics], ds: Sequence[float]
) -> None:
    for i, model in enumerate(found):
        if not any(each.detection for each in own if each.model == model.name):
            axes.text(i, 3, "no test", ha="center", fontsize=SMALL)
    for each, place, _, _ in _places(found, own, ds):
        if each.detection is not None and each.success is not None:
            height = 100 * each.detection.two_tailed + 2
            text = f"{100 * each.success:.0f}"
            axes.text(place, height, text, ha="center", va="bottom", fontsize=SMALL)


def _names(found: Sequence[AttackedModel]) -> list[str]:
    """Return the names of models: their beta, or their name where that is not unique."""
    betas = [model.beta for model in found]
    return [
        label(short_path(model.name, 26), 26)
        if model.beta is None or betas.count(model.beta) > 1
        else f"β = {number(model.beta)}"
        for model in found
    ]


@rc_context(STYLE)
def attack_examples(found: Sequence[AttackedModel]) -> Figure:
    """Draw one image under all attacks, and below each the amplified difference from the original.

    It is the first that all models classify rightly.
    """
    inputs = found[0].inputs
    right = torch.stack([model.clean.logits.argmax(1) == model.inputs.labels for model in found]).all(0)
    chosen = int(right.int().argmax())
    settings = list(dict.fromkeys(setting for model in found for setting in model.attacks))
    across, down = 1 + len(settings), 2 * len(found)
    figure = Figure(figsize=(0.6 + 1.25 * across, 0.8 + 1.42 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    names = inputs.class_names
    for model, shown, rows in zip(found, _names(found), grid.reshape(len(found), 2, across), strict=True):
        original = model.inputs.images[chosen]
        picture_of(rows[0, 0], original, f"{shown}\n{label(names[int(inputs.labels[chosen])], 12)}")
        for (kappa, d), column in zip(settings, rows.T[1:], strict=True):
            attack = model.attacks.get((kappa, d))
            if attack is None:
                continue
            image = attack.images[chosen]
            difference = (image - original / 255).abs()
            factor = max(1.0, round_down(1 / max(1e-9, float(difference.max()))))
            wrong = int(attack.posterior[chosen].argmax())
            title = f"κ {number(kappa)}, d {d:g}\n{label(names[wrong], 12)}"
            picture_of(column[0], (255 * image).round().byte(), title)
            below = f"L2 {float(attack.distance[chosen]):.2g}, × {factor:g}"
            picture_of(column[1], (255 * factor * difference).round().byte(), below)
    said = "attacked images with the class they are taken for; below, |difference|, amplified"
    figure.suptitle(fill(said, 11 * across))
    return figure

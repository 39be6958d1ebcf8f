"""Attacked models: bars over beta, and what attacked images look like."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
    eight_bit,
    label,
    legend,
    picture_of,
    round_down,
    short_path,
)
from candid.robustness.attacks.metrics import VISIBLE, AttackedModel, AttackMetrics

COLOURS = (BLUE, ORANGE, VERMILION, GREEN, PURPLE, SKY)
LEAST_SHOWN = 1e-4
"""The smallest uncertainty that a bar can show."""


@rc_context(STYLE)
def attack_bars(models: Sequence[AttackedModel]) -> Figure:
    """The paper's bars: a row for each kappa; perturbation, detection and uncertainty over the models.

    Bars are of the 8-bit images, if they were attacked, with 95 % intervals; a line marks the perturbation of
    the real-valued ones. A model has a bar for each d. Above the bars of the detection is the attack's
    success rate; there is no detection without attacks that fool it.
    """
    everything = [metrics for model in models for metrics in model.metrics]
    kappas = list(dict.fromkeys(metrics.kappa for metrics in everything))
    ds = list(dict.fromkeys(metrics.d for metrics in everything))
    detection = any(metrics.detection for metrics in everything)
    columns = 2 + detection
    size = (1.6 + 3.4 * columns + 0.25 * len(models) * columns, 0.9 + 2.3 * len(kappas))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(kappas), columns, squeeze=False)
    for row, kappa in zip(grid, kappas, strict=True):
        perturbation, *middle, uncertainty = row
        at_kappa = [metrics for metrics in everything if metrics.kappa == kappa]
        visible = _draw_perturbations(perturbation, models, at_kappa, ds)
        perturbation.set_ylabel(f"κ = {number(kappa)}\nL2 (median)")
        for axes in middle:
            _draw_detection(axes, models, at_kappa, ds)
        _draw_uncertainty(uncertainty, models, at_kappa, ds)
    rounded = any(metrics.eight_bit for metrics in everything)
    titles = [
        "perturbation" + " of 8-bit images" * rounded,
        *["detection\n(above: success rate, %)"] * detection,
        "uncertainty of the wrong class",
    ]
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    names = {0.0: "d = 0: the decision alone"}
    handles: list[Any] = [
        Patch(color=COLOURS[i % len(COLOURS)], label=names.get(d, f"d = {d:g}: the detection, too"))
        for i, d in enumerate(ds)
    ]
    handles += [Line2D([], [], color=BLACK, linewidth=2, label="real-valued images")] * rounded
    legend(figure, [*handles, visible])
    return figure


def _draw_perturbations(
    axes: Axes, models: Sequence[AttackedModel], at_kappa: Sequence[AttackMetrics], ds: Sequence[float]
) -> Line2D:
    """Draw the median L2, and return the line from which it can be seen."""
    _bars(axes, models, at_kappa, ds, lambda metrics: metrics.as_file.l2_median, "l2_median")
    for metrics, place, width, _ in _places(models, at_kappa, ds):
        if metrics.eight_bit is not None and metrics.l2_median is not None:
            ends = [place - 0.46 * width, place + 0.46 * width]
            axes.plot(ends, [metrics.l2_median] * 2, color=BLACK, lw=2)
    size = math.sqrt(models[0].inputs.images[0].size)
    return axes.axhline(VISIBLE * size, color=BLACK, linestyle=":", label="visible from about here")


def _draw_detection(
    axes: Axes, models: Sequence[AttackedModel], at_kappa: Sequence[AttackMetrics], ds: Sequence[float]
) -> None:
    _bars(axes, models, at_kappa, ds, _area, "two_tailed", 100)
    for i, model in enumerate(models):
        if not any(metrics.detection for metrics in at_kappa if metrics.model == model.name):
            axes.text(i, 3, "no test", ha="center", fontsize=SMALL)
    for metrics, place, _, _ in _places(models, at_kappa, ds):
        seen = metrics.as_file
        if seen.detection is not None and seen.success is not None:
            height = 100 * seen.intervals["two_tailed"][1] + 2
            axes.text(place, height, f"{100 * seen.success:.0f}", ha="center", va="bottom", fontsize=SMALL)
    axes.axhline(50, color=GREY, linewidth=1)
    axes.set(ylim=(0, 118), yticks=(0, 25, 50, 75, 100), ylabel="two-tailed AUC (%)")


def _draw_uncertainty(
    axes: Axes, models: Sequence[AttackedModel], at_kappa: Sequence[AttackMetrics], ds: Sequence[float]
) -> None:
    """Draw 1 - confidence on a logarithmic axis; what lies below it is written."""

    def uncertainty(metrics: AttackMetrics) -> float | None:
        confidence = metrics.as_file.confidence
        return None if confidence is None else max(1 - confidence, LEAST_SHOWN)

    axes.set_yscale("log")
    _bars(axes, models, at_kappa, ds, uncertainty, scale=100)
    for metrics, place, _, _ in _places(models, at_kappa, ds):
        if uncertainty(metrics) == LEAST_SHOWN:
            text = f"< {100 * LEAST_SHOWN:g} %"
            axes.text(place, 120 * LEAST_SHOWN, text, rotation=90, ha="center", va="bottom", fontsize=SMALL)
    axes.set(ylim=(100 * LEAST_SHOWN, 100), ylabel="1 − confidence (%)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _area(metrics: AttackMetrics) -> float | None:
    detection = metrics.as_file.detection
    return None if detection is None else detection.two_tailed


def _places(models: Sequence[AttackedModel], at_kappa: Sequence[AttackMetrics], ds: Sequence[float]) -> Any:
    """Yield each attack, where its bar stands, and the colour of its d."""
    width = 0.8 / len(ds)
    for i, model in enumerate(models):
        mine = [metrics for metrics in at_kappa if metrics.model == model.name]
        for k, metrics in enumerate(mine):
            place = i + (k - (len(mine) - 1) / 2) * width
            yield metrics, place, width, COLOURS[ds.index(metrics.d) % len(COLOURS)]


def _bars(
    axes: Axes,
    models: Sequence[AttackedModel],
    at_kappa: Sequence[AttackMetrics],
    ds: Sequence[float],
    height: Callable[[AttackMetrics], float | None],
    interval: str | None = None,
    scale: float = 1,
) -> None:
    """Draw a bar for each attack, with the ``interval`` of this name."""
    for metrics, place, width, colour in _places(models, at_kappa, ds):
        value = height(metrics)
        if value is None or math.isinf(value):
            continue
        axes.bar(place, scale * value, 0.92 * width, color=colour)
        ends = metrics.as_file.intervals.get(interval or "")
        if ends is not None and math.isfinite(ends[1]):
            whiskers = [[scale * (value - ends[0])], [scale * (ends[1] - value)]]
            axes.errorbar(place, scale * value, whiskers, color=GREY, elinewidth=1.2, capsize=2)
    axes.set_xticks(range(len(models)), [fill(name, 10) for name in _names(models)], fontsize=SMALL)
    axes.set_xlim(-0.6, len(models) - 0.4)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _names(models: Sequence[AttackedModel]) -> list[str]:
    """Return the names of models: their beta, or their name where that is not unique."""
    betas = [model.beta for model in models]
    return [
        label(short_path(model.name, 26), 26)
        if model.beta is None or betas.count(model.beta) > 1
        else f"β = {number(model.beta)}"
        for model in models
    ]


@rc_context(STYLE)
def attack_examples(models: Sequence[AttackedModel]) -> Figure:
    """Draw one image under all attacks, and below each the amplified difference from the original.

    It is the first that all models classify rightly.
    """
    inputs = models[0].inputs
    right = np.stack([model.clean.logits.argmax(1) == model.inputs.labels for model in models]).all(0)
    chosen = int(right.argmax())
    settings = sorted({setting for model in models for setting in model.attacks})
    across, down = 1 + len(settings), 2 * len(models)
    figure = Figure(figsize=(0.6 + 1.25 * across, 0.8 + 1.42 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    names = inputs.class_names
    for model, shown, rows in zip(models, _names(models), grid.reshape(len(models), 2, across), strict=True):
        original = model.inputs.images[chosen]
        picture_of(rows[0, 0], original, f"{shown}\n{label(names[int(inputs.labels[chosen])], 12)}")
        for (kappa, d), column in zip(settings, rows.T[1:], strict=True):
            attack = model.attacks.get((kappa, d))
            if attack is None:
                continue
            attack = attack.as_file
            image = attack.images[chosen]
            difference = np.abs(image - original / np.float32(255))
            factor = max(1.0, round_down(1 / max(1e-9, float(difference.max()))))
            wrong = int(attack.posterior[chosen].argmax())
            title = f"κ {number(kappa)}, d {d:g}\n{label(names[wrong], 12)}"
            picture_of(column[0], eight_bit(image), title)
            below = f"L2 {float(attack.distance[chosen]):.2g}, × {factor:g}"
            picture_of(column[1], eight_bit(factor * difference), below)
    said = "attacked images with the class they are taken for; below, |difference|, amplified"
    figure.suptitle(fill(said, 11 * across))
    return figure

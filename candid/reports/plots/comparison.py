"""Several models side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from candid._support.numbers import Array
from candid._support.text import number
from candid.evaluation.calibration_error import Bins, expected_calibration_error
from candid.reports.plots.style import (
    BLUE,
    GREEN,
    GREY,
    STYLE,
    VERMILION,
    bin_points,
    label,
    legend,
    plain,
    short_path,
)

CLOSE = 0.06
"""Lines that are nearer than this share of the axis have one label: the height of a line of text."""


@rc_context(STYLE)
def trade_off(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Figure 3 of the paper: what beta trades, as losses and as accuracy against bits/dim.

    ``rows`` are models with ``name``, ``beta``, ``crops``, ``L_X``, ``L_Y``, ``bits_per_dim`` and
    ``accuracy``. A ResNet has no beta and is a horizontal line; a model of beta 0 does not classify and is a
    vertical line.
    """
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _trade_off(left, rows, "L_X", "L_Y", 1)
    left.set_xlabel("L_X (nats/dim), lower is better")
    left.set_ylabel("L_Y (nats), lower is better")
    _trade_off(right, rows, "bits_per_dim", "accuracy", 100)
    right.set_xlabel("bits/dim, lower is better")
    crops = ", ten crops" if all(row["crops"] == 10 for row in rows) else ""
    right.set_ylabel(f"top-1 accuracy{crops} (%)")
    figure.suptitle("each marker is a model, with its β", fontsize=11)
    return figure


def _trade_off(axes: Axes, rows: Sequence[Mapping[str, Any]], x_key: str, y_key: str, scale: float) -> None:
    resnets = [row for row in rows if row["beta"] is None]
    flows = [row for row in rows if row["beta"] == 0]
    models = sorted((row for row in rows if row["beta"]), key=lambda row: row["beta"])
    xs = [row[x_key] for row in models]
    ys = [scale * row[y_key] for row in models]
    axes.plot(xs, ys, color=BLUE, linewidth=1)
    pill = {"boxstyle": "round,pad=0.45,rounding_size=1", "facecolor": BLUE, "edgecolor": "white"}
    for order, (row, x, y) in enumerate(zip(models, xs, ys, strict=True), start=3):
        axes.plot(x, y, "o", markersize=21, color=BLUE, markeredgecolor="white", zorder=order)
        beta = number(row["beta"])
        axes.annotate(
            beta,
            (x, y),
            ha="center",
            va="center",
            color="white",
            fontsize=15 if beta == "∞" else 10,
            zorder=order,
            bbox=pill if len(beta) > 3 else None,
        )
    for row in flows:
        axes.axvline(row[x_key], color=GREEN, linestyle="--")
        axes.text(row[x_key], 1.01, "β = 0", color=GREEN, ha="center", transform=axes.get_xaxis_transform())
    lines = sorted((scale * row[y_key], plain(short_path(row["name"]))) for row in resnets)
    for y, _ in lines:
        axes.axhline(y, color=VERMILION, linestyle="--")
    axes.margins(0.14)
    axes.grid()
    low, high = axes.get_ylim()
    places = ((0.03, "left"), (0.97, "right"), (0.5, "center"))
    for i, close in enumerate(_close(lines, CLOSE * (high - low))):
        at, side = places[i % len(places)]
        axes.text(
            at,
            sum(y for y, _ in close) / len(close),
            "\n".join(name for _, name in reversed(close)),  # from top to bottom, as the lines are
            ha=side,
            va="center",
            color=VERMILION,
            transform=axes.get_yaxis_transform(),
            bbox={"color": "white", "pad": 1},
        )


def _close(lines: Sequence[tuple[float, str]], gap: float) -> list[list[tuple[float, str]]]:
    """Return the sorted ``lines`` in groups; those that are nearer than ``gap`` share a group.

    >>> _close([(1.0, "a"), (1.1, "b"), (3.0, "c")], 0.5)
    [[(1.0, 'a'), (1.1, 'b')], [(3.0, 'c')]]
    """
    groups: list[list[tuple[float, str]]] = []
    for line in lines:
        if groups and line[0] - groups[-1][-1][0] < gap:
            groups[-1].append(line)
        else:
            groups.append([line])
    return groups


@rc_context(STYLE)
def calibration_curves(models: Mapping[str, tuple[Bins, Bins]]) -> Figure:
    """Draw the share of correct predictions against confidence, one panel per model.

    ``models`` have a title each, and their bins of both kinds. Below the diagonal is overconfidence.
    """
    columns = min(4, len(models))
    rows = math.ceil(len(models) / columns)
    figure = Figure(figsize=(0.6 + 2.5 * columns, 0.8 + 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(models) :]:
        axes.set_axis_off()
    styles: dict[str, dict[str, Any]] = {
        "posteriors of all classes": {"color": BLUE, "marker": "o", "markersize": 4},
        "most probable class": {"color": VERMILION, "marker": "s", "markersize": 4},
    }
    for axes, (title, both) in zip(panels.flat, models.items(), strict=False):
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
        for bins, style in zip(both, styles.values(), strict=True):
            bin_points(axes, bins, **style)
        errors = " and ".join(f"{100 * expected_calibration_error(bins):.2f}" for bins in both)
        axes.set_title(f"{plain(title)}\nECE {errors} %", fontsize=10)
        axes.set(xlabel="confidence", ylabel="share right")
        axes.grid()
    panels[0, 0].set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    for i, axes in enumerate(panels.flat[: len(models)]):
        axes.label_outer()
        if i + columns >= len(models):  # nothing is drawn below it
            axes.set_xlabel("confidence")
            axes.tick_params(labelbottom=True)
    perfect = Line2D([], [], color=GREY, linestyle="--", label="perfect (below it: overconfident)")
    legend(figure, [perfect, *(Line2D([], [], label=name, **style) for name, style in styles.items())])
    return figure


TILE = 1.15
"""The width of an image in inches."""


@rc_context(STYLE)
def corruption_grid(image: Array, corrupted: Mapping[str, Array], title: str = "") -> Figure:
    """Draw corruptions as rows, severities as columns, as in the paper's appendix, next to the clean image.

    ``image`` is 8-bit, (C, H, W); ``corrupted`` has (severities, C, H, W) for each name.
    """
    height, width = image.shape[1:]
    rows = np.stack(
        [np.concatenate((image[None], versions)) for versions in corrupted.values()]
    )  # (R, S + 1, C, H, W)
    down, across = rows.shape[:2]
    gap = max(1, width // 28)
    tiles = np.pad(rows, ((0, 0),) * 3 + ((0, gap),) * 2, constant_values=255)
    mosaic = tiles.transpose(0, 3, 1, 4, 2).reshape(down * (height + gap), across * (width + gap), -1)
    pixels = np.broadcast_to(mosaic[:-gap, :-gap], (*(n - gap for n in mosaic.shape[:2]), 3))

    names = [label(name.replace("_", " ")) for name in corrupted]
    left, top, margin = 0.2 + 0.085 * max(map(len, names)), 0.7 if title else 0.4, 0.1
    wide, tall = TILE * across, TILE * down * (height + gap) / (width + gap)
    inches = wide + left + margin, tall + top + margin
    figure = Figure(figsize=inches)
    axes = figure.add_axes((left / inches[0], margin / inches[1], wide / inches[0], tall / inches[1]))
    axes.imshow(pixels, aspect="auto")
    axes.set_xticks(
        (width + gap) * np.arange(across) + width / 2 - 0.5,
        ["clean", *(f"severity {severity}" for severity in range(1, across))],
    )
    axes.set_yticks((height + gap) * np.arange(down) + height / 2 - 0.5, names)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(label(title, 60))
    return figure


@rc_context(STYLE)
def curves(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Draw cross-entropy, accuracy, bits/dim and the learning rate of each epoch."""
    panels = {
        "cross_entropy": "cross-entropy (nats)",
        "accuracy": "accuracy",
        "bits_per_dim": "bits/dim",
        "learning_rate": "learning rate",
    }
    shown = {key: title for key, title in panels.items() if key in rows[0] or f"val_{key}" in rows[0]}
    figure = Figure(figsize=(3.4 * len(shown), 2.8), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for axes, (key, title) in zip(
        figure.subplots(1, len(shown), squeeze=False).flat, shown.items(), strict=True
    ):
        for prefix, name, colour in (
            ("train_", "training", BLUE),
            ("val_", "validation", VERMILION),
            ("", "", GREY),
        ):
            if prefix + key in rows[0]:
                values = [row[prefix + key] for row in rows]
                axes.plot(epochs, values, color=colour, label=name, marker="." if len(rows) < 40 else "")
        axes.set_xlabel("epoch")
        axes.set_title(title)
        axes.grid()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(axes.lines) > 1:
            axes.legend()
    return figure

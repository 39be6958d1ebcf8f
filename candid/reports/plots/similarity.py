"""How similar the classes are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from textwrap import fill

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from candid.explanations.similarity import Similarity, log_expected_uncertainty
from candid.reports.plots.style import BLACK, SMALL, STYLE, is_dark, label, plain, short

NAMED = 40
"""Up to this number of classes, each has its name at the axes; with more, some have."""
NUMBERED = 12
"""Up to this number of classes, each pair shows its uncertainty."""
DIAGONAL = "#D9D9D9"
MEASURED = "\n\nin parentheses: the measured\nuncertainty, where it differs\nby more than a factor of 1.5"


@rc_context(STYLE)
def similarity(similarity: Similarity, title: str = "") -> Figure:
    """The matrix of distances, with the expected uncertainty on the colour bar's other side.

    Up to 12 classes, the uncertainties in percent are in the cells, too, with the measured one where it
    differs by more than a factor of 1.5. The diagonal, where the distance is 0, is grey.
    """
    count = len(similarity.classes)
    side = np.clip((0.6 if count <= NUMBERED else 0.22) * count, 3.4, 8.5)
    names = 0.085 * max(len(short(name)) for name in similarity.names)
    figure = Figure(figsize=(side + names + 2.8, side + names + 0.9), layout="compressed")
    axes = figure.subplots()
    shown = _matrix(axes, similarity, _scale([similarity]))
    axes.set_title(plain(fill(title, int(10 * side))))
    _colour_bar(figure, shown, [axes])
    return figure


@rc_context(STYLE)
def similarity_groups(groups: Mapping[str, Similarity]) -> Figure:
    """The matrices of several groups of classes side by side, with one colour scale for all."""
    columns = min(len(groups), 3 if len(groups) != 4 else 2)
    rows = math.ceil(len(groups) / columns)
    largest = max(len(group.classes) for group in groups.values())
    longest = max(len(short(name)) for group in groups.values() for name in group.names)
    side = np.clip(0.22 * largest, 2.4, 6.0) + 0.075 * longest
    figure = Figure(figsize=(columns * side + 2.2, rows * (side + 0.4) + 0.2), layout="compressed")
    panels = figure.subplots(rows, columns, squeeze=False)
    scale = _scale(list(groups.values()))
    for axes, (name, group) in zip(panels.flat, groups.items(), strict=False):
        shown = _matrix(axes, group, scale, numbered=False)
        axes.set_title(plain(fill(name, int(9 * side))))
    for axes in panels.flat[len(groups) :]:
        axes.remove()
    _colour_bar(figure, shown, figure.axes)
    return figure


def _scale(groups: list[Similarity]) -> Normalize:
    """Return the smallest and the largest distance of different classes."""
    distances = [g.distances[~np.eye(len(g.classes), dtype=bool)] for g in groups]
    low, high = min(float(d.min()) for d in distances), max(float(d.max()) for d in distances)
    if high - low < 1e-6 * high or high == 0:  # one pair
        low, high = 0.9 * low, 1.1 * high or 1.0
    return Normalize(low, high)


def _matrix(axes: Axes, similarity: Similarity, scale: Normalize, numbered: bool = True) -> AxesImage:
    count = len(similarity.classes)
    distances = similarity.distances.numpy().copy()
    np.fill_diagonal(distances, math.nan)
    note = ""
    colours = colormaps["viridis_r"].with_extremes(bad=DIAGONAL)
    shown = axes.imshow(distances, cmap=colours, norm=scale, interpolation="nearest")
    if count <= NUMBERED and numbered:
        for (row, column), distance in np.ndenumerate(distances):
            if row != column:
                colour = "white" if is_dark(colours(scale(distance))) else BLACK
                pair, cell = similarity.pair(row, column), _percent(distance)
                if pair.measured is not None and pair.differs:
                    cell, note = f"{cell}\n({100 * pair.measured:.2g})", MEASURED
                axes.text(column, row, cell, ha="center", va="center", color=colour, fontsize=SMALL)
    if count > NAMED and similarity.classes == tuple(range(count)):
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(10, steps=(1, 2, 5, 10)))
        axes.set(xlabel="class number", ylabel="class number")
    else:
        # Of too many classes, those at even steps.
        ticks = np.linspace(0, count - 1, min(count, NAMED)).round().astype(int)
        labels = [label(similarity.names[tick]) for tick in ticks]
        axes.set_xticks(ticks, labels, rotation=90, fontsize=SMALL)
        axes.set_yticks(ticks, labels, fontsize=SMALL)
        axes.set(xlabel=f"class{note}", ylabel="class")
        if count > NAMED:
            axes.set_ylabel(f"{count} classes, of which {len(ticks)} are named")
    axes.spines[:].set_visible(False)
    return shown


def _colour_bar(figure: Figure, shown: AxesImage, panels: list[Axes]) -> None:
    """Distances on the right, the uncertainties at the same places on the left."""
    bar = figure.colorbar(shown, ax=panels, shrink=0.9, aspect=24, fraction=0.1)
    low, high = shown.get_clim()
    ticks = [tick for tick in MaxNLocator(7).tick_values(low, high) if low <= tick <= high]
    bar.set_ticks(ticks)
    bar.set_label("distance of class means\n(standard deviations)")
    bar.outline.set_visible(False)
    left = bar.ax.secondary_yaxis("left")
    left.set_yticks(ticks, [_percent(tick) for tick in ticks])
    left.spines[:].set_visible(False)
    left.set_ylabel("expected uncertainty\nbetween the two (%)")


def _percent(distance: float) -> str:
    """The expected uncertainty in percent: three digits, or a power of ten if it is tiny."""
    exponent = (float(log_expected_uncertainty(distance)) + math.log(100)) / math.log(10)
    return f"{10**exponent:#.3g}" if exponent > -3 else f"$10^{{{exponent:.0f}}}$"

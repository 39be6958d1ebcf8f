"""How similar the classes are, and which pixels the features of models depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.special import ndtri

from candid._support.numbers import Array
from candid.explanations.similarity import Similarity, log_expected_uncertainty
from candid.reports.plots.style import (
    BLACK,
    COLOURS,
    DASHES,
    GREY,
    SMALL,
    STYLE,
    is_dark,
    label,
    plain,
    short,
)

if TYPE_CHECKING:
    from candid.explanations.receptive_field import ReceptiveField

Values = NDArray[np.float64]
MAPS = 4
"""Largest number of maps; more would be too small to read."""
WIDEST = 27
"""Largest number of letters of a name in one line."""
LOWEST = 1e-5
"""Sensitivities below this share of the largest have one colour."""
WRITTEN = 10
"""Up to this number of frequencies along either side, each cell shows its number."""


NAMED = 40
"""Up to this number of classes, each has its name at the axes; with more, some have."""
NUMBERED = 12
"""Up to this number of classes, each pair shows its uncertainty."""
DIAGONAL = "#D9D9D9"


@rc_context(STYLE)
def similarity(similarity: Similarity, title: str = "") -> Figure:
    """Draw the distances, with the expected uncertainty on the colour bar's other side.

    Where uncertainties were measured, a second matrix shows them in the colours of the distances at which
    they would be expected. Up to 12 classes, uncertainties in percent are in the cells, too. The diagonal and
    pairs without images are grey.
    """
    count = len(similarity.classes)
    side = np.clip((0.6 if count <= NUMBERED else 0.22) * count, 3.4, 8.5)
    names = 0.085 * max(len(short(name)) for name in similarity.names)
    matrices = {"expected": similarity.distances}
    if similarity.measured is not None:
        matrices["measured on images"] = -2 * ndtri(similarity.measured)
    width = len(matrices) * (side + names) + 2.8
    figure = Figure(figsize=(width, side + names + 0.9), layout="compressed")
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    scale = _scale([similarity])
    for axes, (name, distances) in zip(panels, matrices.items(), strict=True):
        shown = _matrix(axes, similarity, scale, distances)
        if len(matrices) > 1:
            axes.set_title(name)
    figure.suptitle(plain(fill(title, int(10 * side))))
    _colour_bar(figure, shown, list(panels), similarity.of_means)
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
        shown = _matrix(axes, group, scale, group.distances, numbered=False)
        axes.set_title(plain(fill(name, int(9 * side))))
    for axes in panels.flat[len(groups) :]:
        axes.remove()
    _colour_bar(figure, shown, figure.axes, any(group.of_means for group in groups.values()))
    return figure


def _scale(groups: list[Similarity]) -> Normalize:
    """Return the smallest and the largest distance of different classes."""
    distances = [g.distances[~np.eye(len(g.classes), dtype=bool)] for g in groups]
    low, high = min(float(d.min()) for d in distances), max(float(d.max()) for d in distances)
    if high - low < 1e-6 * high or high == 0:  # one pair
        low, high = 0.9 * low, 1.1 * high or 1.0
    return Normalize(low, high)


def _matrix(
    axes: Axes, similarity: Similarity, scale: Normalize, distances: Array, numbered: bool = True
) -> AxesImage:
    count = len(similarity.classes)
    distances = distances.copy()
    np.fill_diagonal(distances, math.nan)
    colours = colormaps["viridis_r"].with_extremes(bad=DIAGONAL)
    shown = axes.imshow(distances, cmap=colours, norm=scale, interpolation="nearest")
    if count <= NUMBERED and numbered:
        for (row, column), distance in np.ndenumerate(distances):
            if math.isfinite(distance):
                colour, cell = "white" if is_dark(colours(scale(distance))) else BLACK, _percent(distance)
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
        axes.set(xlabel="class", ylabel="class")
        if count > NAMED:
            axes.set_ylabel(f"{count} classes, of which {len(ticks)} are named")
    axes.spines[:].set_visible(False)
    return shown


def _colour_bar(figure: Figure, shown: AxesImage, panels: list[Axes], of_means: bool) -> None:
    """Distances on the right, the uncertainties at the same places on the left."""
    bar = figure.colorbar(shown, ax=panels, shrink=0.9, aspect=24, fraction=0.1)
    low, high = shown.get_clim()
    ticks = [tick for tick in MaxNLocator(7).tick_values(low, high) if low <= tick <= high]
    bar.set_ticks(ticks)
    bar.set_label(f"distance of {'class means' if of_means else 'the classes'}\n(standard deviations)")
    bar.outline.set_visible(False)
    left = bar.ax.secondary_yaxis("left")
    left.set_yticks(ticks, [_percent(tick) for tick in ticks])
    left.spines[:].set_visible(False)
    left.set_ylabel("uncertainty between the two (%)")


def _percent(distance: float) -> str:
    """The expected uncertainty in percent: three digits, or a power of ten if it is tiny."""
    exponent = (float(log_expected_uncertainty(distance)) + math.log(100)) / math.log(10)
    return f"{10**exponent:#.3g}" if exponent > -3 else f"$10^{{{exponent:.0f}}}$"


@rc_context(STYLE)
def receptive_fields(fields: Mapping[str, ReceptiveField]) -> Figure:
    """Draw cross-sections of all models' receptive fields, and maps of some, each over its maximum.

    Of more than four models, the first and those whose widths differ most have maps. Bands are two standard
    errors wide to either side, of what is estimated. The cell is what downsampling alone puts into the
    column of features.
    """
    mapped = _most_different([_width(field) for field in fields.values()], MAPS)
    shown = [list(fields.items())[i] for i in mapped]
    lines = sum(_label(name, field).count("\n") + 1 for name, field in fields.items()) + 2
    above = max(3.6, 0.4 + 0.21 * lines)
    below = 2.8 + 0.16 * max(fill(name, WIDEST).count("\n") for name, _ in shown)
    figure = Figure(figsize=(10, above + below), layout="constrained")
    # Two figures in one: else the legend of the first would narrow the maps.
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=(above, below))[:, 0]
    axes = top.subplots()
    axes.legend(
        handles=_cross_sections(axes, fields),
        title="full width at half maximum (pixels)",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        alignment="left",
    )
    lowest = _lowest(*(_relative(field.sensitivity, field.sensitivity) for _, field in shown))
    grid = bottom.add_gridspec(1, MAPS)
    maps = [bottom.add_subplot(grid[column]) for column in range(len(shown))]
    for axes, (name, field) in zip(maps, shown, strict=True):
        image = _map(axes, field, lowest)
        axes.set_title(plain(fill(name, WIDEST)), fontsize=SMALL)
        axes.set_xlabel("column (pixels)", fontsize=SMALL)
    maps[0].set_ylabel("row (pixels)", fontsize=SMALL)
    bar = bottom.colorbar(image, ax=maps, shrink=0.8, aspect=15)
    bar.set_label("sensitivity over its maximum", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    return figure


def _cross_sections(axes: Axes, fields: Mapping[str, ReceptiveField]) -> list[Artist]:
    handles: list[Artist] = []
    sizes = {field.cell.width for field in fields.values()}
    curves = [_relative(field.cross_section, field.cross_section) for field in fields.values()]
    for i, ((name, field), curve) in enumerate(zip(fields.items(), curves, strict=True)):
        cell = field.cell
        x = np.arange(len(curve)) + 0.5 - cell.left - cell.width / 2
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
            "linewidth": 1.8,
        }
        axes.plot(x, curve, **style)
        if field.cross_section_error is not None:
            error = 2 * np.nan_to_num(_relative(field.cross_section_error, field.cross_section))
            axes.fill_between(x, curve - error, curve + error, color=style["color"], alpha=0.2, linewidth=0)
        if len(sizes) > 1:
            for edge in (-cell.width / 2, cell.width / 2):
                axes.axvline(edge, color=style["color"], linestyle=":", linewidth=1)
        handles.append(Line2D([], [], label=_label(name, field), **style))
    if len(sizes) == 1:
        (size,) = sizes
        axes.axvspan(-size / 2, size / 2, color=GREY, alpha=0.2, linewidth=0)
        handles.append(Patch(color=GREY, alpha=0.2, label=f"downsampling alone: {size}"))
    else:
        handles.append(Line2D([], [], color=BLACK, linestyle=":", linewidth=1, label="downsampling alone"))
    axes.axhline(0.5, color=GREY, linestyle="--", linewidth=1, zorder=1)
    handles.append(Line2D([], [], color=GREY, linestyle="--", linewidth=1, label="half of the maximum"))
    axes.set_yscale("log")
    axes.set_ylim(_lowest(*curves) / 1.2, 1.3)
    axes.set_xlabel("pixels from the centre of the cell, along the width")
    axes.set_ylabel("sensitivity over its maximum")
    axes.grid()
    return handles


def _map(axes: Axes, field: ReceptiveField, lowest: float) -> AxesImage:
    values = np.maximum(np.nan_to_num(_relative(field.sensitivity, field.sensitivity)), lowest)
    image = axes.imshow(values, cmap="viridis", norm=LogNorm(lowest, 1))
    top, left, height, width = field.cell
    axes.add_patch(Rectangle((left - 0.5, top - 0.5), width, height, fill=False, color="white"))
    axes.tick_params(labelsize=SMALL)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    return image


def _width(field: ReceptiveField) -> float:
    """Return the width at half maximum; that of the image where it is wider, and 0 if there is no field."""
    if field.width_at_half_maximum is not None:
        return field.width_at_half_maximum
    return float(field.sensitivity.shape[1]) if field.sensitivity.any() else 0.0


def _most_different(widths: Sequence[float], count: int) -> list[int]:
    """Return the first place, and those whose width is furthest from all that are chosen, in their order."""
    logs, chosen = np.log1p(widths), [0]
    while len(chosen) < min(count, len(widths)):
        away = np.abs(logs[:, None] - logs[chosen]).min(1)
        away[chosen] = -1
        chosen.append(int(away.argmax()))
    return sorted(chosen)


def _label(name: str, field: ReceptiveField) -> str:
    width = field.width_at_half_maximum
    if width is not None:
        return plain(fill(f"{name}: {width:.1f}", WIDEST))
    reach = "reaches beyond the image" if field.sensitivity.any() else "zero"
    return plain(fill(f"{name}: {reach}", WIDEST))


def _relative(values: Array, whole: Array) -> Values:
    """Over the maximum of ``whole``; not a number where zero, which has no logarithm."""
    with np.errstate(invalid="ignore"):
        relative = values / whole.max()
    return np.where(relative > 0, relative, np.nan)


def _lowest(*values: Values) -> float:
    """Where a logarithmic axis begins: at the smallest value, but not arbitrarily low."""
    return max(LOWEST, min(0.1, *(float(np.nanmin(each, initial=1)) for each in values)))


@rc_context(STYLE)
def dct_basis(basis: Array) -> Figure:
    """The image of every coefficient, from `dct_basis`: green > 0, purple < 0."""
    height, width = basis.shape[:2]
    figure = Figure(figsize=_size(height, width), layout="compressed")
    axes = figure.subplots()
    largest = np.abs(basis).max()
    for i, j in np.ndindex(height, width):
        place = (j - 0.44, j + 0.44, i + 0.44, i - 0.44)
        shown = axes.imshow(basis[i, j], cmap="PRGn", vmin=-largest, vmax=largest, extent=place)
        axes.add_patch(Rectangle((j - 0.44, i - 0.44), 0.88, 0.88, fill=False, edgecolor=GREY, linewidth=0.8))
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    _frequencies(axes, height, width)
    bar = figure.colorbar(shown, ax=axes, label="weight of the position")
    bar.outline.set_visible(False)
    return figure


@rc_context(STYLE)
def mean_spread(spread: Array) -> Figure:
    """How much the class means differ in every coefficient, from `mean_spread`.

    The colours begin at 0, where a coefficient doesn't affect the classification.
    """
    height, width = spread.shape
    figure = Figure(figsize=_size(height, width), layout="compressed")
    axes = figure.subplots()
    largest = spread.max() or 1.0
    colours = colormaps["viridis"]
    shown = axes.imshow(spread, cmap=colours, vmin=0, vmax=largest)
    if max(height, width) <= WRITTEN:
        for (i, j), value in np.ndenumerate(spread):
            colour = "white" if is_dark(colours(value / largest)) else BLACK
            axes.text(j, i, f"{value:#.2g}", ha="center", va="center", color=colour, fontsize=SMALL)
    _frequencies(axes, height, width)
    bar = figure.colorbar(shown, ax=axes)
    bar.set_label("spread of class means\n(standard deviations)")
    bar.outline.set_visible(False)
    return figure


def _size(height: int, width: int) -> tuple[float, float]:
    cell = min(0.8, 8 / max(height, width))
    return max(cell * width, 1.6) + 1.9, max(cell * height, 2.0) + 0.8


def _frequencies(axes: Axes, height: int, width: int) -> None:
    axes.set_xticks(range(0, width, 1 + width // 16))
    axes.set_yticks(range(0, height, 1 + height // 16))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="frequency along the width", ylabel="frequency along the height")

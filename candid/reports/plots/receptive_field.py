"""Which pixels the features of models depend on."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from candid.reports.plots.style import BLACK, COLOURS, DASHES, GREY, SMALL, STYLE, plain

if TYPE_CHECKING:
    from candid.explanations.receptive_field import ReceptiveField

Values = NDArray[np.float64]
MAPS = 4
"""Largest number of maps; more would be too small to read."""
WIDEST = 27
"""Largest number of letters of a name in one line."""
LOWEST = 1e-5
"""Sensitivities below this share of the largest have one colour."""


@rc_context(STYLE)
def receptive_fields(fields: Mapping[str, ReceptiveField]) -> Figure:
    """Draw cross-sections of all models' receptive fields, and maps of some, each over its maximum.

    Of more than four models, the first, the last and two between them have maps. Bands are two standard
    errors wide to either side, of what is estimated. The cell is what downsampling alone puts into the
    column of features.
    """
    every = max(1, (len(fields) - 1) / (MAPS - 1))
    shown = [list(fields.items())[round(every * i)] for i in range(min(MAPS, len(fields)))]
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


def _label(name: str, field: ReceptiveField) -> str:
    width = field.width_at_half_maximum
    if width is not None:
        return plain(fill(f"{name}: {width:.1f}", WIDEST))
    reach = "reaches beyond the image" if field.sensitivity.any() else "zero"
    return plain(fill(f"{name}: {reach}", WIDEST))


def _relative(values: Tensor, whole: Tensor) -> Values:
    """Over the maximum of ``whole``, as numpy; not a number where zero, which has no logarithm."""
    found: Values = (values / whole.max()).cpu().numpy()
    return np.where(found > 0, found, np.nan)


def _lowest(*values: Values) -> float:
    """Where a logarithmic axis begins: at the smallest value, but not arbitrarily low."""
    return max(LOWEST, min(0.1, *(float(np.nanmin(each, initial=1)) for each in values)))

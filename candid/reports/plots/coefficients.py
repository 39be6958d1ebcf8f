"""The cosine coefficients of the latent: what they look like and what they contribute."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from candid.reports.plots.style import BLACK, GREY, SMALL, STYLE, is_dark

NUMBERED = 10
"""Up to this number of frequencies along either side, each cell shows its number."""


@rc_context(STYLE)
def dct_basis(basis: Tensor) -> Figure:
    """The image of every coefficient, from `dct_basis`: green > 0, purple < 0."""
    images = basis.double().cpu().numpy()
    height, width = images.shape[:2]
    figure = Figure(figsize=_size(height, width), layout="compressed")
    axes = figure.subplots()
    largest = np.abs(images).max()
    for i, j in np.ndindex(height, width):
        place = (j - 0.44, j + 0.44, i + 0.44, i - 0.44)
        shown = axes.imshow(images[i, j], cmap="PRGn", vmin=-largest, vmax=largest, extent=place)
        axes.add_patch(Rectangle((j - 0.44, i - 0.44), 0.88, 0.88, fill=False, edgecolor=GREY, linewidth=0.8))
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    _frequencies(axes, height, width)
    bar = figure.colorbar(shown, ax=axes, label="weight of the position")
    bar.outline.set_visible(False)
    return figure


@rc_context(STYLE)
def mean_spread(spread: Tensor) -> Figure:
    """How much the class means differ in every coefficient, from `mean_spread`.

    The colours begin at 0, where a coefficient doesn't affect the classification.
    """
    values = spread.double().cpu().numpy()
    height, width = values.shape
    figure = Figure(figsize=_size(height, width), layout="compressed")
    axes = figure.subplots()
    largest = values.max() or 1.0
    colours = colormaps["viridis"]
    shown = axes.imshow(values, cmap=colours, vmin=0, vmax=largest)
    if max(height, width) <= NUMBERED:
        for (i, j), value in np.ndenumerate(values):
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

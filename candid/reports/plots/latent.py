"""Paths through latent space: counterfactuals, interpolations, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from candid.reports.plots.style import COLOURS, DASHES, GREY, SMALL, STYLE, label, picture_of

if TYPE_CHECKING:
    from candid.explanations.counterfactual import Counterfactual, Interpolation


@rc_context(STYLE)
def counterfactual(found: Counterfactual, names: Sequence[str]) -> Figure:
    """Draw the images along the path, what changed, and the posteriors along it."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    draw_counterfactual(figure, found, names)
    return figure


def draw_counterfactual(figure: Figure | SubFigure, found: Counterfactual, names: Sequence[str]) -> None:
    """Draw the same as a part of a figure."""
    shown = 4
    steps = [round(i * (len(found.steps) - 1) / (shown - 1)) for i in range(shown)]
    axes = figure.subplots(1, shown + 2, width_ratios=[1] * (shown + 1) + [1.9])
    for each, step in zip(axes, steps, strict=False):
        title = "original" if step == 0 else f"{found.length * step / (len(found.steps) - 1):.1f} σ away"
        picture_of(each, found.steps[step], title)
        best = int(found.posteriors[step].argmax())
        each.set_xlabel(
            f"{label(names[best], 18)}: {100 * float(found.posteriors[step, best]):.0f} %", fontsize=SMALL
        )
    change = found.difference.float().mean(0).numpy()
    limit = max(1.0, float(np.abs(change).max()))
    drawn = axes[shown].imshow(change, cmap="PuOr_r", vmin=-limit, vmax=limit)
    axes[shown].set_title("change of brightness", fontsize=SMALL)
    axes[shown].set_xticks([])
    axes[shown].set_yticks([])
    figure.colorbar(drawn, ax=axes[shown], label="grey levels", shrink=0.6)
    reached = f"{100 * float(found.posterior[found.y]):.1f} % as an 8-bit image"
    target = f"target {100 * found.target:g} %{'' if found.reached else ', not reached'}"
    figure.suptitle(f"moved towards '{label(names[found.y])}': {reached} ({target})", fontsize=11)
    _draw_posteriors(axes[-1], found, names)


def _draw_posteriors(axes: Axes, found: Counterfactual, names: Sequence[str]) -> None:
    """Draw the posteriors of the relevant classes over the length of the path."""
    places = found.shares.double() / found.share * found.length
    ranked = found.posteriors.amax(0).argsort(descending=True).tolist()
    drawn = [found.y, *(y for y in ranked if y != found.y)][:4]
    for y, colour, dashes in zip(drawn, COLOURS, DASHES, strict=False):
        axes.plot(places, 100 * found.posteriors[:, y], dashes, color=colour, label=label(names[y], 16))
    axes.axhline(100 * found.target, color=GREY, linestyle=":", linewidth=1)
    axes.set_ylim(0, 100)
    axes.set_xlabel("way in latent space (σ)")
    axes.set_ylabel("posterior (%)")
    axes.legend(fontsize=SMALL, loc="upper left", bbox_to_anchor=(1, 1))


@rc_context(STYLE)
def interpolation(found: Sequence[Interpolation], names: Sequence[str]) -> Figure:
    """Draw one row per pair of images; below each image its most probable class."""
    ways = [(each.images, each.posteriors) for each in found]
    return _ways(ways, names, "from the image on the left to the one on the right, through latent space")


@rc_context(STYLE)
def counterfactuals(found: Sequence[Counterfactual], names: Sequence[str]) -> Figure:
    """Draw one row per image that becomes something else; below each image its most probable class."""
    ways = [(each.steps, each.posteriors) for each in found]
    title = f"images moved through latent space until another class has {100 * found[0].target:g} %"
    return _ways(ways, names, title)


def _ways(ways: Sequence[tuple[Tensor, Tensor]], names: Sequence[str], title: str) -> Figure:
    columns = len(ways[0][0])
    figure = Figure(figsize=(max(6.8, 1.2 * columns), 1.55 * len(ways) + 0.4), layout="constrained")
    rows = figure.subplots(len(ways), columns, squeeze=False)
    for row, (images, posteriors) in zip(rows, ways, strict=True):
        for axes, image, posterior in zip(row, images, posteriors, strict=True):
            picture_of(axes, image, "")
            best = int(posterior.argmax())
            axes.set_xlabel(f"{label(names[best], 12)}\n{100 * float(posterior[best]):.0f} %", fontsize=SMALL)
    figure.suptitle(title, fontsize=11)
    return figure


@rc_context(STYLE)
def samples(images: Tensor, names: Sequence[str], temperatures: Sequence[float]) -> Figure:
    """Draw images (temperatures, classes, n, C, H, W) uint8: one column per class, n rows per temperature."""
    _, classes, n = images.shape[:3]
    figure = Figure(
        figsize=(max(4.5, 1.05 * classes + 0.9), 1.05 * n * len(temperatures) + 0.6), layout="constrained"
    )
    rows = figure.subplots(len(temperatures) * n, classes, squeeze=False)
    for row, axes_row in enumerate(rows):
        for y, axes in enumerate(axes_row):
            picture_of(axes, images[row // n, y, row % n], label(names[y], 11) if row == 0 else "")
        if row % n == 0:
            axes_row[0].set_ylabel(f"T = {temperatures[row // n]:g}", fontsize=SMALL)
    figure.suptitle("samples: class means plus T times the noise of a class", fontsize=11)
    return figure


@rc_context(STYLE)
def known_photos(photos: Mapping[int, Sequence[Tensor]], names: Sequence[str]) -> Figure:
    """Draw photos (3, H, W) of classes: a row for each class, those nearest to its mean first."""
    columns = max([1, *map(len, photos.values())])
    figure = Figure(figsize=(1.2 * columns + 1.6, 1.2 * len(photos) + 0.5), layout="constrained")
    rows = figure.subplots(len(photos), columns, squeeze=False)
    for axes_row, (y, pictures) in zip(rows, photos.items(), strict=True):
        for axes in axes_row[len(pictures) :]:
            axes.set_axis_off()
        for axes, picture in zip(axes_row, pictures, strict=False):
            picture_of(axes, picture, "")
        if not pictures:
            axes_row[0].text(0, 0.5, f"no photos are kept of {label(names[y], 16)}", fontsize=SMALL)
        axes_row[0].set_ylabel(label(names[y], 16), rotation=0, ha="right", va="center")
    figure.suptitle("known photos, those nearest to the mean of their class first", fontsize=11)
    return figure

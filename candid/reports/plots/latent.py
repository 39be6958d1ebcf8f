"""Paths through latent space: counterfactuals, interpolations, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from candid._support.numbers import Array
from candid.reports.plots.style import COLOURS, DASHES, GREY, SMALL, STYLE, label, picture_of

if TYPE_CHECKING:
    from candid.explanations.counterfactual import Counterfactual, Interpolation


from textwrap import fill
from typing import Any

from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt

from candid._support.errors import CandidError
from candid.models.decision_plane import MASS, DecisionPlane
from candid.reports.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    legend,
    plain,
)


@rc_context(STYLE)
def counterfactual(changed: Counterfactual, names: Sequence[str]) -> Figure:
    """Draw the images along the path, what changed, and the posteriors along it."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    draw_counterfactual(figure, changed, names)
    return figure


def draw_counterfactual(figure: Figure | SubFigure, changed: Counterfactual, names: Sequence[str]) -> None:
    """Draw the same as a part of a figure."""
    shown = 4
    steps = [round(i * (len(changed.steps) - 1) / (shown - 1)) for i in range(shown)]
    axes = figure.subplots(1, shown + 2, width_ratios=[1] * (shown + 1) + [1.9])
    for panel, step in zip(axes, steps, strict=False):
        title = "original" if step == 0 else f"{changed.length * step / (len(changed.steps) - 1):.1f} σ away"
        picture_of(panel, changed.steps[step], title)
        best = int(changed.posteriors[step].argmax())
        panel.set_xlabel(
            f"{label(names[best], 18)}: {100 * float(changed.posteriors[step, best]):.0f} %", fontsize=SMALL
        )
    change = changed.difference.mean(0)
    limit = max(1.0, float(np.abs(change).max()))
    drawn = axes[shown].imshow(change, cmap="PuOr_r", vmin=-limit, vmax=limit)
    axes[shown].set_title("change of brightness", fontsize=SMALL)
    axes[shown].set_xticks([])
    axes[shown].set_yticks([])
    figure.colorbar(drawn, ax=axes[shown], label="grey levels", shrink=0.6)
    reached = f"{100 * float(changed.posterior[changed.y]):.1f} % as an 8-bit image"
    target = f"target {100 * changed.target:g} %{'' if changed.reached else ', not reached'}"
    figure.suptitle(f"moved towards '{label(names[changed.y])}': {reached} ({target})", fontsize=11)
    _draw_posteriors(axes[-1], changed, names)


def _draw_posteriors(axes: Axes, changed: Counterfactual, names: Sequence[str]) -> None:
    """Draw the posteriors of the relevant classes over the length of the path."""
    places = changed.shares.astype(np.float64) / changed.share * changed.length
    ranked = np.argsort(-changed.posteriors.max(0), kind="stable").tolist()
    drawn = [changed.y, *(y for y in ranked if y != changed.y)][:4]
    for y, colour, dashes in zip(drawn, COLOURS, DASHES, strict=False):
        axes.plot(places, 100 * changed.posteriors[:, y], dashes, color=colour, label=label(names[y], 16))
    axes.axhline(100 * changed.target, color=GREY, linestyle=":", linewidth=1)
    axes.set_ylim(0, 100)
    axes.set_xlabel("way in latent space (σ)")
    axes.set_ylabel("posterior (%)")
    axes.legend(fontsize=SMALL, loc="upper left", bbox_to_anchor=(1, 1))


@rc_context(STYLE)
def interpolation(ways: Sequence[Interpolation], names: Sequence[str]) -> Figure:
    """Draw one row per pair of images; below each image its most probable class."""
    drawn = [(way.images, way.posteriors) for way in ways]
    return _ways(drawn, names, "from the image on the left to the one on the right, through latent space")


@rc_context(STYLE)
def counterfactuals(changes: Sequence[Counterfactual], names: Sequence[str]) -> Figure:
    """Draw one row per image that becomes something else; below each image its most probable class."""
    ways = [(changed.steps, changed.posteriors) for changed in changes]
    title = f"images moved through latent space until another class has {100 * changes[0].target:g} %"
    return _ways(ways, names, title)


def _ways(ways: Sequence[tuple[Array, Array]], names: Sequence[str], title: str) -> Figure:
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
def samples(images: Array, names: Sequence[str], temperatures: Sequence[float]) -> Figure:
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
def known_photos(photos: Mapping[int, Sequence[Array]], names: Sequence[str]) -> Figure:
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


Values = NDArray[np.float64]
Style = dict[str, Any]
CLASS_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, "#882255", "#CDBB00", "#8C6D46", "#777777")
MARKERS = "os^DvPX<>*"
MOST_POINTS, MOST_CLASSES, GRID = 1000, 30, 400
LONGEST, SHORTEST = 32, 12  # letters of a name, and where it doesn't fit in a cell
HEIGHT = 6.0  # of the axes, inches


@rc_context(STYLE)
def decision_plane(
    plane: DecisionPlane, points: Array | None = None, labels: Array | None = None, title: str = ""
) -> Figure:
    """The cell of each class, the mixture's density, and where images lie: the whole decision space.

    Background colours mix by posterior and fade with the density; black lines are where two classes are
    equally probable, black points the means, and the dotted line is around 90 % of the mixture. ``points``
    (N, 2) are images, ``labels`` (N,) their classes (-1: unknown); of many, evenly chosen ones are drawn.
    Lengths are standard deviations of a class.
    """
    if len(plane.means) > MOST_CLASSES:
        raise CandidError(
            f"{len(plane.means)} classes in one plane can't be read: draw at most {MOST_CLASSES}."
        )
    points = np.zeros((0, 2)) if points is None else np.asarray(points, np.float64)
    labels = np.full(len(points), -1) if labels is None else labels
    (left, right), (bottom, top) = _reach(plane, points)
    x, y = np.linspace(left, right, GRID), np.linspace(bottom, top, GRID)
    logits = grid_logits(plane, x, y)

    width = HEIGHT * (right - left) / (top - bottom)
    longest = min(LONGEST, max(25, *map(len, plane.class_names)))
    figure = Figure(figsize=(width + 1.8 + 0.085 * longest, HEIGHT + 1), layout="compressed")
    axes = figure.subplots()
    axes.imshow(
        _background(plane, grid_points(x, y).reshape(-1, 2)).reshape(GRID, GRID, 3),
        extent=(left, right, bottom, top),
        origin="lower",
        interpolation="bilinear",
        zorder=0,
    )
    _boundaries(axes, x, y, logits)
    region = plane.log_density(grid_points(x, y).reshape(-1, 2)).reshape(GRID, GRID)
    axes.contour(
        x, y, region, levels=[plane.threshold()], colors=GREY, linestyles=":", linewidths=1.4, zorder=2
    )
    handles = _images(axes, plane, points, labels)
    axes.plot(*plane.means.T, "o", color=BLACK, markersize=6, markeredgecolor="white", zorder=5)
    handles.append(Line2D([], [], linestyle="", marker="o", color=BLACK, label="mean of a class"))
    holds = f"holds {100 * MASS:.0f} % of the mixture"
    handles.append(Line2D([], [], linestyle=":", linewidth=1.4, color=GREY, label=holds))
    _names(axes, plane, (x, y), logits.argmax(-1))
    set_plane_axes(axes, x, y)
    axes.set_title(plain(fill(title, 60)))
    legend(figure, handles, right=True)
    return figure


def set_plane_axes(axes: Axes, x: Values, y: Values) -> None:
    """Give ``axes`` the limits and labels of a plane in latent space."""
    axes.set(
        xlim=(x[0], x[-1]),
        ylim=(y[0], y[-1]),
        xlabel="first axis of the plane (standard deviations)",
        ylabel="second axis (standard deviations)",
    )
    axes.set_aspect("equal")


def grid_points(x: Values, y: Values) -> Values:
    """Return the points of a grid, (len(y), len(x), 2)."""
    return np.stack(np.meshgrid(x, y), -1)


def grid_logits(plane: DecisionPlane, x: Values, y: Values) -> Values:
    """Return the logits of the classes in the plane, (len(y), len(x), M)."""
    return plane.logits(grid_points(x, y))


def grid_points_per_inch(x: Values, y: Values, height: float) -> tuple[float, float]:
    """Return how many points of the grid make an inch down and along, in axes ``height`` inches high."""
    return len(y) / height, len(x) * (y[-1] - y[0]) / (x[-1] - x[0]) / height


def _reach(plane: DecisionPlane, points: Array) -> Values:
    """Left and right, bottom and top: the means with room around them, and nearly all points."""
    means = plane.means
    ends = np.stack((means.min(0) - 2.5, means.max(0) + 2.5))
    if len(points):
        low, high = np.quantile(points, (0.005, 0.995), axis=0)
        room = 0.05 * (high - low)
        ends = np.stack((np.minimum(ends[0], low - room), np.maximum(ends[1], high + room)))
    size = ends[1] - ends[0]
    missing = np.maximum(size, 0.75 * size[::-1]) - size  # the narrow side of the figure is not too narrow
    return (ends + np.stack((-missing, missing)) / 2).T


def _background(plane: DecisionPlane, grid: Array) -> Values:
    """Colours (N, 3): the classes' mixed by posterior, nearly white where the mixture puts nothing."""
    colours = np.array([to_rgb(_colour(i)) for i in range(len(plane.means))])
    log_density = plane.log_density(grid)
    strength = 0.12 + 0.5 * np.exp(0.5 * (log_density - log_density.max()))
    mixed: Values = plane.posterior(grid) @ colours
    return 1 - strength[:, None] * (1 - mixed)


def _boundaries(axes: Axes, x: Values, y: Values, logits: Values) -> None:
    """A line around each class's cell, where it is as probable as the best of the others."""
    best = logits.argmax(-1)
    second, first = np.moveaxis(np.partition(logits, -2, axis=-1)[..., -2:], -1, 0)
    for i in range(logits.shape[-1]):
        ahead = logits[..., i] - np.where(best == i, second, first)
        if ahead.min() < 0 < ahead.max():
            axes.contour(x, y, ahead, levels=[0], colors=BLACK, linewidths=1, linestyles="-", zorder=2)


def _images(axes: Axes, plane: DecisionPlane, points: Array, labels: Array) -> list[Artist]:
    """Points in the colour and marker of their class, those in another's cell with a black rim."""
    count = min(len(points), MOST_POINTS)
    chosen = np.arange(count) * len(points) // max(count, 1)
    points, labels = points[chosen], labels[chosen]
    wrong = (plane.logits(points).argmax(1) != labels) & (labels >= 0)
    handles: list[Artist] = []
    for i in [-1, *range(len(plane.means))]:
        style: Style = {"marker": "." if i < 0 else _marker(i), "color": GREY if i < 0 else _colour(i)}
        for rim, members in ((False, (labels == i) & ~wrong), (True, (labels == i) & wrong)):
            x, y = points[members].T
            edge: Style = {"edgecolors": BLACK if rim else "white", "linewidths": 0.9 if rim else 0.4}
            axes.scatter(x, y, 26, zorder=3 + rim, **edge, **style)
        if i >= 0:
            name = label(plane.class_names[i], LONGEST)
            handles.append(Line2D([], [], linestyle="", label=name, **style))
        elif (labels < 0).any():
            handles.append(Line2D([], [], linestyle="", label="image", **style))
    if wrong.any():
        rimmed: Style = {"markerfacecolor": "none", "markeredgecolor": BLACK}
        handles.append(Line2D([], [], linestyle="", marker="o", label="black rim: wrong", **rimmed))
    return handles


def _names(axes: Axes, plane: DecisionPlane, grid: tuple[Values, Values], best: NDArray[np.int64]) -> None:
    """The name of each class where its cell has most room; none, but in the legend, if it doesn't fit."""
    x, y = grid
    inch = grid_points_per_inch(x, y, HEIGHT)
    for i, name in enumerate(plane.class_names):
        cell = np.pad(best == i, 1)
        column, row = (np.abs(axis - plane.means[i, k]).argmin() for k, axis in enumerate(grid))
        cell[row + 1, column + 1] = False  # the mean stays visible
        for length in (LONGEST, SHORTEST):
            text = fill(label(name, length), 16)
            lines = text.split("\n")
            size = 0.2 * len(lines), 0.09 * max(map(len, lines)) + 0.1  # inches
            sampling = [2 / (inches * points) for inches, points in zip(size, inch, strict=True)]
            room = distance_transform_edt(cell, sampling=sampling)
            if room.max() >= 1.2:  # in halves of the text's box, whose corners are further out
                row, column = np.unravel_index(room.argmax(), room.shape)
                box = {"color": "white", "alpha": 0.75, "pad": 1.5, "linewidth": 0}
                place: Style = {"ha": "center", "va": "center", "weight": "bold", "zorder": 6, "bbox": box}
                axes.text(x[column - 1], y[row - 1], text, **place)
                break


def _colour(i: int) -> str:
    return CLASS_COLOURS[i % len(CLASS_COLOURS)]


def _marker(i: int) -> str:
    return MARKERS[(i + i // len(MARKERS)) % len(MARKERS)]

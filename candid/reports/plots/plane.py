"""The decision space of a few classes in a plane."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.flow.plane import DecisionPlane
from candid.reports.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    label,
    legend,
    plain,
)

Values = NDArray[np.float64]
Style = dict[str, Any]
CLASS_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, "#882255", "#CDBB00", "#8C6D46", "#777777")
MARKERS = "os^DvPX<>*"
MOST_POINTS, MOST_CLASSES, GRID = 1000, 30, 400
LONGEST, SHORTEST = 32, 12  # letters of a name, and where it doesn't fit in a cell
HEIGHT = 6.0  # of the axes, inches


@rc_context(STYLE)
def decision_plane(
    plane: DecisionPlane, points: Tensor | None = None, labels: Tensor | None = None, title: str = ""
) -> Figure:
    """The cell of each class, the mixture's density, and where images lie: the whole decision space.

    Background colours mix by posterior and fade with the density; black lines are where two classes are
    equally probable, black points the means. ``points`` (N, 2) are images, ``labels`` (N,) their classes (-1:
    unknown); of many, evenly chosen ones are drawn. Lengths are standard deviations of a class.
    """
    if len(plane.means) > MOST_CLASSES:
        raise CandidError(
            f"{len(plane.means)} classes in one plane can't be read: draw at most {MOST_CLASSES}."
        )
    points = torch.zeros(0, 2) if points is None else points.detach().cpu().double()
    labels = torch.full((len(points),), -1) if labels is None else labels.cpu()
    (left, right), (bottom, top) = _reach(plane, points)
    x, y = np.linspace(left, right, GRID), np.linspace(bottom, top, GRID)
    logits = grid_logits(plane, x, y)

    width = HEIGHT * (right - left) / (top - bottom)
    longest = min(LONGEST, max(16, *map(len, plane.class_names)))
    figure = Figure(figsize=(width + 1.8 + 0.085 * longest, HEIGHT + 1), layout="compressed")
    axes = figure.subplots()
    axes.imshow(
        _background(plane, grid_points(x, y).view(-1, 2)).reshape(GRID, GRID, 3),
        extent=(left, right, bottom, top),
        origin="lower",
        interpolation="bilinear",
        zorder=0,
    )
    _boundaries(axes, x, y, logits)
    handles = _images(axes, plane, points, labels)
    axes.plot(*plane.means.T.numpy(), "o", color=BLACK, markersize=6, markeredgecolor="white", zorder=5)
    handles.append(Line2D([], [], linestyle="", marker="o", color=BLACK, label="mean of a class"))
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


def grid_points(x: Values, y: Values) -> Tensor:
    """Return the points of a grid, (len(y), len(x), 2)."""
    return torch.from_numpy(np.stack(np.meshgrid(x, y), -1))


def grid_logits(plane: DecisionPlane, x: Values, y: Values) -> Values:
    """Return the logits of the classes in the plane, (len(y), len(x), M)."""
    return plane.logits(grid_points(x, y)).numpy()


def grid_points_per_inch(x: Values, y: Values, height: float) -> tuple[float, float]:
    """Return how many points of the grid make an inch down and along, in axes ``height`` inches high."""
    return len(y) / height, len(x) * (y[-1] - y[0]) / (x[-1] - x[0]) / height


def _reach(plane: DecisionPlane, points: Tensor) -> Values:
    """Left and right, bottom and top: the means with room around them, and nearly all points."""
    means = plane.means.numpy()
    ends = np.stack((means.min(0) - 2.5, means.max(0) + 2.5))
    if len(points):
        low, high = np.quantile(points.numpy(), (0.005, 0.995), axis=0)
        room = 0.05 * (high - low)
        ends = np.stack((np.minimum(ends[0], low - room), np.maximum(ends[1], high + room)))
    size = ends[1] - ends[0]
    missing = np.maximum(size, 0.75 * size[::-1]) - size  # the narrow side of the figure is not too narrow
    return (ends + np.stack((-missing, missing)) / 2).T


def _background(plane: DecisionPlane, grid: Tensor) -> Values:
    """Colours (N, 3): the classes' mixed by posterior, nearly white where the mixture puts nothing."""
    colours = np.array([to_rgb(_colour(i)) for i in range(len(plane.means))])
    log_density = plane.log_density(grid).numpy()
    strength = 0.12 + 0.5 * np.exp(0.5 * (log_density - log_density.max()))
    mixed: Values = plane.posterior(grid).numpy() @ colours
    return 1 - strength[:, None] * (1 - mixed)


def _boundaries(axes: Axes, x: Values, y: Values, logits: Values) -> None:
    """A line around each class's cell, where it is as probable as the best of the others."""
    best = logits.argmax(-1)
    second, first = np.moveaxis(np.partition(logits, -2, axis=-1)[..., -2:], -1, 0)
    for i in range(logits.shape[-1]):
        ahead = logits[..., i] - np.where(best == i, second, first)
        if ahead.min() < 0 < ahead.max():
            axes.contour(x, y, ahead, levels=[0], colors=BLACK, linewidths=1, linestyles="-", zorder=2)


def _images(axes: Axes, plane: DecisionPlane, points: Tensor, labels: Tensor) -> list[Artist]:
    """Points in the colour and marker of their class, those in another's cell with a black rim."""
    count = min(len(points), MOST_POINTS)
    chosen = torch.arange(count) * len(points) // max(count, 1)
    points, labels = points[chosen], labels[chosen]
    wrong = (plane.logits(points).argmax(1) != labels) & (labels >= 0)
    handles: list[Artist] = []
    for i in [-1, *range(len(plane.means))]:
        style: Style = {"marker": "." if i < 0 else _marker(i), "color": GREY if i < 0 else _colour(i)}
        for rim, members in ((False, (labels == i) & ~wrong), (True, (labels == i) & wrong)):
            x, y = points[members].T.numpy()
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
        column, row = (np.abs(axis - plane.means[i, k].item()).argmin() for k, axis in enumerate(grid))
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

"""The paths of attacks through latent space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, minimum_filter

from candid._support.errors import CandidError
from candid._support.text import number
from candid.reports.plots.latent import GRID, Style, Values, grid_logits, grid_points_per_inch, set_plane_axes
from candid.reports.plots.style import (
    BLACK,
    COLOURS,
    GREY,
    SMALL,
    STYLE,
    eight_bit,
    label,
    picture_of,
    plain,
    round_down,
)

if TYPE_CHECKING:
    from candid.robustness.attacks.trajectories import Trajectories

MARKERS = "os^DvP"
MOST_PATHS, MOST_CLASSES, MOST_LINES = len(MARKERS), 30, 10
HEIGHT, PICTURE = 5.0, 1.25  # of the plane and of an image, inches
LEGEND = 2.9  # width, inches
LONGEST, SHORTEST = 24, 10  # letters of a name, and where there is less room
SHADE = "#ececec"


@rc_context(STYLE)
def trajectories(attacks: Sequence[Trajectories], title: str = "") -> Figure:
    """A column for each kappa: the paths in the plane, and below what became of the images.

    Paths are dotted until the model is fooled. Black lines are where the model decides between two classes,
    dashed ones where the target is ahead by kappa. In a plane that is not exact there are none: the model
    decides by what lies outside it, too. Of more than ten classes, those without room for it in their cell
    have no name.
    """
    reaches = [_reach(attack) for attack in attacks]
    widths = [HEIGHT * (right - left) / (top - bottom) + 0.8 for (left, right), (bottom, top) in reaches]
    heights = HEIGHT + 1.1, 3 * (PICTURE + 0.3)
    figure = Figure(figsize=(sum(widths) + LEGEND, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(1, len(attacks) + 1, width_ratios=[*widths, LEGEND])
    *columns, right = parts
    handles: dict[str, Artist] = {}
    for column, attack, reach, width in zip(columns, attacks, reaches, widths, strict=True):
        upper, lower = column.subfigures(2, 1, height_ratios=heights)
        handles |= {str(handle.get_label()): handle for handle in _draw_plane(upper, attack, reach)}
        _draw_images(lower, attack, width)
    right.legend(handles=list(handles.values()), loc="upper left", alignment="left")
    figure.suptitle(plain(fill(title, 80)))
    return figure


def _draw_plane(figure: SubFigure, attack: Trajectories, reach: Values) -> list[Artist]:
    """Draw paths, cells and names; return what the legend says."""
    if len(attack.paths) > MOST_PATHS:
        raise CandidError(f"{len(attack.paths)} paths are too many to see: draw at most {MOST_PATHS}.")
    if len(attack.classes) > MOST_CLASSES:
        raise CandidError(f"{len(attack.classes)} classes are too many to see: draw at most {MOST_CLASSES}.")
    axes: Axes = figure.subplots()
    (left, right), (bottom, top) = reach
    x, y = np.linspace(left, right, GRID), np.linspace(bottom, top, GRID)
    handles = [*_draw_paths(axes, attack), *_draw_cells(axes, attack, x, y)]
    set_plane_axes(axes, x, y)
    _draw_names(axes, attack, x, y)
    said = f"κ = {number(attack.kappa)}"
    if not attack.exact:
        said += f"\nnearest plane to the means of {len(attack.classes)} of {len(attack.class_names)} classes:"
        said += "\na projection, without decision boundaries"
    axes.set_title(said, fontsize=SMALL)
    return handles


def _reach(attack: Trajectories) -> Values:
    """Left and right, bottom and top: all points and means with room around them, not too narrow."""
    shown = np.concatenate([attack.plane.means, *(path.points for path in attack.paths)])
    ends = np.stack((shown.min(0), shown.max(0)))
    room = 0.08 * (ends[1] - ends[0]).max() + 0.1
    size = ends[1] - ends[0] + 2 * room
    missing = np.maximum(size, [0.95, 0.7] * size[::-1]) - size
    return (ends + np.stack((-missing / 2 - room, missing / 2 + room))).T


def _draw_cells(axes: Axes, attack: Trajectories, x: Values, y: Values) -> list[Artist]:
    """Means and, in an exact plane, boundaries and the target's region; returns what the legend says."""
    target = attack.classes.index(attack.target)
    handles: list[Artist] = []
    if attack.exact:
        logits = grid_logits(attack.plane, x, y)
        ahead = [own - np.delete(logits, i, -1).max(-1) for i, own in enumerate(np.moveaxis(logits, -1, 0))]
        drawn: list[tuple[str, Any, float, list[Values]]] = [("decision boundary", "-", 0.0, ahead)]
        if 0 < attack.kappa < math.inf:
            drawn.append(("ahead by κ", "--", attack.kappa, [ahead[target]]))
        for said, dashes, level, leads in drawn:
            handles.append(Line2D([], [], color=BLACK, linewidth=1.2, linestyle=dashes, label=said))
            for lead in leads:
                if lead.min() < level < lead.max():
                    axes.contour(x, y, lead, [level], colors=BLACK, linewidths=1.2, linestyles=dashes)
        if ahead[target].max() > 0:
            axes.contourf(x, y, ahead[target], [0, ahead[target].max()], colors=[SHADE], zorder=0)
        handles.append(Patch(color=SHADE, label="decided for the target"))
    others = [i for i in range(len(attack.classes)) if i != target]
    for members, size, said in ((others, 4.5, "mean of a class"), ([target], 11, "mean of the target")):
        style: Style = {"marker": "o", "color": BLACK, "linestyle": "", "markersize": size}
        axes.plot(*attack.plane.means[members].T, markeredgecolor="white", zorder=5, **style)
        handles.append(Line2D([], [], label=said, **style))
    return handles


def _draw_paths(axes: Axes, attack: Trajectories) -> list[Artist]:
    """Dotted before and solid after the model is fooled, open markers at the start, filled at the end."""
    handles: list[Artist] = []
    for i, path in enumerate(attack.paths):
        style: Style = {"color": COLOURS[i], "linewidth": 2, "zorder": 4}
        points, first = path.points, path.first
        axes.plot(*points[: first + 1].T, linestyle=":", **style)
        axes.plot(*points[first:].T, linestyle="-", **style | {"linewidth": 1.2})
        marker: Style = {"marker": MARKERS[i], "markersize": 8, "linestyle": "", "zorder": 6}
        axes.plot(*points[0], markerfacecolor="white", markeredgecolor=COLOURS[i], **marker)
        axes.plot(*points[-1], color=COLOURS[i], markeredgecolor=BLACK, **marker)
        said = f"{i + 1}: {label(attack.class_names[path.label], LONGEST)}"
        handles.append(Line2D([], [], color=COLOURS[i], marker=MARKERS[i], linewidth=2, label=said))
    handles += [
        Line2D([], [], linestyle=":", label="until the target first leads by κ", color=GREY, linewidth=2),
        Line2D([], [], linestyle="-", label="after that", color=GREY, linewidth=1.2),
        Line2D([], [], linestyle="", marker="o", markerfacecolor="white", color=GREY, label="original"),
        Line2D([], [], linestyle="", marker="o", markeredgecolor=BLACK, color=GREY, label="best attack"),
    ]
    return handles


def _draw_names(axes: Axes, attack: Trajectories, x: Values, y: Values) -> None:
    """Draw the names of classes off the paths: in exact cells, or else of a few, with a line to each."""
    cells = grid_logits(attack.plane, x, y).argmax(-1)
    free = np.ones(cells.shape, bool)
    for points in (*attack.plane.means[:, None], *(path.points for path in attack.paths)):
        free[_on_grid(points, x, y)] = False
    inch = grid_points_per_inch(x, y, HEIGHT)
    sizes = np.bincount(cells.ravel(), minlength=len(attack.classes))
    sizes[attack.classes.index(attack.target)] = -1  # has the first choice
    for i in sizes.argsort():
        cell, aim = cells == i, attack.plane.means[i]
        wish = aim + (not attack.exact) * 0.06 * (y[-1] - y[0]) * aim / max(1e-9, np.hypot(*aim))  # outwards
        for inside, length in ((True, LONGEST), (True, SHORTEST), (False, LONGEST)):
            if inside > attack.exact or (not inside and len(attack.classes) > MOST_LINES):
                continue
            if inside < attack.exact and cell.any():  # the means may be too close together to point at
                row, column = np.unravel_index(distance_transform_edt(cell).argmax(), cell.shape)
                wish = aim = np.array([x[column], y[row]])
            text = fill(label(attack.plane.class_names[i], length), 14)
            lines = text.split("\n")
            high, wide = 0.17 * len(lines) + 0.12, 0.085 * max(map(len, lines)) + 0.12  # inches
            box = math.ceil(high * inch[0]), math.ceil(wide * inch[1])
            fits = minimum_filter(free & cell if inside else free, box, mode="constant", cval=False)
            if not fits.any():
                continue
            away = np.where(fits, np.hypot(x - wish[0], y[:, None] - wish[1]), math.inf)
            row, column = np.unravel_index(away.argmin(), away.shape)
            place = x[column], y[row]
            if not inside:
                axes.plot(*zip(aim, place, strict=True), color=GREY, linewidth=0.7, zorder=3)
                free[_on_grid(np.stack((aim, place)), x, y)] = False
            patch: Style = {"color": "white", "alpha": 0.8, "pad": 1, "linewidth": 0}
            axes.text(*place, text, ha="center", va="center", size=10, zorder=7, bbox=patch)
            down, along = max(0, row - box[0] // 2), max(0, column - box[1] // 2)
            free[down : row + box[0] // 2 + 1, along : column + box[1] // 2 + 1] = False
            break


def _draw_images(figure: SubFigure, attack: Trajectories, width: float) -> None:
    """Original, attacked image and difference of each path, in a frame of its colour; ``width`` in inches."""
    longest = min(LONGEST, int(12 * width / len(attack.paths)) - 8)  # letters that fit above an image
    changes = [np.abs(path.attacked.astype(np.float64) - path.original) for path in attack.paths]
    factor = round_down(1 / max(1e-9, max(float(np.quantile(change, 0.999)) for change in changes)))
    rows: Any = figure.subplots(3, len(attack.paths), squeeze=False)
    for i, (path, change) in enumerate(zip(attack.paths, changes, strict=True)):
        name, seen = (label(attack.class_names[y], longest) for y in (path.label, path.predicted))
        titles = (
            f"{i + 1}: {name}" + ("" if path.label == path.predicted else f"\nseen as {seen}"),
            f"p(target) = {100 * path.posterior:.3g} %" + ("" if path.fooled.any() else "\nnot enough"),
            f"L2 = {path.distance:.3g}",
        )
        images = (path.original, path.attacked, np.minimum(factor * change, 1))
        for axes, image, title in zip(rows[:, i], images, titles, strict=True):
            picture_of(axes, eight_bit(image), title)
            axes.spines[:].set(visible=True, color=COLOURS[i], linewidth=2.5)
    for axes, said in zip(rows[:, 0], ("original", "attacked", f"difference × {factor:g}"), strict=True):
        axes.set_ylabel(said)


def _on_grid(points: Values, x: Values, y: Values) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the grid's points that a path goes through."""
    steps = np.linspace(0, len(points) - 1, 20 * GRID)
    way = [np.interp(steps, np.arange(len(points)), axis) for axis in points.T]
    column, row = (np.interp(way[i], ticks, np.arange(GRID)).round() for i, ticks in enumerate((x, y)))
    return row.astype(np.int64), column.astype(np.int64)

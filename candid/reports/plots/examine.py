"""Figures of what a model says about one image, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Ellipse, Rectangle

from candid._support.numbers import Array
from candid._support.text import listed
from candid.data.images import centre_box
from candid.data.thumbnails import whole_photo
from candid.explanations.class_maps import ClassMaps
from candid.explanations.decision_space import MASS
from candid.reports.plots.latent import draw_counterfactual
from candid.reports.plots.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    SMALL,
    STYLE,
    VERMILION,
    label,
    picture_of,
    plain,
    short_path,
)
from candid.trust.verdict import KINDS

if TYPE_CHECKING:
    from candid.explanations.decision_space import DecisionSpace
    from candid.explanations.explainer import Explanation, NearestPhotos
    from candid.trust.verdict import Examination

TOP = 5
"""Classes that are shown."""
_REGION = {
    "candid": f"region holds {100 * MASS:.0f} % of its class",
    "paper": f"circle holds {100 * MASS:.0f} % of its class in each direction",
}
MOST_MISSING = 3
"""Classes without kept photos that are named."""
FOR_AND_AGAINST, INFORMATION = "RdBu_r", "viridis"


@rc_context(STYLE)
def examination(examined: Examination, explanation: Explanation, names: Sequence[str]) -> Figure:
    """One page: the image, its classes, where it lies between them, what speaks for which class."""
    if explanation.space is None:
        return _without_space(examined, explanation, names)
    assert explanation.summary is not None and examined.evidence is not None
    changed = None if isinstance(explanation.changed, str) else explanation.changed
    maps, nearest = explanation.maps, explanation.nearest
    heights = [4.1, *([] if isinstance(maps, str) else [2.8])]
    heights += [2.6] if changed is not None else [1.9] if nearest is not None else []
    figure = Figure(figsize=(11, 0.4 + sum(heights)), layout="constrained")
    rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    picture, bars, space = rows[0].subplots(1, 3, width_ratios=[1, 1, 1.5])
    image = examined.evidence.image
    if not isinstance(maps, str) and maps.saliency is not None:
        picture_of(picture, image, "as the model sees it")
        _draw_heatmaps(rows[1], image, maps, names)
    else:
        photo = _Photo.of(examined)
        photo.draw(picture)
        if not isinstance(maps, str):
            _draw_photo_maps(rows[1], photo, maps, names)
    _draw_classes(bars, examined)
    draw_decision_space(space, explanation.space, names)
    if changed is not None:
        draw_counterfactual(rows[2], changed, names)
    elif nearest is not None:
        _draw_nearest(rows[-1], nearest, names)
    sentence = textwrap.fill(f"{explanation.summary.sentence} {explanation.deciding}".strip(), 120)
    missing = {"No counterfactual": explanation.changed, "No heatmaps": maps}
    for what, reason in missing.items():
        if isinstance(reason, str):
            sentence += "\n" + textwrap.fill(f"{what}: {reason}", 120)
    _set_title(figure, examined, sentence)
    return figure


def _without_space(examined: Examination, explanation: Explanation, names: Sequence[str]) -> Figure:
    """Draw the image, its classes, and what speaks for each of the most probable ones."""
    assert examined.evidence is not None
    image, maps = examined.evidence.image, explanation.maps
    assert not isinstance(maps, str)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[3, 3])
    picture, bars = rows[0].subplots(1, 2, width_ratios=[1, 1.5])
    picture_of(picture, image, "as the model sees it")
    _draw_classes(bars, examined)
    axes = list(rows[1].subplots(1, len(maps.classes), squeeze=False)[0])
    shown = _draw_maps(axes, maps, lambda panel, values, **scale: _overlay(panel, image, values, **scale))
    for i, panel in enumerate(axes):
        total, baseline = maps.scores[i] - maps.baselines[i], maps.baselines[i]
        title = f"{_why(maps, i, names)}: {total:+.1f} nats\n(average image {baseline:+.1f})"
        panel.set_title(title, fontsize=SMALL)
    bar = rows[1].colorbar(shown, ax=axes, shrink=0.8, fraction=0.025)
    bar.set_label("against — for (nats)\nadds up to the score")
    _set_title(figure, examined)
    return figure


def _set_title(figure: Figure, examined: Examination, sentence: str = "") -> None:
    """Write the name of the file and the sentence above the figure."""
    title = plain(f"{short_path(Path(examined.path).name, 60)}\n{sentence}".rstrip())
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)


@dataclass(frozen=True)
class _Photo:
    """The whole photo, and the square of it that the model sees."""

    pixels: Array
    """(3, H, W) uint8."""
    box: tuple[float, float, float, float]
    """Left, top, right, bottom."""

    @classmethod
    def of(cls, examined: Examination) -> _Photo:
        """Read the file; an image that was never in one is shown as the model sees it."""
        assert examined.evidence is not None
        seen = examined.evidence.image
        whole = whole_photo(Path(examined.path)) if examined.path else None
        pixels = seen if whole is None else whole
        _, height, width = pixels.shape
        return cls(pixels, centre_box(width, height, (seen.shape[1], seen.shape[2])))

    def draw(self, axes: Axes) -> None:
        """Draw the photo and outline what the model sees."""
        left, top, right, bottom = self.box
        _, height, width = self.pixels.shape
        cropped = width - (right - left) > 2 or height - (bottom - top) > 2
        picture_of(axes, self.pixels, "outlined: what the model sees" if cropped else "the photo")
        if cropped:
            corner = (left - 0.5, top - 0.5)
            axes.add_patch(
                Rectangle(corner, right - left, bottom - top, fill=False, edgecolor=ORANGE, lw=1.5)
            )

    def overlay(self, axes: Axes, values: Array, **scale: Any) -> Any:
        """Draw ``values`` (h, w) over the square that the model sees."""
        left, top, right, bottom = (edge - 0.5 for edge in self.box)
        _, height, width = self.pixels.shape
        axes.imshow(self.pixels.mean(0), cmap="gray", vmin=0, vmax=255)
        extent = (left, right, bottom, top)
        shown = axes.imshow(
            values, cmap=FOR_AND_AGAINST, alpha=0.6, extent=extent, interpolation="bilinear", **scale
        )
        axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[])
        return shown


@rc_context(STYLE)
def heatmaps(image: Array, maps: ClassMaps, names: Sequence[str]) -> Figure:
    """The image, its saliency and the posterior heatmaps of its classes; ``image`` is (C, H, W) uint8."""
    figure = Figure(figsize=(2.6 * (2 + len(maps.classes)), 3), layout="constrained")
    _draw_heatmaps(figure, image, maps, names, with_image=True)
    return figure


def _draw_classes(axes: Axes, examined: Examination) -> None:
    best = list(examined.posterior)[:TOP]
    colours = [BLUE if examined.classes is None or name in examined.classes else GREY for name in best]
    shares = [100 * examined.posterior[name] for name in best]
    places = range(len(shares))
    axes.barh(places, shares, color=colours)
    axes.set_yticks(places, [label(name, 18) for name in best])
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xticks([0, 50, 100])
    for place, share in enumerate(shares):
        axes.text(share + 2, place, f"{share:.0f}", va="center", fontsize=SMALL)
    axes.set_xlabel("posterior (%); grey: ruled out" if examined.classes else "posterior (%)")
    if examined.verdict is not None and examined.p_value is not None:
        axes.set_title(
            f"p = {examined.p_value:.2g}: {examined.verdict}",
            color=KINDS[examined.verdict].colour,
            fontweight="bold",
        )


def draw_decision_space(axes: Axes, space: DecisionSpace, names: Sequence[str]) -> None:
    """Draw the image, the regions of the two most probable classes, the means of the others.

    What lies outside of the span is named above; the star of a novel image is hollow.
    """
    for i, colour in enumerate((VERMILION, BLUE)):
        centre = space.means_along[i], 0
        size = 2 * space.half_width, 2 * space.half_height
        axes.add_patch(Ellipse(centre, *size, facecolor=colour, alpha=0.22, edgecolor="none"))
        axes.add_patch(Ellipse(centre, *size, fill=False, edgecolor=colour, linewidth=1.5))
        axes.plot(
            *centre,
            "os"[i],
            color=colour,
            clip_on=False,
            zorder=4,
            label=f"{label(names[space.classes[i]], 18)} ({100 * space.posterior[i]:.0f} %)",
        )
    if len(space.classes) > 2:
        others = (
            f"means of the next {len(space.classes) - 2}" if len(space.classes) > 3 else "mean of the next"
        )
        axes.plot(
            space.means_along[2:], space.means_away[2:], "D", color=GREY, markersize=4, label=others, zorder=3
        )
    axes.axvline(space.boundary, color=GREY, linestyle=":", linewidth=1)
    novel = space.verdict == "novel"
    axes.plot(
        space.along,
        space.away,
        "*",
        color=VERMILION if novel else BLACK,
        markerfacecolor="white" if novel else BLACK,
        markersize=15,
        zorder=5,
        label="this image (novel)" if novel else "this image",
    )
    edge = max(abs(space.along), space.distance / 2 + space.half_width) * 1.12
    axes.set_xlim(-edge, edge)
    axes.set_ylim(0, 1.15 * max(space.away, *space.means_away, space.half_height))
    axes.set_xlabel("along the line through the two means (σ)")
    axes.set_ylabel("distance from it (σ)")
    title = f"outside of this drawing: {space.outside_ratio:.2f} × the expected distance"
    if space.p_value is not None:
        title += f"\nthe image as a whole: p = {space.p_value:.2g}{' (novel)' if novel else ''}"
    axes.set_title(title, fontsize=SMALL, color=VERMILION if novel else BLACK)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        title=f"each {_REGION[space.regions]}",
        fontsize=SMALL,
        title_fontsize=SMALL,
        ncols=2,
    )


def _draw_heatmaps(
    figure: Figure | SubFigure, image: Array, maps: ClassMaps, names: Sequence[str], with_image: bool = False
) -> None:
    """Draw saliency and one map per class, all classes on one scale."""
    assert maps.saliency is not None
    axes = list(figure.subplots(1, len(maps.classes) + 1 + with_image, squeeze=False)[0])
    if with_image:
        picture_of(axes.pop(0), image, "as the model sees it")
    information = _overlay(axes[0], image, maps.saliency, cmap=INFORMATION)
    axes[0].set_title("saliency", fontsize=SMALL)
    figure.colorbar(information, ax=axes[0], label="nats", shrink=0.8, fraction=0.05)
    shown = _draw_maps(axes[1:], maps, lambda panel, values, **scale: _overlay(panel, image, values, **scale))
    for panel, y, score in zip(axes[1:], maps.classes, maps.scores, strict=True):
        panel.set_title(label(names[y], 22), fontsize=SMALL)
        panel.text(
            0.97,
            0.03,
            f"{100 * np.exp(score):.0f} %",
            transform=panel.transAxes,
            color="white",
            fontweight="bold",
            ha="right",
            va="bottom",
            bbox={"facecolor": "black", "alpha": 0.65, "edgecolor": "none", "pad": 2},
        )
    bar = figure.colorbar(shown, ax=axes[1:], shrink=0.8, fraction=0.025)
    unit = "\n(nats; the paper's rule)" if maps.rule == "paper" else " (nats)"
    bar.set_label(f"against — for the class{unit}")


def _draw_photo_maps(
    figure: Figure | SubFigure, photo: _Photo, maps: ClassMaps, names: Sequence[str]
) -> None:
    """Draw the maps on one scale, each with what it adds up to."""
    axes = list(figure.subplots(1, len(maps.classes), squeeze=False)[0])
    shown = _draw_maps(axes, maps, photo.overlay)
    for i, panel in enumerate(axes):
        panel.set_title(_why(maps, i, names), fontsize=SMALL)
        score, baseline = maps.scores[i], maps.baselines[i]
        sums = f"score {score:+.2f} = map {score - baseline:+.2f}\n+ average photo {baseline:+.2f}"
        panel.set_xlabel(sums.replace("-", "−"), fontsize=SMALL)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8, fraction=0.025)
    bar.set_label("against — for (nats)\nadds up to the score")


def _draw_maps(axes: Sequence[Axes], maps: ClassMaps, overlay: Callable[..., Any]) -> Any:
    """Draw one map per class by ``overlay``, all on one scale, and return the last."""
    largest = max(float(np.abs(maps.values).max()), 1e-9)
    shown: Any = None
    for panel, values in zip(axes, maps.values, strict=True):
        shown = overlay(panel, values, vmin=-largest, vmax=largest)
    return shown


def _why(maps: ClassMaps, i: int, names: Sequence[str]) -> str:
    """Return what a map shows: why its class, perhaps compared with another one."""
    why = f"why {label(names[maps.classes[i]], 20)}"
    if maps.against is None or i < len(maps.classes) - 1:
        return why
    return f"{why}, not {label(names[maps.against], 20)}"


def _draw_nearest(figure: Figure | SubFigure, nearest: NearestPhotos, names: Sequence[str]) -> None:
    """Draw the nearest known photos, and those of the class that it could be instead."""
    groups = [
        ("nearest known photos", nearest.nearest),
        (f"if it were {label(names[nearest.instead], 20)} instead: nearest photos", nearest.of_instead),
    ]
    groups = [group for group in groups if group[1]]
    if nearest.missing:
        of = [label(names[y], 20) for y in nearest.missing[:MOST_MISSING]]
        if len(nearest.missing) > MOST_MISSING:
            of.append(f"{len(nearest.missing) - MOST_MISSING} other classes")
        figure.supxlabel(f"no photos of {listed(of)} are kept with this model", fontsize=SMALL)
    parts: Any = figure.subfigures(
        1, len(groups), width_ratios=[len(members) for _, members in groups], squeeze=False
    )[0]
    for part, (title, photos) in zip(parts, groups, strict=True):
        part.suptitle(title, fontsize=SMALL + 1)
        for axes, photo in zip(part.subplots(1, len(photos), squeeze=False)[0], photos, strict=True):
            picture_of(axes, photo.picture, label(names[photo.y], 16))


def _overlay(axes: Axes, image: Array, values: Array, cmap: str = FOR_AND_AGAINST, **scale: Any) -> Any:
    """``values`` of the positions, each over the part of the image that it stands for."""
    _, height, width = image.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(image.mean(0), cmap="gray", vmin=0, vmax=255, extent=extent)
    shown = axes.imshow(values, cmap=cmap, alpha=0.6, extent=extent, interpolation="bilinear", **scale)
    axes.set_xticks([])
    axes.set_yticks([])
    return shown

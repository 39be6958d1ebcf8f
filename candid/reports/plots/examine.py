"""Figures of what a model says about one image, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Ellipse, Rectangle
from torch import Tensor

from candid._support.text import listed
from candid.data.images import centre_box
from candid.data.thumbnails import whole_photo
from candid.explanations.decision_space import MASS
from candid.explanations.photo_maps import PhotoMaps
from candid.reports.plots.latent import draw_counterfactual
from candid.reports.plots.style import (
    BLACK,
    BLUE,
    GREEN,
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

if TYPE_CHECKING:
    from candid.explanations.decision_space import DecisionSpace, Summary
    from candid.explanations.explainer import Explanation
    from candid.explanations.heatmaps import Heatmaps
    from candid.explanations.nearest_photos import NearestPhotos
    from candid.trust.verdict import Examination

TOP = 5
"""Classes that are shown."""
MOST_MISSING = 3
"""Classes without kept photos that are named."""
VERDICT_COLOURS = {"accept": GREEN, "ambiguous": ORANGE, "novel": VERMILION}
FOR_AND_AGAINST, INFORMATION = "RdBu_r", "viridis"


@rc_context(STYLE)
def examination(examined: Examination, explanation: Explanation, names: Sequence[str]) -> Figure:
    """One page: the image, its classes, where it lies between them, what speaks for which class."""
    changed = None if isinstance(explanation.changed, str) else explanation.changed
    maps, nearest = explanation.maps, explanation.nearest
    heights = [4.1, *([] if isinstance(maps, str) else [2.8])]
    heights += [2.6] if changed is not None else [1.9] if nearest is not None else []
    figure = Figure(figsize=(11, 0.4 + sum(heights)), layout="constrained")
    rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    picture, bars, space = rows[0].subplots(1, 3, width_ratios=[1, 1, 1.5])
    assert examined.evidence is not None
    image = examined.evidence.image
    photo = _Photo.of(examined) if nearest is not None or isinstance(maps, PhotoMaps | str) else None
    if photo is None:
        picture_of(picture, image, "as the model sees it")
    else:
        photo.draw(picture)
    _draw_classes(bars, examined)
    draw_decision_space(space, explanation.space, names)
    if isinstance(maps, PhotoMaps):
        assert photo is not None
        _draw_photo_maps(rows[1], photo, maps, names)
    elif not isinstance(maps, str):
        _draw_heatmaps(rows[1], image, maps, names)
    if changed is not None:
        draw_counterfactual(rows[2], changed, names)
    elif nearest is not None:
        _draw_nearest(rows[-1], nearest, names)
    sentence = textwrap.fill(explanation.summary.sentence, 120)
    missing = {"No counterfactual": explanation.changed, "No heatmaps": maps}
    for what, reason in missing.items():
        if isinstance(reason, str):
            sentence += "\n" + textwrap.fill(f"{what}: {reason}", 120)
    figure.suptitle(
        plain(f"{short_path(Path(examined.path).name, 60)}\n{sentence}"), x=0.01, ha="left", fontsize=11
    )
    return figure


@dataclass(frozen=True)
class _Photo:
    """The whole photo, and the square of it that the model sees."""

    pixels: Tensor
    """(3, H, W) uint8."""
    box: tuple[float, float, float, float]
    """Left, top, right, bottom."""

    @classmethod
    def of(cls, examined: Examination) -> _Photo:
        """Read the file; an image that was never in one is shown as the model sees it."""
        assert examined.evidence is not None
        seen = examined.evidence.image
        found = whole_photo(Path(examined.path)) if examined.path else None
        pixels = seen if found is None else found
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

    def overlay(self, axes: Axes, values: Tensor, **scale: Any) -> Any:
        """Draw ``values`` (h, w) over the square that the model sees."""
        left, top, right, bottom = (edge - 0.5 for edge in self.box)
        _, height, width = self.pixels.shape
        axes.imshow(self.pixels.float().mean(0).numpy(), cmap="gray", vmin=0, vmax=255)
        extent = (left, right, bottom, top)
        shown = axes.imshow(
            values.cpu().numpy(),
            cmap=FOR_AND_AGAINST,
            alpha=0.6,
            extent=extent,
            interpolation="bilinear",
            **scale,
        )
        axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[])
        return shown


@rc_context(STYLE)
def decision_space(space: DecisionSpace, names: Sequence[str], summary: Summary | None = None) -> Figure:
    """Figure 4 of the paper for one image."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    draw_decision_space(figure.subplots(), space, names)
    if summary is not None:
        figure.suptitle(plain(textwrap.fill(summary.sentence, 72)), x=0.01, ha="left", fontsize=11)
    return figure


@rc_context(STYLE)
def heatmaps(image: Tensor, maps: Heatmaps, names: Sequence[str]) -> Figure:
    """The image, its saliency and the posterior heatmaps of its classes; ``image`` is (C, H, W) uint8."""
    figure = Figure(figsize=(2.6 * (2 + maps.classes.shape[1]), 3), layout="constrained")
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
    axes.set_xlabel("posterior (%)" if examined.verdict is None else "posterior (%); grey: ruled out")
    if examined.verdict is not None and examined.p_value is not None:
        axes.set_title(
            f"p = {examined.p_value:.2g}: {examined.verdict}",
            color=VERDICT_COLOURS[examined.verdict],
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
        title=f"each region holds {100 * MASS:.0f} % of its class",
        fontsize=SMALL,
        title_fontsize=SMALL,
        ncols=2,
    )


def _draw_heatmaps(
    figure: Figure | SubFigure, image: Tensor, maps: Heatmaps, names: Sequence[str], with_image: bool = False
) -> None:
    """Draw saliency and one map per class, all classes on one scale."""
    columns = maps.classes.shape[1] + 1 + with_image
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    if with_image:
        picture_of(axes.pop(0), image, "as the model sees it")
    information = _overlay(axes[0], image, maps.saliency[0], INFORMATION)
    axes[0].set_title("saliency", fontsize=SMALL)
    figure.colorbar(information, ax=axes[0], label="nats", shrink=0.8, fraction=0.05)
    largest = max(float(maps.posterior[0].abs().max()), 1e-9)
    shown = None
    for i, each in enumerate(axes[1:]):
        shown = _overlay(each, image, maps.posterior[0, i], FOR_AND_AGAINST, vmin=-largest, vmax=largest)
        each.set_title(label(names[int(maps.classes[0, i])], 22), fontsize=SMALL)
        each.text(
            0.97,
            0.03,
            f"{100 * float(maps.log_posterior[0, i].exp()):.0f} %",
            transform=each.transAxes,
            color="white",
            fontweight="bold",
            ha="right",
            va="bottom",
            bbox={"facecolor": "black", "alpha": 0.65, "edgecolor": "none", "pad": 2},
        )
    if shown is not None:
        bar = figure.colorbar(shown, ax=axes[1:], shrink=0.8, fraction=0.025)
        unit = "\n(nats; the paper's rule)" if maps.rule == "paper" else " (nats)"
        bar.set_label(f"against — for the class{unit}")


def _draw_photo_maps(
    figure: Figure | SubFigure, photo: _Photo, maps: PhotoMaps, names: Sequence[str]
) -> None:
    """Draw the maps on one scale, each with what it adds up to."""
    axes = list(figure.subplots(1, len(maps.why), squeeze=False)[0])
    largest = max(float(max(each.values.abs().max() for each in maps.why)), 1e-9)
    shown: Any = None
    for each, why in zip(axes, maps.why, strict=True):
        shown = photo.overlay(each, why.values, vmin=-largest, vmax=largest)
        title = f"why {label(names[why.y], 20)}"
        title += "" if why.other is None else f", not {label(names[why.other], 20)}"
        each.set_title(title, fontsize=SMALL)
        sums = f"score {why.score:+.2f} = map {why.total:+.2f}\n+ average photo {why.baseline:+.2f}"
        each.set_xlabel(sums.replace("-", "−"), fontsize=SMALL)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8, fraction=0.025)
    bar.set_label("against — for (nats)\nadds up to the score")


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
        1, len(groups), width_ratios=[len(each) for _, each in groups], squeeze=False
    )[0]
    for part, (title, photos) in zip(parts, groups, strict=True):
        part.suptitle(title, fontsize=SMALL + 1)
        for axes, photo in zip(part.subplots(1, len(photos), squeeze=False)[0], photos, strict=True):
            picture_of(axes, photo.picture, label(names[photo.y], 16))


def _overlay(axes: Axes, image: Tensor, values: Tensor, colours: str, **scale: Any) -> Any:
    """``values`` of the positions, each over the part of the image that it stands for."""
    _, height, width = image.shape
    grey = image.float().mean(0).numpy()
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=extent)
    shown = axes.imshow(
        values.cpu().numpy(), cmap=colours, alpha=0.6, extent=extent, interpolation="bilinear", **scale
    )
    axes.set_xticks([])
    axes.set_yticks([])
    return shown

"""Figures of what a model says about one image, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Ellipse
from torch import Tensor

from candid.explanations.decision_space import MASS
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
    from candid.trust.verdict import Examination

TOP = 5
"""Classes that are shown."""
VERDICT_COLOURS = {"accept": GREEN, "ambiguous": ORANGE, "novel": VERMILION}
FOR_AND_AGAINST, INFORMATION = "RdBu_r", "viridis"


@rc_context(STYLE)
def examination(examined: Examination, explanation: Explanation, names: Sequence[str]) -> Figure:
    """One page: the image, its classes, where it lies between them, what speaks for which class."""
    changed = None if isinstance(explanation.changed, str) else explanation.changed
    figure = Figure(figsize=(11, 9.9 if changed else 7.3), layout="constrained")
    heights = [4.1, 2.8, 2.6] if changed else [4.1, 2.8]
    rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    picture, bars, space = rows[0].subplots(1, 3, width_ratios=[1, 1, 1.5])
    assert examined.evidence is not None
    picture_of(picture, examined.evidence.image, "as the model sees it")
    _draw_classes(bars, examined)
    draw_decision_space(space, explanation.space, names)
    _draw_heatmaps(rows[1], examined.evidence.image, explanation.maps, names)
    if changed is not None:
        draw_counterfactual(rows[2], changed, names)
    sentence = textwrap.fill(explanation.summary.sentence, 120)
    if isinstance(explanation.changed, str):
        sentence += "\n" + textwrap.fill(f"No counterfactual: {explanation.changed}", 120)
    figure.suptitle(
        plain(f"{short_path(Path(examined.path).name, 60)}\n{sentence}"), x=0.01, ha="left", fontsize=11
    )
    return figure


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

"""How a model was found to do: calibration, out-of-distribution tests, and what beta trades."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from candid._support.numbers import Array
from candid.evaluation.calibration_error import Bins, expected_calibration_error
from candid.inference.metrics import Roc
from candid.reports.plots.style import (
    BLACK,
    BLUE,
    COLOURS,
    DASHES,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    bin_points,
    is_dark,
    legend,
    plain,
)

Values = NDArray[np.float64]
Style = dict[str, Any]
KINDS = ("paper", "new", "classifier", "control")


@rc_context(STYLE)
def calibration(every: Bins, top: Bins, title: str = "", scaled: Bins | None = None) -> Figure:
    """Share right against confidence, of every class's posterior and of the most probable class alone.

    Perfect calibration is the diagonal, below it is overconfidence. Error bars are Poisson's; the lower
    panels count predictions. ``scaled`` are the most probable class's bins after temperature scaling.
    """
    figure = Figure(figsize=(8.6, 5.8), layout="constrained")
    figure.suptitle(fill(title, 80))
    panels = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1))
    perfect = Line2D([], [], color=GREY, linestyle="--", label="perfect (below it: overconfident)")
    handles: list[Artist] = [perfect]
    for bins, axes, counts, name in (
        (every, panels[0, 0], panels[1, 0], "posteriors of all classes"),
        (top, panels[0, 1], panels[1, 1], "most probable class"),
    ):
        axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
        bin_points(axes, bins, marker="o", markersize=6, color=BLUE, zorder=3)
        counts.stairs(bins.count.tolist(), _edges(bins), fill=True, color=BLUE, alpha=0.6)
        counts.set_xlabel("confidence")
        axes.set_title(f"{name}{_error(bins)}")
        axes.grid()
    if scaled is not None:
        hollow: Style = {"marker": "o", "markersize": 6, "color": GREY, "markerfacecolor": "white"}
        bin_points(panels[0, 1], scaled, **hollow)
        panels[1, 1].stairs(scaled.count.tolist(), _edges(scaled), color=GREY, linewidth=1.5)
        handles.append(Line2D([], [], label=f"after temperature scaling{_error(scaled)}", **hollow))
    panels[0, 0].set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="share right")
    largest = max(1, *(int(bins.count.max()) for bins in (every, top, scaled or top)))
    decades = range(0, math.ceil(math.log10(largest)) + 1, 1 if largest < 10_000 else 2)
    panels[1, 0].set_yscale("symlog", linthresh=1)
    panels[1, 0].set_yticks([0, *(10**k for k in decades)])
    panels[1, 0].yaxis.set_major_formatter("{x:,.0f}")
    panels[1, 0].minorticks_off()
    panels[1, 0].set(ylim=(0, 2 * largest), ylabel="predictions")
    legend(figure, handles)
    return figure


@rc_context(STYLE)
def risk_coverage(selective: Mapping[str, Any], title: str = "") -> Figure:
    """Share of wrong images among the accepted ones, against the share that is accepted.

    ``selective`` is what :func:`candid.evaluation.selective.selective_metrics` returned. One line accepts the
    most confident images; with verdicts there is a second one, which accepts novel images last, and a point
    with the intervals of what the verdicts accept.
    """
    curve, rule = selective["curve"], selective.get("verdicts")
    coverage = 100 * np.array(curve["coverage"])
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    name = f"most confident images first (AUGRC {100 * selective['augrc']:.2f} %)"
    axes.plot(coverage, 100 * np.array(curve["risk"]), color=BLUE, label=name)
    if rule is not None:
        axes.plot(
            coverage,
            100 * np.array(curve["novel_last"]),
            color=ORANGE,
            linestyle="--",
            label="novel ones last",
        )
        if rule["accepted"] is not None:
            x, y = 100 * rule["coverage"], 100 * (1 - rule["accepted"])
            left, right = (100 * end for end in rule["intervals"]["coverage"])
            high, low = (100 * (1 - end) for end in rule["intervals"]["accepted"])
            axes.errorbar(
                x,
                y,
                yerr=[[y - low], [high - y]],
                xerr=[[x - left], [right - x]],
                marker="o",
                color=VERMILION,
                linestyle="none",
                label="what the verdicts accept",
            )
    axes.set(xlim=(0, 101), ylim=(0, None), xlabel="accepted (%)", ylabel="wrong among accepted (%)")
    axes.set_title(plain(fill(title, 60)))
    axes.grid()
    axes.legend(loc="upper left")
    return figure


@rc_context(STYLE)
def ood_zones(
    held_out: Array,
    detectors: Mapping[str, Any],
    alpha: float,
    others: Mapping[str, Array],
    label: str,
) -> Figure:
    """Which values of a statistic each test calls outliers at level ``alpha``, and where other sets lie.

    Red numbers are the shares of held-out images (n,) below and above the accepted interval. Images beyond
    the axis are counted in the outermost bins.

    Args:
        held_out: the statistic of held-out images, (n,).
        detectors: fitted tests that say which interval they accept.
        alpha: the level.
        others: the statistic of out-of-distribution sets.
        label: what the statistic is.
    """
    values = held_out.astype(np.float64)
    sets = {name: other.astype(np.float64) for name, other in others.items()}
    zones = {name: detector.accepted(alpha) for name, detector in detectors.items()}
    edges = _zone_edges(values, sets.values(), [end for zone in zones.values() for end in zone])
    density = _density(values, edges, len(values))
    outlines = {name: _density(scores, edges, len(scores)) for name, scores in sets.items()}
    colours = (GREEN, ORANGE, PURPLE, BLACK, SKY)
    styles: list[Style] = [
        {"color": colours[i % len(colours)], "linestyle": DASHES[i // len(colours) % len(DASHES)]}
        for i in range(len(sets))
    ]
    inner = max((outline[1:-1].max() for outline in outlines.values()), default=0)

    figure = Figure(figsize=(8.6, 1.2 + 2 * len(zones) + 0.25 * len(sets)), layout="constrained")
    panels = figure.subplots(len(zones), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, (low, high)) in zip(panels, zones.items(), strict=True):
        accepted = _density(values[(low <= values) & (values <= high)], edges, len(values))
        axes.stairs(accepted, edges, fill=True, color=BLUE, alpha=0.7)
        axes.stairs(density, edges, baseline=accepted, fill=True, color=VERMILION, alpha=0.7)
        for start, end in ((-math.inf, low), (high, math.inf)):
            zone = np.clip((start, end), edges[0], edges[-1])
            axes.axvspan(*zone, color=VERMILION, alpha=0.1, linewidth=0)
        for outline, line in zip(outlines.values(), styles, strict=True):
            axes.stairs(np.where(outline > 0, outline, np.nan), edges, linewidth=1.5, **line)
        _zone_shares(axes, values, low, high, (edges[0], edges[-1]))
        axes.set_title(name, loc="left")
        axes.set_ylabel("density")
        axes.yaxis.set_major_locator(MaxNLocator(3))
    panels[0].set_xlim(edges[0], edges[-1])
    panels[0].set_ylim(0, 1.25 * np.clip(inner, density.max(), 1.5 * density.max()))
    panels[-1].set_xlabel(label)
    figure.suptitle(f"outlier zone at level α = {alpha:g}")
    handles: list[Artist] = [
        Patch(color=BLUE, alpha=0.7, label="held-out images"),
        Patch(color=VERMILION, alpha=0.7, label="held-out images called outliers"),
    ]
    handles += [
        Line2D([], [], linewidth=1.5, label=plain(name) + _beyond(scores, edges), **line)
        for (name, scores), line in zip(sets.items(), styles, strict=True)
    ]
    cut = any(((scores < edges[0]) | (scores > edges[-1])).any() for scores in (values, *sets.values()))
    legend(figure, handles, "The outermost bins also count the images beyond the axis." if cut else None)
    return figure


@rc_context(STYLE)
def roc_curves(
    curves: Mapping[str, Mapping[str, Roc]],
    aucs: Mapping[str, Mapping[str, float]],
    kinds: Mapping[str, str] | None = None,
) -> Figure:
    """One panel for each set of outliers, one line for each test; both mappings are by set, then test.

    Tests of a kind share a line style. The legend has each test's area under the curve, averaged over sets.
    """
    kinds = kinds or {}
    every_test = dict.fromkeys(test for by_test in curves.values() for test in by_test)
    tests = _line_styles(_by_kind(every_test, kinds), kinds)
    rows = math.ceil(len(curves) / 4)
    columns = math.ceil(len(curves) / rows)
    beside = columns < 3
    size = (
        (2.8 * columns + 0.08 * max(map(len, tests)) + 1.5, max(2.9 * rows, 0.22 * len(tests) + 0.5))
        if beside
        else (2.6 * columns, 3 * rows + 0.7 + 0.06 * len(tests))
    )
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, by_test) in zip(panels.flat, curves.items(), strict=False):
        axes.plot([0, 1], [0, 1], ":", color=GREY)
        for test, style in tests.items():
            if test in by_test:
                axes.plot(*_thinned(by_test[test]), linewidth=1.8, alpha=0.9, **style)
        axes.set_title(plain(fill(name, 28)), fontsize=10)
        axes.grid()
    for axes in panels.flat[len(curves) :]:
        axes.remove()
    for axes in figure.axes[-columns:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("false positive rate")
    for axes in panels[:, 0]:
        axes.set_ylabel("true positive rate")
    panels[0, 0].set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    handles = [
        Line2D([], [], linewidth=1.8, label=f"{test}: {_mean_auc(aucs, test)}", **style)
        for test, style in tests.items()
    ]
    mean = "mean " if len(curves) > 1 else ""
    legend(figure, handles, f"{mean}area under the curve", beside)
    return figure


@rc_context(STYLE)
def auc_table(aucs: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str]) -> Figure:
    """Areas under the ROC curves in percent, by test (a row, grouped by kind) and set of outliers (a column).

    Blue is better than chance, red worse; the best test of each set is bold.
    """
    tests = _by_kind(aucs, kinds)
    sets = list(dict.fromkeys(name for by_set in aucs.values() for name in by_set))
    table = np.array([[aucs[test].get(name, math.nan) for name in sets] for test in tests])
    names = [plain(fill(name, 30)) for name in sets]
    width = 0.75 * len(sets) + 0.085 * max(map(len, tests)) + 1.6
    figure = Figure(
        figsize=(width, 0.32 * len(tests) + 0.045 * min(30, max(map(len, sets))) + 1.3), layout="constrained"
    )
    axes = figure.subplots()
    colours = colormaps["RdBu"]
    axes.imshow(table, cmap=colours, vmin=-0.1, vmax=1.1, aspect="auto")
    best = np.nanmax(table, axis=0)
    for (row, column), auc in np.ndenumerate(table):
        dark = is_dark(colours((auc + 0.1) / 1.2)) and not math.isnan(auc)
        axes.text(
            column,
            row,
            "–" if math.isnan(auc) else f"{100 * auc:.1f}",
            ha="center",
            va="center",
            color="white" if dark else BLACK,
            weight="bold" if round(auc, 3) == round(best[column], 3) else "normal",
        )
    groups = [kinds.get(test, "") for test in tests]
    for row in range(1, len(tests)):
        axes.axhline(row - 0.5, color="white", linewidth=5 if groups[row] != groups[row - 1] else 1)
    for column in range(1, len(sets)):
        axes.axvline(column - 0.5, color="white", linewidth=1)
    for kind in dict.fromkeys(groups):
        middle = groups.index(kind) + (groups.count(kind) - 1) / 2
        axes.text(len(sets) - 0.4, middle, kind, va="center", style="italic", color=GREY)
    axes.set_xticks(range(len(sets)), names, rotation=30, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(tests)), tests)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("set of outliers")
    axes.set_title("AUC (%), best in bold")
    axes.set_ylabel("score")
    return figure


def _edges(bins: Bins) -> Values:
    return np.linspace(0, 1, len(bins.count) + 1)


def _error(bins: Bins) -> str:
    return f", ECE {100 * expected_calibration_error(bins):.2f} %" if bins.count.any() else ""


def _zone_edges(held_out: Values, others: Iterable[Values], ends: Iterable[float]) -> Values:
    """Bins over nearly all held-out values, the ends of zones and the bulk of the other sets.

    What is further from the held-out bulk than twice its width is left beyond the axis.
    """
    low, high = np.quantile(held_out, (0.05, 0.95))
    largest = max(abs(low), abs(high))
    width = high - low if high - low > 1e-6 * largest else 0.1 * largest or 1.0
    lowest, highest = low - 2 * width, high + 2 * width
    finite = [values[np.isfinite(values)] for values in others]
    bulks = [np.quantile(values, (0.05, 0.95)) for values in finite if len(values)]
    wanted = np.concatenate((list(ends), *bulks))
    near = wanted[(lowest <= wanted) & (wanted <= highest)]
    nearly_all = np.quantile(held_out, (0.002, 0.998)).clip(lowest, highest)
    reach = np.concatenate((nearly_all, near, (low - width / 4, high + width / 4)))
    start, end = reach.min(), reach.max()
    margin = 0.1 * (end - start)
    fineness = np.clip(math.sqrt(len(held_out)), 10, 25) / width
    return np.linspace(start - margin, end + margin, 1 + math.ceil(1.2 * (end - start) * fineness))


def _density(values: Values, edges: Values, images: int) -> Values:
    """Return the histogram of some of the images; what is beyond the edges is in the outermost bins."""
    counts, _ = np.histogram(values.clip(edges[0], edges[-1]), edges)
    return counts / max(images, 1) / np.diff(edges)


def _zone_shares(axes: Axes, values: Values, low: float, high: float, ends: tuple[float, float]) -> None:
    """The red numbers, each in its zone, or at the end of the axis with an arrow to the zone."""
    room = 0.08 * (ends[1] - ends[0])
    for end, share, side, arrow in (
        (low, np.mean(values < low), "right", "← {}"),
        (high, np.mean(values > high), "left", "{} →"),
    ):
        if math.isfinite(end):
            at = np.clip(end, ends[0] + room, ends[1] - room)
            text = f"{100 * share:.3g} %"
            axes.annotate(
                text if at == end else arrow.format(text),
                (at, 0.98),
                (-4 if side == "right" else 4, 0),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                ha=side,
                va="top",
                color=VERMILION,
                bbox={"color": "white", "alpha": 0.7, "pad": 1},
            )


def _beyond(values: Values, edges: Values) -> str:
    """How many lie beyond the axis."""
    shares = {"left": np.mean(values < edges[0]), "right": np.mean(values > edges[-1])} if len(values) else {}
    sides = [f"{100 * share:.0f} % further {side}" for side, share in shares.items() if share >= 0.005]
    return f" ({', '.join(sides)})" if sides else ""


def _by_kind(tests: Iterable[str], kinds: Mapping[str, str]) -> list[str]:
    order = [*KINDS, *kinds.values(), ""]
    return sorted(tests, key=lambda test: order.index(kinds.get(test, "")))


def _line_styles(tests: Sequence[str], kinds: Mapping[str, str]) -> dict[str, Style]:
    """The colour and dashes of each test's line; a kind has dashes of its own."""
    styles: dict[str, Style] = {}
    dashes, alike = -1, 0
    for i, test in enumerate(tests):
        alike += 1
        if i == 0 or kinds.get(test) != kinds.get(tests[i - 1]) or alike == len(COLOURS):
            dashes, alike = dashes + 1, 0
        styles[test] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[dashes % len(DASHES)]}
    return styles


def _thinned(curve: Roc) -> tuple[Values, Values]:
    """At most 500 points along the curve."""
    x, y = curve.false_positive_rate, curve.true_positive_rate
    kept = np.searchsorted(x + y, np.linspace(0, x[-1] + y[-1], 500))
    return x[kept], y[kept]


def _mean_auc(aucs: Mapping[str, Mapping[str, float]], test: str) -> str:
    areas = [by_test[test] for by_test in aucs.values() if test in by_test]
    return f"{100 * sum(areas) / len(areas):.1f} %" if areas else "–"

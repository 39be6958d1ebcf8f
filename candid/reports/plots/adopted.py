"""The page of an image that an adopted model judged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from candid.explanations.adopted_maps import AdoptedMaps
from candid.reports.plots.examine import FOR_AND_AGAINST, _draw_classes, _overlay
from candid.reports.plots.style import SMALL, STYLE, label, picture_of, plain, short_path
from candid.trust.verdict import Examination


@rc_context(STYLE)
def adopted_page(examined: Examination, maps: AdoptedMaps, names: Sequence[str]) -> Figure:
    """Draw the image, its classes, and what speaks for each of the most probable ones."""
    assert examined.evidence is not None
    image = examined.evidence.image
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[3, 3])
    picture, bars = rows[0].subplots(1, 2, width_ratios=[1, 1.5])
    picture_of(picture, image, "as the model sees it")
    _draw_classes(bars, examined)
    axes = list(rows[1].subplots(1, len(maps.classes), squeeze=False)[0])
    largest = max(float(maps.maps.abs().max()), 1e-9)
    shown: Any = None
    for each, y, values, score, baseline in zip(
        axes, maps.classes, maps.maps, maps.scores.tolist(), maps.baselines.tolist(), strict=True
    ):
        shown = _overlay(each, image, values, FOR_AND_AGAINST, vmin=-largest, vmax=largest)
        title = f"why {label(names[y], 22)}: {score - baseline:+.1f} nats\n(average image {baseline:+.1f})"
        each.set_title(title, fontsize=SMALL)
    bar = rows[1].colorbar(shown, ax=axes, shrink=0.8, fraction=0.025)
    bar.set_label("against — for (nats)\nadds up to the score")
    figure.suptitle(plain(short_path(Path(examined.path).name, 60)), x=0.01, ha="left", fontsize=11)
    return figure

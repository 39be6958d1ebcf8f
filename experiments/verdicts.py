"""Photos with what a model says of each: the verdict, the class and the p-value."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from candid.reports.plots.style import GREY, SMALL, STYLE, label, plain
from candid.trust.verdict import KINDS, Examination

PIXELS = 224
"""Side of a photo."""
SIDE, GAP, TITLE, HEIGHT = 1.6, 0.1, 0.3, 2.95
"""Of a photo, between photos, of a title, and of a row, in inches."""


@rc_context(STYLE)
def verdicts(rows: Sequence[Mapping[str, Sequence[Examination]]]) -> Figure:
    """Draw photos, each with a bar for the verdict, the most probable class, its posterior and the p-value.

    Args:
        rows: the groups of photos in each row, by their titles. The files of the photos are read again.
    """
    columns = max(sum(len(group) for group in row.values()) for row in rows)
    width, height = columns * (SIDE + GAP) + GAP, HEIGHT * len(rows)
    figure = Figure(figsize=(width, height))
    for i, row in enumerate(rows):
        bottom = height - i * HEIGHT - TITLE - SIDE
        left = GAP
        for title, group in row.items():
            figure.text(left / width, (bottom + SIDE + 0.08) / height, plain(title), fontweight="bold")
            for examined in group:
                place = (left / width, bottom / height, SIDE / width, SIDE / height)
                _photo(figure.add_axes(place, xticks=[], yticks=[]), examined)
                left += SIDE + GAP
    return figure


def _photo(axes: Axes, examined: Examination) -> None:
    with Image.open(examined.path) as photo:
        square = ImageOps.fit(ImageOps.exif_transpose(photo).convert("RGB"), (PIXELS, PIXELS))
    colour = GREY if examined.verdict is None else KINDS[examined.verdict].colour
    axes.imshow(square)
    bar = axes.inset_axes((0, -0.16, 1, 0.16), facecolor=colour, xticks=[], yticks=[])
    for each in (axes, bar):
        each.spines[:].set(visible=True, color=colour, linewidth=2)
    bar.text(
        0.5,
        0.46,
        examined.verdict or "no verdict",
        color="white",
        fontweight="bold",
        ha="center",
        va="center",
    )
    words = "\n".join(_lines(examined))
    axes.text(0.5, -0.19, words, transform=axes.transAxes, ha="center", va="top", fontsize=SMALL + 1)


def _lines(examined: Examination) -> list[str]:
    """Return the class and its posterior, the p-value, and the other classes of an ambiguous image."""
    percent = 100 * examined.confidence
    lines = [f"{label(examined.label, 18)} {percent:.{0 if percent < 99.5 else 1}f} %"]
    if examined.p_value is not None:
        lines.append(f"p = {examined.p_value:.2g}")
    if examined.verdict == "ambiguous" and examined.classes:
        others = f"or {', '.join(examined.classes[1:])}"
        lines += textwrap.wrap(plain(others), 22, max_lines=2, placeholder=" …")
    return lines

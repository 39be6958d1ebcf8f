"""What the figures share: colours, sizes, legends, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from candid._support.files import replacing
from candid._support.numbers import Array
from candid._support.text import printable

matplotlib.use("Agg")

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

    from candid.evaluation.calibration_error import Bins

# Okabe & Ito's colours, which the colour-blind can tell apart; their yellow is too pale for lines.
BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#808080"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
DASHES = ("-", "--", ":", "-.")
SMALL = 9
STYLE: dict[RcKeyType, Any] = {
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.title_fontsize": 10,
    "legend.frameon": False,
    "figure.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "svg.hashsalt": "candid",  # the same figure is the same file
    "svg.fonttype": "none",
}


def legend(figure: Figure, handles: Sequence[Artist], title: str | None = None, right: bool = False) -> None:
    """Draw one legend below all panels, with as many columns as fit, or to their right."""
    if right:
        figure.legend(handles=handles, title=title, loc="outside right upper", alignment="left")
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = int(11 * figure.get_figwidth() / (longest + 7))
    figure.legend(
        handles=handles, title=title, loc="outside lower center", ncols=min(max(1, columns), len(handles))
    )


def short_path(name: str, length: int = 30) -> str:
    """``name`` of a model or file, without its middle if it is longer than ``length``."""
    return name if len(name) <= length else f"{name[: length // 2]}…{name[-length // 2 + 1 :]}"


def short(name: str, length: int = 24) -> str:
    """``name`` of a class without its end, where synonyms are, if it is longer than ``length``."""
    return name if len(name) <= length else f"{name[: length - 1].rstrip(' ,')}…"


def plain(text: str) -> str:
    """``text`` as it is: without formulas between dollar signs, with control characters written out."""
    text = text.encode(errors="replace").decode()
    return printable(text).replace("$", r"\$")


def label(name: str, length: int = 24) -> str:
    """A class's name, for titles and labels."""
    return plain(short(name, length))


def round_down(number: float) -> float:
    """Round down to 1, 2 or 5 times a power of ten.

    >>> round_down(73), round_down(0.3)
    (50.0, 0.2)
    """
    power = 10.0 ** math.floor(math.log10(number))
    return max(n * power for n in (1, 2, 5) if n * power <= number)


def is_dark(colour: tuple[float, ...]) -> bool:
    """Return whether text on ``colour`` (red, green, blue, ...) should be white."""
    red, green, blue = colour[:3]
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.5


def picture_of(axes: Axes, image: Array, title: str) -> None:
    """Draw an 8-bit image (C, H, W), without ticks."""
    axes.imshow(np.broadcast_to(image.transpose(1, 2, 0), (*image.shape[1:], 3)))
    axes.set_title(title, fontsize=SMALL)
    axes.set_xticks([])
    axes.set_yticks([])


def eight_bit(image: Array) -> Array:
    """Return an image of floats in [0, 1] as 8-bit numbers."""
    return np.round(255 * np.asarray(image)).astype(np.uint8)


def bin_points(axes: Axes, bins: Bins, **style: Any) -> None:
    """Draw the share of correct predictions against confidence, with Poisson error bars."""
    filled = bins.count > 0
    x, y, errors = (column[filled].tolist() for column in (bins.confidence, bins.accuracy, bins.errors))
    axes.errorbar(x, y, errors, linewidth=0.8, elinewidth=1.5, **style)


@rc_context(STYLE)
def save(figure: Figure, path: Path, svg: bool = False) -> Path:
    """Write ``figure`` as a PNG, and as an SVG next to it if asked for; return where the PNG is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, dpi=140, format="png")
    if svg:
        figure.set_layout_engine("none")  # both files have the layout of the first
        with replacing(path.with_suffix(".svg")) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return path

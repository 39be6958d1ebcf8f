"""Figures; the only place that imports matplotlib."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from candid.demo import RoundTrip

matplotlib.use("Agg")


def round_trip(trip: RoundTrip) -> Figure:
    """A photo, how large its latent is at each frequency, the photo back, and the error."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots(1, 4)
    error = (trip.restored - trip.image).abs().amax(0)
    _photo(axes[0], trip.image, "the photo")
    _map(figure, axes[1], trip.spread, "its latent: spread by frequency")
    axes[1].set_xlabel("frequency along the width")
    axes[1].set_ylabel("along the height")
    _photo(axes[2], trip.restored, "and back")
    _map(figure, axes[3], error * 255, "error in grey levels (white is 255)")
    axes[3].set_xticks([])
    axes[3].set_yticks([])
    axes[3].set_xlabel(f"largest: {255 * float(error.max()):.1g}")
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` as a PNG and return where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _photo(axes: Axes, image: Tensor, title: str) -> None:
    axes.imshow(np.clip(image.permute(1, 2, 0).numpy(), 0, 1))
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()


def _map(figure: Figure, axes: Axes, values: Tensor, title: str) -> None:
    shown = axes.imshow(values.numpy(), cmap="viridis")
    axes.set_title(title, fontsize=9)
    figure.colorbar(shown, ax=axes, shrink=0.8)

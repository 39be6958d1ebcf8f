"""Figures; the only place that imports matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
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


def curves(rows: Sequence[Mapping[str, float]]) -> Figure:
    """What a run's epochs brought: cross-entropy, accuracy, bits/dim and the learning rate."""
    panels = {
        "cross_entropy": "cross-entropy (nats)",
        "accuracy": "accuracy",
        "bits_per_dim": "bits/dim",
        "learning_rate": "learning rate",
    }
    shown = {key: label for key, label in panels.items() if key in rows[0] or f"val_{key}" in rows[0]}
    figure = Figure(figsize=(3.4 * len(shown), 2.8), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for axes, (key, label) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for prefix, name, colour in (
            ("train_", "training", "C0"),
            ("val_", "validation", "C1"),
            ("", "", "C7"),
        ):
            if prefix + key in rows[0]:
                values = [row[prefix + key] for row in rows]
                axes.plot(epochs, values, color=colour, label=name, marker="." if len(rows) < 40 else "")
        axes.set_xlabel("epoch")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(axes.lines) > 1:
            axes.legend(fontsize=8, frameon=False)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` as a PNG and return where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=110, format="png")
    return temporary.replace(path)


def _photo(axes: Axes, image: Tensor, title: str) -> None:
    axes.imshow(np.clip(image.permute(1, 2, 0).numpy(), 0, 1))
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()


def _map(figure: Figure, axes: Axes, values: Tensor, title: str) -> None:
    shown = axes.imshow(values.numpy(), cmap="viridis")
    axes.set_title(title, fontsize=9)
    figure.colorbar(shown, ax=axes, shrink=0.8)

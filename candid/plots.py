"""Figures; the only place that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

if TYPE_CHECKING:
    from candid.demo import DigitsDemo, RoundTrip

matplotlib.use("Agg")
SIGNIFICANT = 0.05


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


def opinions(demo: DigitsDemo, shown: int = 8) -> Figure:
    """Examples of each group of images, with the model's class, its posterior and the p-value."""
    figure = Figure(figsize=(0.9 * shown + 1, 1.25 * len(demo.opinions) + 0.5), layout="constrained")
    rows = figure.subplots(len(demo.opinions), shown)
    for axes_row, (name, opinion) in zip(rows, demo.opinions.items(), strict=True):
        for i, axes in enumerate(axes_row):
            axes.imshow(opinion.images[i, 0].numpy(), cmap="gray", vmin=0, vmax=255)
            probability, label = opinion.posterior[i].max(0)
            p = float(opinion.p_value[i])
            axes.set_title(f"{int(label)}: {100 * float(probability):.0f} %", fontsize=8)
            colour = "tab:green" if p > SIGNIFICANT else "tab:red"
            axes.set_xlabel(f"p = {p:.2f}", fontsize=8, color=colour)
            axes.set_xticks([])
            axes.set_yticks([])
        axes_row[0].set_ylabel(name, fontsize=9)
    figure.suptitle(
        "above each image: the class and its posterior; below: the p-value, "
        f"red where the model says 'not a digit' (p ≤ {SIGNIFICANT})",
        fontsize=9,
    )
    return figure


def reliability(posterior: Tensor, labels: Tensor, error: float, bins: int = 10) -> Figure:
    """Accuracy against confidence, and how many images have each confidence."""
    confidence, predicted = posterior.max(1)
    right = (predicted == labels).double()
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    figure = Figure(figsize=(4, 4.2), layout="constrained")
    axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    axes.plot([0, 1], [0, 1], color="C7", linestyle="--", label="perfectly calibrated")
    for k in range(bins):
        chosen = bin_of == k
        if chosen.any():
            axes.bar((k + 0.5) / bins, float(right[chosen].mean()), width=0.9 / bins, color="C0", alpha=0.8)
        counts.bar((k + 0.5) / bins, int(chosen.sum()), width=0.9 / bins, color="C7")
    axes.set_ylabel("accuracy")
    axes.set_title(f"expected calibration error {100 * error:.1f} %", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    counts.set_yscale("symlog")
    counts.set_ylabel("images")
    counts.set_xlabel("confidence")
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

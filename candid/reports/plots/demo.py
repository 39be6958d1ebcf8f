"""The figures of ``candid demo``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from candid.reports.plots.style import GREEN, SMALL, STYLE, VERMILION

SIGNIFICANT = 0.05


@rc_context(STYLE)
def round_trip(image: Tensor, spread: Tensor, restored: Tensor) -> Figure:
    """Draw a photo, the spread of its latent at each frequency, the restored photo, and the error.

    Images are (3, H, W) in [0, 1].
    """
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots(1, 4)
    error = (restored - image).abs().amax(0)
    _photo(axes[0], image, "the photo")
    _map(figure, axes[1], spread, "its latent: spread by frequency")
    axes[1].set_xlabel("frequency along the width")
    axes[1].set_ylabel("along the height")
    _photo(axes[2], restored, "and back")
    _map(figure, axes[3], error * 255, "error in grey levels (white is 255)")
    axes[3].set_xticks([])
    axes[3].set_yticks([])
    axes[3].set_xlabel(f"largest: {255 * float(error.max()):.1g}")
    return figure


@rc_context(STYLE)
def opinions(groups: Mapping[str, tuple[Tensor, Tensor, Tensor]], shown: int = 8) -> Figure:
    """Draw examples of each group of images with the most probable class, its posterior and the p-value.

    A group has 8-bit images (N, 1, H, W), posteriors (N, M) and p-values (N,).
    """
    figure = Figure(figsize=(0.9 * shown + 1, 1.25 * len(groups) + 0.5), layout="constrained")
    rows = figure.subplots(len(groups), shown, squeeze=False)
    for axes_row, (name, (images, posterior, p_values)) in zip(rows, groups.items(), strict=True):
        for i, axes in enumerate(axes_row):
            axes.imshow(images[i, 0].numpy(), cmap="gray", vmin=0, vmax=255)
            probability, label = posterior[i].max(0)
            p = float(p_values[i])
            axes.set_title(f"{int(label)}: {100 * float(probability):.0f} %", fontsize=SMALL)
            axes.set_xlabel(f"p = {p:.2f}", fontsize=SMALL, color=GREEN if p > SIGNIFICANT else VERMILION)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(True)
        axes_row[0].set_ylabel(name, fontsize=SMALL)
    figure.suptitle(
        "above each image: the class and its posterior; below: the p-value, "
        f"red where the model says 'not a digit' (p ≤ {SIGNIFICANT})",
        fontsize=SMALL,
    )
    return figure


def _photo(axes: Axes, image: Tensor, title: str) -> None:
    axes.imshow(np.clip(image.permute(1, 2, 0).numpy(), 0, 1))
    axes.set_title(title, fontsize=SMALL)
    axes.set_axis_off()


def _map(figure: Figure, axes: Axes, values: Tensor, title: str) -> None:
    shown = axes.imshow(values.numpy(), cmap="viridis")
    axes.set_title(title, fontsize=SMALL)
    figure.colorbar(shown, ax=axes, shrink=0.8)

"""The figures of ``candid demo``."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from candid.reports.plots.style import GREEN, SMALL, STYLE, VERMILION

SIGNIFICANT = 0.05


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

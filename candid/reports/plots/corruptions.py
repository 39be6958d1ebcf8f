"""Corrupted images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from candid.reports.plots.style import STYLE, label

TILE = 1.15
"""The width of an image in inches."""


@rc_context(STYLE)
def corruption_grid(image: Tensor, corrupted: Mapping[str, Tensor], title: str = "") -> Figure:
    """Draw corruptions as rows, severities as columns, as in the paper's appendix, next to the clean image.

    ``image`` is 8-bit, (C, H, W); ``corrupted`` has (severities, C, H, W) for each name.
    """
    height, width = image.shape[1:]
    rows = torch.stack([torch.cat((image[None], each)) for each in corrupted.values()])  # (R, S + 1, C, H, W)
    down, across = rows.shape[:2]
    gap = max(1, width // 28)
    tiles = F.pad(rows, (0, gap, 0, gap), value=255)
    mosaic = tiles.permute(0, 3, 1, 4, 2).reshape(down * (height + gap), across * (width + gap), -1)
    pixels = np.broadcast_to(mosaic[:-gap, :-gap].numpy(), (*(n - gap for n in mosaic.shape[:2]), 3))

    names = [label(name.replace("_", " ")) for name in corrupted]
    left, top, margin = 0.2 + 0.085 * max(map(len, names)), 0.7 if title else 0.4, 0.1
    wide, tall = TILE * across, TILE * down * (height + gap) / (width + gap)
    inches = wide + left + margin, tall + top + margin
    figure = Figure(figsize=inches)
    axes = figure.add_axes((left / inches[0], margin / inches[1], wide / inches[0], tall / inches[1]))
    axes.imshow(pixels, aspect="auto")
    axes.set_xticks(
        (width + gap) * np.arange(across) + width / 2 - 0.5,
        ["clean", *(f"severity {severity}" for severity in range(1, across))],
    )
    axes.set_yticks((height + gap) * np.arange(down) + height / 2 - 0.5, names)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    if title:
        axes.set_title(label(title, 60))
    return figure

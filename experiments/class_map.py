"""A map of the classes of an adopted model, and pictures of heatmaps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from torch import Tensor

from candid.data.images import decode
from candid.explanations.photo_maps import photo_maps
from candid.inference.predictions import to_float
from candid.models.heads.adopted import AdoptedModel
from candid.models.heads.photo import PhotoModel
from candid.reports.plots.style import SMALL, STYLE, label

GROUPS = 18
KINDS = {"dogs": (151, 269), "cats, big ones included": (281, 294)}
"""Class numbers of ImageNet, which are in the order of WordNet for animals."""
CLOSE = range(269, 294)
"""Wolves, foxes, hyenas and cats."""
COLOURS = "viridis"
BLOCK = 5
"""Classes a side of a cell of the map."""


@dataclass(frozen=True)
class ClassMap:
    """How similar the classes of a model are."""

    names: tuple[str, ...]
    similarity: Tensor
    """Cosines of the rows of the last layer, less their mean, (M, M)."""
    order: list[int]
    """Classes in the order of the tree."""
    groups: list[list[int]]
    """Groups of classes, in that order."""

    def central(self, group: Sequence[int], count: int) -> list[str]:
        """Return the names of the classes that are most similar to the others of a group."""
        rows = torch.tensor(group)
        mean = self.similarity[rows][:, rows].mean(1)
        return [self.names[group[i]] for i in mean.argsort(descending=True)[:count].tolist()]


def class_map(model: AdoptedModel) -> ClassMap:
    """Return the similarity of all classes: what the last layer, a linear one, looks for in each."""
    layer = model.eye.last_layer()
    assert layer is not None
    away = layer[0].double() - layer[0].double().mean(0)
    rows = away / away.norm(dim=1, keepdim=True)
    similarity = rows @ rows.T
    above = torch.triu_indices(len(rows), len(rows), offset=1)
    tree = linkage((1 - similarity[above[0], above[1]]).numpy(), "average")
    order, found = leaves_list(tree).tolist(), fcluster(tree, GROUPS, "maxclust")
    numbers = dict.fromkeys(found[order].tolist())
    groups = [[each for each in order if found[each] == number] for number in numbers]
    return ClassMap(model.class_names, similarity, order, groups)


def figures(found: ClassMap) -> dict[str, Any]:
    """Return the groups with their central classes, how pure kinds of animals are, and the closest pairs."""
    others = found.similarity.clone().fill_diagonal_(-2)
    nearest, count = others.argmax(1), len(others)
    kinds = {}
    for kind, (start, stop) in KINDS.items():
        own = nearest[start:stop]
        home = max(found.groups, key=lambda group: sum(start <= each < stop for each in group))
        kinds[kind] = {
            "classes": stop - start,
            "nearest_is_one": int(((own >= start) & (own < stop)).sum()),
            "in_one_group": sum(start <= each < stop for each in home),
            "others_there": sum(not start <= each < stop for each in home),
        }
    closest = others.triu(1).flatten().topk(8)
    pairs = [
        (found.names[i // count], found.names[i % count], value)
        for value, i in zip(closest.values.tolist(), closest.indices.tolist(), strict=True)
    ]
    groups = [{"classes": len(group), "central": found.central(group, 4)} for group in found.groups]
    return {"groups": groups, "kinds": kinds, "closest": pairs}


@rc_context(STYLE)
def draw(found: ClassMap) -> Figure:
    """Draw all classes in the order of the tree with their groups, and some cats and wild dogs by name."""
    figure = Figure(figsize=(13, 5.7), layout="compressed")
    whole, close = figure.subplots(1, 2)
    count = len(found.names)
    ordered = found.similarity.clone().fill_diagonal_(0)[found.order][:, found.order]
    cells = F.avg_pool2d(ordered[None], BLOCK)[0]
    shown = whole.imshow(cells, cmap=COLOURS, vmin=0, vmax=0.15, extent=(0, count, count, 0))
    start, middles = 0, []
    for size in map(len, found.groups):
        whole.add_patch(Rectangle((start, start), size, size, fill=False, color="white", linewidth=0.8))
        middles.append(start + size / 2)
        start += size
    names = [f"{', '.join(found.central(group, 2))} … ({len(group)})" for group in found.groups]
    whole.yaxis.tick_right()
    whole.set_yticks(middles, [label(each, 60) for each in names], fontsize=SMALL)
    whole.set_xticks([])
    whole.set_title(f"{count} classes in {len(found.groups)} groups")
    means = f"mean similarity of {BLOCK} × {BLOCK} classes"
    figure.colorbar(shown, ax=whole, label=means, shrink=0.6, location="bottom", ticks=(0, 0.05, 0.1, 0.15))
    chosen = [each for each in found.order if each in CLOSE]
    shown = close.imshow(found.similarity[chosen][:, chosen], cmap=COLOURS, vmin=0, vmax=0.5)
    ticks = [label(found.names[each]) for each in chosen]
    close.set_xticks([])
    close.yaxis.tick_right()
    close.set_yticks(range(len(chosen)), ticks, fontsize=SMALL)
    close.set_title("wolves, foxes and cats")
    figure.colorbar(shown, ax=close, label="similarity (cosine)", shrink=0.6, location="bottom")
    for axes in (whole, close):
        axes.spines[:].set_visible(False)
    return figure


@rc_context(STYLE)
def draw_heatmaps(model: PhotoModel, photos: Sequence[Path]) -> Figure:
    """Draw photos, and below each why its class and not the second one; all maps have one scale."""
    figure = Figure(figsize=(2.6 * len(photos), 5.9), layout="constrained")
    panels = figure.subplots(2, len(photos), squeeze=False)
    prepared = model.preprocessing
    found = []
    for path in photos:
        image = decode(path, 3, prepared.size, prepared.box)
        seen = to_float(image[None], "cpu")[0]
        second = int(model.logits(seen[None])[0].topk(2).indices[1])
        found.append((path, image, second, photo_maps(model, seen, top=1, against=second).why[-1]))
    limit = max(float(why.values.abs().max()) for *_, why in found)
    shown: Any = None
    for column, (path, image, second, why) in zip(panels.T, found, strict=True):
        height, width = image.shape[1:]
        for axes in column:
            axes.imshow(image.permute(1, 2, 0).numpy(), extent=(0, width, height, 0))
            axes.set_xticks([])
            axes.set_yticks([])
        values = np.asarray(why.values)
        extent = (0, width, height, 0)
        shown = column[1].imshow(
            values, cmap="RdBu_r", vmin=-limit, vmax=limit, alpha=0.6, extent=extent, interpolation="bilinear"
        )
        names = model.class_names
        column[0].set_title(label(path.parent.name))
        column[1].set_title(f"{names[why.y]}, not {names[second]}:\n{why.total:+.1f} nats")
    figure.colorbar(shown, ax=list(panels[1]), shrink=0.8, fraction=0.025, label="against – for (nats)")
    return figure

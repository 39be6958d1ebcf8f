"""A map of the classes of an adopted model, and pictures of heatmaps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage

from candid._support.numbers import Array
from candid.data.images import decode, to_float
from candid.explanations.class_maps import ClassMaps, class_maps
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.model import PhotoModel
from candid.reports.plots.style import SMALL, STYLE, label
from candid.trust.gaussians import unit

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
    similarity: Array
    """Cosines of the rows of the last layer, less their mean, (M, M)."""
    order: list[int]
    """Classes in the order of the tree."""
    groups: list[list[int]]
    """Groups of classes, in that order."""

    def central(self, group: Sequence[int], count: int) -> list[str]:
        """Return the names of the classes that are most similar to the others of a group."""
        mean = self.similarity[np.ix_(group, group)].mean(1)
        return [self.names[group[i]] for i in np.argsort(-mean)[:count].tolist()]


def class_map(model: AdoptedModel) -> ClassMap:
    """Return the similarity of all classes: what the last layer, a linear one, looks for in each."""
    layer = model.eye.last_layer()
    assert layer is not None
    weights = layer[0].astype(np.float64)
    rows = unit(weights - weights.mean(0))
    similarity = rows @ rows.T
    tree = linkage(1 - similarity[np.triu_indices(len(rows), 1)], "average")
    order, numbers = leaves_list(tree).tolist(), fcluster(tree, GROUPS, "maxclust")
    in_order = dict.fromkeys(numbers[order].tolist())
    groups = [[y for y in order if numbers[y] == number] for number in in_order]
    return ClassMap(model.class_names, similarity, order, groups)


def figures(found: ClassMap) -> dict[str, Any]:
    """Return the groups with their central classes, how pure kinds of animals are, and the closest pairs."""
    others = _with_diagonal(found.similarity, -2)
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
    above = np.triu(others, 1).flatten()
    pairs = [
        (found.names[i // count], found.names[i % count], float(above[i]))
        for i in np.argsort(-above, kind="stable")[:8].tolist()
    ]
    groups = [{"classes": len(group), "central": found.central(group, 4)} for group in found.groups]
    return {"groups": groups, "kinds": kinds, "closest": pairs}


def _with_diagonal(matrix: Array, value: float) -> Array:
    changed = matrix.copy()
    np.fill_diagonal(changed, value)
    return changed


@rc_context(STYLE)
def draw(found: ClassMap) -> Figure:
    """Draw all classes in the order of the tree with their groups, and some cats and wild dogs by name."""
    figure = Figure(figsize=(13, 5.7), layout="compressed")
    whole, close = figure.subplots(1, 2)
    count = len(found.names)
    ordered = _with_diagonal(found.similarity, 0)[np.ix_(found.order, found.order)]
    side = count // BLOCK
    whole_blocks = ordered[: side * BLOCK, : side * BLOCK]
    cells = whole_blocks.reshape(side, BLOCK, side, BLOCK).mean((1, 3))
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
    shown = close.imshow(found.similarity[np.ix_(chosen, chosen)], cmap=COLOURS, vmin=0, vmax=0.5)
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
    seen = [decode(path, 3, prepared.size, prepared.box) for path in photos]
    maps = [_first_not_second(model, to_float(image)) for image in seen]
    limit = max(float(abs(each.values[-1]).max()) for each in maps)
    shown: Any = None
    for column, path, image, why in zip(panels.T, photos, seen, maps, strict=True):
        height, width = image.shape[1:]
        for axes in column:
            axes.imshow(image.transpose(1, 2, 0), extent=(0, width, height, 0))
            axes.set_xticks([])
            axes.set_yticks([])
        extent = (0, width, height, 0)
        shown = column[1].imshow(
            why.values[-1],
            cmap="RdBu_r",
            vmin=-limit,
            vmax=limit,
            alpha=0.6,
            extent=extent,
            interpolation="bilinear",
        )
        total = why.scores[-1] - why.baselines[-1]
        assert why.against is not None
        first, second = model.class_names[why.classes[-1]], model.class_names[why.against]
        column[0].set_title(label(path.parent.name))
        column[1].set_title(f"{first}, not {second}:\n{total:+.1f} nats")
    figure.colorbar(shown, ax=list(panels[1]), shrink=0.8, fraction=0.025, label="against – for (nats)")
    return figure


def _first_not_second(model: PhotoModel, image: Array) -> ClassMaps:
    """Return the map of the most probable class compared with the second one, as the last of its maps."""
    second = int(np.argsort(-model.logits(image[None])[0])[1])
    return class_maps(model, image, top=1, against=second)

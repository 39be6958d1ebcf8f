"""Group photos of unknown kinds in the space of a photo model that knows other kinds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from candid._support.numbers import Array
from candid._support.randomness import Draws
from candid.judging.group import clusters
from candid.models.photo.efficientnet import PackagedEye
from candid.trust.gaussians import unit
from candid.trust.ranking import CombinedRanks
from experiments.measures import share
from experiments.photo_sets import FAR, OWN_SPLIT, OWN_UNKNOWN, Photos, PhotoSet, joined
from experiments.photos import Fitted
from experiments.tables import Cell, shown, table, text

TRIPLES = (
    ("basophil", "eosinophil", "erythroblast"),
    ("ig", "lymphocyte", "monocyte"),
    ("monocyte", "neutrophil", "platelet"),
    ("eosinophil", "lymphocyte", "platelet"),
)
EACH = 60
"""Photos of each left-out kind of blood cells."""
CATEGORIES, DRAWS = 20, 3
"""Categories of caltech99, and how often they are drawn."""
LEVELS = (0.01, 0.05)


class Unknown(NamedTuple):
    """Photos of unknown kinds, and the model that does not know them."""

    name: str
    photos: Photos
    model: Fitted
    held_out: Photos


def blood_cells(photos: PhotoSet, eye: PackagedEye) -> Iterator[Unknown]:
    """Yield three kinds of blood cells, left out of the training of a model of the other five."""
    names = (*photos.class_names, "ig")
    labels = np.full(len(photos.unknown), len(names) - 1)
    everyone = joined(photos.photos, replace(photos.unknown, labels=labels))
    for triple in TRIPLES:
        kinds = [names.index(name) for name in triple]
        known = everyone[~np.isin(everyone.labels, kinds)]
        known = replace(known, labels=np.unique(known.labels, return_inverse=True)[1])
        order = Draws(0).permutation(len(known))
        first, second = int(0.6 * len(known)), int(0.8 * len(known))
        rows = np.concatenate([np.flatnonzero(everyone.labels == kind)[:EACH] for kind in kinds])
        model = Fitted(known[order[:first]], len(names) - 3, eye)
        yield Unknown(", ".join(triple), everyone[rows], model, known[order[first:second]])


def clothes(sets: dict[str, PhotoSet], far: Photos, eye: PackagedEye) -> Iterator[Unknown]:
    """Yield other clothes, and things, for a model of ten kinds of clothes."""
    photos = sets[OWN_SPLIT]
    train, held_out, _ = photos.parts()
    model = Fitted(train, len(photos.class_names), eye)
    yield Unknown(OWN_UNKNOWN, photos.unknown, model, held_out)
    categories = int(far.labels.max()) + 1
    for seed in range(DRAWS):
        chosen = Draws(seed).permutation(categories)[:CATEGORIES]
        yield Unknown(f"{FAR}, draw {seed + 1}", far[np.isin(far.labels, chosen)], model, held_out)


def agreement(labels: Array, rows: list[list[int]]) -> dict[str, float]:
    """Return AMI, single photos counted as one more group, and the purity of the groups."""
    from sklearn.metrics import adjusted_mutual_info_score

    numbers = np.full(len(labels), -1)
    for number, own in enumerate(rows):
        numbers[own] = number
    most = sum(int(np.bincount(labels[own]).max()) for own in rows)
    grouped = sum(map(len, rows))
    return {
        "ami": float(adjusted_mutual_info_score(labels, numbers)),
        "purity": most / grouped if grouped else 0.0,
        "groups": float(len(rows)),
        "single": 1 - grouped / len(labels),
    }


def figures(unknown: Unknown) -> dict[str, Any]:
    """Return how well all photos are grouped, and those that come through at two levels of novelty."""
    model, statistics = unknown.model.model, unknown.photos.statistics
    labels = np.unique(unknown.photos.labels, return_inverse=True)[1]
    z = model.whitened(statistics)
    plain = unit((statistics - model.centre) / model.scale)
    kinds = int(labels.max()) + 1
    found: dict[str, Any] = {
        "photos": len(labels),
        "kinds": kinds,
        "all": agreement(labels, clusters(z)),
        "k-means": agreement(labels, clusters(z, kinds)),
        "k-means, not whitened": agreement(labels, clusters(plain, kinds)),
    }
    ranks = CombinedRanks(unknown.model(unknown.held_out)[1])
    p = ranks.p_values(unknown.model(unknown.photos)[1])
    for level in LEVELS:
        novel = p <= level
        found[f"through {level:g}"] = share(novel)
        if int(novel.sum()) >= kinds:
            found[f"novel {level:g}"] = agreement(labels[novel], clusters(z[novel]))
    return found


def measured(sets: dict[str, PhotoSet], far: Photos, eye: PackagedEye) -> dict[str, Any]:
    """Return the figures of each set of unknown photos."""
    tasks = (*blood_cells(sets["bloodcells8"], eye), *clothes(sets, far, eye))
    return {unknown.name: figures(unknown) for unknown in tasks}


def tables(found: dict[str, Any]) -> str:
    """Return the table in Markdown."""

    def agreed(key: str) -> Cell:
        def cell(record: Any) -> str:
            return f"{record[key]['ami']:.2f} / {record[key]['purity']:.2f}" if key in record else "–"

        return cell

    def through(record: Any) -> str:
        return ", ".join(f"{100 * record[f'through {level:g}']:.0f}" for level in LEVELS)

    return table(
        [{"name": name, **each} for name, each in found.items()],
        (
            ("unknown kinds", text("name")),
            ("photos", text("photos")),
            ("kinds", text("kinds")),
            ("AMI / purity", agreed("all")),
            ("groups", shown(0, 1, "all", "groups")),
            ("single photos (%)", shown(0, 100, "all", "single")),
            ("k-means, true number", agreed("k-means")),
            ("not whitened", agreed("k-means, not whitened")),
            ("novel at 1 %, at 5 % (%)", through),
            ("those at 5 %: AMI / purity", agreed("novel 0.05")),
        ),
    )

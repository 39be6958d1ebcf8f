"""Group photos of unknown kinds in the space of a photo model that knows other kinds."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from candid.models.eyes.eye import PackagedEye
from candid.trust.combined import CombinedRanks
from candid.trust.group import clusters
from experiments.cells import Table, markdown
from experiments.photo_sets import FAR, OWN_SPLIT, OWN_UNKNOWN, Photos, PhotoSet
from experiments.photos import Fitted

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
    labels = torch.full((len(photos.unknown),), len(names) - 1)
    everyone = Photos(
        torch.cat((photos.photos.statistics, photos.unknown.statistics)),
        torch.cat((photos.photos.pooled, photos.unknown.pooled)),
        torch.cat((photos.photos.labels, labels)),
    )
    for triple in TRIPLES:
        kinds = torch.tensor([names.index(name) for name in triple])
        known = everyone[~torch.isin(everyone.labels, kinds)]
        numbers = torch.unique(known.labels, return_inverse=True)[1]
        known = Photos(known.statistics, known.pooled, numbers)
        order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
        first, second = int(0.6 * len(known)), int(0.8 * len(known))
        rows = torch.cat([(everyone.labels == kind).nonzero().flatten()[:EACH] for kind in kinds])
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
        chosen = torch.randperm(categories, generator=torch.Generator().manual_seed(seed))[:CATEGORIES]
        yield Unknown(f"{FAR}, draw {seed + 1}", far[torch.isin(far.labels, chosen)], model, held_out)


def agreement(labels: Tensor, rows: list[list[int]]) -> dict[str, float]:
    """Return AMI, single photos counted as one more group, and the purity of the groups."""
    from sklearn.metrics import adjusted_mutual_info_score

    found = np.full(len(labels), -1)
    for number, own in enumerate(rows):
        found[own] = number
    truth = labels.numpy()
    most = sum(int(np.bincount(truth[own]).max()) for own in rows)
    grouped = sum(map(len, rows))
    return {
        "ami": float(adjusted_mutual_info_score(truth, found)),
        "purity": most / grouped if grouped else 0.0,
        "groups": float(len(rows)),
        "single": 1 - grouped / len(labels),
    }


@torch.no_grad()
def figures(unknown: Unknown) -> dict[str, Any]:
    """Return how well all photos are grouped, and those that come through at two levels of novelty."""
    model, statistics = unknown.model.model, unknown.photos.statistics
    labels = torch.unique(unknown.photos.labels, return_inverse=True)[1]
    z = model.whitened(statistics)
    plain = F.normalize((statistics - model.centre) / model.scale)
    kinds = int(labels.max()) + 1
    found: dict[str, Any] = {
        "photos": len(labels),
        "kinds": kinds,
        "all": agreement(labels, clusters(z)),
        "k-means": agreement(labels, clusters(z, kinds)),
        "k-means, not whitened": agreement(labels, clusters(plain, kinds)),
    }
    ranks = CombinedRanks.fit(unknown.model(unknown.held_out)[1])
    p = ranks.p_values(unknown.model(unknown.photos)[1])
    for level in LEVELS:
        novel = p <= level
        found[f"through {level:g}"] = float(novel.double().mean())
        if int(novel.sum()) >= kinds:
            found[f"novel {level:g}"] = agreement(labels[novel], clusters(z[novel]))
    return found


def measured(sets: dict[str, PhotoSet], far: Photos, eye: PackagedEye) -> dict[str, Any]:
    """Return the figures of each set of unknown photos."""
    tasks = (*blood_cells(sets["bloodcells8"], eye), *clothes(sets, far, eye))
    return {unknown.name: figures(unknown) for unknown in tasks}


def tables(found: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    return markdown(*_table(found))


def _table(found: dict[str, Any]) -> Table:
    head = ["unknown kinds", "photos", "kinds", "AMI / purity", "groups", "single photos (%)"]
    head += ["k-means, true number", "not whitened", "novel at 1 %, at 5 % (%)", "those at 5 %: AMI / purity"]
    return head, (_row(name, each) for name, each in found.items())


def _row(name: str, each: dict[str, Any]) -> list[str]:
    def pair(key: str) -> str:
        return f"{each[key]['ami']:.2f} / {each[key]['purity']:.2f}" if key in each else "–"

    through = ", ".join(f"{100 * each[f'through {level:g}']:.0f}" for level in LEVELS)
    return [
        name,
        str(each["photos"]),
        str(each["kinds"]),
        pair("all"),
        f"{each['all']['groups']:.0f}",
        f"{100 * each['all']['single']:.0f}",
        pair("k-means"),
        pair("k-means, not whitened"),
        through,
        pair("novel 0.05"),
    ]

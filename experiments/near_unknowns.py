"""Measure two changes that were meant to find more kinds that look like known ones; neither is used.

``python -m experiments.near_unknowns DATA_FOLDER``, which is as for ``experiments.photos``

Classes of three sets are left out of the training in turn, with 20, 50 and all photos of each class to fit.
Another *rule* for ``combined``: the residual distance counts only if it is extreme, and the mean cosine to
the five nearest training photos of the predicted class is a fourth part. A ninth *group* of the head: roots
of the features that the eye's own classifier reads. Photos are found if their p-value is at most 5 %.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.numbers import Array
from candid._support.randomness import Draws
from candid.inference.metrics import accuracy, cross_entropy
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.eyes import EYES
from candid.models.photo.head import fit_head
from candid.models.photo.model import PhotoModel
from candid.trust.gaussians import unit
from candid.trust.ranking import CLIP, TOLERANCE
from experiments.measures import share
from experiments.open_world.teaching import _parts
from experiments.photo_sets import FAR, OWN_SPLIT, Photos, PhotoSet, Reader
from experiments.tables import markdown

LEVEL, NEAREST = 0.05, 5
SIZES = (20, 50, 1000)
"""Training photos of each class; the last is all of them."""
NOW, RULE, GROUP = "now", "rule", "ninth group"
Figures = dict[str, float]


def usual(p: Array) -> Array:
    """Return the terms that are added up now."""
    return np.tan(math.pi * (0.5 - np.minimum(p, CLIP)))


def extreme(p: Array) -> Array:
    """Return terms that are zero unless p is below 0.1."""
    return np.maximum(0, np.tan(math.pi * (0.5 - np.minimum(5 * p, 0.5))))


def p_values(held_out: Array, new: Array, terms: Sequence[Callable[[Array], Array]]) -> Array:
    """Return exact ranks of sums of terms, (N,): the new image is in the bag of every rank.

    Args:
        held_out: scores that rise with outlyingness, (n, J).
        new: of N images, (N, J).
        terms: of each score, from p-values.
    """
    n = len(held_out)
    of_held_out, of_new = np.zeros((len(new), n)), np.zeros(len(new))
    for column, values, term in zip(held_out.T, new.T, terms, strict=True):
        ordered = np.sort(column)
        rank = n - ordered.searchsorted(column)
        above = values[:, None] >= column
        of_held_out += np.where(above, term((rank + 1) / (n + 1)), term(rank / (n + 1)))
        of_new += term((1 + n - ordered.searchsorted(values)) / (n + 1))
    p: Array = (1 + (of_held_out >= of_new[:, None] - TOLERANCE).sum(1)) / (n + 1)
    return p


class Model:
    """A head, and what it says of photos."""

    def __init__(self, train: Photos, classes: int, eye: PackagedEye, pooled: bool) -> None:
        self._pooled = pooled
        groups = (*eye.groups, train.pooled.shape[1]) if pooled else eye.groups
        head = fit_head(self._statistics(train), train.labels, classes, groups, logistic=False)
        names = [str(y) for y in range(classes)]
        self._model = PhotoModel.of(head, eye, names) if not pooled else _of_groups(head, eye, names)
        self._train, self._labels = unit(self._seen(train).z), train.labels

    def _statistics(self, photos: Photos) -> Array:
        roots = np.sqrt(photos.pooled.clip(min=0))
        return np.concatenate((photos.statistics, roots), 1) if self._pooled else photos.statistics

    def _seen(self, photos: Photos) -> Any:
        return self._model.fitted_part(self._statistics(photos).astype(np.float64))

    def __call__(self, photos: Photos) -> tuple[Array, Array]:
        """Return logits and four scores of photos: relative distance, energy, rest, and cosine distance."""
        seen = self._seen(photos)
        cosines = unit(seen.z) @ self._train.T
        same = self._labels == seen.logits.argmax(1)[:, None]
        nearest = -np.sort(-np.where(same, cosines, -1), axis=1)[:, :NEAREST].mean(1)
        return seen.logits.astype(np.float64), np.column_stack((seen.novelty, -nearest)).astype(np.float64)


def _of_groups(head: Any, eye: PackagedEye, names: list[str]) -> PhotoModel:
    """Return the model of a head that has one more group than its eye."""
    return PhotoModel.of(head, _More(eye, head.groups), names)  # type: ignore[arg-type]


class _More:
    """An eye whose statistics have another length, which only the sizes of a model need."""

    def __init__(self, eye: PackagedEye, groups: Sequence[int]) -> None:
        self._eye, self.groups, self.dimensions = eye, tuple(groups), sum(groups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._eye, name)


def measured(photos: Photos, left_out: int, size: int, far: Photos, eye: PackagedEye) -> dict[str, Figures]:
    """Return the figures of each change with one class left out."""
    near = photos[photos.labels == left_out]
    train, held_out, test = _parts(photos.without(left_out), Draws(0))
    order = Draws(1).permutation(len(train))
    labels = train.labels[order]
    rows = np.concatenate([order[labels == y][:size] for y in np.unique(labels)])
    classes = int(test.labels.max()) + 1
    found = {}
    for name, pooled in ((NOW, False), (GROUP, True)):
        model = Model(train[rows], classes, eye, pooled)
        ranked = model(held_out)[1]
        logits, scores = model(test)
        sets = {"alarms": scores, "near": model(near)[1], "far": model(far)[1]}
        rules: dict[str, list[Callable[[Array], Array]]] = {name: [usual] * 3}
        if not pooled:
            rules[RULE] = [usual, usual, extreme, usual]
        for rule, terms in rules.items():
            found[rule] = {
                kind: share(p_values(ranked[:, : len(terms)], each[:, : len(terms)], terms) <= LEVEL)
                for kind, each in sets.items()
            }
        found[name] |= {"accuracy": accuracy(logits, test.labels), "loss": cross_entropy(logits, test.labels)}
    return found


def with_unknown(name: str, photos: PhotoSet) -> Photos:
    """Return all photos of a set, also those of the class that other experiments leave out."""
    if name == OWN_SPLIT:
        return photos.photos
    new = np.full(len(photos.unknown), len(photos.class_names))
    columns = zip(
        vars(photos.photos).values(), (photos.unknown.statistics, photos.unknown.pooled, new), strict=True
    )
    return Photos(*(np.concatenate(pair) for pair in columns))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.near_unknowns", description=__doc__)
    parser.add_argument("data", metavar="DATA_FOLDER", type=Path, help="the folder of the photo sets")
    parser.add_argument(
        "--classes", type=int, default=100, help="leave out this number of classes of each set"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="photos of each class; 1000 for all"
    )
    parser.add_argument("--far-every", type=int, default=1, help="use one of this number of far photos")
    parser.add_argument("--work", type=Path, default=Path("runs/near-unknowns"), help="where features are")
    asked = parser.parse_args(arguments)
    eye = PackagedEye(EYES["lite0"])
    reader = Reader(eye, asked.work)
    sets, (far, _) = reader.sets(asked.data), reader.read(asked.data / FAR)
    far = far[np.arange(len(far))[:: asked.far_every]]
    keys = [(change, key) for change in (RULE, GROUP) for key in ("alarms", "near", "far")]
    keys += [(GROUP, "accuracy"), (GROUP, "loss")]
    rows = []
    for name, photos in sets.items():
        everything = with_unknown(name, photos)
        classes = np.unique(everything.labels).tolist()
        classes = classes[:: max(1, len(classes) // asked.classes)][: asked.classes]
        for size in asked.sizes:
            found = [measured(everything, left_out, size, far, eye) for left_out in classes]
            cells = []
            for change, key in keys:
                now, then = (np.mean([each[which][key] for each in found]) for which in (NOW, change))
                factor, digits = (1, 3) if key == "loss" else (100, 1)
                cells.append(f"{factor * now:.{digits}f} ({factor * (then - now):+.{digits}f})")
            rows.append([f"{name}, {len(classes)} classes", str(size) if size < 1000 else "all", *cells])
            print(rows[-1], flush=True)
    print(markdown(["", "photos of a class", *(f"{change}: {key}" for change, key in keys)], rows))


if __name__ == "__main__":
    main()

"""Folders of photos as features and splits, for ``experiments.photos``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from candid._support.numbers import Array
from candid._support.processes import launch
from candid._support.progress import SILENT
from candid.data.formats import image_files, part_folders, subfolders
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.eye import Eye
from candid.models.photo.gaussian import stratified_folds
from candid.training.features import Extraction, FeatureCache

UNKNOWN = {"bloodcells8": "ig", "trashnet6": "trash"}
"""The class that is kept from the models, by set."""
OWN_SPLIT, OWN_UNKNOWN, FAR = "clothing10", "clothing-other", "caltech99"
SPLITS = 5


class EyeAndPooled(Eye):
    """An eye whose statistics are followed by the features that its network's own classifier reads."""

    def __init__(self, eye: PackagedEye) -> None:
        self.eye, self.name, self.size, self.sha256 = eye, f"{eye.name} and pooled", eye.size, eye.sha256
        _, pooled = eye.statistics_and_pooled(np.zeros((1, 3, eye.size, eye.size), np.float32))
        self.groups = (*eye.groups, pooled.shape[1])

    def statistics(self, images: Array) -> Array:
        """Return both, (B, D + P)."""
        return np.concatenate(self.eye.statistics_and_pooled(images), 1)


@dataclass(frozen=True)
class Photos:
    """Features of N photos."""

    statistics: Array
    """(N, D)."""
    pooled: Array
    """(N, P)."""
    labels: Array
    """(N,)."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Array) -> "Photos":
        return Photos(self.statistics[rows], self.pooled[rows], self.labels[rows])

    def without(self, left_out: int) -> "Photos":
        """Return the photos of all classes but one; classes after it move up."""
        kept = self[self.labels != left_out]
        return Photos(kept.statistics, kept.pooled, kept.labels - (kept.labels > left_out))


def joined(*parts: Photos) -> Photos:
    """Return the photos of all parts."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Photos(*(np.concatenate(same) for same in columns))


class Parts(NamedTuple):
    """Photos of known classes: to fit, to rank among, to test."""

    train: Photos
    held_out: Photos
    test: Photos


@dataclass(frozen=True)
class PhotoSet:
    """A set of photos, with its own parts or with random ones."""

    class_names: tuple[str, ...]
    photos: Photos
    unknown: Photos
    own: tuple[Array, ...] = ()
    """The rows of its own parts; empty if it has none."""

    def parts(self, split: int | None = None, left_out: int | None = None) -> Parts:
        """Return a random split of 60, 20 and 20 %, or its own parts if it has some, without a class.

        The photos of each class are dealt to five parts once; each of five splits tests one of them and
        holds another one out, so that every photo is tested once.
        """
        rows = self.own
        if split is not None or not rows:
            part = (stratified_folds(self.photos.labels, SPLITS) - (split or 0)) % SPLITS
            rows = tuple(np.flatnonzero(rows) for rows in (part > 1, part == 1, part == 0))
        parts = [self.photos[part] for part in rows]
        return Parts(*parts if left_out is None else (part.without(left_out) for part in parts))


class Reader:
    """Computes features of folders of photos, or finds them in the cache."""

    def __init__(self, eye: PackagedEye, work: Path) -> None:
        self.eye, self._both = eye, EyeAndPooled(eye)
        cache = FeatureCache(self._both, SILENT, work)
        self._extract = Extraction(self._both, cache, launch(1), SILENT)

    def read(self, folder: Path, class_names: Sequence[str] | None = None) -> tuple[Photos, tuple[str, ...]]:
        """Return the photos of a folder of class folders, and the names of the classes."""
        names = tuple(class_names or (entry.name for entry in subfolders(folder)))
        features = self._extract(image_files(folder, names))
        statistics, pooled = np.split(features.values, [self.eye.dimensions], 1)
        return Photos(statistics, pooled, features.labels), names

    def sets(self, folder: Path) -> dict[str, PhotoSet]:
        """Return the three sets."""
        sets = {}
        for name, unknown in UNKNOWN.items():
            photos, names = self.read(folder / name)
            number = names.index(unknown)
            known = tuple(kind for kind in names if kind != unknown)
            sets[name] = PhotoSet(known, photos.without(number), photos[photos.labels == number])
        folders = part_folders(folder / OWN_SPLIT)
        names = tuple(entry.name for entry in subfolders(folders["train"]))
        parts = [self.read(folders[part], names)[0] for part in ("train", "val", "test")]
        together = joined(*parts)
        rows = np.split(np.arange(len(together)), np.cumsum([len(part) for part in parts])[:-1])
        sets[OWN_SPLIT] = PhotoSet(names, together, self.read(folder / OWN_UNKNOWN)[0], tuple(rows))
        return sets

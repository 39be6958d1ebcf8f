"""Group images that a model does not know: one group for each kind, as far as features show it."""

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.files import remove_unfinished, replacing
from candid._support.numbers import Array, log_softmax
from candid._support.options import build
from candid._support.progress import SILENT, Progress
from candid._support.text import as_csv
from candid.judging.examine import Examiner, sources
from candid.judging.held_out import HeldOut, needed
from candid.models import checkpoint
from candid.models.protocol import Model, can
from candid.trust.gaussians import unit
from candid.trust.learned import Mahalanobis
from candid.trust.promises import ExamineOptions
from candid.trust.verdict import Examination, UnusableImage

COMPONENTS = 20
"""Principal components in which images are grouped."""
SMALLEST = 5
"""Images in a group at least."""
NEIGHBOURS = 3
ACCEPTED, AMBIGUOUS, NOVEL = "accepted", "ambiguous", "novel"
SINGLE, UNKNOWN = "unknown-single", "unknown-"
"""The folders that images are copied into: how their names start."""


@dataclass(frozen=True)
class Group:
    """Images that belong together."""

    name: str
    """``"unknown 1"``, ``"unknown 2"``, ..., the largest first."""
    members: tuple[Examination, ...]
    """The most central image first."""
    nearest: str
    """The known class that the images resemble most."""

    @property
    def folder(self) -> str:
        """The name of a folder for it."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class GroupResult:
    """The result of :func:`candid.group`."""

    examinations: tuple[Examination, ...]
    """All images that could be judged."""
    groups: tuple[Group, ...]
    singles: tuple[Examination, ...]
    """Novel images that fit no group."""
    unusable: tuple[UnusableImage, ...] = ()

    @property
    def novel(self) -> int:
        """The number of novel images."""
        return len(self.singles) + sum(len(group.members) for group in self.groups)

    def places(self) -> dict[str, str]:
        """Return the folder that each image belongs to, by its path."""
        places = {
            examined.path: AMBIGUOUS
            if examined.verdict != "accept"
            else f"{ACCEPTED}/{examined.node or examined.label}"
            for examined in self.examinations
        }
        places |= {single.path: SINGLE for single in self.singles}
        return places | {member.path: group.folder for group in self.groups for member in group.members}

    def csv(self) -> str:
        """Return one line for each image."""
        named = {
            member.path: (group.name, group.nearest) for group in self.groups for member in group.members
        }
        rows = [("path", "verdict", "class", "posterior", "p_value", "group", "nearest_class")]
        for examined in self.examinations:
            group, nearest = named.get(examined.path, ("single" if examined.verdict == "novel" else "", ""))
            p_value = "" if examined.p_value is None else f"{examined.p_value:.6f}"
            judged = examined.path, str(examined.verdict), examined.label, f"{examined.confidence:.6f}"
            rows.append((*judged, p_value, group, nearest))
        return as_csv(rows)


def is_sorted_copy(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is in a folder that images are sorted into in ``folder``."""
    place, root = path.resolve(), folder.resolve()
    if not place.is_relative_to(root):
        return False
    parts = place.relative_to(root).parts
    return len(parts) > 1 and (parts[0] in (ACCEPTED, AMBIGUOUS, NOVEL) or parts[0].startswith(UNKNOWN))


def clusters(features: Array, groups: int | None = None) -> list[list[int]]:
    """Return the rows of each group of N images, the largest group first; some rows are in none.

    Features of unit length are reduced to 20 principal components, scaled to unit length again, and grouped
    by HDBSCAN (Campello et al., 2013). A row that it leaves out joins the group with the nearest mean, if it
    is no further from it than the furthest row of the group.

    Args:
        features: in a space in which known classes have about unit covariance, (N, D).
        groups: the number of groups, if it is known; then k-means, and all rows are in a group.

    Returns:
        Rows by group, the most central one first.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(40, 8)) / 4
        >>> x[:15, 0] += 5
        >>> x[15:, 1] += 5
        >>> [(len(rows), min(rows)) for rows in clusters(x)]
        [(25, 15), (15, 0)]
    """
    if groups is not None and not 1 <= groups <= len(features):
        raise CandidError(f"{len(features)} novel images can't be divided into {groups} groups.")
    if groups is None and len(features) < SMALLEST:
        return []
    x = _reduced(features)
    labels = np.zeros(len(x), dtype=int) if groups == 1 else _labels(x, groups)
    groups_of_rows = []
    for label in range(labels.max(initial=-1) + 1):
        rows = np.flatnonzero(labels == label)
        closeness = x[rows] @ x[rows].mean(0)
        groups_of_rows.append(rows[np.argsort(-closeness, kind="stable")].tolist())
    return sorted(groups_of_rows, key=lambda rows: (-len(rows), min(rows)))


def _reduced(features: Array) -> Array:
    """Return unit vectors of the principal components of unit features, (N, components)."""
    directions = unit(features.astype(np.float64))
    centred = directions - directions.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    return unit(centred @ axes[:COMPONENTS].T)


def _labels(x: Array, groups: int | None) -> Array:
    from sklearn.cluster import HDBSCAN, KMeans

    if groups is None:
        scan = HDBSCAN(min_cluster_size=SMALLEST, min_samples=NEIGHBOURS, copy=True)
        return _joined(x, scan.fit_predict(x))
    labels: Array = KMeans(groups, n_init=5, random_state=0).fit_predict(x)
    return labels


def _joined(x: Array, labels: Array) -> Array:
    """Return labels in which rows without a group (-1) join the nearest one if they lie within its reach."""
    count = labels.max(initial=-1) + 1
    if not count:
        return labels
    means = np.stack([x[labels == label].mean(0) for label in range(count)])
    closeness = x @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    reach = np.array([closeness[labels == label, label].min() for label in range(count)])
    nearest = closeness.argmax(1)
    within = closeness[np.arange(len(x)), nearest] >= reach[nearest]
    return np.where((labels < 0) & within, nearest, labels)


class Whitener:
    """Brings the features of images into a space in which the known classes have about unit covariance.

    Args:
        model: a photo model, an adopted model, or one with a Mahalanobis score from its training images.
        held_out: its held-out scores.
        name: what users call it.
    """

    def __init__(self, model: Model, held_out: HeldOut, name: object = "this model") -> None:
        self._own: Any = model.whitened if can(model, "whitening") else None  # type: ignore[attr-defined]
        score = held_out.learned.get("mahalanobis")
        if self._own is None and not isinstance(score, Mahalanobis):
            raise CandidError(
                f"'{name}' knows no covariance of features, which images are grouped by: calibrate it with "
                "the data that it was trained on."
            )
        self._score = score

    def __call__(self, features: Array) -> Array:
        """Return whitened features, (N, D)."""
        if self._own is not None:
            z: Array = self._own(features)
            return z
        assert isinstance(self._score, Mahalanobis)
        return self._score.whitened(features)


def group(
    model: Any, images: Any, *, groups: int | None = None, progress: Progress = SILENT, **options: Any
) -> GroupResult:
    """Examine images, and group those that are novel.

    Args:
        model: a model with held-out scores, or its name or folder.
        images: see :func:`candid.examine`.
        groups: the number of groups, if it is known; by default it is found.
        progress: shows how many images are done.
        **options: fields of :class:`~candid.trust.promises.ExamineOptions`.

    Returns:
        The groups, the largest first, novel images that fit no group, and all examinations.

    Raises:
        CandidError: if the model has no held-out scores, or if an image can't be used, unless ``skip_bad`` is
            set.

    Example:
        >>> import candid
        >>> noise = np.random.default_rng(0).random((6, 32, 32, 3))
        >>> result = candid.group("cifar10-resnet", noise, groups=1)
        >>> [(group.name, len(group.members)) for group in result.groups]
        [('unknown 1', 6)]
    """
    chosen = build(ExamineOptions, options)
    loaded = checkpoint.resolve(model)
    name = model if isinstance(model, str | os.PathLike) else "this model"
    held_out = needed(loaded, name)
    whiten = Whitener(loaded, held_out, name)
    examiner = Examiner(loaded, name, chosen, evidence=True, held_out=held_out)
    examinations, unusable, novel = [], [], []
    named = list(sources(images))
    judged = examiner.examine([source for _, source in named])
    for examined in progress.track(judged, "examining", len(named)):
        if isinstance(examined, UnusableImage):
            if not chosen.skip_bad:
                raise CandidError(
                    f"'{examined.path}' can't be used: {examined.reason}. Leave it out, or set skip_bad=True."
                )
            unusable.append(examined)
            continue
        assert examined.evidence is not None
        light = replace(examined, evidence=None)
        examinations.append(light)
        if examined.verdict == "novel":
            outputs = examined.evidence.outputs
            novel.append((light, outputs.features[0], outputs.logits[0].astype(np.float64)))
    grouped, singles = _grouped(novel, whiten, loaded.class_names, groups)
    return GroupResult(tuple(examinations), grouped, singles, tuple(unusable))


def _grouped(
    novel: list[tuple[Examination, Array, Array]],
    whiten: Whitener,
    class_names: tuple[str, ...],
    groups: int | None,
) -> tuple[tuple[Group, ...], tuple[Examination, ...]]:
    if not novel:
        return (), ()
    z = whiten(np.stack([features for _, features, _ in novel]))
    logits = np.stack([row for _, _, row in novel])
    clustered = clusters(z, groups)
    made = tuple(
        Group(
            f"unknown {number}",
            tuple(novel[row][0] for row in rows),
            class_names[int(log_softmax(logits[rows]).mean(0).argmax())],
        )
        for number, rows in enumerate(clustered, 1)
    )
    taken = {row for rows in clustered for row in rows}
    return made, tuple(examined for row, (examined, _, _) in enumerate(novel) if row not in taken)


def sort_into(places: Mapping[str, str], folder: Path) -> Counter[str]:
    """Copy images into subfolders of ``folder``.

    No file is moved, removed or overwritten. An image that is there already is not copied again, so that an
    interrupted run can be repeated; a different image of the same name gets a number.

    Args:
        places: the subfolder of each image, by its path; parts of it are joined by ``/``.
        folder: where the subfolders are made.

    Returns:
        The number of images of each subfolder, by its name on the disk.

    Raises:
        CandidError: if the disk is full, or a folder can't be written.
    """
    try:
        names = _names_on_disk(places.values())
        for name in names.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder / name)
        digests: dict[Path, list[bytes]] = {}
        for path, place in places.items():
            _copy(Path(path), folder / names[place], digests)
    except OSError as error:
        raise CandidError(
            f"Can't copy images into '{folder}' ({error}): free some space, or name another folder."
        ) from error
    return Counter(names[place] for place in places.values())


def _names_on_disk(places: Iterable[str]) -> dict[str, str]:
    """Return a name for each place that every file system takes; different places never share one.

    >>> _names_on_disk(["accepted/a b", "accepted/a?b", "accepted/a:b"])
    {'accepted/a b': 'accepted/a b', 'accepted/a:b': 'accepted/a-b', 'accepted/a?b': 'accepted/a-b-2'}
    """
    names: dict[str, str] = {}
    taken = set()
    for place in sorted(set(places)):
        parts = [re.sub(r'[\x00-\x1f<>:"/\\|?*]+', "-", part).strip(" .") for part in place.split("/", 1)]
        name, number = "/".join(part or "unnamed" for part in parts), 1
        unique = name
        while unique.casefold() in taken:
            number += 1
            unique = f"{name}-{number}"
        taken.add(unique.casefold())
        names[place] = unique
    return names


def _copy(path: Path, folder: Path, digests: dict[Path, list[bytes]]) -> None:
    """Copy a file unless its content is there already under its name, or its name with a number.

    ``digests`` has those of files that are there, in the order of their numbers, by the name without one.
    """
    digest, taken = _digest(path), digests.setdefault(folder / path.name, [])
    if digest in taken:
        return
    while (target := _numbered(folder / path.name, len(taken) + 1)).exists():
        taken.append(_digest(target) if target.is_file() else b"")
        if taken[-1] == digest:
            return
    with replacing(target) as temporary:
        shutil.copyfile(path, temporary)
    shutil.copystat(path, target)
    taken.append(digest)


def _numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()

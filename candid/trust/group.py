"""Group images that a model does not know: one group for each kind, as far as features show it."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from candid._support.config import build
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid._support.tables import as_csv
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.trust.examine import Examiner, Unusable, sources
from candid.trust.feature_scores import Mahalanobis
from candid.trust.judge import HeldOut, needed
from candid.trust.options import ExamineOptions
from candid.trust.verdict import Examination

COMPONENTS = 20
"""Principal components in which images are grouped."""
SMALLEST = 5
"""Images in a group at least."""
NEIGHBOURS = 3
ACCEPTED, AMBIGUOUS, SINGLE, UNKNOWN = "accepted", "ambiguous", "unknown-single", "unknown-"
"""The folders that images are copied into: how their names start."""
NOVELTY = 0.05
"""The level of novelty by default: a false alarm costs little here, it is one more single image."""


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
class Grouping:
    """The result of :func:`candid.group`."""

    examinations: tuple[Examination, ...]
    """All images that could be judged."""
    groups: tuple[Group, ...]
    singles: tuple[Examination, ...]
    """Novel images that fit no group."""
    unusable: tuple[Unusable, ...] = ()

    @property
    def novel(self) -> int:
        """The number of novel images."""
        return len(self.singles) + sum(len(group.members) for group in self.groups)

    def places(self) -> dict[str, str]:
        """Return the folder that each image belongs to, by its path."""
        found = {
            each.path: f"{ACCEPTED}/{each.label}" if each.verdict == "accept" else AMBIGUOUS
            for each in self.examinations
        }
        found |= {each.path: SINGLE for each in self.singles}
        return found | {each.path: group.folder for group in self.groups for each in group.members}

    def csv(self) -> str:
        """Return one line for each image."""
        named = {each.path: (group.name, group.nearest) for group in self.groups for each in group.members}
        rows = [("path", "verdict", "class", "posterior", "p_value", "group", "nearest_class")]
        for each in self.examinations:
            group, nearest = named.get(each.path, ("single" if each.verdict == "novel" else "", ""))
            posterior, p = f"{each.confidence:.6f}", "" if each.p_value is None else f"{each.p_value:.6f}"
            rows.append((each.path, str(each.verdict), each.label, posterior, p, group, nearest))
        return as_csv(rows)


def is_sorted_copy(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is in one of the folders that :meth:`Grouping.places` names in ``folder``."""
    place, own = path.resolve(), folder.resolve()
    if not place.is_relative_to(own):
        return False
    parts = place.relative_to(own).parts
    return len(parts) > 1 and (parts[0] in (ACCEPTED, AMBIGUOUS) or parts[0].startswith(UNKNOWN))


def clusters(features: Tensor, groups: int | None = None) -> list[list[int]]:
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
        >>> x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) / 4
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
    found = []
    for label in range(labels.max(initial=-1) + 1):
        rows = np.flatnonzero(labels == label)
        closeness = x[rows] @ x[rows].mean(0)
        found.append(rows[np.argsort(-closeness, kind="stable")].tolist())
    return sorted(found, key=lambda rows: (-len(rows), min(rows)))


def _reduced(features: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
    unit = F.normalize(features.double())
    centred = unit - unit.mean(0)
    _, _, axes = torch.linalg.svd(centred, full_matrices=False)
    reduced: np.ndarray[Any, np.dtype[np.float64]] = F.normalize(centred @ axes[:COMPONENTS].T).numpy()
    return reduced


def _labels(x: "np.ndarray[Any, Any]", groups: int | None) -> "np.ndarray[Any, Any]":
    from sklearn.cluster import HDBSCAN, KMeans

    if groups is None:
        found = HDBSCAN(min_cluster_size=SMALLEST, min_samples=NEIGHBOURS, copy=True).fit_predict(x)
        return _joined(x, found)
    labels: np.ndarray[Any, Any] = KMeans(groups, n_init=5, random_state=0).fit_predict(x)
    return labels


def _joined(x: "np.ndarray[Any, Any]", labels: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
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
        self._own = getattr(model, "whitened", None)
        found = held_out.column_scores.get("mahalanobis")
        if self._own is None and not isinstance(found, Mahalanobis):
            raise CandidError(
                f"'{name}' knows no covariance of features, which images are grouped by: calibrate it with "
                "the data that it was trained on."
            )
        self._score = found

    def __call__(self, features: Tensor) -> Tensor:
        """Return whitened features, (N, D)."""
        if self._own is not None:
            z: Tensor = self._own(features)
            return z
        assert isinstance(self._score, Mahalanobis)
        return (features - self._score.centre).float() @ self._score.whitening.T


@torch.inference_mode()
def group(
    model: Any, images: Any, *, groups: int | None = None, progress: Progress = SILENT, **options: Any
) -> Grouping:
    """Examine images, and group those that are novel.

    Args:
        model: a model with held-out scores, or its name or folder.
        images: see :func:`candid.examine`.
        groups: the number of groups, if it is known; by default it is found.
        progress: shows how many images are done.
        **options: fields of :class:`~candid.trust.options.ExamineOptions`. If it is not given, the level
            ``novelty`` is 0.05 here, or the smallest possible one.

    Returns:
        The groups, the largest first, novel images that fit no group, and all examinations.

    Raises:
        CandidError: if the model has no held-out scores, or if an image can't be used, unless ``skip_bad`` is
            set.

    Example:
        >>> import candid, torch
        >>> noise = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> found = candid.group("cifar10-resnet", noise, groups=1)
        >>> [(each.name, len(each.members)) for each in found.groups]
        [('unknown 1', 6)]
    """
    chosen = build(ExamineOptions, options)
    loaded = checkpoint.resolve(model)
    name = model if isinstance(model, str | os.PathLike) else "this model"
    held_out = needed(loaded, name)
    whiten = Whitener(loaded, held_out, name)
    if chosen.novelty is None:
        chosen = build(ExamineOptions, options | {"novelty": max(NOVELTY, 2 / (len(held_out) + 1))})
    examiner = Examiner(loaded, name, chosen, evidence=True, held_out=held_out)
    known, unusable, novel = [], [], []
    given = list(sources(images))
    judged = examiner.examine([source for _, source in given])
    for each in progress.track(judged, "examining", len(given)):
        if isinstance(each, Unusable):
            if not chosen.skip_bad:
                raise CandidError(
                    f"'{each.path}' can't be used: {each.reason}. Leave it out, or set skip_bad=True."
                )
            unusable.append(each)
            continue
        assert each.evidence is not None
        light = replace(each, evidence=None)
        known.append(light)
        if each.verdict == "novel":
            outputs = each.evidence.outputs
            novel.append((light, outputs.features[0].cpu(), outputs.logits[0].double().cpu()))
    made, singles = _grouped(novel, whiten, loaded.class_names, groups)
    return Grouping(tuple(known), made, singles, tuple(unusable))


def _grouped(
    novel: list[tuple[Examination, Tensor, Tensor]],
    whiten: Whitener,
    class_names: tuple[str, ...],
    groups: int | None,
) -> tuple[tuple[Group, ...], tuple[Examination, ...]]:
    if not novel:
        return (), ()
    z = whiten(torch.stack([features for _, features, _ in novel]))
    logits = torch.stack([each for _, _, each in novel])
    found = clusters(z, groups)
    made = tuple(
        Group(
            f"unknown {number}",
            tuple(novel[row][0] for row in rows),
            class_names[int(logits[rows].log_softmax(1).mean(0).argmax())],
        )
        for number, rows in enumerate(found, 1)
    )
    taken = {row for rows in found for row in rows}
    return made, tuple(each for row, (each, _, _) in enumerate(novel) if row not in taken)

"""The score of an image that is watched for drift: fixed before the held-out images that rank it are seen."""

from dataclasses import dataclass

import numpy as np

from candid._support.numbers import Array, digest
from candid._support.old_formats import ALL_PARTS
from candid._support.randomness import draws
from candid.inference.predictions import Measure
from candid.judging.held_out import HeldOut, measures_for, needed
from candid.models.protocol import Model
from candid.trust.arrays import firsts, series_of
from candid.trust.conformal import Detector, KernelDensity
from candid.trust.drift import SKIPPED, Among, Watch, Watched
from candid.trust.ranking import Standard, new_detector
from candid.trust.scores import OWN_PARTS, SCORES, Columns, chosen_score
from candid.trust.verdict import Sighting

FIXING = 4
"""One of this number of held-out images fixes the score and the bets; the others are ranked."""
DISTANCES = ("mahalanobis++", "mahalanobis", "pca-residual")
"""The first of these that a model without a density has is watched."""


@dataclass(frozen=True)
class WatchedScore:
    """The score of an image: a standardised novelty plus a standardised lack of confidence.

    Novelty is, for a photo model, the relative distance plus the squared distance outside the span of its
    class means; for a pixel model, minus the log density of the terms of its log density and of code lengths;
    else a distance of features. Lack of confidence is the energy. A score that is asked for is watched alone.
    """

    held_out: HeldOut
    """The held-out images; a fixed quarter of them fixes the score."""
    name: str | None
    """The score that is its novelty; None if the model has no more than logits."""
    density: KernelDensity | None
    own: slice
    """Which of the model's own scores are added up."""
    standard: Standard
    fitted: int
    """The number of classes, the first ones, that were fitted: images of taught ones say nothing of how
    frequent the others are."""
    detector: Detector | None = None
    """That of the score that was asked for; None if none was."""

    @classmethod
    def of(cls, model: Model, name: object = "this model", score: str | None = None) -> "WatchedScore":
        """Return the score of a model that carries held-out scores; ``name`` is for messages."""
        return cls.fit(needed(model, name), model, score)

    @classmethod
    def fit(cls, held_out: HeldOut, model: Model, score: str | None = None) -> "WatchedScore":
        """Return the score of a model that a quarter of the held-out images fixes.

        Args:
            held_out: what the model knows of held-out images.
            model: the model.
            score: the name of a score that is watched alone.
        """
        fixing, own = _rows(held_out, 0), model.watched_novelty
        chosen: str | None = "combined"
        density = detector = None
        if score is not None:
            asked = chosen_score(fixing, score)
            chosen, detector = asked.name, new_detector(asked).fit(asked.of(fixing))
        elif OWN_PARTS not in fixing and SCORES["joint"].is_available(fixing):
            chosen, density = "joint", KernelDensity(SCORES["joint"].of(fixing))
        elif OWN_PARTS not in fixing:
            chosen = next((name for name in DISTANCES if name in fixing), None)
        standard = Standard.of(_parts(fixing, chosen, density, own, detector))
        return cls(held_out, chosen, density, own, standard, model.fitted_classes, detector)

    def identity(self, model: Model) -> str:
        """Return a SHA-256 digest that changes when the watch can: of the model and its held-out scores."""
        columns = self.held_out.statistics
        return digest(model.fingerprint(), *(columns[name] for name in sorted(columns))).hexdigest()

    @property
    def measures(self) -> dict[str, Measure]:
        """What must be measured of images."""
        return {} if self.name is None else measures_for((SCORES[self.name],), self.held_out.learned)

    def sightings(self, columns: Columns) -> list[Sighting]:
        """Return what a watch needs to know of N images; those predicted as a taught class have none."""
        scores = self.standard.sum(_parts(columns, self.name, self.density, self.own, self.detector))
        classes = np.where(columns["predicted"] < self.fitted, columns["predicted"], SKIPPED)
        seen = scores, classes, columns["max_posterior"].astype(np.float64)
        return [Sighting(*row) for row in zip(*(column.tolist() for column in seen), strict=True)]

    def watch(
        self,
        class_names: tuple[str, ...],
        alarm: float = 0.01,
        among: Among = "held-out",
        watched: Watched = "both",
    ) -> Watch:
        """Return a watch of scores, predicted classes or both that has seen the held-out images only."""
        fixing, fitted = _rows(self.held_out, 0)["predicted"], class_names[: self.fitted]
        counts = 1.0 + np.bincount(fixing[fixing < self.fitted], minlength=self.fitted)
        seen = self.sightings(_rows(self.held_out, 1))
        scores, classes, confidence = zip(*seen, strict=True)
        frequencies = dict(zip(fitted, (counts / counts.sum()).tolist(), strict=True))
        watch = Watch(alarm, among=among, proven=not self.held_out.out_of_fold).fit(
            None if watched == "classes" else scores,
            None if watched == "images" else classes,
            None if watched == "images" else frequencies,
            confidence,
        )
        watch.score = ALL_PARTS if self.name == "combined" and self.own == slice(None) else ""
        if self.detector is not None:
            watch.score = str(self.name)
        return watch


def _rows(held_out: HeldOut, part: int) -> Columns:
    """Return the columns of the quarter that fixes the score (0), or of the other images (1).

    Only the first of the copies of an image, or of its series, is in one of them.
    """
    columns = held_out.statistics
    distinct = np.flatnonzero(firsts(series_of(columns, columns.get("series"))))
    order, n = distinct[draws(1).permutation(len(distinct))], len(distinct) // FIXING
    return columns.rows((order[:n], order[n:])[part])


def _parts(
    columns: Columns, name: str | None, density: KernelDensity | None, own: slice, detector: Detector | None
) -> Array:
    """Return what is added up, once it is standardised, (N, J)."""
    if detector is not None and name is not None:
        return detector.score(SCORES[name].of(columns))[:, None]
    if name == "combined":
        return columns[OWN_PARTS][:, own].astype(np.float64)
    energy = -columns["log_evidence"]
    if name is None:
        return energy[:, None]
    value = columns[name] if density is None else density.negative_log(SCORES[name].of(columns))
    return np.stack((value, energy), 1).astype(np.float64)

"""The score of an image that is watched for drift: fixed before the held-out images that rank it are seen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from candid._support.files import digest
from candid._support.randomness import generator
from candid.inference.predictions import Measure
from candid.models.protocol import Model
from candid.trust.detectors import KernelDensity
from candid.trust.judge import HeldOut, needed
from candid.trust.scores import OWN_PARTS, SCORES, Statistics, measures_for
from candid.trust.verdict import Sighting
from candid.trust.watch import Among, Watch

FIXING = 4
"""One of this number of held-out images fixes the score and the bets; the others are ranked."""
DISTANCES = ("mahalanobis++", "mahalanobis", "pca-residual")
"""The first of these that a model without a density has is watched."""

OWN_TWO = slice(-2, None)
"""The columns of a model's own scores that are watched, a novelty and the energy: of a photo model (relative
distance, energy, rest) the last two; of an adopted model (a distance of each group of features, energy) the
distance of the last group and the energy."""


@dataclass(frozen=True)
class Standard:
    """Centres and scales of J scores, from images that will not be ranked."""

    centre: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Standard":
        """Return the medians and the interquartile ranges of scores (n, J)."""
        low, centre, high = values.double().quantile(values.new_tensor([0.25, 0.5, 0.75]).double(), dim=0)
        return cls(centre, torch.where(high > low, (high - low) / 1.349, 1.0))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the standardised scores of N images, (N, J) to (N,).

        >>> Standard(torch.zeros(2), torch.ones(2)).sum(torch.tensor([[1.0, 2.0]]))
        tensor([3.], dtype=torch.float64)
        """
        return ((values.double() - self.centre) / self.scale).sum(1)


@dataclass(frozen=True)
class WatchedScore:
    """The score of an image: a standardised novelty plus a standardised lack of confidence.

    Novelty is what the model knows best: the rest of a photo model, the density of a pixel model (of the
    terms of its log density and of code lengths), else a distance of features. Lack of confidence is the
    energy.
    """

    held_out: HeldOut
    """The held-out images; a fixed quarter of them fixes the score."""
    name: str | None
    """The score that is its novelty; None if the model has no more than logits."""
    density: KernelDensity | None
    standard: Standard

    @classmethod
    def of(cls, model: Model, name: object = "this model") -> "WatchedScore":
        """Return the score of a model that carries held-out scores; ``name`` is for messages."""
        return cls.fit(needed(model, name))

    @classmethod
    def fit(cls, held_out: HeldOut) -> "WatchedScore":
        """Return the score that a quarter of the held-out images fixes."""
        known = _rows(held_out, 0)
        density = None
        if OWN_PARTS in known:
            chosen: str | None = "combined"
        elif SCORES["joint"].is_available(known):
            chosen, density = "joint", KernelDensity(SCORES["joint"].of(known))
        else:
            chosen = next((each for each in DISTANCES if each in known), None)
        return cls(held_out, chosen, density, Standard.of(_parts(known, chosen, density)))

    def identity(self, model: Model) -> str:
        """Return a SHA-256 digest that changes when the watch can: of the model and its held-out scores."""
        known = self.held_out.statistics
        return digest(model.fingerprint(), *(known[name] for name in sorted(known))).hexdigest()

    @property
    def measures(self) -> dict[str, Measure]:
        """What must be measured of images."""
        return {} if self.name is None else measures_for((SCORES[self.name],), self.held_out.column_scores)

    def sightings(self, statistics: Statistics) -> list[Sighting]:
        """Return what a watch needs to know of N images."""
        scores = self.standard.sum(_parts(statistics, self.name, self.density))
        columns = scores, statistics["predicted"], statistics["max_posterior"].double()
        return [Sighting(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]

    def watch(self, class_names: tuple[str, ...], alarm: float = 0.01, among: Among = "held-out") -> Watch:
        """Return a watch of scores and predicted classes that has seen the held-out images only."""
        fixing = _rows(self.held_out, 0)["predicted"]
        counts = 1 + torch.bincount(fixing, minlength=len(class_names)).double()
        seen = self.sightings(_rows(self.held_out, 1))
        scores, classes, confidence = zip(*seen, strict=True)
        return Watch(alarm, among=among, proven=not self.held_out.out_of_fold).fit(
            scores, classes, dict(zip(class_names, (counts / counts.sum()).tolist(), strict=True)), confidence
        )


def _rows(held_out: HeldOut, part: int) -> dict[str, Tensor]:
    """Return the statistics of the quarter that fixes the score (0), or of the other images (1)."""
    order = torch.randperm(len(held_out), generator=generator(1))
    n = len(held_out) // FIXING
    rows = (order[:n], order[n:])[part]
    return {name: values[rows] for name, values in held_out.statistics.items()}


def _parts(statistics: Statistics, name: str | None, density: KernelDensity | None) -> Tensor:
    """Return what is added up, once it is standardised, (N, J)."""
    if name == "combined":
        return statistics[OWN_PARTS][:, OWN_TWO].double()
    energy = -statistics["log_evidence"].double()
    if name is None:
        return energy[:, None]
    value = (
        statistics[name].double() if density is None else density.negative_log(SCORES[name].of(statistics))
    )
    return torch.stack((value, energy), 1)

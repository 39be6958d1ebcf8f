"""Class similarity: the distances of the class means, and what follows from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from torch import Tensor

from candid._support.errors import CandidError
from candid.explanations.classes import chosen_classes
from candid.models.protocol import Model, require_mixture
from candid.trust.judge import HeldOut

DIFFERENCE = 1.5
"""Expected and measured uncertainties that differ by more than this factor are shown side by side."""
OPTIMAL = 300
"""Up to this number of classes, the tree's branches are turned to bring neighbours closest (cubic effort)."""


class Pair(NamedTuple):
    """Two classes, the smaller class number first."""

    first: int
    second: int
    distance: float
    """Distance of their means, in standard deviations of a class."""
    uncertainty: float
    """Expected uncertainty of a decision between the two, 0 to 1/2."""
    measured: float | None = None
    """The same, measured on images of the two; None if there are none."""

    @property
    def differs(self) -> bool:
        """Whether the expected and the measured uncertainty differ by more than a factor of 1.5."""
        return differ(self.uncertainty, self.measured)


@dataclass(frozen=True)
class Similarity:
    """How similar n classes are, in the order in which they are drawn."""

    classes: tuple[int, ...]
    """Class numbers."""
    names: tuple[str, ...]
    distances: Tensor
    """|mu_i - mu_j| in standard deviations of a class, (n, n), float64."""
    uncertainty: Tensor
    """`expected_uncertainty` of the distances, (n, n), float64."""
    measured: Tensor | None = None
    """The same, measured on images, (n, n), NaN for pairs without images; None if nothing was measured."""

    def closest_pairs(self, count: int = 10) -> list[Pair]:
        """Return the ``count`` most similar pairs of classes, or all if fewer, by rising distance."""
        if count < 1:
            raise CandidError(f"The number of closest pairs must be at least 1, not {count}.")
        pairs = torch.triu_indices(len(self.classes), len(self.classes), offset=1)
        nearest = self.distances[pairs[0], pairs[1]].argsort(stable=True)[:count]
        return [self.pair(i, j) for i, j in pairs[:, nearest].T.tolist()]

    def pair(self, i: int, j: int) -> Pair:
        """Return the pair in row ``i`` and column ``j``."""
        first, second = sorted((self.classes[i], self.classes[j]))
        measured = entry(self.measured, i, j)
        return Pair(first, second, float(self.distances[i, j]), float(self.uncertainty[i, j]), measured)


@torch.no_grad()
def similarity(
    model: Model,
    classes: str | Sequence[str | int] | None = None,
    order: Literal["clustering", "given"] = "clustering",
    measured: Tensor | None = None,
) -> Similarity:
    """Return the distances of all class means, or of those that `chosen_classes` finds for ``classes``.

    By ``"clustering"`` similar classes become neighbours: the leaves of a tree of average linkage;
    ``"given"`` keeps the order of ``classes``. ``measured`` are the uncertainties between all M classes on
    images, (M, M); by default those that were measured on held-out images and are stored with the model.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> found = similarity(model, "7,1,3", order="given")
    >>> found.classes, found.distances.shape
    ((7, 1, 3), torch.Size([3, 3]))
    >>> found.closest_pairs(1)[0].distance == found.distances[found.distances > 0].min()
    tensor(True)
    """
    model = require_mixture(model, "The similarity of classes")
    if order not in ("clustering", "given"):
        raise CandidError(f"The order of classes is 'clustering' or 'given', not '{order}'.")
    names = model.class_names
    chosen = list(range(len(names))) if classes is None else chosen_classes(names, classes)
    if len(chosen) < 2:
        raise CandidError("Similarity is between classes: choose at least two.")
    distances = model.mixture.pairwise_distances().cpu()
    if not distances.isfinite().all():
        raise CandidError("The model's class means are infinite or NaN: give one whose training went well.")
    distances = (0.5 * (distances + distances.T))[chosen][:, chosen]  # symmetric to the last bit
    if order == "clustering":
        leaves = _clustered(distances)
        chosen, distances = [chosen[leaf] for leaf in leaves], distances[leaves][:, leaves]
    measured = held_out_uncertainty(model) if measured is None else measured
    return Similarity(
        tuple(chosen),
        tuple(names[c] for c in chosen),
        distances,
        expected_uncertainty(distances),
        None if measured is None else measured[chosen][:, chosen].double(),
    )


def _clustered(distances: Tensor) -> list[int]:
    """Return the rows of ``distances`` in the order of a tree of average linkage."""
    rows, columns = torch.triu_indices(len(distances), len(distances), offset=1)
    tree = linkage(distances[rows, columns].numpy(), "average", optimal_ordering=len(distances) <= OPTIMAL)
    return [int(leaf) for leaf in leaves_list(tree)]


def expected_uncertainty(distance: Tensor | float) -> Tensor:
    """Return ``1 - E[c] = Phi(-d / 2)`` of decisions between two classes with means d apart, in float64.

    c is the posterior of the more probable one of the two; the expectation is over latents that follow the
    model's own density, with equal priors. It is 1/2 at distance 0 and underflows to 0 beyond 76;
    `log_expected_uncertainty` does not.

    >>> expected_uncertainty(torch.tensor([0.0, 1.7, 3.8]))
    tensor([0.5000, 0.1977, 0.0287], dtype=torch.float64)
    """
    # torch.special.ndtr is 1 + erf, which is 0 from distance 17 on.
    return 0.5 * torch.special.erfc(_checked(distance) / math.sqrt(8))


def log_expected_uncertainty(distance: Tensor | float) -> Tensor:
    """Return ``log Phi(-d / 2)`` in nats, float64.

    >>> log_expected_uncertainty(100.0)
    tensor(-1254.8314, dtype=torch.float64)
    """
    return torch.special.log_ndtr(-0.5 * _checked(distance))


def held_out_uncertainty(model: Model) -> Tensor | None:
    """Return the uncertainty between each two classes on held-out images, (M, M), if the model carries it."""
    held_out = HeldOut.of(model)
    return None if held_out is None else held_out.pair_uncertainty


def entry(measured: Tensor | None, i: int, j: int) -> float | None:
    """Return ``measured[i, j]``; None if it was not measured."""
    if measured is None or measured[i, j].isnan():
        return None
    return float(measured[i, j])


def differ(expected: float, measured: float | None) -> bool:
    """Return whether there is a measured uncertainty that differs by more than a factor of 1.5.

    >>> differ(0.18, 0.2), differ(0.11, 0.05), differ(0.11, None)
    (False, True, False)
    """
    return measured is not None and max(expected, measured) > DIFFERENCE * min(expected, measured)


def _checked(distance: Tensor | float) -> Tensor:
    checked = torch.as_tensor(distance, dtype=torch.float64)
    bad = checked[~(checked >= 0)]
    if len(bad):
        raise CandidError(f"Distances of class means are numbers from 0 on, not {float(bad[0])}.")
    return checked

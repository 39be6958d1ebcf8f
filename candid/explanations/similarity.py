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
from candid.models.protocol import Model, require_latent

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

    def closest_pairs(self, count: int = 10) -> list[Pair]:
        """Return the ``count`` most similar pairs of classes, or all if fewer, by rising distance."""
        if count < 1:
            raise CandidError(f"The number of closest pairs must be at least 1, not {count}.")
        pairs = torch.triu_indices(len(self.classes), len(self.classes), offset=1)
        nearest = self.distances[pairs[0], pairs[1]].argsort(stable=True)[:count]
        return [self._pair(i, j) for i, j in pairs[:, nearest].T.tolist()]

    def _pair(self, i: int, j: int) -> Pair:
        first, second = sorted((self.classes[i], self.classes[j]))
        return Pair(first, second, float(self.distances[i, j]), float(self.uncertainty[i, j]))


@torch.no_grad()
def similarity(
    model: Model,
    classes: str | Sequence[str | int] | None = None,
    order: Literal["clustering", "given"] = "clustering",
) -> Similarity:
    """Return the distances of all class means, or of those that `chosen_classes` finds for ``classes``.

    By ``"clustering"`` similar classes become neighbours: the leaves of a tree of average linkage;
    ``"given"`` keeps the order of ``classes``.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> found = similarity(model, "7,1,3", order="given")
    >>> found.classes, found.distances.shape
    ((7, 1, 3), torch.Size([3, 3]))
    >>> found.closest_pairs(1)[0].distance == found.distances[found.distances > 0].min()
    tensor(True)
    """
    model = require_latent(model, "The similarity of classes")
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
    return Similarity(
        tuple(chosen), tuple(names[c] for c in chosen), distances, expected_uncertainty(distances)
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


def measured_uncertainty(posterior: Tensor, labels: Tensor, pairs: Sequence[Pair]) -> list[float | None]:
    """Return the uncertainty of pairs of classes, measured on images of the two.

    The mean of ``min(p_a, p_b) / (p_a + p_b)`` over images with these labels, from posteriors (N, M); None
    where there are none. It differs from the expected one where latents do not follow the mixture.

    >>> posterior = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.9, 0.0]])
    >>> (found,) = measured_uncertainty(posterior, torch.tensor([0, 1]), [Pair(0, 1, 1.0, 0.3)])
    >>> round(found, 4)
    0.175
    """
    found: list[float | None] = []
    for pair in pairs:
        both = posterior[(labels == pair.first) | (labels == pair.second)][
            :, [pair.first, pair.second]
        ].double()
        lower = both.amin(1) / both.sum(1).clamp(min=torch.finfo(torch.float64).tiny)
        found.append(float(lower.mean()) if len(lower) else None)
    return found


def _checked(distance: Tensor | float) -> Tensor:
    checked = torch.as_tensor(distance, dtype=torch.float64)
    bad = checked[~(checked >= 0)]
    if len(bad):
        raise CandidError(f"Distances of class means are numbers from 0 on, not {float(bad[0])}.")
    return checked

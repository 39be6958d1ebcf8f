"""Class similarity: the distances of the classes, and what follows from them.

Distances are measured on held-out images along the lines that decide between two classes
(:func:`candid.inference.metrics.measured_distances`), since much of the class means of a pixel model decides
little. Means are in their place where nothing was measured, and in photo models, whose means are averages of
photos.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid.judging.held_out import HeldOut
from candid.models.protocol import Model, require

DIFFERENCE = 1.5
"""Expected and measured uncertainties that differ by more than this factor are shown side by side."""
SIMILAR = 1 / 8
"""Two classes are similar if a decision between them is expected to be at least this uncertain."""
OPTIMAL = 300
"""Up to this number of classes, the tree's branches are turned to bring neighbours closest (cubic effort)."""


class Pair(NamedTuple):
    """Two classes, the smaller class number first."""

    first: int
    second: int
    distance: float
    """Their distance, in standard deviations of a class."""
    uncertainty: float
    """Expected uncertainty of a decision between the two, 0 to 1/2."""
    measured: float | None = None
    """The same, measured on images of the two; None if there are none."""

    @property
    def similar(self) -> bool:
        """Whether the expected uncertainty is at least 1/8: the distance is at most 2.3."""
        return self.uncertainty >= SIMILAR

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
    distances: Array
    """In standard deviations of a class, (n, n), float64."""
    uncertainty: Array
    """`expected_uncertainty` of the distances, (n, n), float64."""
    measured: Array | None = None
    """The same, measured on images, (n, n), NaN for pairs without images; None if nothing was measured."""
    of_means: bool = False
    """Whether the distances are those of the class means, |mu_i - mu_j|, and not measured."""

    def closest_pairs(self, count: int = 10) -> list[Pair]:
        """Return the ``count`` most similar pairs of classes, or all if fewer, by rising distance."""
        if count < 1:
            raise CandidError(f"The number of closest pairs must be at least 1, not {count}.")
        rows, columns = np.triu_indices(len(self.classes), k=1)
        nearest = np.argsort(self.distances[rows, columns], kind="stable")[:count]
        return [self.pair(int(rows[i]), int(columns[i])) for i in nearest]

    def pair(self, i: int, j: int) -> Pair:
        """Return the pair in row ``i`` and column ``j``."""
        first, second = sorted((self.classes[i], self.classes[j]))
        measured = entry(self.measured, i, j)
        return Pair(first, second, float(self.distances[i, j]), float(self.uncertainty[i, j]), measured)


def similarity(
    model: Model,
    classes: str | Sequence[str | int] | None = None,
    order: Literal["clustering", "given"] = "clustering",
    measured: Array | None = None,
    distances: Array | None = None,
) -> Similarity:
    """Return the distances of all classes, or of those that `chosen_classes` finds for ``classes``.

    By ``"clustering"`` similar classes become neighbours: the leaves of a tree of average linkage;
    ``"given"`` keeps the order of ``classes``. ``measured`` are the uncertainties between all M classes on
    images, (M, M), and ``distances`` those between them; by default what was measured on held-out images and
    is stored with the model. Without stored distances those of the means are taken.

    >>> import candid
    >>> similar = similarity(candid.load("waste"), "trash,glass,paper", order="given")
    >>> similar.classes, similar.distances.shape
    ((5, 1, 3), (3, 3))
    >>> bool(similar.closest_pairs(1)[0].distance == similar.distances[similar.distances > 0].min())
    True
    """
    require(model, "geometry", "The similarity of classes")
    if order not in ("clustering", "given"):
        raise CandidError(f"The order of classes is 'clustering' or 'given', not '{order}'.")
    names = model.class_names
    chosen = list(range(len(names))) if classes is None else chosen_classes(names, classes)
    if len(chosen) < 2:
        raise CandidError("Similarity is between classes: choose at least two.")
    means = model.geometry.distances()
    if not np.isfinite(means).all():
        raise CandidError("The model's class means are infinite or NaN: give one whose training went well.")
    distances = held_out_distances(model) if distances is None else distances
    of_means = distances is None or bool(np.isnan(distances).any())
    distances = (means if of_means or distances is None else distances).astype(np.float64)
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
        None if measured is None else measured[chosen][:, chosen].astype(np.float64),
        of_means,
    )


def _clustered(distances: Array) -> list[int]:
    """Return the rows of ``distances`` in the order of a tree of average linkage."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    condensed = distances[np.triu_indices(len(distances), k=1)]
    tree = linkage(condensed, "average", optimal_ordering=len(distances) <= OPTIMAL)
    return [int(leaf) for leaf in leaves_list(tree)]


def expected_uncertainty(distance: Array | float) -> Array:
    """Return ``1 - E[c] = Phi(-d / 2)`` of decisions between two classes with means d apart, in float64.

    c is the posterior of the more probable one of the two; the expectation is over latents that follow the
    model's own density, with equal priors. It is 1/2 at distance 0 and underflows to 0 beyond 76;
    `log_expected_uncertainty` does not.

    >>> expected_uncertainty(np.array([0.0, 1.7, 3.8])).round(4)
    array([0.5   , 0.1977, 0.0287])
    """
    from scipy.special import erfc

    uncertainty: Array = 0.5 * erfc(_checked(distance) / math.sqrt(8))
    return uncertainty


def log_expected_uncertainty(distance: Array | float) -> Array:
    """Return ``log Phi(-d / 2)`` in nats, float64.

    >>> round(float(log_expected_uncertainty(100.0)), 4)
    -1254.8314
    """
    from scipy.special import log_ndtr

    log_uncertainty: Array = log_ndtr(-0.5 * _checked(distance))
    return log_uncertainty


def held_out_uncertainty(model: Model) -> Array | None:
    """Return the uncertainty between each two classes on held-out images, (M, M), if the model carries it."""
    held_out = HeldOut.of(model)
    return None if held_out is None else held_out.pair_uncertainty


def held_out_distances(model: Model) -> Array | None:
    """Return the distances of the classes on held-out images, (M, M), if the model carries them."""
    held_out = HeldOut.of(model)
    return None if held_out is None else held_out.pair_distances


def entry(measured: Array | None, i: int, j: int) -> float | None:
    """Return ``measured[i, j]``; None if it was not measured."""
    if measured is None or np.isnan(measured[i, j]):
        return None
    return float(measured[i, j])


def differ(expected: float, measured: float | None) -> bool:
    """Return whether there is a measured uncertainty that differs by more than a factor of 1.5.

    >>> differ(0.18, 0.2), differ(0.11, 0.05), differ(0.11, None)
    (False, True, False)
    """
    return measured is not None and max(expected, measured) > DIFFERENCE * min(expected, measured)


def _checked(distance: Array | float) -> Array:
    checked = np.asarray(distance, np.float64)
    bad = checked[~(checked >= 0)]
    if len(bad):
        raise CandidError(f"Distances of class means are numbers from 0 on, not {float(bad[0])}.")
    return checked


LONGEST_HINT = 300


def chosen_classes(names: Sequence[str], spec: str | Sequence[str | int]) -> list[int]:
    """Return class numbers from class names, class numbers and patterns with ``*``, ``?`` and ``[]``.

    ``spec`` is a list of them or a string with commas between them. Names may have commas, too: in a string
    the longest name that fits is taken. A name comes before a number, a number before a pattern. The order is
    kept, a class that comes again is left out; a name of several classes stands for all of them.

    >>> chosen_classes(["tench, Tinca tinca", "cat", "tiger cat", "dog"], "dog, *cat, 0, tench, Tinca tinca")
    [3, 1, 2, 0]
    """
    if isinstance(spec, str):
        spec = _split(names, spec)
    if not spec:
        raise CandidError("No classes are chosen: give names, numbers or patterns with commas between them.")
    return list(dict.fromkeys(number for item in spec for number in _numbers(names, item)))


def _split(names: Sequence[str], spec: str) -> list[str]:
    """Return the items of a string; pieces between commas stay together if they are a name."""
    most = 1 + max(name.count(",") for name in names)
    pieces, items = spec.split(","), []
    while pieces:
        for length in range(min(most, len(pieces)), 0, -1):
            item = ",".join(pieces[:length]).strip()
            if item in names or length == 1:
                break
        items.append(item)
        pieces = pieces[length:]
    return [item for item in items if item]


def _numbers(names: Sequence[str], item: str | int) -> list[int]:
    """Return the classes that one name, number or pattern stands for."""
    if isinstance(item, str):
        if equal := [number for number, name in enumerate(names) if name == item]:
            return equal
        if not item.removeprefix("-").isdecimal():
            if matching := [number for number, name in enumerate(names) if fnmatchcase(name, item)]:
                return matching
            raise CandidError(f"The model has no class '{item}': {_hint(item, names)}")
    number = operator.index(item) if not isinstance(item, str) else int(item)
    if not 0 <= number < len(names):
        raise CandidError(f"The model has no class {number}: class numbers go from 0 to {len(names) - 1}.")
    return [number]


def _hint(item: str, names: Sequence[str]) -> str:
    """Return the nearest names, few enough for one sentence."""
    holding = [name for name in names if item.lower() in name.lower()]
    hint = did_you_mean(item, holding or names)
    return hint if len(hint) < LONGEST_HINT else f"choose from its {len(names)} names, such as '{names[0]}'."


CHUNK = 4096
"""Columns of the prototypes that are computed at a time in float64."""


def dct_basis(height: int, width: int) -> Array:
    """Return the image that each coefficient is the product with, (height, width, height, width), float64.

    ``[i, j]`` is the image of frequency i along the height and j along the width: with feature map f the
    coefficient is ``(basis[i, j] * f).sum()``. The images are orthonormal.

    >>> dct_basis(1, 2)[0].round(4)
    array([[[ 0.7071,  0.7071]],
    <BLANKLINE>
           [[ 0.7071, -0.7071]]])
    """
    if min(height, width) < 1:
        raise CandidError(f"A feature map has at least 1 x 1 positions, not {height} x {width}.")
    from scipy.fft import dct

    down, across = (dct(np.eye(side), norm="ortho", axis=0) for side in (height, width))
    basis: Array = down[:, None, :, None] * across[None, :, None, :]
    return basis


def mean_spread(model: Model) -> Array:
    """Return how much the class means differ in each cosine coefficient, (height, width), float64.

    ``[i, j]`` is the standard deviation over classes (divisor M) of the entries of mu_y at frequency i along
    the height and j along the width, averaged over channels, in standard deviations of a class. Where it is
    0 the coefficient doesn't affect the classification.

    >>> from candid import GenerativeClassifier
    >>> mean_spread(GenerativeClassifier.from_preset("cifar")).shape
    (4, 4)
    """
    network = require(model, "invert", "The spread of class means")
    mixture = network.mixture
    mean, prototypes = (part.detach().cpu().numpy() for part in (mixture.mean, mixture.prototypes))
    weights = None if mixture.weights is None else mixture.weights.detach().cpu().numpy()
    height, width = network.grid
    spreads = [_spread(mean, None)]
    spreads += [
        _spread(prototypes[:, start : start + CHUNK], weights)
        for start in range(0, prototypes.shape[1], CHUNK)
    ]
    by_frequency = np.concatenate(spreads).reshape(width, height, -1)  # z runs along the width slowest
    return by_frequency.mean(2).T


def _spread(rows: Array, weights: Array | None) -> Array:
    """Return the standard deviations of the columns of ``weights @ rows``, or of ``rows``, (columns,)."""
    rows = rows.astype(np.float64)
    per_class = rows if weights is None else weights.astype(np.float64)
    centred = (per_class - per_class.mean(0)) / len(per_class) ** 0.5
    if weights is not None:
        # |R p|^2 is the variance of alpha_y . p over classes: what is formed has K rows, not M.
        centred = np.linalg.qr(centred, mode="r") @ rows
    norms: Array = np.linalg.norm(centred, axis=0)
    return norms

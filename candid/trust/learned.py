"""Scores that learn from features, for any classifier: they rise with outlyingness.

Fit a score to other images than those that rank it: to training images, or to one half of the held-out
images. If the same images do both, there are several times too many false alarms.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from candid._support.numbers import Array, logsumexp, packed, unpacked
from candid._support.old_formats import mahalanobis_state
from candid.trust.gaussians import (
    SMALLEST,
    Columns,
    FitImages,
    Moments,
    checked_columns,
    even_steps,
    offset,
    parts_of,
    principal_axes,
    residual,
    unit,
)

EXPLAINED = 0.9
"""The share of the variance that the components of :class:`PcaResidual` explain."""
NEIGHBOURS, FEWEST_KEPT, MOST_KEPT = 10, 500, 2000


class LearnedScore(ABC):
    """A score of images from the columns of a pass, with what it has learned as attributes."""

    columns: ClassVar[tuple[str, ...]] = ("features",)
    """The columns that it needs."""

    def fit(self, columns: Columns, labels: Array) -> Self:
        """Learn from images that will not rank this score.

        Args:
            columns: the columns of N images; others than those in ``self.columns`` are not used.
            labels: their true classes, (N,).
        """
        return self.learn(FitImages.of(self.columns, columns, labels))

    @abstractmethod
    def learn(self, images: FitImages) -> Self:
        """Learn from checked images."""

    @abstractmethod
    def of(self, columns: Columns) -> Array:
        """Return the scores of a few images, (N,): from logits in float64, features in float32 or float64."""

    def score(self, columns: Columns) -> Array:
        """Return how far out images are, (N,) in float64; the memory is bounded."""
        checked = checked_columns(self.columns, columns)
        scores = [
            self.of({name: _precise(name, part) for name, part in zip(checked, parts, strict=True)})
            for parts in parts_of(*checked.values())
        ]
        return scores[0] if len(scores) == 1 else np.concatenate(scores or [np.empty(0)])

    def state(self) -> dict[str, Array]:
        """Return what was learned, to be saved."""
        return {name: np.asarray(value) for name, value in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Array]) -> Self:
        """Return the score whose :meth:`state` it was."""
        score = cls()
        vars(score).update(state)
        return score


class Mahalanobis(LearnedScore):
    """The distance to the mean of the nearest class, in standard deviations of the features within classes.

    Lee et al. (2018), https://arxiv.org/abs/1807.03888; the covariance is shrunk (Ledoit and Wolf).

    >>> x = np.random.default_rng(0).normal(size=(500, 4))
    >>> fitted = Mahalanobis().fit({"features": x}, np.zeros(500))
    >>> fitted.score({"features": np.array([[0.0, 0, 0, 0], [9.0, 0, 0, 0]])}) > 8
    array([False,  True])
    """

    centre: Array
    whitening: Array
    means: Array

    def learn(self, images: FitImages) -> Self:
        """Learn the whitening, and the means of the classes in the whitened space."""
        return self._learn(images.moments)

    def _learn(self, moments: Moments) -> Self:
        self.centre, self.whitening = moments.mean, moments.whitening.astype(np.float32)
        self.means = ((moments.means - self.centre) @ self.whitening.T.astype(np.float64)).astype(np.float32)
        return self

    def whitened(self, features: Array) -> Array:
        """Return features in coordinates in which the classes have about unit covariance, (N, F)."""
        return _times_triangular(offset(features, self.centre), self.whitening)

    def of(self, columns: Columns) -> Array:
        """Return the distances."""
        white = self.whitened(columns["features"])
        nearest = (white @ self.means.T - np.square(self.means).sum(1) / 2).argmax(1)
        return np.sqrt(np.square((white - self.means[nearest]).astype(np.float64)).sum(1))

    def state(self) -> dict[str, Array]:
        """Return what was learned, the whitening without its zeros."""
        return {**vars(self), "whitening": packed(self.whitening)}

    @classmethod
    def from_state(cls, state: Mapping[str, Array]) -> Self:
        """Return the score, whose whitening is packed or whole."""
        whitening = state["whitening"]
        if whitening.ndim == 1:
            whitening = unpacked(whitening, state["means"].shape[1])
        return super().from_state({**mahalanobis_state(state), "whitening": whitening})


def _precise(name: str, part: Array) -> Array:
    return part.astype(np.float64 if name == "logits" or part.dtype == np.float64 else np.float32, copy=False)


def _times_triangular(x: Array, lower: Array) -> Array:
    """Return x L^T, (N, F), for L lower triangular: most of its zeros are left out."""
    if len(x) < len(lower) // 4:
        return x @ lower.T
    step = max(1, len(lower) // 4)
    blocks = [(start, min(start + step, len(lower))) for start in range(0, len(lower), step)]
    return np.concatenate([x[:, :end] @ lower[start:end, :end].T for start, end in blocks], 1)


class UnitMahalanobis(Mahalanobis):
    """Mahalanobis++: the distance of features that are scaled to length 1.

    Müller & Hein (2025), https://arxiv.org/abs/2505.18032
    """

    def learn(self, images: FitImages) -> Self:
        """Learn from scaled features."""
        return self._learn(images.unit_moments)

    def of(self, columns: Columns) -> Array:
        """Return the distances of scaled features."""
        return super().of({"features": unit(columns["features"])})


class RelativeMahalanobis(LearnedScore):
    """The squared distance to the nearest class minus that to one Gaussian around all images.

    Ren et al. (2021), https://arxiv.org/abs/2106.09022. The covariance of all images is the shrunk one within
    classes plus that of the class means. So the score depends only on the directions of the class means, and
    works with fewer images than features, where two covariances that are shrunk separately don't match.
    With a single class it is always 0.
    """

    mean: Array
    directions: Array
    centres: Array
    weights: Array

    def learn(self, images: FitImages) -> Self:
        """Learn the directions of the class means in the whitened space."""
        moments, whitening = images.moments, images.moments.whitening
        _, scale, axes = np.linalg.svd(moments.between @ whitening.T, full_matrices=False)
        some = scale > SMALLEST * scale[0]  # the others have no sign and no place of their own
        scale, axes = scale[some], axes[some]
        self.mean, self.directions = moments.mean, (axes @ whitening).astype(np.float32)
        self.centres = (moments.means - self.mean) @ self.directions.T.astype(np.float64)
        self.weights = np.square(scale) / (1 + np.square(scale))
        return self

    def of(self, columns: Columns) -> Array:
        """Return min_c |y - c|^2 - y^T (I + B)^-1 y, with B the covariance of the class means."""
        y = (offset(columns["features"], self.mean) @ self.directions.T).astype(np.float64)
        to_class = np.square(self.centres).sum(1) - 2 * y @ self.centres.T  # without |y|^2, which cancels
        return to_class.min(1) + np.square(y) @ self.weights


class PcaResidual(LearnedScore):
    """The distance from the plane of the principal components that explain 90 % of the variance."""

    origin: Array
    basis: Array

    def learn(self, images: FitImages) -> Self:
        """Learn the mean and the components."""
        variances, axes = images.moments.principal
        kept = 0
        if variances[0] > 0:
            kept = int((variances.cumsum() / variances.sum() <= EXPLAINED).sum()) + 1
        self.origin, self.basis = images.moments.mean.astype(np.float32), axes[:kept].astype(np.float32)
        return self

    def of(self, columns: Columns) -> Array:
        """Return the distances."""
        return residual(columns["features"], self.origin, self.basis)


class Vim(LearnedScore):
    """Virtual-logit matching: the distance from a principal subspace, scaled as a logit, minus the evidence.

    Wang et al. (2022), https://arxiv.org/abs/2203.10807. The last layer is solved from logits = W f + b by
    least squares, which is exact if the layer is linear. The subspace passes through the point where all
    logits are 0. It has F / 2 dimensions (512 for F >= 768, 1000 for F >= 2048), and never more than half the
    number of images.
    """

    columns = ("features", "logits")
    origin: Array
    basis: Array
    alpha: Array

    def learn(self, images: FitImages) -> Self:
        """Learn the last layer, the subspace and the scale."""
        features, moments = images.columns["features"], images.moments
        logits = images.columns["logits"].astype(np.float64)
        weight, bias = _last_layer(features, logits, moments)
        origin = -np.linalg.pinv(weight) @ bias
        shift = moments.mean - origin
        _, axes = principal_axes(moments.total + np.outer(shift, shift))
        size = len(axes)
        kept = 1000 if size >= 2048 else 512 if size >= 768 else size // 2
        self.origin = origin.astype(np.float32)
        self.basis = axes[: min(kept, len(features) // 2)].astype(np.float32)
        distances = [residual(rows, self.origin, self.basis) for (rows,) in parts_of(features)]
        distance = np.concatenate(distances).mean()
        largest = np.abs(logits.max(1).mean())  # logits may have any constant; a distance keeps its sign
        self.alpha = np.asarray(largest / distance if distance > 0 else 0.0)
        return self

    def of(self, columns: Columns) -> Array:
        """Return the virtual logit minus the log of the sum of the exponentiated logits."""
        distance = residual(columns["features"], self.origin, self.basis)
        return self.alpha * distance - logsumexp(columns["logits"])


def _last_layer(features: Array, logits: Array, moments: Moments) -> tuple[Array, Array]:
    """Return W and b of logits = W f + b, by least squares; W has no part along features that never vary."""
    variances, axes = moments.principal
    some = variances > SMALLEST**2 * variances[0]
    product = np.zeros((logits.shape[1], features.shape[1]))
    for rows, values in parts_of(features, logits - logits.mean(0)):
        product += values.T @ (rows.astype(np.float64) - moments.mean)
    weight = product / len(features) @ axes[some].T / variances[some] @ axes[some]
    return weight, logits.mean(0) - weight @ moments.mean


class NearestNeighbours(LearnedScore):
    """The distance to the k-th nearest of the images that it was fitted to; features are scaled to length 1.

    Sun et al. (2022), https://arxiv.org/abs/2204.06507. It keeps n images at even steps, in half precision:
    as many as there are features, but at least 500 and at most 2000. k is 10, or the root of n if less.
    """

    reference: Array

    def learn(self, images: FitImages) -> Self:
        """Keep the features."""
        features = images.columns["features"]
        most = min(MOST_KEPT, max(FEWEST_KEPT, features.shape[1]))
        rows = features[even_steps(len(features), most)].astype(np.float32)
        self.reference = unit(rows).astype(np.float16)
        return self

    def of(self, columns: Columns) -> Array:
        """Return the distances."""
        k = min(NEIGHBOURS, math.ceil(math.sqrt(len(self.reference))))
        reference = self.reference.astype(np.float32)
        features = unit(columns["features"]).astype(np.float32)
        squares = np.square(features, dtype=np.float64).sum(1)[:, None] - 2.0 * (features @ reference.T)
        squares += np.square(reference, dtype=np.float64).sum(1)
        nearest = np.argpartition(squares, k - 1, axis=1)[:, :k]
        exact = reference.astype(np.float64)[nearest] - features.astype(np.float64)[:, None]
        return np.sqrt(np.square(exact).sum(2).max(1))

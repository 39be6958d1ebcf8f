"""Scores of images from two columns of a pass, logits and features: the known ones for any classifier.

Every score rises with outlyingness. Fit a score to other images than those that rank it: to training images,
or to one half of the held-out images. If the same images do both, there are several times too many false
alarms.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from candid._support.errors import CandidError, did_you_mean
from candid.inference.predictions import half_features
from candid.models.protocol import Outputs
from candid.trust.feature_moments import (
    ROWS,
    SMALLEST,
    Columns,
    FitImages,
    Moments,
    checked_columns,
    even_steps,
    offset,
    principal_axes,
    residual,
    unit,
)

EXPLAINED = 0.9
"""The share of the variance that the components of :class:`PcaResidual` explain."""
NEIGHBOURS, FEWEST_KEPT, MOST_KEPT = 10, 500, 2000
GEN_CLASSES, GEN_POWER = 100, 0.1


class ColumnScore(ABC):
    """A score of images from the columns of a pass. As a measure, it scores the images of a batch."""

    columns: ClassVar[tuple[str, ...]] = ("features",)
    """The columns that it needs."""

    def fit(self, columns: Columns, labels: Tensor) -> Self:
        """Learn from images that will not rank this score.

        Args:
            columns: the columns of N images; others than those in ``self.columns`` are not used.
            labels: their true classes, (N,).
        """
        return self.learn(FitImages.of(self.columns, columns, labels))

    def learn(self, images: "FitImages") -> Self:
        """Learn from checked images; scores of logits alone have nothing to learn."""
        return self

    @abstractmethod
    def of(self, columns: Columns) -> Tensor:
        """Return the scores of a few images, (N,): from logits in float64, features in float32 or float64."""

    def score(self, columns: Columns) -> Tensor:
        """Return how far out images are, (N,) in float64; the memory is bounded."""
        own = checked_columns(self.columns, columns)
        return torch.cat(
            [
                self.of({name: _precise(name, part) for name, part in zip(own, parts, strict=True)})
                for parts in zip(*(column.split(ROWS) for column in own.values()), strict=True)
            ]
        )

    def state(self) -> dict[str, Tensor]:
        """Return what was learned, to be saved."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Return the score whose :meth:`state` it was."""
        score = cls()
        vars(score).update(state)
        return score

    def __call__(self, images: Tensor, outputs: Outputs) -> Tensor:
        """Measure a batch in a pass: as the columns that the pass can keep would be scored."""
        return self.score({"logits": outputs.logits.cpu(), "features": half_features(images, outputs).cpu()})


class Mahalanobis(ColumnScore):
    """The distance to the mean of the nearest class, in standard deviations of the features within classes.

    Lee et al. (2018), https://arxiv.org/abs/1807.03888; the covariance is shrunk (Ledoit and Wolf).

    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> fitted = Mahalanobis().fit({"features": x}, torch.zeros(500))
    >>> fitted.score({"features": torch.tensor([[0.0, 0, 0, 0], [9.0, 0, 0, 0]])}) > 8
    tensor([False,  True])
    """

    centre: Tensor
    whitening: Tensor
    means: Tensor

    def learn(self, images: FitImages) -> Self:
        """Learn the whitening, and the means of the classes in the whitened space."""
        return self._learn(images.moments)

    def _learn(self, moments: Moments) -> Self:
        self.centre, self.whitening = moments.mean, moments.whitening.float().contiguous()
        self.means = ((moments.means - self.centre) @ self.whitening.double().T).float()
        return self

    def of(self, columns: Columns) -> Tensor:
        """Return the distances."""
        white = _times_triangular(offset(columns["features"], self.centre), self.whitening)
        nearest = (white @ self.means.T - self.means.square().sum(1) / 2).argmax(1)
        return (white - self.means[nearest]).double().norm(dim=1)

    def state(self) -> dict[str, Tensor]:
        """Return what was learned, the whitening without its zeros."""
        rows, columns = torch.tril_indices(*self.whitening.shape)
        return {**vars(self), "whitening": self.whitening[rows, columns]}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Return the score; earlier versions have a whole whitening and no centre."""
        size = state["means"].shape[1]
        whole = state["whitening"]
        if whole.ndim == 1:
            rows, columns = torch.tril_indices(size, size)
            whole = whole.new_zeros(size, size).index_put((rows, columns), whole)
        return super().from_state({"centre": torch.zeros(size), **state, "whitening": whole})


def _precise(name: str, part: Tensor) -> Tensor:
    return part.double() if name == "logits" or part.dtype == torch.float64 else part.float()


def _times_triangular(x: Tensor, lower: Tensor) -> Tensor:
    """Return x L^T, (N, F), for L lower triangular: most of its zeros are left out."""
    step = max(1, len(lower) // 4)
    blocks = [(start, min(start + step, len(lower))) for start in range(0, len(lower), step)]
    return torch.cat([x[:, :end] @ lower[start:end, :end].T for start, end in blocks], 1)


class UnitMahalanobis(Mahalanobis):
    """Mahalanobis++: the distance of features that are scaled to length 1.

    Müller & Hein (2025), https://arxiv.org/abs/2505.18032
    """

    def learn(self, images: FitImages) -> Self:
        """Learn from scaled features."""
        return self._learn(images.unit_moments)

    def of(self, columns: Columns) -> Tensor:
        """Return the distances of scaled features."""
        return super().of({"features": unit(columns["features"])})


class RelativeMahalanobis(ColumnScore):
    """The squared distance to the nearest class minus that to one Gaussian around all images.

    Ren et al. (2021), https://arxiv.org/abs/2106.09022. The covariance of all images is the shrunk one within
    classes plus that of the class means. So the score depends only on the directions of the class means, and
    works with fewer images than features, where two covariances that are shrunk separately don't match.
    With a single class it is always 0.
    """

    mean: Tensor
    directions: Tensor
    centres: Tensor
    weights: Tensor

    def learn(self, images: FitImages) -> Self:
        """Learn the directions of the class means in the whitened space."""
        moments, whitening = images.moments, images.moments.whitening
        _, scale, axes = torch.linalg.svd(moments.between @ whitening.T, full_matrices=False)
        some = scale > SMALLEST * scale[0]  # the others have no sign and no place of their own
        scale, axes = scale[some], axes[some]
        self.mean, self.directions = moments.mean, (axes @ whitening).float()
        self.centres = (moments.means - self.mean) @ self.directions.double().T
        self.weights = scale.square() / (1 + scale.square())
        return self

    def of(self, columns: Columns) -> Tensor:
        """Return min_c |y - c|^2 - y^T (I + B)^-1 y, with B the covariance of the class means."""
        y = (offset(columns["features"], self.mean) @ self.directions.T).double()
        to_class = self.centres.square().sum(1) - 2 * y @ self.centres.T  # without |y|^2, which cancels
        return to_class.amin(1) + y.square() @ self.weights


class PcaResidual(ColumnScore):
    """The distance from the plane of the principal components that explain 90 % of the variance."""

    origin: Tensor
    basis: Tensor

    def learn(self, images: FitImages) -> Self:
        """Learn the mean and the components."""
        variances, axes = images.moments.principal
        explained = variances.cumsum(0) / variances.sum()
        kept = int((explained <= EXPLAINED).sum()) + 1 if variances[0] > 0 else 0
        self.origin, self.basis = images.moments.mean.float(), axes[:kept].float()
        return self

    def of(self, columns: Columns) -> Tensor:
        """Return the distances."""
        return residual(columns["features"], self.origin, self.basis)


class Vim(ColumnScore):
    """Virtual-logit matching: the distance from a principal subspace, scaled as a logit, minus the evidence.

    Wang et al. (2022), https://arxiv.org/abs/2203.10807. The last layer is solved from logits = W f + b by
    least squares, which is exact if the layer is linear. The subspace passes through the point where all
    logits are 0. It has F / 2 dimensions (512 for F >= 768, 1000 for F >= 2048), and never more than half the
    number of images.
    """

    columns = ("features", "logits")
    origin: Tensor
    basis: Tensor
    alpha: Tensor

    def learn(self, images: FitImages) -> Self:
        """Learn the last layer, the subspace and the scale."""
        features, logits, moments = (
            images.columns["features"],
            images.columns["logits"].double(),
            images.moments,
        )
        weight, bias = _last_layer(features, logits, moments)
        origin = -torch.linalg.pinv(weight) @ bias
        shift = moments.mean - origin
        _, axes = principal_axes(moments.total + shift.outer(shift))
        size = len(axes)
        kept = 1000 if size >= 2048 else 512 if size >= 768 else size // 2
        self.origin, self.basis = origin.float(), axes[: min(kept, len(features) // 2)].float()
        distances = [residual(rows, self.origin, self.basis) for rows in features.split(ROWS)]
        distance = torch.cat(distances).mean()
        largest = logits.amax(1).mean().abs()  # logits may have any constant; a distance keeps its sign
        self.alpha = largest / distance if distance > 0 else torch.zeros_like(largest)
        return self

    def of(self, columns: Columns) -> Tensor:
        """Return the virtual logit minus the log of the sum of the exponentiated logits."""
        distance = residual(columns["features"], self.origin, self.basis)
        return self.alpha * distance - columns["logits"].logsumexp(1)


def _last_layer(features: Tensor, logits: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """Return W and b of logits = W f + b, by least squares; W has no part along features that never vary."""
    variances, axes = moments.principal
    some = variances > SMALLEST**2 * variances[0]
    product = torch.zeros(logits.shape[1], features.shape[1], dtype=torch.float64)
    for rows, values in zip(features.split(ROWS), (logits - logits.mean(0)).split(ROWS), strict=True):
        product += values.T @ (rows.double() - moments.mean)
    weight = product / len(features) @ axes[some].T / variances[some] @ axes[some]
    return weight, logits.mean(0) - weight @ moments.mean


class NearestNeighbours(ColumnScore):
    """The distance to the k-th nearest of the images that it was fitted to; features are scaled to length 1.

    Sun et al. (2022), https://arxiv.org/abs/2204.06507. It keeps n images at even steps, in half precision:
    as many as there are features, but at least 500 and at most 2000. k is 10, or the root of n if less.
    """

    reference: Tensor

    def learn(self, images: FitImages) -> Self:
        """Keep the features."""
        features = images.columns["features"]
        most = min(MOST_KEPT, max(FEWEST_KEPT, features.shape[1]))
        self.reference = unit(features[even_steps(len(features), most)].float()).half()
        return self

    def of(self, columns: Columns) -> Tensor:
        """Return the distances."""
        k = min(NEIGHBOURS, math.ceil(math.sqrt(len(self.reference))))
        distances = torch.cdist(unit(columns["features"]).float(), self.reference.float())
        return distances.topk(k, dim=1, largest=False).values[:, -1].double()


class LogitScore(ColumnScore):
    """A score of logits alone: there is nothing to learn."""

    columns = ("logits",)


class Energy(LogitScore):
    """Minus the log of the sum of the exponentiated logits. Liu et al. (2020), https://arxiv.org/abs/2010.03759

    >>> Energy().score({"logits": torch.tensor([[0.0, 0.0], [5.0, 0.0]])})
    tensor([-0.6931, -5.0067], dtype=torch.float64)
    """

    def of(self, columns: Columns) -> Tensor:
        """Return the energies."""
        return -columns["logits"].logsumexp(1)


class MaxLogit(LogitScore):
    """Minus the largest logit. Hendrycks et al. (2022), https://arxiv.org/abs/1911.11132"""

    def of(self, columns: Columns) -> Tensor:
        """Return the scores."""
        return -columns["logits"].amax(1)


class MaxPosterior(LogitScore):
    """Minus the largest posterior. Hendrycks & Gimpel (2017), https://arxiv.org/abs/1610.02136"""

    def of(self, columns: Columns) -> Tensor:
        """Return the scores."""
        return -columns["logits"].softmax(1).amax(1)


class Gen(LogitScore):
    """Generalised entropy: the sum of (p (1 - p))^0.1 over the posteriors of the 100 most probable classes.

    Liu et al. (2023), https://openaccess.thecvf.com/content/CVPR2023/html/Liu_GEN_CVPR_2023_paper.html

    >>> Gen().score({"logits": torch.tensor([[0.0, 0.0], [9.0, 0.0]])})
    tensor([1.7411, 0.8131], dtype=torch.float64)
    """

    def of(self, columns: Columns) -> Tensor:
        """Return the entropies."""
        return generalised_entropy(columns["logits"].softmax(1))


def generalised_entropy(posterior: Tensor) -> Tensor:
    """Return the score :class:`Gen` of posteriors (N, M), (N,)."""
    top = posterior.topk(min(GEN_CLASSES, posterior.shape[1]), dim=1).values
    return (top * (1 - top)).pow(GEN_POWER).sum(1)


COLUMN_SCORES: dict[str, type[ColumnScore]] = {
    "knn": NearestNeighbours,
    "mahalanobis": Mahalanobis,
    "mahalanobis++": UnitMahalanobis,
    "relative-mahalanobis": RelativeMahalanobis,
    "vim": Vim,
    "gen": Gen,
    "energy": Energy,
    "max-logit": MaxLogit,
    "max-posterior": MaxPosterior,
    "pca-residual": PcaResidual,
}
"""All scores of columns by the name that users know."""


def fit_scores(names: Iterable[str], columns: Columns, labels: Tensor) -> dict[str, ColumnScore]:
    """Return scores that are fitted to the same images; their covariance is computed only once.

    Args:
        names: keys of :data:`COLUMN_SCORES`.
        columns: the columns of N images that will not rank the scores.
        labels: the true classes of these images, (N,).

    Returns:
        The fitted scores by name.

    Example:
        >>> columns = {"logits": torch.eye(3).repeat(9, 1)}
        >>> list(fit_scores(("energy", "gen"), columns, torch.arange(27) % 3))
        ['energy', 'gen']
    """
    names = tuple(names)
    for name in names:
        if name not in COLUMN_SCORES:
            raise CandidError(f"There is no score '{name}': {did_you_mean(name, COLUMN_SCORES)}")
    new = {name: COLUMN_SCORES[name]() for name in names}
    needed = dict.fromkeys(column for score in new.values() for column in score.columns)
    images = FitImages.of(needed, columns, labels)
    return {name: score.learn(images) for name, score in new.items()}

"""Judge distances of classes by the confusions of test images: which distance says what a model confuses?

``experiments.geometry`` measures it for the bundled models. A model's own posteriors are no judge: they are
functions of the same distances.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import rankdata

from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.explanations.similarity import differ, expected_uncertainty, mean_spread, similarity
from candid.inference.metrics import measured_distances, measured_uncertainty
from candid.models.flow.classifier import FlowOutputs, GenerativeClassifier
from candid.models.flow.means import before_refit, span_of
from candid.models.flow.network import array_of
from candid.models.protocol import Model

RESAMPLES, LEVEL = 1000, 0.95
"""Resamples of the test images for intervals, and what these hold."""
CLOSEST = 5
"""Pairs of classes that are named."""


class Seen(NamedTuple):
    """What a pixel model makes of N labelled images."""

    outputs: FlowOutputs
    labels: Array
    """(N,)."""

    @property
    def predicted(self) -> Array:
        """The most probable classes, (N,)."""
        return array_of(self.outputs.logits).argmax(1)


def confusions(labels: Array, predicted: Array, classes: int) -> Array:
    """Return how often each two of M classes are confused: (n_ij + n_ji) / (n_i + n_j), (M, M).

    n_ij images of class i are taken for j, and n_i images are of class i.

    >>> confusions(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2]), 3)[0]
    array([0.5       , 0.33333333, 0.        ])
    """
    counts = np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    images = counts.sum(1)
    with np.errstate(invalid="ignore"):
        shares: Array = (counts + counts.T) / (images[:, None] + images)
    return shares


def rank_correlation(distances: Array, labels: Array, predicted: Array) -> dict[str, float]:
    """Return Spearman's rank correlation of closeness with confusions over pairs of classes.

    The interval is a bootstrap's over images, moved so that its median is the value: resampled
    confusions are noisier than confusions, which lowers every correlation.

    Args:
        distances: of M classes, (M, M).
        labels: of N test images, (N,).
        predicted: what the model takes them for, (N,).

    >>> line = np.abs(np.arange(4.0)[:, None] - np.arange(4.0))
    >>> labels = np.repeat(np.arange(4), 40)
    >>> found = rank_correlation(line, labels, np.where(np.arange(160) % 40 < 10, labels ^ 1, labels))
    >>> round(found["value"], 2)
    0.67
    """
    classes, images = len(distances), len(labels)
    pairs = np.triu_indices(classes, 1)
    closeness = rankdata(-distances[pairs])

    def correlation(rows: Array) -> float:
        ranks = rankdata(confusions(labels[rows], predicted[rows], classes)[pairs])
        return float(np.corrcoef(closeness, ranks)[0, 1]) if ranks.min() < ranks.max() else math.nan

    random, value = draws(0), correlation(np.arange(images))
    resampled = np.array([correlation(random.integers(images, images)) for _ in range(RESAMPLES)])
    moved = resampled - np.nanmedian(resampled) + value
    low, high = np.nanquantile(moved, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": value, "low": float(max(low, -1)), "high": float(min(high, 1))}


def of_means(model: Model, labels: Array, predicted: Array) -> dict[str, Any]:
    """Return how the distances of the class means agree with confusions; enough for a photo model."""
    similar = similarity(model, order="given", distances=model.geometry.distances())
    return {
        "images": len(labels),
        "confused": int((labels != predicted).sum()),
        "rank": {"means": rank_correlation(similar.distances, labels, predicted)},
        "closest": {"means": _closest(model, similar.distances)},
    }


def of_pixel_model(model: GenerativeClassifier, test: Seen, held_out: Seen) -> dict[str, Any]:
    """Return how several distances of classes agree with confusions of test images, and more on the means."""
    distances = candidates(model, held_out)
    pairs = np.triu_indices(len(model.class_names), 1)
    posterior = array_of(test.outputs.logits.double().softmax(1))
    measured = measured_uncertainty(posterior, test.labels)[pairs]
    expected = {name: expected_uncertainty(distances[name])[pairs] for name in ("means", "span", "line")}
    mixture, _ = before_refit(model)
    squares = np.square(array_of(mixture.pairwise_distances()))[pairs].sum()
    constant, *others = mean_spread(model).ravel()
    return of_means(model, test.labels, test.predicted) | {
        "rank": {
            name: rank_correlation(values, test.labels, test.predicted) for name, values in distances.items()
        },
        "closest": {name: _closest(model, distances[name]) for name in ("means", "line")},
        "expected": {name: float(values.mean()) for name, values in expected.items()},
        "measured": float(measured.mean()),
        "differing": {
            name: float(np.mean([differ(*both) for both in zip(values, measured, strict=True)]))
            for name, values in expected.items()
        },
        "beyond_pooled": 1 - float(np.square(_of_pooled_means(model))[pairs].sum() / squares),
        "constant_over_next": float(constant / max(others)) if others else None,
    }


def candidates(model: GenerativeClassifier, held_out: Seen) -> dict[str, Array]:
    """Return distances of M classes, each (M, M); ``line`` is the one that models carry."""
    classes, labels = len(model.class_names), held_out.labels
    layer = span_of(model.mixture).layer
    places = np.concatenate([array_of(layer.coordinates(z.double())) for z in held_out.outputs.z.split(1000)])
    averages = np.stack([places[labels == y].mean(0) for y in range(classes)])
    within = places - averages[labels]
    whitening = np.linalg.cholesky(np.linalg.inv(within.T @ within / (len(places) - classes)))
    means, logits = model.geometry.distances(), array_of(held_out.outputs.logits).astype(np.float64)
    line = measured_distances(logits, labels, means)
    return {
        "means": means,
        "pooled": _of_pooled_means(model),
        "span": cdist(averages, averages),
        "whitened": cdist(averages @ whitening, averages @ whitening),
        "line": line,
        "line over spread": line / _spread_along(logits, labels, means),
    }


def _of_pooled_means(model: GenerativeClassifier) -> Array:
    """Return the distances of the mean-pooled parts of the class means, as they were trained, (M, M)."""
    mixture, _ = before_refit(model)
    pooled = array_of(mixture.mean)
    return cdist(pooled, pooled)


def _spread_along(logits: Array, labels: Array, distances: Array) -> Array:
    """Return the standard deviation along the line through two means, within the two classes, (M, M)."""
    classes = logits.shape[1]
    of_class = np.stack([np.cov(logits[labels == y].T) for y in range(classes)])
    diagonals = np.diagonal(of_class, axis1=1, axis2=2)
    variances = diagonals[:, :, None] + diagonals[:, None] - 2 * of_class  # of l_i - l_j, by class
    i, j = np.indices((classes, classes))
    pooled = 0.5 * (variances[i, i, j] + variances[j, i, j])
    np.fill_diagonal(pooled, 1)
    return np.sqrt(pooled) / np.where(distances > 0, distances, 1)


def _closest(model: Model, distances: Array) -> list[list[str]]:
    """Return the names of the closest pairs of classes."""
    pairs = similarity(model, order="given", distances=distances).closest_pairs(CLOSEST)
    return [[model.class_names[pair.first], model.class_names[pair.second]] for pair in pairs]

"""Class maps: why each class, as a sum over the positions of the image. Here those of linear logits.

The logits of a photo model are linear in the statistics of its eye, and statistics are sums over positions::

    l_k = c_k + sum_j a_jk mean_j + b_jk std_j
    h_k(p) = 1/P sum_j [ a_jk (x_pj - mean0_j) + b_jk ((x_pj - mean_j)^2 / std_j - std0_j) ]
    sum_p h_k(p) = l_k - l_k(mean0, std0)

with P positions in a stage, and mean0, std0 the statistics of the average training photo. The maps of all
stages are added on the finest grid. Features without places, such as the class token of a transformer, add
the same at every position. The logits of many other classifiers are linear in the mean of the last
maps alone (class activation maps, Zhou et al., 2016): adopted models have one stage, and no b_jk.

A map adds up to the score; it does not say what caused it, since every position has seen a part of the photo
around it. Maps of pixel models are in :mod:`candid.explanations.heatmaps`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from candid._support.numbers import Array
from candid.explanations.options import HeatmapRule
from candid.models.photo.efficientnet import STD_EPSILON
from candid.models.protocol import can, require


@dataclass(frozen=True)
class ClassMaps:
    """Why each of some classes of one image, in nats, in float64.

    A map adds up to its score: ``values.sum((1, 2)) == scores - baselines``.
    """

    classes: tuple[int, ...]
    """The most probable classes, falling; and, if it was asked for, the one that is compared with another."""
    values: Array
    """What each position adds to the score, (n, h, w)."""
    scores: Array
    """Of a pixel model the log posterior, else the logit of each class minus the mean of all, (n,)."""
    baselines: Array
    """Zero of a pixel model, else the score of the average training image, (n,)."""
    saliency: Array | None = None
    """The information that a pixel model finds at each position, up to a constant, (h, w)."""
    against: int | None = None
    """The class that the last map compares its class with, in place of the mean of all."""
    rule: HeatmapRule = "candid"
    """How a pixel model distributes what all classes share over the positions."""
    largest_error: float = 0.0
    """Largest difference between the sum of a map and its score, over all classes, drawn or not."""


def class_maps(model: Any, image: Array, top: int = 3, against: int | None = None) -> ClassMaps:
    """Return why the ``top`` most probable classes of one image, (C, H, W) in [0, 1].

    Args:
        model: a photo model or an adopted model.
        image: as the model sees it.
        top: how many classes.
        against: a class; adds why the most probable class and not this one. If it is the most probable one,
            why the second and not it.

    Raises:
        CandidError: if the eye gives no maps, or if logits are not known to be linear in them.
    """
    require(model, "class maps", "Heatmaps")
    maps, logits, baseline = (part[0] for part in maps_of_all_classes(model, image[None]))
    error = float(np.abs(maps.sum((1, 2)) - (logits - baseline)).max())
    ranked = np.argsort(-logits, kind="stable").tolist()
    classes: list[int] = ranked[: max(1, top)]
    if against is not None:
        classes.append(ranked[0] if ranked[0] != against else ranked[1])

    def minus(values: Array) -> Array:
        """Return ``values`` of the classes without what all share, or what the other class has."""
        common = np.repeat(values.mean(0, keepdims=True), len(classes), axis=0)
        if against is not None:
            common[-1] = values[against]
        return values[classes] - common

    values = minus(maps)
    if can(model, "geometry"):
        values = smooth(values)
    return ClassMaps(
        tuple(classes), values, minus(logits), minus(baseline), against=against, largest_error=error
    )


def maps_of_all_classes(model: Any, images: Array) -> tuple[Array, Array, Array]:
    """Return the maps of all classes, the logits, and the logits of the average training image, in float64.

    Args:
        model: a photo model or an adopted model with K classes.
        images: (B, C, H, W) in [0, 1].

    Returns:
        (B, K, h, w), (B, K) and (1, K): ``maps.sum((2, 3)) == logits - baseline``.
    """
    weights, _ = model.linear_logits()
    stages = [stage.astype(np.float64) for stage in model.maps(images)]
    centre = model.centre[: weights.shape[1]].astype(np.float64)
    has_deviations = weights.shape[1] > sum(stage.shape[1] for stage in stages)
    height, width = (max(stage.shape[side] for stage in stages if stage.ndim == 4) for side in (2, 3))
    total = np.zeros((len(images), len(weights), height, width))
    start, statistics = 0, []
    for stage in stages:
        x = stage if stage.ndim == 4 else stage[..., None, None]
        summands, mean = [x], x.mean((2, 3))
        statistics.append(mean)
        if has_deviations and stage.ndim == 4:
            std = np.sqrt(x.var((2, 3)) + STD_EPSILON)
            away = np.square(x - mean[..., None, None]) + STD_EPSILON
            summands.append(away / std[..., None, None])  # averages to std
            statistics.append(std)
        ends = start + x.shape[1] * np.arange(len(summands) + 1)
        for part, begin, end in zip(summands, ends, ends[1:], strict=False):
            total += spread(_weighted(part, weights[:, begin:end], centre[begin:end]), height, width)
        start = ends[-1]
    logits = model.logits_of(np.concatenate([np.concatenate(statistics, 1), centre[None]]))
    return total, logits[:-1], logits[-1:]


def _weighted(x: Array, weights: Array, centre: Array) -> Array:
    """Return ``weights . (x_p - centre) / P`` at the P positions of maps (B, C, h, w), (B, K, h, w)."""
    away = (x - centre[:, None, None]).reshape(*x.shape[:2], -1)
    summed: Array = weights @ away / away.shape[2]
    return summed.reshape(len(x), len(weights), *x.shape[2:])


def spread(maps: Array, height: int, width: int) -> Array:
    """Return maps (..., h, w) on a grid of ``height`` x ``width``: each cell is shared out by area.

    >>> spread(np.ones((1, 1, 1)), 2, 2)
    array([[[0.25, 0.25],
            [0.25, 0.25]]])
    """
    down, across = _shares(maps.shape[-2], height), _shares(maps.shape[-1], width)
    shared: Array = down.T @ maps @ across
    return shared


def _shares(cells: int, finer: int) -> Array:
    """Return which share of each cell of a side goes to each cell of another division of it."""
    edges = np.arange(finer + 1) / finer
    starts = np.arange(cells)[:, None]
    overlap = np.minimum(edges[1:], (starts + 1) / cells) - np.maximum(edges[:-1], starts / cells)
    overlap = np.maximum(overlap, 0)
    shares: Array = overlap / overlap.sum(1, keepdims=True)
    return shares


def smooth(maps: Array) -> Array:
    """Return maps (B, h, w) averaged over 3 x 3 positions, with repeated edges: their sums stay.

    >>> smooth(np.array([[[9.0, 0.0, 0.0]]]))
    array([[[6., 3., 0.]]])
    """
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1)), mode="edge")
    averaged: Array = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2)).mean((-2, -1))
    return averaged

"""Heatmaps of photo models: the logit of each class as a sum over the positions of the photo.

The logits of a photo model are linear in the statistics of its eye, and statistics are sums over positions::

    l_k = c_k + sum_j a_jk mean_j + b_jk std_j
    h_k(p) = 1/P sum_j [ a_jk (x_pj - mean0_j) + b_jk ((x_pj - mean_j)^2 / std_j - std0_j) ]
    sum_p h_k(p) = l_k - l_k(mean0, std0)

with P positions in a stage, and mean0, std0 the statistics of the average training photo. The maps of all
stages are added on the finest grid. A map adds up to the score; it does not say what caused it, since every
position has seen a part of the photo around it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from candid.models.eyes.efficientnet import STD_EPSILON
from candid.models.heads.photo import PhotoModel


@dataclass(frozen=True)
class WhyMap:
    """Why a class, or why it and not another one: a map, and what it adds up to, in nats."""

    y: int
    """The class."""
    other: int | None
    """The class that it is compared with; None for the mean of all classes."""
    values: Tensor
    """What each position adds to the score, (h, w) in float64."""
    score: float
    """The logit of y minus the other one, or minus the mean of all: ``baseline`` plus the map's sum."""
    baseline: float
    """The same of the average training photo."""

    @property
    def total(self) -> float:
        """What the map adds up to."""
        return self.score - self.baseline


@dataclass(frozen=True)
class PhotoMaps:
    """The maps of one photo."""

    why: tuple[WhyMap, ...]
    """Of the most probable classes, falling; and, if it was asked for, of the first and not another one."""
    largest_error: float
    """Largest difference between the sum of a map and its logit minus its baseline, over all classes."""


def photo_maps(model: PhotoModel, image: Tensor, top: int = 3, against: int | None = None) -> PhotoMaps:
    """Return why the ``top`` most probable classes of one image, (C, H, W) in [0, 1].

    Args:
        model: a photo model.
        image: as the model sees it.
        top: how many classes.
        against: a class; adds why the most probable class and not this one. If it is the most probable one,
            why the second and not it.

    Raises:
        CandidError: if the eye gives no maps.
    """
    maps, logits, baseline = class_maps(model, image[None].to(model.device))
    total, own = maps[0], logits[0]
    error = float((total.sum((1, 2)) - (own - baseline)).abs().max())
    classes = own.topk(min(max(1, top), len(own))).indices.tolist()
    pairs: list[tuple[int, int | None]] = [(y, None) for y in classes]
    if against is not None:
        first, second = own.topk(2).indices.tolist()
        pairs.append((first if first != against else second, against))
    found = []
    for y, other in pairs:

        def minus(values: Tensor, y: int = y, other: int | None = other) -> Tensor:
            return values[y] - (values.mean(0) if other is None else values[other])

        shown = smooth(minus(total)[None])[0].cpu()
        found.append(WhyMap(y, other, shown, float(minus(own)), float(minus(baseline))))
    return PhotoMaps(tuple(found), error)


@torch.no_grad()
def class_maps(model: PhotoModel, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maps of all classes, the logits, and the logits of the average training photo, in float64.

    Args:
        model: a photo model with K classes.
        images: (B, C, H, W) in [0, 1].

    Returns:
        (B, K, h, w), (B, K) and (K,): ``maps.sum((2, 3)) == logits - baseline``.
    """
    maps = [each.double() for each in model.eye.maps(images)]
    weights, _ = model.linear_logits()
    centre = model.centre.double()
    side = max(each.shape[2] for each in maps), max(each.shape[3] for each in maps)
    total: Tensor | float = 0.0
    start, statistics = 0, []
    for x in maps:
        own = slice(start, start + x.shape[1]), slice(start + x.shape[1], start + 2 * x.shape[1])
        variance, mean = torch.var_mean(x, (2, 3), correction=0)
        std = (variance + STD_EPSILON).sqrt()
        away = ((x - mean[..., None, None]).square() + STD_EPSILON) / std[..., None, None]  # averages to std
        stage = torch.einsum("kc,bchw->bkhw", weights[:, own[0]], x - centre[own[0], None, None])
        stage += torch.einsum("kc,bchw->bkhw", weights[:, own[1]], away - centre[own[1], None, None])
        total = total + spread(stage / x[0, 0].numel(), *side)
        statistics += [mean, std]
        start = own[1].stop
    assert isinstance(total, Tensor)
    logits = model.logits_of(torch.cat([torch.cat(statistics, 1), centre[None]]))
    return total, logits[:-1], logits[-1]


def spread(maps: Tensor, height: int, width: int) -> Tensor:
    """Return maps (..., h, w) on a grid of ``height`` x ``width``: each cell is shared out by area.

    >>> spread(torch.ones(1, 1, 1), 2, 2)
    tensor([[[0.2500, 0.2500],
             [0.2500, 0.2500]]])
    """
    down, across = _shares(maps.shape[-2], height), _shares(maps.shape[-1], width)
    return down.to(maps).T @ maps @ across.to(maps)


def _shares(cells: int, finer: int) -> Tensor:
    """Return which share of each cell of a side goes to each cell of another division of it."""
    edges = torch.arange(finer + 1, dtype=torch.float64) / finer
    own = torch.arange(cells, dtype=torch.float64)[:, None]
    overlap = torch.minimum(edges[1:], (own + 1) / cells) - torch.maximum(edges[:-1], own / cells)
    overlap = overlap.clamp(min=0)
    return overlap / overlap.sum(1, keepdim=True)


def smooth(maps: Tensor) -> Tensor:
    """Return maps (B, h, w) averaged over 3 x 3 positions, with repeated edges: their sums stay.

    >>> smooth(torch.tensor([[[9.0, 0.0, 0.0]]]))
    tensor([[[6., 3., 0.]]])
    """
    padded = F.pad(maps[None], (1, 1, 1, 1), mode="replicate")
    return F.avg_pool2d(padded, 3, stride=1)[0]

"""Heatmaps of adopted models: the logit of a class as a sum over the positions of the image.

The logits of many classifiers are linear in the mean of the last maps (class activation maps, Zhou et al.,
2016). With weights w_k minus their mean over all classes, P positions x_p and the mean features m of the
images that were fitted::

    h_k(p) = w_k . (x_p - m) / P
    sum_p h_k(p) = l_k - l_k(m)

with l_k the logit of class k minus the mean of all logits. A map adds up to the score; it does not say what
caused it, since every position has seen a part of the image around it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.heads.adopted import AdoptedModel


@dataclass(frozen=True)
class AdoptedMaps:
    """Why each of the most probable classes of one image, in nats, in float64."""

    classes: tuple[int, ...]
    """The most probable classes, falling."""
    maps: Tensor
    """What each position adds to the score, (n, h, w)."""
    scores: Tensor
    """The logit of each class minus the mean of all: the baseline plus what the map adds up to, (n,)."""
    baselines: Tensor
    """The same of the average image that was fitted, (n,)."""


@torch.no_grad()
def adopted_maps(model: AdoptedModel, image: Tensor, top: int = 3) -> AdoptedMaps:
    """Return the maps of the ``top`` most probable classes of one image, (C, H, W) in [0, 1].

    Raises:
        CandidError: if the classifier gives no maps, or if its logits are not linear in their mean.
    """
    layer = model.eye.last_layer()
    if layer is None:
        raise CandidError(
            f"The logits of '{model.config.eye}' are not known to be linear in its maps, so there are no "
            "heatmaps: adopt an EfficientNet-Lite or a ResNet."
        )
    maps = model.feature_maps(image[None].to(model.device))[0].double()
    weights, biases = (each.to(maps) for each in layer)
    logits = weights @ maps.mean((1, 2)) + biases
    classes = logits.topk(min(top, len(logits))).indices
    own, bias = weights[classes] - weights.mean(0), biases[classes] - biases.mean()
    centre = model.centre[: len(maps)].double()
    away = (maps - centre[:, None, None]) / maps[0].numel()
    return AdoptedMaps(
        tuple(classes.tolist()),
        torch.einsum("kc,chw->khw", own, away).cpu(),
        (logits[classes] - logits.mean()).cpu(),
        (own @ centre + bias).cpu(),
    )

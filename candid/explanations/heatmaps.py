"""Heatmaps: the log posterior of each class as a sum over positions of the image.

With ``q(w_kl | y) = exp(-|w_kl - m_y,kl|^2 / 2)`` and ``S = log sum_y p(y) q(z | y)``::

    Q_Saliency(k, l) = -log sum_y p(y) q(w_kl | y)
    Q_Class(k, l, y) = log q(w_kl | y) + log p(y) / (h w) - S_kl,    sum_kl Q_Class = log q(y | x)
    S_kl = S (r_kl + contrast) / sum_kl (r_kl + contrast),           r_kl = Q_Saliency / max_kl Q_Saliency

All classes share S_kl. With a contrast of 0 it takes away what they have in common at each position; with
infinity it is even, and the maps show above all where the image is unusual.

The rule ``"paper"`` is the wording of the paper, for M classes::

    r_kl = (log p(w_kl) - min_kl log p(w_kl)) / (max_kl log p(w_kl) - min_kl log p(w_kl))

with ``log p(w_kl) = -Q_Saliency(k, l)``. The paper's priors are equal and left out: this rule has
M p(y) in place of p(y) in Q_Class and S. The maps add up, too, but S_kl varies from position to
position by far more than classes differ.

Of a refitted model, z and mu_y are those before the refit. Refitting leaves every posterior alone, but its
last layer spreads what happens at one position over all others: only before it, a part of the image changes
the maps around that part.
"""

import math

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.explanations.class_maps import ClassMaps
from candid.explanations.options import CONTRAST, HeatmapRule, check_contrast, check_rule
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.means import before_refit
from candid.models.flow.pooling import DCTPooling
from candid.models.protocol import Outputs, require


class SpatialMixture:
    """The latent mixture seen from the h x w positions of the last feature maps.

    The orthonormal cosine transform keeps distances, so with w the inverse transform of z and m_y that of
    mu_y, ``|z - mu_y|^2 = sum_kl |w_kl - m_y,kl|^2``. As in the mixture, the means stay products of
    prototypes: all classes at all positions cost 2 % of what the imagenet network does. A refit is undone
    first. Everything is in float64.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("cifar").eval()
    >>> outputs = model.tensor_outputs(torch.rand(2, 3, 32, 32))
    >>> spatial = SpatialMixture(model)
    >>> terms = spatial.terms(spatial.maps(spatial.before_refit(outputs.latent)))
    >>> terms.shape, terms.sum(1).allclose((outputs.logits - model.mixture.log_priors).double(), atol=1e-4)
    (torch.Size([2, 16, 10]), True)
    """

    @torch.no_grad()
    def __init__(self, model: GenerativeClassifier) -> None:
        self.after = require(model, "invert", "Heatmaps").mixture.double_copy()
        mixture, self.refit = before_refit(model)
        self.shape = model.grid
        self.positions = math.prod(self.shape)
        self.dct = DCTPooling(model.feature_size, *self.shape).cpu().double()
        self.log_priors, self.weights = mixture.log_priors, mixture.weights
        free = mixture.mean / math.sqrt(self.positions)  # at every position the same
        self.mean = free if mixture.constant else None  # (M, C)
        self.prototypes = self.maps(torch.nn.functional.pad(mixture.prototypes, (mixture.constant, 0)))
        self.prototypes = self.prototypes.transpose(0, 1).contiguous()  # (h w, K, C)
        self.squared_norms = torch.stack([self._squared_norms(p) for p in self.prototypes])

    @torch.no_grad()
    def before_refit(self, z: Tensor) -> Tensor:
        """Return latents as they were before the last layer of a refitted model, in float64, (B, D)."""
        return z.double() if self.refit is None else self.refit.inverse(z.double())[0]

    @torch.no_grad()
    def log_posterior(self, z: Tensor) -> Tensor:
        """Return log p(y | z) of latents of the model as it is, in float64, (B, M)."""
        return self.after.logits(z.double()).log_softmax(1)

    def maps(self, z: Tensor) -> Tensor:
        """Return w, the inverse cosine transform of latents, in float64, (B, h w, C)."""
        by_channel, _ = self.dct.inverse(z.double())
        return by_channel.flatten(2).mT

    def terms(self, maps: Tensor) -> Tensor:
        """Return ``log q(w_kl | y) + |w_kl|^2 / 2``, float64, (B, h w, M); sums are logits without priors."""
        w = maps.transpose(0, 1).contiguous()  # (h w, B, C)
        products = (w @ self.prototypes.mT).flatten(0, 1)
        if self.weights is not None:
            products = products @ self.weights.T
        if self.mean is not None:
            products = products + w.flatten(0, 1) @ self.mean.T
        terms = products.unflatten(0, w.shape[:2]) - 0.5 * self.squared_norms[:, None]
        return terms.transpose(0, 1)

    def _squared_norms(self, prototypes: Tensor) -> Tensor:
        """Return ``|m_y,kl|^2`` at the position of these ``prototypes`` (K, C), (M,)."""
        mean, weights = self.mean, self.weights
        if weights is None:
            return (prototypes if mean is None else prototypes + mean).square().sum(1)
        norms = ((weights @ (prototypes @ prototypes.T)) * weights).sum(1)
        if mean is not None:
            norms = norms + (mean @ prototypes.T * weights).sum(1) * 2 + mean.square().sum(1)
        return norms


@torch.no_grad()
def heatmaps(
    model: GenerativeClassifier,
    outputs: Outputs,
    classes: Array | None = None,
    top: int = 3,
    contrast: float = CONTRAST,
    spatial: SpatialMixture | None = None,
    rule: HeatmapRule = "candid",
) -> list[ClassMaps]:
    """Return saliency and posterior heatmaps of each image from one forward pass: no gradients, no second.

    The formulas and both rules are those at the top of this module.

    Args:
        model: in evaluation mode.
        outputs: what ``model.outputs(images)`` returned, of B images.
        classes: whose maps to keep, (B, n); the ``top`` most probable ones if None.
        top: number of classes.
        contrast: the paper's constant.
        spatial: made once for many calls; it depends on the model alone.
        rule: how S is distributed over the positions.

    Returns:
        One set of maps for each image.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("cifar").eval()
    >>> first, second = heatmaps(model, model.outputs(np.zeros((2, 3, 32, 32), np.float32)))
    >>> first.values.shape, first.saliency.shape
    ((3, 4, 4), (4, 4))
    >>> np.allclose(np.exp(first.values.sum((1, 2))), np.exp(first.scores), atol=1e-5)
    True
    """
    spatial = spatial or SpatialMixture(model)
    check_contrast(contrast)
    check_rule(rule)
    assert outputs.latent is not None
    latent = torch.from_numpy(outputs.latent)
    log_posterior = spatial.log_posterior(latent)
    chosen = _best(log_posterior, top) if classes is None else torch.from_numpy(classes)
    maps = spatial.maps(spatial.before_refit(latent))
    half_squares = 0.5 * maps.square().sum(2)  # (B, h w)
    terms, log_priors = spatial.terms(maps), spatial.log_priors
    saliency = half_squares - (terms + log_priors).logsumexp(2)
    if rule == "paper":
        log_priors = log_priors + math.log(len(log_priors))
    evidence = (terms.sum(1) + log_priors).logsumexp(1) - half_squares.sum(1)  # S, (B,)
    share = _shares(saliency, contrast, rule)
    common = half_squares + evidence[:, None] * share  # |w_kl|^2 / 2 + S_kl
    sums = terms.sum(1) + log_priors - common.sum(1)[:, None]
    of_chosen = terms.gather(2, chosen[:, None].expand(-1, spatial.positions, -1))
    posterior = of_chosen - common[:, :, None] + log_priors[chosen][:, None] / spatial.positions
    parts = (
        chosen,
        posterior.mT.unflatten(2, spatial.shape),
        log_posterior.gather(1, chosen),
        saliency.unflatten(1, spatial.shape),
        (sums - log_posterior).abs().amax(1),
    )
    return [
        ClassMaps(tuple(y.tolist()), values, scores, np.zeros_like(scores), seen, None, rule, float(error))
        for y, values, scores, seen, error in zip(*(part.numpy() for part in parts), strict=True)
    ]


def _best(log_posterior: Tensor, top: int) -> Tensor:
    """Return the ``top`` most probable classes, (B, top)."""
    count = log_posterior.shape[1]
    if not 1 <= top <= count:
        raise CandidError(f"The model has {count} classes: ask for the maps of 1 to {count}, not {top}.")
    return log_posterior.topk(top).indices


def _shares(saliency: Tensor, contrast: float, rule: HeatmapRule) -> Tensor:
    """Return the shares in which S is distributed over positions, (B, h w); rows sum to one."""
    even = torch.full_like(saliency, 1 / saliency.shape[1])
    if math.isinf(contrast):
        return even
    smallest = torch.finfo(saliency.dtype).tiny
    low, high = (end[:, None] for end in saliency.aminmax(dim=1))
    if rule == "paper":
        relative = (high - saliency) / (high - low).clamp(min=smallest)
    else:
        relative = (saliency / high.clamp(min=smallest)).clamp(min=0)
    weights = (relative + contrast) / (1 + contrast)
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total, even)

"""The Gaussian mixture in latent space: one unit-variance component per class."""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.models.flow.config import check_planar, check_priors
from candid.models.flow.network import array_of, full_precision
from candid.models.flow.subnets import normal

BLOCK_DISTANCE = 3.5
"""Distance of the class means at the start of the released models' training, in standard deviations."""


class LatentMixture(nn.Module):
    """``p(z) = sum_y p(y) N(z; mu_y, 1)`` with means that are cheap to hold.

    mu_y has C free numbers for the constant coefficients of z and, for the D - C others, a
    combination of ``rank`` prototypes::

        mu_y = [mean_y, alpha_y @ prototypes]

    The M x (D - C) matrix of the second part is never formed: products with it go through the
    prototypes, norms through their K x K Gram matrix. ``rank=None`` gives every class a prototype of
    its own (full rank, for few classes), ``rank=0`` leaves the second part out. ``planar`` means lie in one
    plane of all D dimensions, without a free part: ``mu_y = prototypes[0] + alpha_y @ prototypes[1:]``, two
    numbers per class. On a ``circle`` they have one radius, and an angle each, with E the orthonormal axes of
    the plane (``prototypes[1:]`` after Gram and Schmidt)::

        mu_y = prototypes[0] + radius * (cos angle_y, sin angle_y) @ E

    Args:
        classes: M, the number of classes.
        constant: C, the number of constant coefficients.
        dimensions: D, the length of z.
        rank: K, 0 for none, or None for full rank.
        priors: class priors, M positive numbers that sum to one; None for uniform ones.
        planar: whether all means lie in one plane; then ``constant`` doesn't count, and there is no rank.
        circle: whether planar means lie on a circle.

    >>> mixture = LatentMixture(classes=10, constant=12, dimensions=48, rank=4)
    >>> mixture.posterior(torch.randn(2, 48)).sum(1).allclose(torch.ones(2))
    True
    """

    log_priors: Tensor
    frozen_norms: Tensor | None

    def __init__(
        self,
        classes: int,
        constant: int,
        dimensions: int,
        rank: int | None = None,
        priors: Sequence[float] | None = None,
        planar: bool = False,
        circle: bool = False,
    ) -> None:
        super().__init__()
        if rank is not None and rank < 0:
            raise CandidError(f"'rank' must be at least 0, not {rank}.")
        check_planar(planar, rank, circle)
        self.pooled = constant
        constant, rank = (0, 2) if planar else (constant, rank)
        self.classes, self.constant, self.dimensions, self.planar = classes, constant, dimensions, planar
        # Two classes start about 0.7 standard deviations apart: where their means lie says nothing yet.
        self.mean = nn.Parameter(_normal(classes, constant, times=math.sqrt(0.18 / max(constant, 1))))
        rest, rows = dimensions - constant, classes if rank is None else rank + planar
        self.prototypes = nn.Parameter(_normal(rows, rest, times=0.3, over=math.sqrt(max(rest, 1))))
        self.alpha = self.angles = self.log_radius = None
        if circle:
            self.angles = nn.Parameter(2 * math.pi / classes * torch.arange(classes, dtype=torch.float32))
            self.log_radius = nn.Parameter(torch.tensor(0.0))
        elif rank is not None:
            self.alpha = nn.Parameter(_normal(classes, rank, over=math.sqrt(max(rank, 1))))
        check_priors(priors, classes)
        logs = [math.log(p) for p in priors] if priors else [-math.log(classes)] * classes
        self.register_buffer("log_priors", torch.tensor(logs))
        self.register_buffer("frozen_norms", None)

    @torch.no_grad()
    def start_in_blocks(self) -> None:
        """Put the means :data:`BLOCK_DISTANCE` apart: each class gets a block of constant coefficients.

        Raises:
            CandidError: if there are more classes than constant coefficients.

        >>> mixture = LatentMixture(classes=4, constant=12, dimensions=48, rank=0)
        >>> mixture.start_in_blocks()
        >>> round(float(mixture.pairwise_distances()[0, 1]), 4)
        3.5
        """
        size = self.constant // self.classes
        if not size:
            raise CandidError(
                f"{self.classes} classes can't start in blocks of {self.constant} constant coefficients: "
                "use means_start = 'random'."
            )
        blocks = torch.eye(self.classes).repeat_interleave(size, 1) * BLOCK_DISTANCE / math.sqrt(2 * size)
        self.mean.zero_()
        self.mean[:, : self.classes * size] = blocks

    @torch.no_grad()
    def start_without_rest(self) -> None:
        """Let the means differ in the constant coefficients alone: alpha (or each class's prototype) is 0.

        Raises:
            CandidError: if the means are planar.

        >>> mixture = LatentMixture(classes=4, constant=12, dimensions=48, rank=2)
        >>> mixture.start_without_rest()
        >>> mixture.means(torch.arange(4))[:, 12:].abs().max().item()
        0.0
        """
        if self.planar:
            raise CandidError("Planar class means have no mean-pooled part: use means_start = 'random'.")
        (self.prototypes if self.alpha is None else self.alpha).zero_()

    def rest(self) -> list[nn.Parameter]:
        """Return the parameters of the means beyond the constant coefficients; none of planar means."""
        if self.planar:
            return []
        return [self.prototypes] if self.alpha is None else [self.alpha, self.prototypes]

    @property
    def weights(self) -> Tensor | None:
        """The weights that combine the prototypes, (M, K); None if every class has its own."""
        weights = self.alpha if self.angles is None else self.circle_places() @ self.plane_factor()
        if weights is None or not self.planar:
            return weights
        return torch.cat((torch.ones_like(weights[:, :1]), weights), dim=1)

    def circle_places(self) -> Tensor:
        """Return where the means lie on their circle, about its centre, (M, 2)."""
        assert self.angles is not None and self.log_radius is not None
        return self.log_radius.exp() * torch.stack((self.angles.cos(), self.angles.sin()), 1)

    def plane_factor(self) -> Tensor:
        """Return F with F @ prototypes[1:] orthonormal, (2, 2)."""
        axes = self.prototypes[1:]
        with full_precision(axes):
            root = torch.linalg.cholesky(axes @ axes.T)
            return torch.linalg.solve_triangular(root, torch.eye(2).to(axes), upper=False)

    @torch.no_grad()
    def frozen(self) -> "LatentMixture":
        """Return a copy that is not trained and stores the norms of its means."""
        copied = copy.deepcopy(self).requires_grad_(False)
        copied.frozen_norms = copied.squared_norms()
        return copied

    def logits(self, z: Tensor) -> Tensor:
        """Return ``z . mu_y - |mu_y|^2 / 2 + log p(y)``, (B, M): log p(y | z) up to a constant of z.

        Free of |z|^2, which is the same for every class and so large (1e5 at 224 x 224) that it
        would drown the differences between classes in float32.
        """
        return self.products(z) - 0.5 * self.squared_norms() + self.log_priors

    def products(self, z: Tensor) -> Tensor:
        """Return ``z . mu_y``, (B, M)."""
        with full_precision(z):
            products = z[:, : self.constant] @ self.mean.T
            return products + self._combine(z[:, self.constant :] @ self.prototypes.T)

    def posterior(self, z: Tensor) -> Tensor:
        """Return ``p(y | z)``, (B, M); rows sum to one."""
        return self.logits(z).softmax(dim=1)

    def squared_norms(self) -> Tensor:
        """Return ``|mu_y|^2``, (M,)."""
        if self.frozen_norms is not None:
            return self.frozen_norms
        with full_precision(self.mean):
            weights = self.weights
            if weights is None:
                rest = self.prototypes.square().sum(1)
            else:
                gram: Tensor = _Gram.apply(self.prototypes)
                rest = ((weights @ gram) * weights).sum(1)
            return self.mean.square().sum(1) + rest

    def means(self, y: Tensor) -> Tensor:
        """Return the means of the classes ``y``, (len(y), D)."""
        with full_precision(self.mean):
            weights = self.weights
            rest = self.prototypes[y] if weights is None else weights[y] @ self.prototypes
            return torch.cat((self.mean[y], rest), dim=1)

    def sample(self, y: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Draw one z for each label in ``y``, with standard deviation ``temperature``, (len(y), D)."""
        means = self.means(y)
        device = means.device if generator is None else generator.device
        noise = torch.randn(means.shape, generator=generator, device=device, dtype=means.dtype)
        return means + temperature * noise.to(means.device)

    @torch.no_grad()
    def mean_products(self) -> Tensor:
        """Return ``mu_i . mu_j`` in float64, (M, M)."""
        mean, prototypes = self.mean.double(), self.prototypes.double()
        return mean @ mean.T + self._combine(self._combine(prototypes @ prototypes.T).T)

    @torch.no_grad()
    def double_copy(self) -> "LatentMixture":
        """Return a copy in float64 on the CPU that is not trained."""
        return copy.deepcopy(self).requires_grad_(False).cpu().double()

    @torch.no_grad()
    def pairwise_distances(self) -> Tensor:
        """Return ``|mu_i - mu_j|`` in float64, (M, M); a unit is one standard deviation."""
        products = self.mean_products()
        norms = products.diagonal()
        squares = norms[:, None] + norms[None, :] - 2 * products
        return squares.clamp(min=0).sqrt().fill_diagonal_(0)

    def _combine(self, by_prototype: Tensor) -> Tensor:
        """Turn products with prototypes into products with the classes' rest means: (..., K) -> (..., M)."""
        weights = self.weights
        return by_prototype if weights is None else by_prototype @ weights.T.to(by_prototype.dtype)


class MixtureGeometry:
    """:class:`~candid.models.protocol.ClassGeometry` of a mixture, as it is when it is asked.

    >>> geometry = MixtureGeometry(LatentMixture(classes=10, constant=12, dimensions=48, rank=4))
    >>> geometry.means(np.array([3, 1])).shape, geometry.distances().shape
    ((2, 48), (10, 10))
    """

    def __init__(self, mixture: LatentMixture) -> None:
        self.mixture = mixture

    @property
    def log_priors(self) -> Array:
        """Log p(y), (M,)."""
        return array_of(self.mixture.log_priors)

    @property
    def planar(self) -> bool:
        """Whether all means lie in one plane by construction."""
        return self.mixture.planar

    def means(self, classes: Array | None = None) -> Array:
        """Return the means of ``classes``, all of them if None, (k, D) in float64."""
        chosen = np.arange(self.mixture.classes) if classes is None else np.asarray(classes)
        return array_of(self.mixture.double_copy().means(torch.from_numpy(chosen)))

    def distances(self) -> Array:
        """Return the distances of the means in standard deviations, (M, M) in float64."""
        return array_of(self.mixture.pairwise_distances())


class _Gram(torch.autograd.Function):
    """``P P^T``, whose gradient autograd would form twice, each as large as P."""

    generate_vmap_rule = True

    @staticmethod
    def forward(prototypes: Tensor) -> Tensor:
        return prototypes @ prototypes.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (prototypes,) = ctx.saved_tensors
        return (gradient + gradient.T) @ prototypes

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (prototypes,) = ctx.saved_tensors
        half = tangent @ prototypes.T
        return half + half.T


def log_standard_normal(z: Tensor) -> Tensor:
    """Return ``log N(z; 0, 1)`` in nats, (B,)."""
    return -0.5 * z.square().sum(1) - 0.5 * z.shape[1] * math.log(2 * math.pi)


def _normal(*shape: int, times: float = 1.0, over: float = 1.0) -> Tensor:
    """Return scaled normal numbers; on the meta device unscaled, else torch would load its compiler."""
    drawn = normal(*shape)
    return drawn if drawn.is_meta else drawn * times / over


class Losses(NamedTuple):
    """Scalars: the weighted sum to minimise, and its two parts in nats."""

    total: Tensor
    L_X: Tensor
    """-log q(v) per dimension, of the normalised image v: how well the model describes images."""
    L_Y: Tensor
    """Cross-entropy of the class posterior: how well it separates classes."""


def information_bottleneck_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    beta: float,
    label_smoothing: float = 0.05,
    generator: torch.Generator | None = None,
) -> Losses:
    """``(L_X + beta L_Y) / (1 + beta)``; ``beta = 0`` is L_X alone and ``inf`` L_Y alone.

    ::

        L_X = -(logsumexp_y(log p(z|y) + log p(y)) + log_det) / D
        L_Y = -sum_y t_y log p(y|z),   t = (1 - label_smoothing) onehot(y) + label_smoothing / M

    averaged over the batch (Ardizzone et al., 2020; with the signs that the paper's print lost).

    Args:
        model: a :class:`~candid.GenerativeClassifier`, bare or wrapped in DistributedDataParallel.
        x: images in [0, 1], (B, C, H, W).
        y: labels, (B,).
        beta: the weight of the classification loss.
        label_smoothing: the share of each label that is spread over all classes.
        generator: where the dequantisation noise of training comes from.

    Returns:
        The total loss, L_X and L_Y, each averaged over the batch.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> losses = information_bottleneck_loss(model, torch.rand(4, 1, 8, 8), torch.arange(4), beta=1)
    >>> losses.total.isclose((losses.L_X + losses.L_Y) / 2).item()
    True
    """
    if not beta >= 0:
        raise CandidError(f"'beta' must be zero, a positive number or inf, not {beta}.")
    if not 0 <= label_smoothing <= 1:
        raise CandidError(f"'label_smoothing' must lie in [0, 1], not {label_smoothing}.")
    z, log_det, logits = model(x, generator)
    log_density = log_standard_normal(z) + logits.logsumexp(1) + log_det
    l_x = -log_density.mean() / z.shape[1]
    l_y = F.cross_entropy(logits, y, label_smoothing=label_smoothing)
    if math.isinf(beta):
        return Losses(l_y, l_x, l_y)
    weight_x = 1 / (1 + beta)
    return Losses(weight_x * l_x + (1 - weight_x) * l_y if beta else l_x, l_x, l_y)

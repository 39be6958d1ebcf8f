"""The generative classifier of vectors: features of a pretrained network in, likelihoods out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array
from candid._support.options import check_range, checked_names
from candid.data.images import Preprocessing
from candid.models.flow.backbone import build_flow
from candid.models.flow.classifier import FlowOutputs, MixtureClassifier
from candid.models.flow.config import ClassifierConfig
from candid.models.flow.invertible import frozen_statistics
from candid.models.flow.mixture import LatentMixture, log_standard_normal
from candid.models.flow.network import TensorOutputs, array_of, check_batch
from candid.models.flow.subnets import normal
from candid.models.photo.eye import Eye
from candid.models.photo.opening import trained_eye
from candid.models.protocol import Ability, DensityOf, Outputs, missing

ROWS = 4096
"""Vectors that pass at a time."""


@dataclass(frozen=True)
class VectorConfig(ClassifierConfig):
    """Everything that rebuilds a classifier of vectors; it is stored with the weights.

    >>> from candid.models.flow.config import vector_flow
    >>> VectorConfig(vector_flow(6, width=4), classes=2, rank=0, groups=(4, 2)).dimensions
    6
    """

    groups: tuple[int, ...] = ()
    """How many features each group has: those of a group are divided by one number."""
    eye: str = ""
    """The name of the eye that images are seen through; empty for stored features."""
    eye_sha256: str = ""
    """The digest of its weights."""
    size: int = 224
    """Pixels of its images on each side."""
    deviation: float = 0.05
    """Standard deviation of the noise, where the features of a group have a root mean variance of one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, 65_536, "groups", "size")
        if sum(self.groups) != self.dimensions or self.flow.pooling != "none":
            raise CandidError(f"The groups have {sum(self.groups)} features, the flow {self.dimensions}.")
        if not self.deviation > 0:
            raise CandidError(f"'deviation' must be positive, or there is no density: not {self.deviation}.")

    @property
    def dimensions(self) -> int:
        """The number of features, D."""
        return self.flow.dimensions


class VectorClassifier(MixtureClassifier):
    """Models p(features | class) exactly with an invertible network and a Gaussian mixture.

    Features h, (B, D), are centred, each group is divided by one number, and noise of a stated size is added,
    since features of a network have directions without any variance, in which a density is infinite. What
    follows is whitened linearly and passes the couplings::

        v = (h - centre) / scale + noise,   z = flow(whitening @ v)

    In training the noise is drawn again at every call. In evaluation it is one fixed pattern, kept with the
    weights, as in :class:`~candid.GenerativeClassifier`. Densities are those of h with this noise, in nats.

    Args:
        config: the layout.
        class_names: one name a class; the class numbers if None.
        seed: of the initial weights, the permutations and the evaluation noise.
        eye: what images are seen through, if it is open already.

    >>> from candid.models.flow.config import vector_flow
    >>> config = VectorConfig(vector_flow(6, width=4), classes=2, rank=0, groups=(6,))
    >>> model = VectorClassifier(config).eval()
    >>> outputs = model.outputs_of(np.zeros((3, 6), np.float32))
    >>> outputs.logits.shape, outputs.latent.shape, outputs.log_density_terms.shape
    ((3, 2), (3, 6), (3, 3))
    """

    kind: ClassVar = "vector"
    density_of: ClassVar[DensityOf] = "features"
    limits: ClassVar = (
        "a vector model, whose eye has no inverse to pixels: use a pixel model, such as 'cifar10-beta1'."
    )
    watched_novelty: ClassVar = slice(-2, None)
    """The two scores that have the density."""
    posterior_name: ClassVar = "mixture"
    config: VectorConfig
    centre: Tensor
    scale: Tensor
    whitening: Tensor
    noise: Tensor

    def __init__(
        self,
        config: VectorConfig,
        class_names: Sequence[str] | None = None,
        seed: int = 0,
        eye: Eye | None = None,
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config, self.image_shape, self._eye = config, (3, config.size, config.size), eye
        self._eye_module: list[torch.nn.Module] = []  # in a list, so that its weights are not this model's
        d = config.dimensions
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.flow = build_flow(config.flow)
            self.mixture = LatentMixture(config.classes, d, d, config.rank, config.priors)
            self.register_buffer("noise", config.deviation * normal(d))
        self.register_buffer("centre", torch.zeros(d))
        self.register_buffer("scale", torch.ones(d))
        self.register_buffer("whitening", torch.eye(d))

    @torch.no_grad()
    def start(self, centre: Array, scale: Array, whitening: Array) -> None:
        """Set what precedes the couplings: centre and scale (D,), whitening (D, D), lower triangular."""
        for name, values in (("centre", centre), ("scale", scale), ("whitening", whitening)):
            getattr(self, name).copy_(torch.from_numpy(values))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.noise.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it computes with."""
        return self.noise.dtype

    @property
    def can(self) -> frozenset[Ability]:
        """What it is able to do; gradients need an eye that torch can run."""
        abilities: set[Ability] = {"geometry", "mixture", "density", "network"}
        if self.config.eye:
            abilities.add("eye")
            if not any(eye.endswith(".onnx") for eye in self.config.eye.split("+")):
                abilities.add("gradients")
        return frozenset(abilities)

    @property
    def eye(self) -> Eye:
        """What images are seen through; its weights are read when it is first used."""
        if not self.config.eye:
            raise CandidError(
                "This model was trained on stored features, and has no eye to see images with: give features "
                "to model.outputs_of, or train one on a folder of photos with --preset vector."
            )
        if self._eye is None:
            self._eye = trained_eye(self.config, self.folder)
        return self._eye

    @property
    def preprocessing(self) -> Preprocessing:
        """The whole centre square of a photo, scaled to the eye's size, if the eye does not say otherwise."""
        if self.config.eye.endswith(".onnx"):
            return self.eye.preprocessing
        return Preprocessing(*self.image_shape)

    @property
    def feature_size(self) -> int:
        """The number of features, D."""
        return self.config.dimensions

    @property
    def is_frozen(self) -> bool:
        """Whether this is a copy for inference: there are none."""
        return False

    def forward(self, features: Tensor, generator: torch.Generator | None = None) -> FlowOutputs:
        """Make one pass over features, (B, D); ``generator`` draws the noise in training mode.

        The log-determinant is that of z with respect to v.
        """
        z, log_det = self.flow(self.whitened(features, generator)[:, :, None, None])
        log_det = log_det + self._log_det_whitening().to(log_det)
        logits = self.mixture.logits(z)
        if not bool(torch.isfinite(torch.stack([logits.sum(), log_det.sum()])).all()):
            raise NonFiniteError("The latent or its logits overflowed: the features are huge or NaN.")
        return FlowOutputs(z, log_det, logits)

    def whitened(self, features: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return what the couplings see of features, (B, D)."""
        d = self.config.dimensions
        if features.dim() != 2 or features.shape[1] != d or not len(features):
            raise CandidError(
                f"The model takes features of the shape (batch, {d}), not {tuple(features.shape)}."
            )
        noise = self.noise
        if self.training:
            drawn = torch.empty(features.shape, dtype=noise.dtype).normal_(generator=generator)
            noise = self.config.deviation * drawn.to(noise.device)
        v = (features.to(noise.dtype) - self.centre) / self.scale + noise
        return v @ self.whitening.T

    def tensor_outputs_of(self, features: Tensor) -> TensorOutputs:
        """Return everything that the model says of features, (B, D); gradients can follow.

        The terms of the density are log p(z), the log-determinants of whitening and couplings, and that of
        the scaling. ``novelty`` has three scores: the squared distance to the nearest class mean, minus the
        log density, and minus the log evidence.
        """
        z, log_det, logits = self(features)
        base = log_standard_normal(z.double())
        evidence = logits.double().logsumexp(1)
        constant = -self.scale.double().log().sum()
        terms = torch.stack((evidence + base, log_det.double(), constant.expand(len(z))), 1)
        nearest = (logits.double() - self.mixture.log_priors.double()).amax(1)
        novelty = torch.stack((z.double().square().sum(1) - 2 * nearest, -terms.sum(1), -evidence), 1)
        return TensorOutputs(logits, features, terms, z, novelty)

    @torch.inference_mode()
    def outputs_of(self, features: Array) -> Outputs:
        """Return everything that the model says of features, (B, D)."""
        rows = torch.from_numpy(np.ascontiguousarray(features)).to(self.device)
        parts = [self.tensor_outputs_of(part).arrays() for part in rows.split(ROWS)]
        columns = [None if part[0] is None else np.concatenate(part) for part in zip(*parts, strict=True)]
        return Outputs(*columns)  # type: ignore[arg-type]

    def features(self, x: Tensor) -> Tensor:
        """Return the features of images, (B, D); in torch if gradients are wanted, else as the eye runs."""
        check_batch(x, self.image_shape)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return torch.from_numpy(self.eye.statistics(array_of(x))).to(self.device)
        if not self._eye_module:
            if "gradients" not in self.can:
                raise missing(self, "gradients", "be attacked")
            from candid.models.photo.torch_models import network_of

            self._eye_module.append(network_of(self.eye).eval().requires_grad_(False).to(self.device))
        seen: Tensor = self._eye_module[0](x)
        return seen

    def tensor_outputs(self, x: Tensor) -> TensorOutputs:
        """Make one forward pass over images; gradients can follow."""
        return self.tensor_outputs_of(self.features(x))

    def logits(self, x: Tensor) -> Tensor:
        """Return the log posterior up to a constant of the image, (B, M)."""
        outputs: FlowOutputs = self(self.features(x))
        return outputs.logits

    def feature_maps(self, x: Tensor) -> Tensor:
        """Return the last maps of the eye, (B, C, h, w)."""
        return torch.from_numpy(self.eye.maps(array_of(x))[-1])

    def log_density_of(self, outputs: TensorOutputs) -> Tensor:
        """Return the log density of features in nats, (B,) in float64, from a pass that was already made."""
        assert outputs.log_density_terms is not None
        return outputs.log_density_terms.sum(1)

    @torch.inference_mode()
    def invert(self, latent: Array) -> Array:
        """Return the features that have these latents, (B, D): undoes :meth:`outputs_of`."""
        with frozen_statistics(self.flow):
            v, _ = self.flow.inverse(torch.from_numpy(np.ascontiguousarray(latent)).to(self.noise))
        v = torch.linalg.solve_triangular(self.whitening, v.flatten(1).T, upper=False).T
        return array_of((v - self.noise) * self.scale + self.centre)

    def _log_det_whitening(self) -> Tensor:
        return self.whitening.diagonal().double().log().sum()


def nats_per_feature(log_density: Array, dimensions: int) -> float:
    """Return the mean of ``-log p / D``: what bits per dimension are to pixels.

    >>> nats_per_feature(np.array([-2.0, -4.0]), 3)
    1.0
    """
    return float(-log_density.mean() / dimensions) if len(log_density) else math.nan

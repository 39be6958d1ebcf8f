"""The generative classifier: pixels in, likelihoods out, samples back."""

import copy
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array
from candid._support.options import checked_names
from candid.models.flow.backbone import build_flow
from candid.models.flow.config import ClassifierConfig, Memory, preset
from candid.models.flow.coupling import OrthogonalMatrix
from candid.models.flow.frozen import FrozenFlow, freeze
from candid.models.flow.invertible import frozen_statistics
from candid.models.flow.mixture import LatentMixture, MixtureGeometry, log_standard_normal
from candid.models.flow.network import ImageClassifier, TensorOutputs, array_of, check_batch
from candid.models.flow.pooling import DCTPooling
from candid.models.flow.subnets import uniform
from candid.models.protocol import Ability, ClassGeometry, DensityOf


class FlowOutputs(NamedTuple):
    """The results of one forward pass; everything else is a function of them."""

    z: Tensor
    """Latent, (B, D)."""
    log_det: Tensor
    """log |det dz/dv| in nats, of the normalised image v, (B,)."""
    logits: Tensor
    """z . mu_y - |mu_y|^2 / 2 + log p(y), (B, M)."""


class MixtureClassifier(ImageClassifier):
    """An invertible network with a Gaussian mixture of its latents, one Gaussian for each class."""

    mixture: LatentMixture

    @property
    def log_priors(self) -> Array:
        """Log p(y), (M,)."""
        return array_of(self.mixture.log_priors)

    @property
    def geometry(self) -> ClassGeometry:
        """Where the classes lie in latent space."""
        return MixtureGeometry(self.mixture)

    @property
    def fixed_weights(self) -> frozenset[str]:
        """The fixed rotations, which the fingerprint leaves out."""
        parts = self.named_modules()
        return frozenset(f"{name}.weight" for name, part in parts if isinstance(part, OrthogonalMatrix))


class GenerativeClassifier(MixtureClassifier):
    """Models p(image | class) exactly with an invertible network and a Gaussian mixture.

    Images are float tensors in [0, 1], (B, C, H, W); an 8-bit pixel p stands for p / 255. Likelihoods
    are densities over the 0..255 grid, widened by uniform noise r in [0, 1): the network sees
    ``v = ((255 x + r) / 255 - mean) / std``. In training r is drawn again at every call. In evaluation
    it is one fixed pattern, kept with the weights, so that a result depends on the image alone, not on
    its batch, the process or the machine, and :meth:`invert` can take it off again.

    Args:
        config: the layout; see :class:`~candid.ClassifierConfig`.
        class_names: one name per class; the class numbers if None.
        memory: ``"inverse"`` recomputes activations in the backward pass instead of storing them.
        seed: of the initial weights, the mixing matrices and the evaluation noise.

    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8)) / 255
    >>> model.posterior(x).shape, model.log_likelihoods(x).shape, model.predict(x).shape
    (torch.Size([2, 10]), torch.Size([2, 10]), torch.Size([2]))
    >>> model.invert(model.latent(x)).allclose(x, atol=1e-4)
    True
    """

    kind: ClassVar = "generative"
    density_of: ClassVar[DensityOf] = "pixels"
    can: ClassVar[frozenset[Ability]] = frozenset(
        ("geometry", "mixture", "invert", "class maps", "gradients", "density", "network")
    )
    config: ClassifierConfig
    noise: Tensor
    image_std: Tensor

    def __init__(
        self,
        config: ClassifierConfig,
        class_names: Sequence[str] | None = None,
        memory: Memory = "plain",
        seed: int = 0,
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config = config
        flow = config.flow
        self.image_shape = (flow.channels, flow.height, flow.width)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.flow = build_flow(flow)
            self.mixture = LatentMixture(
                config.classes,
                flow.constant_coefficients,
                flow.dimensions,
                config.rank,
                config.priors,
                config.planar,
                config.circle,
            )
            self.register_buffer("noise", uniform(*self.image_shape))
        for name, values in (("image_mean", config.mean), ("image_std", config.std)):
            # The configuration holds them; on the CPU even where a model is built without memory (meta).
            per_channel = torch.tensor(values, device="cpu")[:, None, None]
            self.register_buffer(name, per_channel, persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.memory = memory

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        class_names: Sequence[str] | None = None,
        memory: Memory = "plain",
        seed: int = 0,
        **changes: Any,
    ) -> "GenerativeClassifier":
        """Return a new model with the layout ``name``; any key of the configuration can be changed.

        >>> GenerativeClassifier.from_preset("digits", classes=3, mixing="permutation").config.classes
        3
        """
        if class_names is not None:
            changes.setdefault("classes", len(class_names))
        return cls(preset(name, **changes), class_names, memory, seed)

    @property
    def memory(self) -> Memory:
        """How training gets activations: ``"plain"`` stores, ``"inverse"`` recomputes them."""
        return self.flow.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.flow.memory = memory

    @property
    def feature_size(self) -> int:
        """Number of constant coefficients of the latent."""
        return self.config.flow.constant_coefficients

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the last feature maps."""
        flow = self.config.flow
        return flow.height // flow.downsampling, flow.width // flow.downsampling

    def tensor_outputs(self, x: Tensor) -> TensorOutputs:
        """Make one forward pass, with the terms that add up to the log density."""
        outputs, terms = self.forward_by_stage(x)
        return TensorOutputs(outputs.logits, outputs.z[:, : self.feature_size], terms, outputs.z)

    def frozen(self) -> "GenerativeClassifier":
        """Return a copy for inference: the same results up to rounding in 0.7 of the time.

        Batch norm, ActNorm and mixing are folded into weights (:mod:`~candid.models.flow.frozen`), norms of
        the means are computed once. Gradients reach images, not weights; it can't be trained or saved.

        >>> fast = GenerativeClassifier.from_preset("digits").frozen()
        >>> fast.posterior(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        """
        if self.is_frozen:
            return self
        copied = copy.copy(self)
        copied._modules = {"flow": freeze(self.flow), "mixture": self.mixture.frozen()}
        copied._buffers = {name: buffer.clone() for name, buffer in self.named_buffers(recurse=False)}
        return copied.eval()

    @property
    def is_frozen(self) -> bool:
        """Whether this is a copy for inference."""
        return isinstance(self.flow, FrozenFlow)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> FlowOutputs:
        """Make one pass; ``generator`` draws the dequantisation noise in training mode."""
        v = self.normalise(x, generator)
        z, log_det = self.flow(v)
        return self._outputs(x, v, z, log_det)

    def forward_by_stage(self, x: Tensor) -> tuple[FlowOutputs, Tensor]:
        """Make one pass and return the terms that add up to :meth:`log_density`, (B, 2 + stages), in float64.

        First log p(z), then the log-determinants of what lies before the first stage (with that of the
        pixels' scaling) and of each stage.
        """
        v = self.normalise(x, None)
        z, log_dets = self.flow.forward_by_layer(v)
        terms = z.new_zeros(len(z), 2 + len(self.config.flow.blocks), dtype=torch.float64)
        stage = 1
        for name, log_det in log_dets.items():
            if match := re.match(r"stage(\d+)", name):
                stage = 1 + int(match[1])
            terms[:, stage] += log_det
        outputs = self._outputs(x, v, z, terms[:, 1:].sum(1).to(z.dtype))
        terms[:, 0] = outputs.logits.double().logsumexp(1) + log_standard_normal(z.double())
        terms[:, 1] += self._log_dv_du()
        return outputs, terms

    def _outputs(self, x: Tensor, v: Tensor, z: Tensor, log_det: Tensor) -> FlowOutputs:
        logits = self.mixture.logits(z)
        if not torch.compiler.is_compiling() and not _all_finite(
            logits, log_det, log_standard_normal(z.detach())
        ):
            raise self._nonfinite_error(x, v)
        return FlowOutputs(z, log_det, logits)

    def latent(self, x: Tensor) -> Tensor:
        """Return z, (B, D): first the C constant coefficients, then the rest."""
        return self(x).z

    def feature_maps(self, x: Tensor) -> Tensor:
        """Return the last maps before the DCT, (B, C, h, w).

        The latent is their cosine transform; in a refitted model the span of the means is rescaled after it.

        >>> GenerativeClassifier.from_preset("digits").eval().feature_maps(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 64, 1, 1])
        """
        maps = v = self.normalise(x, None)
        for _, layer in self.flow.leaves():
            if isinstance(layer, DCTPooling):
                break
            maps, _ = layer(maps)
        if not torch.compiler.is_compiling() and not _all_finite(maps):
            raise self._nonfinite_error(x, v)
        return maps

    def logits(self, x: Tensor) -> Tensor:
        """Return the log posterior up to a constant of the image, (B, M): for decisions and attacks."""
        return self(x).logits

    def log_likelihoods(self, x: Tensor) -> Tensor:
        """Return log p(x | y) of the 8-bit image in nats, (B, M), in float64.

        Float64, because the numbers are so large that float32 would lose the differences of classes.
        """
        outputs = self(x)
        return outputs.logits.double() - self.mixture.log_priors + self._log_base(outputs)[:, None]

    def log_density(self, x: Tensor) -> Tensor:
        """Return log p(x) = log sum_y p(y) p(x | y) of the 8-bit image in nats, (B,), in float64.

        Bits per dimension are ``-log_density / (D ln 2)``.
        """
        return self.log_density_of(self(x))

    def log_density_of(self, outputs: FlowOutputs) -> Tensor:
        """Return :meth:`log_density` from a forward pass that was already made."""
        return outputs.logits.double().logsumexp(1) + self._log_base(outputs)

    @property
    def bits_offset(self) -> float:
        """What turns L_X of the loss into bits per dimension: ``L_X / ln 2 + bits_offset``."""
        return float((255 * self.image_std.double()).log2().mean())

    def invert(self, z: Tensor) -> Tensor:
        """Return the image of a latent, (B, C, H, W): undoes :meth:`latent` in evaluation mode."""
        return self._denormalise(z) - self.noise / 255

    @torch.no_grad()
    def sample(
        self,
        y: int | Sequence[int] | Tensor,
        n: int = 1,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw ``n`` images of each class in ``y``, on the 8-bit grid, (len(y) * n, C, H, W).

        ``temperature`` scales the standard deviation in latent space. Call it in evaluation mode.
        """
        labels = torch.as_tensor(y, device=self.noise.device).reshape(-1)
        if labels.is_floating_point() or not len(labels) or n < 1:
            raise CandidError(f"Samples need whole class numbers and a count, not {y} and {n}.")
        if not 0 <= int(labels.min()) <= int(labels.max()) < self.config.classes:
            raise CandidError(
                f"Classes go from 0 to {self.config.classes - 1}: {labels.tolist()} don't all fit."
            )
        z = self.mixture.sample(labels.repeat_interleave(n), temperature, generator)
        return (255 * self._denormalise(z)).floor().clamp(0, 255) / 255

    def normalise(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return what the network sees of images in [0, 1]: dequantised, centred and scaled."""
        check_batch(x, self.image_shape)
        noise = self.noise
        if self.training:
            device = x.device if generator is None else generator.device
            noise = torch.rand(x.shape, generator=generator, device=device, dtype=noise.dtype).to(x.device)
        x = x.to(noise.dtype, memory_format=torch.channels_last)
        return (x + noise / 255 - self.image_mean) / self.image_std

    def _denormalise(self, z: Tensor) -> Tensor:
        """Return the dequantised image u / 255 of a latent, (B, C, H, W)."""
        if z.dim() != 2 or z.shape[1] != self.dimensions or not len(z):
            raise CandidError(f"Latents have the shape (batch, {self.dimensions}), not {tuple(z.shape)}.")
        with frozen_statistics(self.flow):
            v, log_det = self.flow.inverse(z)
        if not torch.compiler.is_compiling() and not _all_finite(v, log_det):
            raise self.flow.first_nonfinite(z, "inverse") or NonFiniteError("The inverse pass overflowed.")
        return v * self.image_std + self.image_mean

    def _log_base(self, outputs: FlowOutputs) -> Tensor:
        """Return what all classes share of log p(x | y): the |z|^2 term and both log-determinants."""
        return log_standard_normal(outputs.z.double()) + outputs.log_det.double() + self._log_dv_du()

    def _log_dv_du(self) -> Tensor:
        """Return the log-determinant of the normalised image v with respect to the pixels' u = 255 x + r."""
        return -(255 * self.image_std.double()).log().expand(self.image_shape).sum()

    def _nonfinite_error(self, x: Tensor, v: Tensor) -> CandidError:
        bad = (~torch.isfinite(x).flatten(1).all(1)).nonzero().flatten().tolist()
        if bad:
            return NonFiniteError(
                f"Image {bad[0]} of the batch has NaN or infinite pixels: remove or repair it."
            )
        return self.flow.first_nonfinite(v, "forward") or NonFiniteError(
            "The latent or its logits overflowed in the mixture: its means or the images are huge or NaN."
        )


@torch.no_grad()
def _all_finite(*tensors: Tensor) -> bool:
    """Return whether all tensors are finite, from their sums: a sum is finite only if all its parts are."""
    return bool(torch.isfinite(torch.stack([t.sum() for t in tensors])).all())

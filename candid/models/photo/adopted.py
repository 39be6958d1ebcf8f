"""Adopted models: a softmax classifier keeps its posteriors and gains a density of its features."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, logsumexp, packed, unpacked
from candid._support.options import check_fields, check_range, checked_names
from candid.data.images import Preprocessing
from candid.models.photo.eye import FILES, SoftmaxEye
from candid.models.photo.gaussian import halved
from candid.models.photo.opening import moved, open_softmax
from candid.models.protocol import Ability, DensityOf, ModelBase, Outputs, check_batch, missing


@dataclass(frozen=True)
class AdoptedConfig:
    """What an adopted model consists of.

    >>> AdoptedConfig(classes=10).features
    (1280,)
    """

    eye: str = "lite0"
    """The name of the classifier that was adopted."""
    eye_sha256: str = ""
    """The digest of its weights."""
    image_shape: tuple[int, int, int] = (3, 224, 224)
    border: int = 0
    """Pixels that are cut off an image; see :class:`candid.data.images.Preprocessing`."""
    features: tuple[int, ...] = (1280,)
    """How many features each group has."""
    classes: int = 1000

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, 1, 65_536, "image_shape", "features")
        check_range(self, 0, 65_536, "border")
        check_range(self, 2, 1_000_000, "classes")


class AdoptedModel(ModelBase):
    """A generative classifier with the posteriors of a softmax classifier.

    With features f of an image, p(f, y) = p(f) p(y | f): the posterior is the softmax of the classifier, and
    p(f) has one Gaussian for each group of features. Whatever p(f) is, the posterior of this joint density is
    the one that was adopted. The priors are those that belong to it: the mean posterior of the images that
    p(f) was fitted to.

    Args:
        config: the classifier and the number of its features.
        class_names: one name per class.
        eye: the classifier, if it is open already or can't be found by its name.
    """

    kind: ClassVar = "adopted"
    density_of: ClassVar[DensityOf] = "features"
    limits: ClassVar = (
        "an adopted model, which has one density for all classes and no inverse to pixels: use a pixel "
        "model, such as 'cifar10-beta1'."
    )
    watched_novelty: ClassVar = slice(-2, None)
    """The distance of the last group of features and the energy."""
    posterior_name: ClassVar = "softmax"
    config: AdoptedConfig
    centre: Array
    scale: Array
    whitening: Array
    priors: Array

    def __init__(
        self, config: AdoptedConfig, class_names: Sequence[str] | None = None, eye: SoftmaxEye | None = None
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config, self.image_shape, self._eye = config, config.image_shape, eye
        # the bits of half-precision numbers, so that nothing widens them in memory or on disk
        bits = np.zeros(sum(d * (d + 1) // 2 for d in config.features))
        priors = np.full(config.classes, -math.log(config.classes))
        size = self.feature_size
        self.load_state(
            {"centre": np.zeros(size), "scale": np.ones(size), "priors": priors, "whitening": bits}
        )

    @classmethod
    def of(cls, eye: SoftmaxEye) -> "AdoptedModel":
        """Return the model of a classifier. Its density still has to be fitted."""
        config = AdoptedConfig(
            eye.name, eye.sha256, eye.image_shape, eye.border, eye.groups, len(eye.class_names)
        )
        model = cls(config, eye.class_names, eye)
        model.metadata = dict(eye.metadata)
        return model.set_density(model.centre, np.eye(model.feature_size), model.priors)

    def set_density(self, mean: Array, whitening: Array, log_priors: Array) -> Self:
        """Set p(f) to the Gaussian in which ``whitening @ (f - mean)`` is standard normal.

        Args:
            mean: (F,).
            whitening: (F, F), a lower triangle with a positive diagonal for each group of features. It is
                stored in half precision.
            log_priors: Log p(y), (M,).
        """
        groups = self.config.features
        parts = np.split(whitening.diagonal(), np.cumsum(groups)[:-1])
        scale = np.repeat([1 / part.mean() for part in parts], groups).astype(np.float32)
        bits = halved(packed(whitening * scale, *groups)).view(np.int16)
        self.load_state({"centre": mean, "scale": scale, "priors": log_priors, "whitening": bits})
        return self

    def state(self) -> dict[str, Array]:
        """Return the weights by name."""
        return {name: getattr(self, name) for name in ("centre", "scale", "priors", "whitening")}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take weights by name; they are stored in float32, the whitening as the bits of halves."""
        for name, value in state.items():
            setattr(self, name, np.asarray(value, np.int16 if name == "whitening" else np.float32))
        self._factors: dict[np.dtype[Any], Array] = {}
        self.__dict__.pop("_log_det", None)

    @property
    def can(self) -> frozenset[Ability]:
        """What it is able to do; see :func:`candid.models.photo.opening.open_softmax` for the classifiers."""
        path, abilities = Path(self.config.eye), {"density", "eye", "whitening"}
        is_packaged = path.suffix not in FILES and self.config.eye != "module"
        if is_packaged if self._eye is None else self._eye.last_layer() is not None:
            abilities.add("class maps")
        if path.suffix != ".onnx":
            abilities.add("gradients")
        return frozenset(abilities)  # type: ignore[arg-type]

    @property
    def novelty_size(self) -> int:
        """Number of its own scores of novelty."""
        return len(self.config.features) + 1

    @property
    def size(self) -> int:
        """Number of weights of the density."""
        return sum(weights.size for weights in self.state().values())

    @property
    def eye(self) -> SoftmaxEye:
        """The classifier; its weights are read when it is first used."""
        if self._eye is None:
            if self.config.eye == "module":
                raise CandidError(
                    "The network of this model was given in Python and is not part of it: call "
                    "model.attach(network) first."
                )
            name = moved(self.config.eye, self.folder)
            self.attach(open_softmax(name, self.class_names, download=False))
        assert self._eye is not None
        return self._eye

    def attach(self, network: Any) -> Self:
        """Give a model that was loaded its classifier: what :func:`candid.adopt` was given in Python."""
        eye = open_softmax(network)
        if eye.sha256 != self.config.eye_sha256:
            raise CandidError(
                f"The classifier '{self.config.eye}' has other weights than the one that was adopted: "
                "restore it, or adopt it again."
            )
        self._eye = eye
        return self

    @property
    def preprocessing(self) -> Preprocessing:
        """Images as the classifier saw them in its training."""
        if self.config.eye.endswith(".onnx"):  # the files next to it say it
            return self.eye.preprocessing
        return Preprocessing(*self.image_shape, self.record.crop, border=self.config.border)

    @property
    def feature_size(self) -> int:
        """The number of features."""
        return sum(self.config.features)

    @property
    def log_priors(self) -> Array:
        """Log p(y), (M,)."""
        return self.priors

    def ready(self) -> Self:
        """Return the model itself: onnxruntime uses a GPU if it can."""
        return self

    def outputs(self, images: Array) -> Outputs:
        """Make one forward pass."""
        check_batch(images, self.image_shape)
        return self.outputs_of(*self.eye.logits_and_features(images))

    def outputs_of(self, logits: Array, features: Array) -> Outputs:
        """Return the outputs of images with these logits (B, M) and features (B, F).

        ``novelty`` has a score for each group of features, their squared distance from their mean in standard
        deviations, and minus the log of the sum of the exponentiated logits.
        """
        z = self.whitened(features).astype(np.float64)
        ends = np.cumsum(self.config.features).tolist()
        groups = [z[:, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        distances = np.stack([(group**2).sum(axis=1) for group in groups], 1)
        log_density = self._log_det - 0.5 * (
            distances.sum(axis=1, keepdims=True) + self.feature_size * math.log(2 * math.pi)
        )
        novelty = np.concatenate((distances.astype(logits.dtype), -logsumexp(logits, keepdims=True)), 1)
        return Outputs(logits, features, log_density, None, novelty)

    def whitened(self, features: Array) -> Array:
        """Return features in coordinates in which those of all images have about unit covariance, (B, F)."""
        centre, scale = (each.astype(features.dtype, copy=False) for each in (self.centre, self.scale))
        return (features - centre) / scale @ self._factor(features.dtype).T

    def logits(self, images: Array) -> Array:
        """Return the logits of the classifier, (B, M)."""
        check_batch(images, self.image_shape)
        return self.eye.logits_and_features(images)[0]

    def linear_logits(self) -> tuple[Array, Array]:
        """Return weights (M, C) and biases (M,) in float64 by which means of the last maps become logits.

        Raises:
            CandidError: if the logits of the classifier are not known to be linear in its maps.
        """
        layer = self.eye.last_layer()
        if layer is None:
            raise missing(self, "class maps", "Heatmaps")
        return layer[0].astype(np.float64), layer[1].astype(np.float64)

    def logits_of(self, features: Array) -> Array:
        """Return the logits of means of the last maps, (B, M)."""
        weights, biases = self.linear_logits()
        return features @ weights.T + biases

    def maps(self, images: Array) -> list[Array]:
        """Return the last maps of the classifier, (B, C, h, w)."""
        check_batch(images, self.image_shape)
        return self.eye.maps(images)[-1:]

    def feature_maps(self, images: Array) -> Array:
        """Return the last maps of the classifier, (B, C, h, w)."""
        return self.maps(images)[-1]

    @cached_property
    def _log_det(self) -> float:
        """The log determinant of :meth:`whitened`."""
        diagonal = self._factor(np.dtype(np.float32)).diagonal().astype(np.float64)
        return float(np.log(diagonal / self.scale.astype(np.float64)).sum())

    def _factor(self, dtype: np.dtype[Any]) -> Array:
        """Return the whitening as a matrix, (F, F); computed once for a type."""
        if dtype not in self._factors:
            factor = unpacked(self.whitening.view(np.float16), *self.config.features)
            self._factors[dtype] = factor.astype(dtype)
        return self._factors[dtype]

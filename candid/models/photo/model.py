"""Photo models: a pretrained eye and a generative head on its statistics, as one model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, get_args

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, logsumexp, packed, unpacked
from candid._support.options import check_fields, check_range, checked_names
from candid.data.images import Preprocessing
from candid.models.photo.eye import Eye
from candid.models.photo.gaussian import PhotoGeometry, SecondStage, Span, class_scores, contrasts, halved
from candid.models.photo.head import ClosedForm, Posterior
from candid.models.photo.known_photos import KnownPhotos
from candid.models.photo.opening import trained_eye
from candid.models.photo.taught import Known, Seen, TaughtClasses
from candid.models.protocol import Ability, DensityOf, ModelBase, Outputs, check_batch


@dataclass(frozen=True)
class PhotoConfig:
    """What a photo model consists of.

    >>> PhotoConfig(classes=3).dimensions
    1408
    """

    eye: str = "lite0"
    """The name of the eye."""
    eye_sha256: str = ""
    """The digest of its weights."""
    size: int = 224
    groups: tuple[int, ...] = (80, 80, 112, 112, 192, 192, 320, 320)
    """How many statistics each group has."""
    classes: int = 2
    posterior: Posterior = "mixture"
    """Which of three posteriors had the lowest out-of-fold log-loss."""
    taught: int = 0
    """How many of the classes, the last ones, were taught after the training."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, 1, 65_536, "size", "groups")
        check_range(self, 2, 1_000_000, "classes")
        check_range(self, 0, self.classes - 2, "taught")
        if self.posterior not in get_args(Posterior):
            raise CandidError(f"'posterior' must be one of {', '.join(get_args(Posterior))}.")

    @property
    def dimensions(self) -> int:
        """The number of statistics, D."""
        return sum(self.groups)

    @property
    def fitted(self) -> int:
        """The number of classes that the head was fitted to, K."""
        return self.classes - self.taught


class _Weights(NamedTuple):
    """The weights of a head in one type, for statistics of this type."""

    centre: Array
    scale: Array
    factor: Array
    """The whitening, (D, D)."""
    known: Known
    logistic: tuple[Array, Array] | None
    taught: TaughtClasses | None


class PhotoModel(ModelBase):
    """A generative classifier of photos: an eye, an invertible linear map and a Gaussian mixture.

    Its density is one of features, the statistics of the eye, not of pixels. The mixture has one component
    of unit covariance for each class in the coordinates of :meth:`latent_of`. What takes statistics computes
    in their type.

    Args:
        config: the eye and the classes.
        class_names: one name per class.
        eye: the eye, if it is open already or can't be found by its name.
    """

    kind: ClassVar = "photo"
    density_of: ClassVar[DensityOf] = "features"
    limits: ClassVar = (
        "a photo model, whose eye has no inverse to pixels: use a pixel model, such as 'cifar10-beta1'."
    )
    novelty_size: ClassVar = 3
    """Number of its own scores of novelty."""
    config: PhotoConfig
    centre: Array
    scale: Array
    whitening: Array
    means: Array
    priors: Array
    temperatures: Array
    rest_scale: Array
    logistic_weight: Array
    logistic_bias: Array

    def __init__(
        self, config: PhotoConfig, class_names: Sequence[str] | None = None, eye: Eye | None = None
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config, self.image_shape, self._eye = config, (3, config.size, config.size), eye
        d, k, t = config.dimensions, config.fitted, config.taught
        self._shapes = {
            "centre": (d,),
            "scale": (d,),
            "means": (k, d),
            "priors": (k,),
            "temperatures": (2,),
            "rest_scale": (),
            "second_factor": (k - 1, k - 1),
            "second_means": (k, k - 1),
            "second_centre": (k - 1,),
            "second_spread": (k - 1, k - 1),
        }
        if config.posterior == "logistic":
            self._shapes |= {"logistic_weight": (k, d), "logistic_bias": (k,)}
        if t:
            self._shapes |= {"taught_weights": (t, d), "taught_constants": (t,), "taught_places": (t, d)}
        # the bits of half-precision numbers, so that nothing widens them in memory or on disk
        self._shapes["whitening"] = (d * (d + 1) // 2,)
        self.load_state({name: np.zeros(shape) for name, shape in self._shapes.items()})

    @classmethod
    def of(cls, head: ClosedForm, eye: Eye, class_names: Sequence[str]) -> "PhotoModel":
        """Return the model of a fitted head. Its whitening is rounded to half precision.

        Raises:
            CandidError: if the photos of each class differ so little that it can't be.
        """
        config = PhotoConfig(eye.name, eye.sha256, eye.size, eye.groups, len(class_names), head.posterior)
        model = cls(config, class_names, eye)
        factor = halved(head.whitened.factor)
        if not np.isfinite(factor).all():
            raise CandidError("All photos of a class look almost the same to the eye: give different ones.")
        values = {
            "centre": head.standardised.centre,
            "scale": head.standardised.scale,
            "means": head.standardised.means @ factor.astype(np.float64).T,
            "priors": head.log_priors,
            "temperatures": np.array([head.temperature, head.second_temperature]),
            "rest_scale": np.array(head.rest_scale),
            **{f"second_{name}": value for name, value in head.second._asdict().items()},
            "whitening": packed(factor).view(np.int16),
        }
        if head.logistic is not None:
            values |= {"logistic_weight": head.logistic[0], "logistic_bias": head.logistic[1]}
        model.load_state(values)
        return model

    def state(self) -> dict[str, Array]:
        """Return the weights by name."""
        return {name: getattr(self, name) for name in self._shapes}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take weights by name; they are stored in float32, the whitening as the bits of halves."""
        for name, value in state.items():
            setattr(self, name, np.asarray(value, np.int16 if name == "whitening" else np.float32))
        self._cached: dict[np.dtype[Any], _Weights] = {}
        for derived in ("_span", "_log_det"):
            self.__dict__.pop(derived, None)

    @property
    def can(self) -> frozenset[Ability]:
        """What it is able to do; gradients need an eye that torch can run."""
        abilities: set[Ability] = {"geometry", "class maps", "teach", "density", "eye", "whitening"}
        if not any(part.endswith(".onnx") for part in self.config.eye.split("+")):
            abilities.add("gradients")
        if self.thumbnails:
            abilities.add("known photos")
        return frozenset(abilities)

    @property
    def fitted_classes(self) -> int:
        """How many classes, the first ones, were not taught by examples."""
        return self.config.fitted

    @property
    def posterior_name(self) -> str:
        """Which posterior it has."""
        return self.config.posterior

    @property
    def size(self) -> int:
        """Number of weights of the head."""
        return sum(weights.size for weights in self.state().values())

    @property
    def eye(self) -> Eye:
        """The eye; its weights are read when it is first used."""
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
        """The number of statistics, D."""
        return self.config.dimensions

    def features(self, images: Array) -> Array:
        """Return the statistics of images, (B, D)."""
        check_batch(images, self.image_shape)
        return self.eye.statistics(images)

    def maps(self, images: Array) -> list[Array]:
        """Return the maps of the eye's stages, (B, C, h, w), and its features without places, (B, C)."""
        check_batch(images, self.image_shape)
        return self.eye.maps(images)

    def feature_maps(self, images: Array) -> Array:
        """Return the last maps of the eye, (B, C, h, w)."""
        return [each for each in self.maps(images) if each.ndim == 4][-1]

    def ready(self) -> Self:
        """Return the model itself: onnxruntime uses a GPU if it can."""
        return self

    @property
    def taught(self) -> TaughtClasses:
        """The classes that were taught after the training."""
        return TaughtClasses(*(getattr(self, f"taught_{name}") for name in TaughtClasses._fields))

    @property
    def known(self) -> Known:
        """What stays as it is when classes are taught."""
        return self._weights(np.dtype(np.float32)).known

    @property
    def log_priors(self) -> Array:
        """Log p(y) of the mixture, (M,)."""
        return self._log_priors().astype(np.float32)

    @property
    def geometry(self) -> PhotoGeometry:
        """The classes in latent space."""
        means = self._span.means @ self._span.basis
        if self.config.taught:
            known = self._weights(np.dtype(np.float64)).known
            means = np.concatenate((means, _latent(self.taught.places.astype(np.float64), known)))
        return PhotoGeometry(self._log_priors(), means)

    def _log_priors(self) -> Array:
        classes = self.config.classes
        fitted = self._span.log_priors + math.log(self.config.fitted / classes)
        return np.concatenate((fitted, np.full(self.config.taught, -math.log(classes))))

    def outputs(self, images: Array) -> Outputs:
        """Make one forward pass."""
        return self.outputs_of(self.features(images))

    def outputs_of(self, features: Array) -> Outputs:
        """Return everything that the head says of statistics, (B, D).

        ``novelty`` has three scores: the distance to the nearest class relative to that to all photos, minus
        the log evidence, and the squared distance outside of the span of the class means.
        """
        seen = self.fitted_part(features)
        weights = self._weights(features.dtype)
        latent = _latent(seen.z, weights.known)
        if weights.taught is not None:
            seen = weights.known.extended(seen, weights.taught)
        return Outputs(seen.logits, features, seen.terms, latent, seen.novelty)

    def fitted_part(self, features: Array) -> Seen:
        """Return what the head says of statistics without taught classes."""
        known = self._weights(features.dtype).known
        x, z, scores, first = self._first_stage(features)
        inside = z @ known.basis.T
        rest = np.maximum((z**2).sum(axis=1) - (inside**2).sum(axis=1), 0)
        novelty = known.second.relative_distance(scores), -logsumexp(first), rest
        terms = self._density_terms(inside, rest)
        return Seen(z, scores, self._logits(x, scores, first), np.stack(novelty, 1), terms)

    def logits(self, images: Array) -> Array:
        """Return the log posterior up to a constant of the image, (B, M)."""
        return self.logits_of(self.features(images))

    def logits_of(self, features: Array) -> Array:
        """Return the logits of statistics, (B, M).

        They are linear in the statistics, except those of a class that was taught to a logistic posterior.
        """
        weights = self._weights(features.dtype)
        x, z, scores, first = self._first_stage(features)
        logits = self._logits(x, scores, first)
        return logits if weights.taught is None else weights.known.logits(logits, first, z, weights.taught)

    def latent_of(self, features: Array) -> Array:
        """Return z: statistics in coordinates in which the mixture has unit covariance, (B, D)."""
        return _latent(self.whitened(features), self._weights(features.dtype).known)

    def places(self, latent: Array) -> Array:
        """Return coordinates of latents (B, D) along the span of the means of fitted classes, (B, K - 1)."""
        return latent @ self._weights(latent.dtype).known.basis.T

    @property
    def known_photos(self) -> KnownPhotos | None:
        """Photos of each class that are kept with the model; None if there are none."""
        return KnownPhotos.read(self.thumbnails, self.config.fitted)

    def invert(self, latent: Array) -> Array:
        """Return the statistics that have these latents, (B, D). An eye has no inverse to pixels."""
        from scipy.linalg import solve_triangular

        weights, span = self._weights(latent.dtype), self._span
        known = weights.known
        matrix, shift = (part.astype(latent.dtype) for part in (span.matrix, span.shift))
        inside = latent @ known.basis.T
        rest = (latent - inside @ known.basis) * known.rest_scale
        z = rest + np.linalg.solve(matrix, (inside - shift).T).T @ known.basis
        x = solve_triangular(weights.factor, z.T, lower=True).T
        return x * weights.scale + weights.centre

    def linear_logits(self) -> tuple[Array, Array]:
        """Return weights (M, D) and biases (M,) in float64: logits = statistics @ weights' + biases."""
        bias = self.logits_of(np.zeros((1, self.config.dimensions)))[0]
        double = self._weights(np.dtype(np.float64))
        known, posterior = double.known, self.config.posterior
        scores = known.means @ double.factor / double.scale  # of the first stage
        linear = first = known.temperatures[0] * scores
        if double.logistic is not None:
            linear = double.logistic[0] / double.scale
        elif posterior == "second-stage":
            u = known.second.factor @ contrasts(self.config.fitted) @ scores
            linear = known.temperatures[1] * known.second.means @ u
        if double.taught is None:
            return linear, bias
        if posterior == "logistic":
            raise CandidError(
                "The logits of a class that was taught to a model with a logistic posterior are not linear: "
                "heatmaps of it can't add up. Use the model without that class ('candid forget')."
            )
        added = known.temperatures[0] * double.taught.weights @ double.factor / double.scale
        if posterior == "second-stage":
            added = linear.mean(0) + known.spread() * (added - first.mean(0))
        return np.concatenate((linear, added)), bias

    def whitened(self, features: Array) -> Array:
        """Return statistics in coordinates in which the fitted classes have about unit covariance, (B, D)."""
        weights = self._weights(features.dtype)
        return (features - weights.centre) / weights.scale @ weights.factor.T

    def _first_stage(self, features: Array) -> tuple[Array, Array, Array, Array]:
        """Return standardised and whitened statistics, (B, D); scores and tempered logits of them, (B, K)."""
        weights, known = self._weights(features.dtype), self._weights(features.dtype).known
        x = (features - weights.centre) / weights.scale
        z = x @ weights.factor.T
        scores = class_scores(z, known.means)
        return x, z, scores, known.temperatures[0] * (scores + known.priors)

    def _logits(self, x: Array, scores: Array, first: Array) -> Array:
        weights = self._weights(x.dtype)
        if weights.logistic is not None:
            return x @ weights.logistic[0].T + weights.logistic[1]
        if self.config.posterior == "mixture":
            return first
        known = weights.known
        second = class_scores(known.second.whitened(scores), known.second.means)
        return known.temperatures[1] * (second + known.priors)

    def _density_terms(self, inside: Array, rest: Array) -> Array:
        """Return log p of the span, log p of the rest and the log determinant, (B, 3) in float64."""
        inside, rest, span = inside.astype(np.float64), rest.astype(np.float64), self._span
        d, k = self.config.dimensions, self.config.fitted
        half_log, r = 0.5 * math.log(2 * math.pi), float(self.rest_scale)
        coordinates = inside @ span.matrix.T + span.shift
        evidence = class_scores(coordinates, span.means) + span.log_priors
        of_span = logsumexp(evidence) - 0.5 * (coordinates**2).sum(axis=1) - (k - 1) * half_log
        of_rest = -0.5 * rest / r**2 - (d - k + 1) * half_log
        return np.stack((of_span, of_rest, 0 * of_rest + self._log_det), 1)

    @cached_property
    def _log_det(self) -> float:
        """The log determinant of the map from statistics to latents."""
        d, k = self.config.dimensions, self.config.fitted
        diagonal = self.whitening.view(np.float16)[np.arange(1, d + 1).cumsum() - 1].astype(np.float64)
        scales = np.log(self.scale.astype(np.float64)).sum() + (d - k + 1) * math.log(self.rest_scale)
        return float(np.log(diagonal).sum() - scales + np.linalg.slogdet(self._span.matrix)[1])

    def _weights(self, dtype: np.dtype[Any]) -> _Weights:
        """Return the weights in one type, with the whitening as a matrix; computed once."""
        if dtype not in self._cached:
            d, posterior = self.config.dimensions, self.config.posterior
            values = {
                name: value.astype(dtype) for name, value in self.state().items() if name != "whitening"
            }
            factor = unpacked(self.whitening.view(np.float16), d).astype(dtype)
            second = SecondStage(*(values[f"second_{name}"] for name in SecondStage._fields))
            parts = values["temperatures"], values["priors"], second, self._span, values["means"]
            known = Known(*parts, values["rest_scale"], posterior, self._span.basis.astype(dtype))
            logistic = taught = None
            if posterior == "logistic":
                logistic = values["logistic_weight"], values["logistic_bias"]
            if self.config.taught:
                taught = TaughtClasses(*(values[f"taught_{name}"] for name in TaughtClasses._fields))
            self._cached[dtype] = _Weights(values["centre"], values["scale"], factor, known, logistic, taught)
        return self._cached[dtype]

    @cached_property
    def _span(self) -> Span:
        """The span in float64; with the logistic posterior, the mixture is the one of the first stage."""
        values = {
            name: value.astype(np.float64) for name, value in self.state().items() if name != "whitening"
        }
        means, priors, temperatures = values["means"], values["priors"], values["temperatures"]
        if self.config.posterior == "second-stage":
            second = SecondStage(*(values[f"second_{name}"] for name in SecondStage._fields))
            return second.span(means, priors, float(temperatures[1]))
        return Span.of(means, priors, float(temperatures[0]))


def _latent(z: Array, known: Known) -> Array:
    """Return z in coordinates in which the mixture has unit covariance, (B, D)."""
    inside, basis = z @ known.basis.T, known.basis
    matrix, shift = (part.astype(basis.dtype) for part in (known.span.matrix, known.span.shift))
    return (z - inside @ basis) / known.rest_scale + (inside @ matrix.T + shift) @ basis

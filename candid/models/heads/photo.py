"""Photo models: a pretrained eye and a generative head on its statistics, as one model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor

from candid._support.config import check_fields, check_range
from candid._support.errors import CandidError
from candid.data.images import Preprocessing
from candid.models.eyes import moved, open_eye
from candid.models.eyes.eye import Eye
from candid.models.flow.config import checked_names
from candid.models.flow.mixture import LatentMixture
from candid.models.heads.closed_form import ClosedForm, Posterior
from candid.models.heads.gaussian import SecondStage, Span, class_scores, contrasts
from candid.models.heads.known_photos import KnownPhotos
from candid.models.heads.taught import Known, Seen, TaughtClasses
from candid.models.protocol import DensityOf, ImageClassifier, Outputs, check_batch


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


class PhotoModel(ImageClassifier):
    """A generative classifier of photos: an eye, an invertible linear map and a Gaussian mixture.

    Its density is one of features, the statistics of the eye, not of pixels. The mixture has one component
    of unit covariance for each class in the coordinates of :meth:`latent`.

    Args:
        config: the eye and the classes.
        class_names: one name per class.
        eye: the eye, if it is open already or can't be found by its name.
    """

    kind: ClassVar = "photo"
    density_of: ClassVar[DensityOf] = "features"
    config: PhotoConfig
    centre: Tensor
    scale: Tensor
    whitening: Tensor
    means: Tensor
    priors: Tensor
    temperatures: Tensor
    rest_scale: Tensor
    logistic_weight: Tensor
    logistic_bias: Tensor

    def __init__(
        self, config: PhotoConfig, class_names: Sequence[str] | None = None, eye: Eye | None = None
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config, self.image_shape, self._eye = config, (3, config.size, config.size), eye
        self.thumbnails: dict[str, Tensor] = {}
        """Photos that are kept for people, as :class:`~candid.models.heads.known_photos.KnownPhotos`."""
        self.register_buffer("image_mean", torch.zeros(1, device="cpu"), persistent=False)
        d, k = config.dimensions, config.fitted
        shapes = {
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
            shapes |= {"logistic_weight": (k, d), "logistic_bias": (k,)}
        if config.taught:
            t = config.taught
            shapes |= {"taught_weights": (t, d), "taught_constants": (t,), "taught_places": (t, d)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))
        # the bits of half-precision numbers, so that nothing widens them in memory or on disk
        self.register_buffer("whitening", torch.zeros(d * (d + 1) // 2, dtype=torch.int16))
        self._derived: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Span]] = {}
        self.register_load_state_dict_post_hook(_forget_derived)

    @classmethod
    def of(cls, head: ClosedForm, eye: Eye, class_names: Sequence[str]) -> "PhotoModel":
        """Return the model of a fitted head. Its whitening is rounded to half precision.

        Raises:
            CandidError: if the photos of each class differ so little that it can't be.
        """
        config = PhotoConfig(eye.name, eye.sha256, eye.size, eye.groups, len(class_names), head.posterior)
        model = cls(config, class_names, eye)
        factor = head.whitened.factor.half()
        if not factor.isfinite().all():
            raise CandidError("All photos of a class look almost the same to the eye: give different ones.")
        rows, columns = torch.tril_indices(*factor.shape)
        model.whitening = factor[rows, columns].view(torch.int16)
        values = {
            "centre": head.standardised.centre,
            "scale": head.standardised.scale,
            "means": head.standardised.means @ factor.double().T,
            "priors": head.log_priors,
            "temperatures": torch.tensor([head.temperature, head.second_temperature]),
            "rest_scale": torch.tensor(head.rest_scale),
            **{f"second_{name}": value for name, value in head.second._asdict().items()},
        }
        if head.logistic is not None:
            values |= {"logistic_weight": head.logistic[0], "logistic_bias": head.logistic[1]}
        for name, value in values.items():
            setattr(model, name, value.float())
        return model.eval()

    @property
    def eye(self) -> Eye:
        """The eye; its weights are read when it is first used."""
        if self._eye is None:
            eye = open_eye(moved(self.config.eye, self.folder))
            if eye.sha256 != self.config.eye_sha256 or eye.groups != self.config.groups:
                raise CandidError(
                    f"The eye '{self.config.eye}' has other weights than the one that this model was trained "
                    "with: restore it, or train the model again."
                )
            self._eye = eye
        return self._eye

    @property
    def preprocessing(self) -> Preprocessing:
        """The whole centre square of a photo, scaled to the eye's size."""
        return Preprocessing(*self.image_shape)

    @property
    def feature_size(self) -> int:
        """The number of statistics, D."""
        return self.config.dimensions

    def features(self, x: Tensor) -> Tensor:
        """Return the statistics of images, (B, D)."""
        check_batch(x, self.image_shape)
        return self.eye.statistics(x)

    def feature_maps(self, x: Tensor) -> Tensor:
        """Return the last maps of the eye, (B, C, h, w)."""
        check_batch(x, self.image_shape)
        return self.eye.maps(x)[-1]

    def frozen(self) -> Self:
        """Return the model itself: nothing is folded."""
        return self

    @property
    def second(self) -> SecondStage:
        """Gaussians of the scores of new photos."""
        return SecondStage(*(self.get_buffer(f"second_{name}") for name in SecondStage._fields))

    @property
    def taught(self) -> TaughtClasses:
        """The classes that were taught after the training."""
        return TaughtClasses(*(self.get_buffer(f"taught_{name}") for name in TaughtClasses._fields))

    @property
    def known(self) -> Known:
        """What stays as it is when classes are taught."""
        parts = self.temperatures, self.priors, self.second, self._parts()[1], self.means
        return Known(*parts, self.rest_scale, self.config.posterior)

    @property
    def log_priors(self) -> Tensor:
        """Log p(y) of the mixture on the CPU, (M,)."""
        return self._log_priors().float().cpu()

    @property
    def mixture(self) -> LatentMixture:
        """The classes in latent space."""
        _, span = self._parts()
        mixture = LatentMixture(self.config.classes, 0, self.config.dimensions)
        means = span.means @ span.basis
        if self.config.taught:
            places = self.taught.places.double()
            means = torch.cat((means, self._latent(places, places @ span.basis.T, span)))
        mixture.prototypes.data = means
        mixture.log_priors = self._log_priors()
        return mixture.requires_grad_(False)

    def outputs(self, images: Tensor) -> Outputs:
        """Make one forward pass."""
        return self.outputs_of(self.features(images))

    def outputs_of(self, features: Tensor) -> Outputs:
        """Return everything that the head says of statistics, (B, D).

        ``novelty`` has three scores: the distance to the nearest class relative to that to all photos, minus
        the log evidence, and the squared distance outside of the span of the class means.
        """
        seen = self.fitted_part(features)
        _, span = self._parts()
        latent = self._latent(seen.z, seen.z @ span.basis.to(seen.z).T, span)
        if self.config.taught:
            seen = self.known.extended(seen, self.taught)
        return Outputs(seen.logits, features, seen.terms, latent, seen.novelty)

    def fitted_part(self, features: Tensor) -> Seen:
        """Return what the head says of statistics without taught classes."""
        x, z = self._whitened(features)
        scores = class_scores(z, self.means.to(z))
        first = self.temperatures[0].to(z) * (scores + self.priors.to(z))
        _, span = self._parts()
        inside = z @ span.basis.to(z).T
        rest = (z.square().sum(1) - inside.square().sum(1)).clamp(min=0)
        parts = self.second.relative_distance(scores), -first.logsumexp(1), rest
        terms = self._density_terms(inside, rest, span)
        return Seen(z, scores, self._logits(x, scores, first), torch.stack(parts, 1), terms)

    def logits(self, x: Tensor) -> Tensor:
        """Return the log posterior up to a constant of the image, (B, M)."""
        return self.logits_of(self.features(x))

    def logits_of(self, features: Tensor) -> Tensor:
        """Return the logits of statistics, (B, M).

        They are linear in the statistics, except those of a class that was taught to a logistic posterior.
        """
        x, z = self._whitened(features)
        scores = class_scores(z, self.means.to(z))
        first = self.temperatures[0].to(z) * (scores + self.priors.to(z))
        logits = self._logits(x, scores, first)
        return self.known.logits(logits, first, z, self.taught) if self.config.taught else logits

    def latent(self, x: Tensor) -> Tensor:
        """Return z of images: statistics in coordinates in which the mixture has unit covariance, (B, D)."""
        return self.latent_of(self.features(x))

    def latent_of(self, features: Tensor) -> Tensor:
        """Return the latent of statistics, (B, D)."""
        _, z = self._whitened(features)
        _, span = self._parts()
        return self._latent(z, z @ span.basis.to(z).T, span)

    def places(self, latent: Tensor) -> Tensor:
        """Return coordinates of latents (B, D) along the span of the means of fitted classes, (B, K - 1)."""
        return latent @ self._parts()[1].basis.to(latent).T

    @property
    def known_photos(self) -> KnownPhotos | None:
        """Photos of each class that are kept with the model; None if there are none."""
        return KnownPhotos.read(self.thumbnails, self.config.fitted)

    def invert(self, latent: Tensor) -> Tensor:
        """Return the statistics that have these latents, (B, D). An eye has no inverse to pixels."""
        factor, span = self._parts()
        basis = span.basis.to(latent)
        inside = latent @ basis.T
        rest = (latent - inside @ basis) * self.rest_scale.to(latent)
        inside = torch.linalg.solve(span.matrix.to(latent), (inside - span.shift.to(latent)).T).T
        z = rest + inside @ basis
        x = torch.linalg.solve_triangular(factor.to(latent), z.T, upper=False).T
        return x * self.scale.to(latent) + self.centre.to(latent)

    def linear_logits(self) -> tuple[Tensor, Tensor]:
        """Return weights (M, D) and biases (M,) in float64: logits = statistics @ weights' + biases."""
        double = torch.float64
        origin = torch.zeros(1, self.config.dimensions, dtype=double, device=self.device)
        bias = self.logits_of(origin)[0]
        factor, scale = self._parts()[0].double(), self.scale.double()
        first = self.temperatures[0].double() * self.means.double() @ factor / scale
        weights = first
        if self.config.posterior == "logistic":
            weights = self.logistic_weight.double() / scale
        elif self.config.posterior == "second-stage":
            rows = contrasts(self.config.fitted).to(weights)
            u = self.second.factor.double() @ rows @ (self.means.double() @ factor / scale)
            weights = self.temperatures[1].double() * self.second.means.double() @ u
        if not self.config.taught:
            return weights, bias
        if self.config.posterior == "logistic":
            raise CandidError(
                "The logits of a class that was taught to a model with a logistic posterior are not linear: "
                "heatmaps of it can't add up. Use the model without that class ('candid forget')."
            )
        taught = self.temperatures[0].double() * self.taught.weights.double() @ factor / scale
        if self.config.posterior == "second-stage":
            taught = weights.mean(0) + self.known.spread() * (taught - first.mean(0))
        return torch.cat((weights, taught)), bias

    def whitened(self, features: Tensor) -> Tensor:
        """Return statistics in coordinates in which the fitted classes have about unit covariance, (B, D)."""
        return self._whitened(features)[1]

    def _log_priors(self) -> Tensor:
        fitted, classes = self._parts()[1].log_priors, self.config.classes
        more = fitted.new_full((self.config.taught,), -math.log(classes))
        return torch.cat((fitted + math.log(self.config.fitted / classes), more))

    def _whitened(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return standardised statistics and z, each (B, D)."""
        x = (features - self.centre.to(features)) / self.scale.to(features)
        return x, x @ self._parts()[0].to(x).T

    def _logits(self, x: Tensor, scores: Tensor, first: Tensor) -> Tensor:
        if self.config.posterior == "mixture":
            return first
        if self.config.posterior == "logistic":
            return x @ self.logistic_weight.to(x).T + self.logistic_bias.to(x)
        second = class_scores(self.second.whitened(scores), self.second.means.to(x))
        return self.temperatures[1].to(x) * (second + self.priors.to(x))

    def _latent(self, z: Tensor, inside: Tensor, span: Span) -> Tensor:
        basis = span.basis.to(z)
        outside = (z - inside @ basis) / self.rest_scale.to(z)
        return outside + (inside @ span.matrix.to(z).T + span.shift.to(z)) @ basis

    def _density_terms(self, inside: Tensor, rest: Tensor, span: Span) -> Tensor:
        """Return log p of the span, log p of the rest and the log determinant, (B, 3) in float64."""
        inside, rest = inside.double(), rest.double()
        d, k = self.config.dimensions, self.config.fitted
        half_log = 0.5 * math.log(2 * math.pi)
        coordinates = inside @ span.matrix.to(inside).T + span.shift.to(inside)
        evidence = class_scores(coordinates, span.means.to(inside)) + span.log_priors.to(inside)
        of_span = evidence.logsumexp(1) - 0.5 * coordinates.square().sum(1) - (k - 1) * half_log
        r = self.rest_scale.to(rest)
        of_rest = -0.5 * rest / r.square() - (d - k + 1) * half_log
        factor, _ = self._parts()
        log_det = (
            factor.diagonal().to(rest).log().sum()
            - self.scale.to(rest).log().sum()
            - (d - k + 1) * r.log()
            + torch.linalg.slogdet(span.matrix.to(rest))[1]
        )
        return torch.stack((of_span, of_rest, log_det.expand_as(of_rest)), 1)

    def _parts(self) -> tuple[Tensor, Span]:
        """Return the whitening as a matrix, and the span; computed once."""
        key = self.device, self.dtype
        if key not in self._derived:
            with torch.inference_mode(False), torch.no_grad():  # gradients may be asked for later
                self._derived = {key: (self._factor(), self._span())}
        return self._derived[key]

    def _factor(self) -> Tensor:
        d = self.config.dimensions
        rows, columns = torch.tril_indices(d, d, device=self.device)
        factor = torch.zeros(d, d, device=self.device, dtype=self.dtype)
        factor[rows, columns] = self.whitening.view(torch.half).to(self.dtype)
        return factor

    def _span(self) -> Span:
        """Return the span in float64.

        With the logistic posterior, the mixture is the one of the first stage.
        """
        means, priors, temperatures = self.means.double(), self.priors.double(), self.temperatures.double()
        if self.config.posterior == "second-stage":
            return self.second.span(means, priors, temperatures[1])
        return Span.of(means, priors, temperatures[0])


def _forget_derived(model: torch.nn.Module, _: Any) -> None:
    assert isinstance(model, PhotoModel)
    model._derived = {}

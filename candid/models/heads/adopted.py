"""Adopted models: a softmax classifier keeps its posteriors and gains a density of its features."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from candid._support.config import check_fields, check_range
from candid._support.errors import CandidError
from candid.data.images import Preprocessing
from candid.models.eyes import moved
from candid.models.flow.config import checked_names
from candid.models.heads.softmax import SoftmaxEye, open_softmax
from candid.models.protocol import DensityOf, ImageClassifier, Outputs, check_batch


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


class AdoptedModel(ImageClassifier):
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
    config: AdoptedConfig
    centre: Tensor
    scale: Tensor
    whitening: Tensor
    priors: Tensor

    def __init__(
        self, config: AdoptedConfig, class_names: Sequence[str] | None = None, eye: SoftmaxEye | None = None
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config, self.image_shape, self._eye = config, config.image_shape, eye
        self.register_buffer("image_mean", torch.zeros(1, device="cpu"), persistent=False)
        self.register_buffer("centre", torch.zeros(self.feature_size))
        self.register_buffer("scale", torch.ones(self.feature_size))
        self.register_buffer("priors", torch.full((config.classes,), -math.log(config.classes)))
        # the bits of half-precision numbers, so that nothing widens them in memory or on disk
        stored = sum(d * (d + 1) // 2 for d in config.features)
        self.register_buffer("whitening", torch.zeros(stored, dtype=torch.int16))
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.register_load_state_dict_post_hook(_forget_factors)

    @classmethod
    def of(cls, eye: SoftmaxEye) -> "AdoptedModel":
        """Return the model of a classifier. Its density still has to be fitted."""
        config = AdoptedConfig(
            eye.name, eye.sha256, eye.image_shape, eye.border, eye.groups, len(eye.class_names)
        )
        model = cls(config, eye.class_names, eye)
        model.metadata = dict(eye.metadata)
        return model.set_density(model.centre, torch.eye(model.feature_size), model.priors).eval()

    def set_density(self, mean: Tensor, whitening: Tensor, log_priors: Tensor) -> Self:
        """Set p(f) to the Gaussian in which ``whitening @ (f - mean)`` is standard normal.

        Args:
            mean: (F,).
            whitening: (F, F), a lower triangle with a positive diagonal for each group of features. It is
                stored in half precision.
            log_priors: Log p(y), (M,).
        """
        groups = whitening.diagonal().split(list(self.config.features))
        scale = torch.cat([(1 / each.mean()).expand(len(each)) for each in groups]).float()
        factor = whitening * scale
        rows, columns = _triangles(self.config.features, whitening.device)
        self.centre, self.scale = mean.float().to(self.device), scale.to(self.device)
        self.whitening = factor[rows, columns].half().view(torch.int16).to(self.device)
        self.priors = log_priors.float().to(self.device)
        self._factors = {}
        return self

    @property
    def eye(self) -> SoftmaxEye:
        """The classifier; its weights are read when it is first used."""
        if self._eye is None:
            if self.config.eye == "module":
                raise CandidError(
                    "The network of this model was given in Python and is not part of it: call "
                    "model.attach(network) first."
                )
            with torch.inference_mode(False):  # gradients may be asked for later
                self.attach(open_softmax(moved(self.config.eye, self.folder), self.class_names))
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
        return Preprocessing(*self.image_shape, self.record.crop, border=self.config.border)

    @property
    def feature_size(self) -> int:
        """The number of features."""
        return sum(self.config.features)

    @property
    def log_priors(self) -> Tensor:
        """Log p(y) on the CPU, (M,)."""
        return self.priors.cpu()

    def frozen(self) -> Self:
        """Return the model itself: nothing is folded."""
        return self

    def outputs(self, images: Tensor) -> Outputs:
        """Make one forward pass."""
        check_batch(images, self.image_shape)
        return self.outputs_of(*self.eye.logits_and_features(images))

    def outputs_of(self, logits: Tensor, features: Tensor) -> Outputs:
        """Return the outputs of images with these logits (B, M) and features (B, F).

        ``novelty`` has a score for each group of features, their squared distance from their mean in standard
        deviations, and minus the log of the sum of the exponentiated logits.
        """
        groups = self.whitened(features).double().split(list(self.config.features), 1)
        distances = torch.stack([z.square().sum(1) for z in groups], 1)
        log_det = (self._factor(features).diagonal().double() / self.scale.double()).log().sum()
        log_density = log_det - 0.5 * (distances.sum(1) + self.feature_size * math.log(2 * math.pi))
        novelty = torch.cat((distances.to(logits), -logits.logsumexp(1, keepdim=True)), 1)
        return Outputs(logits, features, log_density[:, None], None, novelty)

    def whitened(self, features: Tensor) -> Tensor:
        """Return features in coordinates in which those of all images have about unit covariance, (B, F)."""
        away = (features - self.centre.to(features)) / self.scale.to(features)
        return away @ self._factor(features).T

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the classifier, (B, M)."""
        check_batch(x, self.image_shape)
        return self.eye.logits_and_features(x)[0]

    def feature_maps(self, x: Tensor) -> Tensor:
        """Return the last maps of the classifier, (B, C, h, w)."""
        check_batch(x, self.image_shape)
        return self.eye.maps(x)[-1]

    def _factor(self, like: Tensor) -> Tensor:
        """Return the whitening as a matrix, (F, F); computed once for a device and type."""
        key = like.device, like.dtype
        if key not in self._factors:
            d = self.feature_size
            rows, columns = _triangles(self.config.features, like.device)
            with torch.inference_mode(False):  # gradients may be asked for later
                factor = torch.zeros(d, d, device=like.device, dtype=like.dtype)
                factor[rows, columns] = self.whitening.to(like.device).view(torch.half).to(like.dtype)
            self._factors = {key: factor}
        return self._factors[key]


def _forget_factors(model: torch.nn.Module, _: Any) -> None:
    assert isinstance(model, AdoptedModel)
    model._factors = {}


def _triangles(groups: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of the lower triangle of each group.

    >>> [each.tolist() for each in _triangles((2, 1), torch.device("cpu"))]
    [[0, 1, 1, 2], [0, 0, 1, 2]]
    """
    starts = [sum(groups[:number]) for number in range(len(groups))]
    parts = [torch.tril_indices(d, d, device=device) + start for d, start in zip(groups, starts, strict=True)]
    rows, columns = torch.cat(parts, 1)
    return rows, columns

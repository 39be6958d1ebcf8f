"""What every model is: one protocol for pixel models, ResNets and all that come after them."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, cast, get_args

import torch
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid._support.files import digest
from candid.data.images import Crop, Preprocessing, current_crop
from candid.models.flow.chain import Chain
from candid.models.flow.coupling import OrthogonalMatrix
from candid.models.flow.mixture import LatentMixture

DensityOf = Literal["pixels", "features"] | None


class Outputs(NamedTuple):
    """What one forward pass over B images gives; None where the model has no such thing."""

    logits: Tensor
    """Log posterior up to a constant of the image, (B, M)."""
    features: Tensor
    """Mean-pooled features, (B, F)."""
    log_density_terms: Tensor | None
    """Terms that add up to the log density in nats, (B, T) in float64."""
    latent: Tensor | None
    """z, (B, D)."""
    novelty: Tensor | None = None
    """Scores of the model's own that rise with outlyingness, (B, J): the score ``combined`` ranks them."""

    def at(self, i: int) -> "Outputs":
        """Return the outputs of image ``i`` alone, (1, ...)."""
        own = (None if part is None else part[i : i + 1] for part in self[2:])
        return Outputs(self.logits[i : i + 1], self.features[i : i + 1], *own)


@dataclass(frozen=True)
class TrainingRecord:
    """How a model was trained, as far as it is known.

    >>> TrainingRecord.of({"training": {"config": {"data": "digits", "beta": "inf"}}}).beta
    inf
    """

    beta: float | None = None
    data: str | None = None
    crop: Crop = "resized"
    """How training images were cropped; as photos if that is not known."""
    holdout: float | None = None
    """The share of the training images that was held out, where the data has no division of its own."""
    split_seed: int | None = None
    source: str | None = None
    """Where imported weights come from."""
    config: dict[str, Any] = field(default_factory=dict)
    """The whole configuration of the training; empty if unknown."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "TrainingRecord":
        """Read the record from the metadata of a model.

        Raises:
            CandidError: if an entry that decides something has the wrong type.
        """
        training = metadata.get("training")
        config = training.get("config") if isinstance(training, dict) else None
        config = config if isinstance(config, dict) else {}
        for key, (check, wanted) in _ENTRIES.items():
            if config.get(key) is not None and not check(config[key]):
                raise CandidError(f"{WRONG_ENTRY} '{key}': it must be {wanted}.")
        beta = config.get("beta", metadata.get("beta"))
        if beta is not None and not _is_number(beta):
            raise CandidError(f"{WRONG_ENTRY} 'beta': it must be a number.")
        found = {key: config[key] for key in _FIELDS if config.get(key) is not None}
        if "crop" in found:
            found["crop"] = current_crop(found["crop"])
        source = metadata.get("source")
        beta = None if beta is None else float(beta)
        return cls(beta=beta, source=None if source is None else str(source), config=config, **found)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, int | float | str) and float(value) >= 0
    except ValueError:
        return False


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


WRONG_ENTRY = "The model's record of its training has a wrong"
_FIELDS = ("data", "crop", "holdout", "split_seed")
_ENTRIES: dict[str, tuple[Any, str]] = {
    "data": (_is_text, "text"),
    "crop": (lambda value: current_crop(value) in get_args(Crop), f"one of {', '.join(get_args(Crop))}"),
    "holdout": (_is_share, "a number from 0 to 1"),
    "split_seed": (_is_whole, "a whole number"),
    "split": (lambda value: value in ("hash", "shuffled"), "hash or shuffled"),
    "only": (
        lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
        "a list of class names",
    ),
}


class Model(Protocol):
    """An image classifier that Candid can judge.

    Images are float tensors in [0, 1], (B, C, H, W); gradients reach them.
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    metadata: dict[str, Any]
    """What else is saved with the model, as JSON: how it was trained."""
    held_out: dict[str, Tensor]
    """Scores of held-out images; :class:`candid.trust.judge.Judge` reads them. Empty if there are none."""
    training: bool

    @property
    def config(self) -> Any:
        """The dataclass that rebuilds the model."""

    @property
    def kind(self) -> str:
        """The key of :data:`candid.models.checkpoint.KINDS`."""

    @property
    def density_of(self) -> DensityOf:
        """What the model has a density of, if it has one."""

    @property
    def record(self) -> TrainingRecord:
        """How the model was trained."""

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes a tensor that the model takes."""

    @property
    def dimensions(self) -> int:
        """Numbers in an image, D."""

    @property
    def feature_size(self) -> int:
        """Number of mean-pooled features, F."""

    @property
    def log_priors(self) -> Tensor:
        """Log p(y) on the CPU, (M,)."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it computes with."""

    def outputs(self, images: Tensor) -> Outputs:
        """One forward pass."""

    def logits(self, x: Tensor, /) -> Tensor:
        """The logits alone, (B, M)."""

    def feature_maps(self, x: Tensor, /) -> Tensor:
        """The last maps before pooling, (B, C, h, w)."""

    def frozen(self) -> Self:
        """The same function, folded for inference; the model itself if there is nothing to fold."""

    def fingerprint(self) -> str:
        """A SHA-256 digest that changes whenever a result can change."""

    def eval(self) -> Self:
        """Switch to evaluation mode."""

    def to(self, device: torch.device | str, /) -> Self:
        """Move the weights."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""

    def modules(self) -> Iterator[nn.Module]:
        """The layers."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Choose whether gradients reach the weights."""


class LatentModel(Model, Protocol):
    """A model whose latent can be read and turned back: explanations need it."""

    @property
    def flow(self) -> Chain:
        """The invertible map to the latent."""

    @property
    def mixture(self) -> LatentMixture:
        """The classes in latent space."""

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the feature maps that the latent is the cosine transform of."""

    @property
    def bits_offset(self) -> float:
        """What turns L_X of the loss into bits per dimension: ``L_X / ln 2 + bits_offset``."""

    def __call__(self, x: Tensor, /) -> Any:
        """One forward pass: z, log_det, logits."""

    def latent(self, x: Tensor, /) -> Tensor:
        """z, (B, D)."""

    def posterior(self, x: Tensor, /) -> Tensor:
        """p(y | x), (B, M)."""

    def log_density_of(self, outputs: Any, /) -> Tensor:
        """Log density in nats from a forward pass, (B,) in float64."""

    def invert(self, z: Tensor, /) -> Tensor:
        """Return the images of latents."""

    def sample(
        self,
        y: Any,
        n: int = 1,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``n`` images of each class in ``y``."""


def density_dimensions(model: Model) -> int:
    """Return how many numbers the density is of: the pixels of an image, or its features."""
    return model.feature_size if model.density_of == "features" else model.dimensions


def as_latent(model: object) -> LatentModel | None:
    """Return the model if it has a latent that can be turned back into an image, else None."""
    found = hasattr(model, "mixture") and getattr(model, "density_of", None) == "pixels"
    return cast(LatentModel, model) if found else None


def require_mixture(model: object, purpose: str) -> LatentModel:
    """Return the model if it has class means in a latent space: a pixel model or a photo model."""
    return cast(LatentModel, model) if hasattr(model, "mixture") else require_latent(model, purpose)


def require_latent(model: object, purpose: str) -> LatentModel:
    """Return the model, or raise a CandidError that names the ``purpose``: "Heatmaps", "A counterfactual"."""
    latent = as_latent(model)
    if latent is not None:
        return latent
    kind = {"resnet": "ResNet"}.get(name := getattr(model, "kind", type(model).__name__), name)
    if kind == "adopted":
        raise CandidError(
            f"{purpose} can't come from an adopted model, which has one density for all classes and no "
            "inverse to pixels: use a pixel model, such as 'cifar10-beta1'."
        )
    if getattr(model, "density_of", None) == "features":
        raise CandidError(
            f"{purpose} can't come from a {kind} model, whose eye has no inverse to pixels: use a pixel "
            "model, such as 'cifar10-beta1'."
        )
    raise CandidError(
        f"{purpose} can't come from a {kind}, which has no class means in a latent space: "
        "use a generative classifier."
    )


class ImageClassifier(nn.Module):
    """What pixel models and ResNets share of :class:`Model`."""

    image_shape: tuple[int, int, int]
    image_mean: Tensor
    config: Any

    def __init__(self, class_names: tuple[str, ...]) -> None:
        super().__init__()
        self.class_names = class_names
        self.metadata: dict[str, Any] = {}
        """What else is saved with the model, as JSON: how it was trained."""
        self.held_out: dict[str, Tensor] = {}
        """Scores of held-out images: p-values come from them."""
        self.folder: Path | None = None
        """Where it was loaded from."""

    @property
    def record(self) -> TrainingRecord:
        """How the model was trained."""
        return TrainingRecord.of(self.metadata)

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes a tensor that the model takes."""
        return Preprocessing(*self.image_shape, self.record.crop)

    @property
    def dimensions(self) -> int:
        """Numbers in an image; of a pixel model also the length of the latent."""
        return math.prod(self.image_shape)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.image_mean.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it computes with."""
        return self.image_mean.dtype

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of configuration, class names, preprocessing and weights.

        Fixed rotations are left out: one that was stored in half precision is made orthogonal again when it
        is loaded, and the last digit of that may differ between machines. Of the configuration, what differs
        from its defaults counts, so that a later version may have more keys.
        """
        described = [_without_defaults(self.config), self.class_names, self.image_shape, self.record.crop]
        return digest(described, weights_digest(self).digest()).hexdigest()

    def logits(self, x: Tensor) -> Tensor:
        """Return the log posterior up to a constant of the image, (B, M): for decisions and attacks."""
        raise NotImplementedError

    def posterior(self, x: Tensor) -> Tensor:
        """Return p(y | x), (B, M); rows sum to one."""
        return self.logits(x).softmax(dim=1)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the most probable class, (B,)."""
        return self.logits(x).argmax(dim=1)


def _without_defaults(config: Any) -> dict[str, Any]:
    values = {each.name: (getattr(config, each.name), each.default) for each in fields(config)}
    return {
        name: _without_defaults(value) if is_dataclass(value) else value
        for name, (value, default) in values.items()
        if value != default
    }


def weights_digest(model: Any) -> "hashlib._Hash":
    """Return the SHA-256 of all weights but fixed rotations; see :meth:`ImageClassifier.fingerprint`."""
    fixed = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, OrthogonalMatrix)}
    return digest(*(tensor for name, tensor in model.state_dict().items() if name not in fixed))


def check_batch(x: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise an error unless ``x`` is a batch of float images of this ``shape`` (C, H, W) in [0, 1]."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = getattr(x, "dtype", type(x).__name__)
        raise CandidError(f"Images must be float tensors in [0, 1], not {given}: divide 8-bit ones by 255.")
    expected, found = (" x ".join(map(str, s)) for s in (shape, x.shape))
    if tuple(x.shape) == shape:
        raise CandidError(f"The model takes batches: give a single {expected} image as x[None].")
    if tuple(x.shape[1:]) != shape or not len(x):
        raise CandidError(
            f"The model takes a batch of {expected} images (channels x height x width), "
            f"not a tensor of {found or 'no dimensions'}: resize or crop them first."
        )
    if not x.is_meta and x.max() > 20:
        raise CandidError(
            f"The images reach {float(x.max()):.4g} where white is 1: divide 8-bit pixels by 255."
        )

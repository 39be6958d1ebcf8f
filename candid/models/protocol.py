"""What every model is: one protocol for pixel models, photo models, adopted classifiers and ResNets."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, digest
from candid._support.old_formats import CROPS
from candid.data import Crop
from candid.data.images import Preprocessing
from candid.trust.scores import OWN_PARTS
from candid.trust.tree import Tree

NUMBERS_A_BATCH = 250 * 3 * 32 * 32

DensityOf = Literal["pixels", "features"] | None
Ability = Literal[
    "geometry",
    "mixture",
    "invert",
    "class maps",
    "gradients",
    "teach",
    "density",
    "network",
    "eye",
    "whitening",
    "known photos",
]
"""What a model may be able to do: class means in a latent space, means that were trained and can be refitted,
a latent that goes back to an image, maps that add up to the score of a class, gradients with respect to
images, new classes by examples, a density. And what it may have: a network of torch that can be trained, a
pretrained eye, a covariance of features within classes, thumbnails of photos that it was trained with."""


class Outputs(NamedTuple):
    """What one forward pass over B images gives; None where the model has no such thing."""

    logits: Array
    """Log posterior up to a constant of the image, (B, M)."""
    features: Array
    """Mean-pooled features, (B, F)."""
    log_density_terms: Array | None
    """Terms that add up to the log density in nats, (B, T) in float64."""
    latent: Array | None
    """z, (B, D)."""
    novelty: Array | None = None
    """Scores of the model's own that rise with outlyingness, (B, J): the score ``combined`` ranks them."""

    def at(self, i: int) -> "Outputs":
        """Return the outputs of image ``i`` alone, (1, ...)."""
        return Outputs(*(None if part is None else part[i : i + 1] for part in self))  # type: ignore[arg-type]

    def columns(self) -> dict[str, Array]:
        """Return the columns that scores are computed from: see :class:`candid.trust.scores.Columns`."""
        parts = {"logits": self.logits, "log_density_terms": self.log_density_terms, OWN_PARTS: self.novelty}
        return {name: part for name, part in parts.items() if part is not None}


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
        entries = {key: config[key] for key in _FIELDS if config.get(key) is not None}
        if "crop" in entries:
            entries["crop"] = CROPS.get(entries["crop"], entries["crop"])
        source = metadata.get("source")
        beta = None if beta is None else float(beta)
        return cls(beta=beta, source=None if source is None else str(source), config=config, **entries)


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
    "crop": (lambda value: value in (*get_args(Crop), *CROPS), f"one of {', '.join(get_args(Crop))}"),
    "holdout": (_is_share, "a number from 0 to 1"),
    "split_seed": (_is_whole, "a whole number"),
    "split": (lambda value: value in ("hash", "shuffled"), "hash or shuffled"),
    "only": (
        lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
        "a list of class names",
    ),
}


class ClassGeometry(Protocol):
    """Where the classes of a model lie in its latent space: one unit Gaussian for each."""

    @property
    def log_priors(self) -> Array:
        """Log p(y), (M,)."""

    @property
    def planar(self) -> bool:
        """Whether all means lie in one plane by construction."""

    def means(self, classes: Array | None = None) -> Array:
        """Means of ``classes``, all of them if None, (k, D) in float64."""

    def distances(self) -> Array:
        """Distances of the means in standard deviations, (M, M) in float64."""


class Model(Protocol):
    """An image classifier that Candid can judge.

    Images are float32 arrays in [0, 1], (B, C, H, W).
    """

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    metadata: dict[str, Any]
    """What else is saved with the model, as JSON: how it was trained."""
    held_out: dict[str, Array]
    """Scores of held-out images; :class:`candid.judging.held_out.HeldOut` reads them. Empty without."""
    folder: Path | None
    """Where it was loaded from."""
    tree: Tree | None
    """Kinds above the classes."""
    thumbnails: dict[str, Array]
    """Photos that are kept for people, as :class:`~candid.models.photo.known_photos.KnownPhotos`."""
    watched_novelty: ClassVar[slice]
    """Which of its own scores of novelty are watched for drift."""

    @property
    def config(self) -> Any:
        """The dataclass that rebuilds the model."""

    @property
    def kind(self) -> str:
        """The key of :data:`candid.models.checkpoint.KINDS`."""

    @property
    def can(self) -> frozenset[Ability]:
        """What it is able to do; see :data:`Ability`."""

    @property
    def density_of(self) -> DensityOf:
        """What the model has a density of, if it has one."""

    @property
    def record(self) -> TrainingRecord:
        """How the model was trained."""

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes an image that the model takes."""

    @property
    def dimensions(self) -> int:
        """Numbers in an image, D."""

    @property
    def feature_size(self) -> int:
        """Number of mean-pooled features, F."""

    @property
    def log_priors(self) -> Array:
        """Log p(y), (M,)."""

    @property
    def fitted_classes(self) -> int:
        """How many classes, the first ones, were not taught by examples."""

    @property
    def size(self) -> int:
        """Number of weights."""

    @property
    def device(self) -> Any:
        """Where it computes."""

    @property
    def geometry(self) -> ClassGeometry:
        """Where the classes lie; only with the ability "geometry"."""

    def outputs(self, images: Array) -> Outputs:
        """One forward pass."""

    def frozen(self) -> Self:
        """The same function, folded for inference; the model itself if there is nothing to fold."""

    def ready(self) -> Self:
        """The model itself, prepared to be asked: on the GPU if there is one and it can use it."""

    def fingerprint(self) -> str:
        """A SHA-256 digest that changes whenever a result can change."""

    def state(self) -> dict[str, Array]:
        """The weights by name."""


class ModelBase:
    """What all kinds of models share of :class:`Model`; ``state`` and the rest are theirs."""

    image_shape: tuple[int, int, int]
    config: Any
    limits: ClassVar[str] = ""
    """What the model is, why it has no inverse or no class means, and what to use instead."""
    watched_novelty: ClassVar[slice] = slice(None)
    """Which of its own scores of novelty are watched for drift."""

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self.class_names = class_names
        self.metadata: dict[str, Any] = {}
        """What else is saved with the model, as JSON: how it was trained."""
        self.held_out: dict[str, Array] = {}
        """Scores of held-out images: p-values come from them."""
        self.folder: Path | None = None
        """Where it was loaded from."""
        self.tree: Tree | None = None
        """Kinds above the classes."""
        self.thumbnails: dict[str, Array] = {}
        """Photos that are kept for people, as :class:`~candid.models.photo.known_photos.KnownPhotos`."""

    @property
    def record(self) -> TrainingRecord:
        """How the model was trained."""
        return TrainingRecord.of(self.metadata)

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes an image that the model takes."""
        return Preprocessing(*self.image_shape, self.record.crop)

    @property
    def geometry(self) -> ClassGeometry:
        """Where the classes lie; only with the ability "geometry"."""
        raise missing(self, "geometry", "Class means")

    @property
    def dimensions(self) -> int:
        """Numbers in an image; of a pixel model also the length of the latent."""
        return math.prod(self.image_shape)

    @property
    def fitted_classes(self) -> int:
        """How many classes, the first ones, were not taught by examples."""
        return len(self.class_names)

    @property
    def device(self) -> Any:
        """Where it computes."""
        return "cpu"

    def frozen(self) -> Self:
        """Return the same function, folded for inference; the model itself if there is nothing to fold."""
        return self

    def state(self) -> dict[str, Array]:
        """Return the weights by name."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take weights by name, of the right shapes; those in half precision are widened."""
        raise NotImplementedError

    def layout(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the shape of each weight in :meth:`state`, and whether it has floating-point numbers."""
        return {name: (weights.shape, weights.dtype.kind == "f") for name, weights in self.state().items()}

    @property
    def fixed_weights(self) -> frozenset[str]:
        """The weights that the fingerprint leaves out."""
        return frozenset()

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of configuration, class names, preprocessing and weights.

        Fixed rotations are left out: one that was stored in half precision is made orthogonal again when it
        is loaded, and the last digit of that may differ between machines. Of the configuration, what differs
        from its defaults counts, so that a later version may have more keys.
        """
        described = [_without_defaults(self.config), self.class_names, self.image_shape, self.record.crop]
        described += [] if self.tree is None else [self.tree.to_dict()]
        return digest(described, self.weights_digest().digest()).hexdigest()

    def weights_digest(self) -> "hashlib._Hash":
        """Return the SHA-256 of all weights but fixed rotations; see :meth:`fingerprint`."""
        fixed = self.fixed_weights
        return digest(*(weights for name, weights in self.state().items() if name not in fixed))


def _without_defaults(config: Any) -> dict[str, Any]:
    values = {entry.name: (getattr(config, entry.name), entry.default) for entry in fields(config)}
    return {
        name: _without_defaults(value) if is_dataclass(value) else value
        for name, (value, default) in values.items()
        if value != default
    }


def density_dimensions(model: Model) -> int:
    """Return how many numbers the density is of: the pixels of an image, or its features."""
    return model.feature_size if model.density_of == "features" else model.dimensions


def can(model: object, ability: Ability) -> bool:
    """Return whether ``model`` has the ability; anything that is no model of Candid has none.

    >>> can("everyday", "teach")
    False
    """
    return ability in getattr(model, "can", ())


def require(model: Any, ability: Ability, purpose: str) -> Any:
    """Return the model, or raise a CandidError that says why it can't serve the purpose.

    Args:
        model: any model.
        ability: what the purpose needs.
        purpose: "Heatmaps", "A counterfactual"; for "teach" and "gradients" what is done: "learn new
            classes", "be attacked".
    """
    if can(model, ability):
        return model
    raise missing(model, ability, purpose)


def missing(model: Any, ability: Ability, purpose: str) -> CandidError:
    """Return the error of a model that lacks an ability; see :func:`require`."""
    name = str(getattr(model, "kind", type(model).__name__))
    kind = {"resnet": "ResNet"}.get(name, name)
    eye = getattr(getattr(model, "config", None), "eye", None)
    if ability == "teach":
        return CandidError(
            f"Only a photo model can {purpose}, and this is a model of the kind '{name}': train one "
            "with 'candid train PHOTOS'."
        )
    if ability == "gradients":
        cause = f"A {kind}" if eye is None else f"The eye '{eye}' runs in onnxruntime, which"
        return CandidError(
            f"{cause} gives no gradients, so this model can't {purpose}: train it with an eye in torch, such "
            "as lite0 or a .pt2 file."
        )
    if ability == "class maps" and name == "vector":
        return CandidError(
            "The logits of a vector model are not linear in the maps of its eye, so there are no heatmaps: "
            "train a photo model with 'candid train PHOTOS'."
        )
    if ability == "class maps" and eye is not None:
        return CandidError(
            f"The logits of '{eye}' are not known to be linear in its maps, so there are no "
            "heatmaps: adopt an EfficientNet-Lite or a ResNet."
        )
    if ability == "density":
        return CandidError(f"{purpose} can't come from a {kind}, which has no density of images or features.")
    limits = f"a {kind}, which has no class means in a latent space: use a generative classifier."
    return CandidError(f"{purpose} can't come from {getattr(model, 'limits', '') or limits}")


def check_batch(images: Array, shape: tuple[int, int, int]) -> None:
    """Raise an error unless ``images`` is a batch of float images of this ``shape`` (C, H, W) in [0, 1]."""
    if not isinstance(images, np.ndarray) or images.dtype.kind != "f":
        raise wrong_type(images, "arrays")
    check_batch_shape(images.shape, shape, "an array")
    check_white(images.max())


def wrong_type(images: Any, wanted: str) -> CandidError:
    """Return the error of images that are no float ``wanted``: arrays or tensors."""
    kind = getattr(images, "dtype", type(images).__name__)
    return CandidError(f"Images must be float {wanted} in [0, 1], not {kind}: divide 8-bit ones by 255.")


def check_batch_shape(batch: tuple[int, ...], shape: tuple[int, int, int], what: str) -> None:
    """Raise an error unless ``batch`` is the shape of ``what``, an array or a tensor, of some images."""
    expected, actual = (" x ".join(map(str, sizes)) for sizes in (shape, batch))
    if tuple(batch) == shape:
        raise CandidError(f"The model takes batches: give a single {expected} image as x[None].")
    if tuple(batch[1:]) != shape or not batch[0]:
        raise CandidError(
            f"The model takes a batch of {expected} images (channels x height x width), "
            f"not {what} of {actual or 'no dimensions'}: resize or crop them first."
        )


def check_white(largest: Any) -> None:
    """Raise an error if the largest number of some images is far above that of white, 1."""
    if largest > 20:
        raise CandidError(
            f"The images reach {float(largest):.4g} where white is 1: divide 8-bit pixels by 255."
        )


def batch_size(model: Model) -> int:
    """Return the number of images that should pass a network at a time."""
    return min(250, max(1, NUMBERS_A_BATCH // math.prod(model.image_shape)))

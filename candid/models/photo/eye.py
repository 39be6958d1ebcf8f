"""What every eye is: a pretrained network that turns images into the statistics that heads are fitted to."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.data.images import Preprocessing

FILES = (".onnx", ".pt2")
"""Endings of files that are eyes."""
TIMM = "timm:"
"""How the names of networks of timm begin."""
PREPROCESSOR = "preprocessor_config.json"
"""The file of the Hub that says how a network sees images."""


class Eye(ABC):
    """A fixed network that describes images in [0, 1], (B, 3, size, size), by D numbers.

    These are the mean and the standard deviation over positions of the channels of its stages.
    """

    name: str
    """What :func:`candid.models.photo.opening.open_eye` takes."""
    size: int
    sha256: str
    """Of the weights."""
    licence: str = "unknown"
    source: str = "unknown"
    groups: tuple[int, ...]
    """How many numbers each group has: means of the first stage, their standard deviations, ..."""
    border: int = 0
    """Pixels that its own classifier does not see of an image; photo models see the whole centre square."""

    @property
    def dimensions(self) -> int:
        """The number of statistics, D."""
        return sum(self.groups)

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes an image that it takes: the whole centre square, scaled to its size."""
        return Preprocessing(3, self.size, self.size)

    @abstractmethod
    def statistics(self, images: Array) -> Array:
        """Return the mean and standard deviation of each channel of each stage, (B, D)."""

    def maps(self, images: Array) -> list[Array]:
        """Return what the statistics come from: maps (B, C, h, w), and features without places (B, C)."""
        raise CandidError(f"The eye '{self.name}' gives no maps, so there are no heatmaps through it.")


class JoinedEyes(Eye):
    """Several eyes: their statistics one after the other. Each sees the centre square at its own size."""

    def __init__(self, eyes: Sequence[Eye]) -> None:
        self.eyes = tuple(eyes)
        self.name = "+".join(eye.name for eye in eyes)
        self.size = max(eye.size for eye in eyes)
        self.sha256 = "+".join(eye.sha256 for eye in eyes)
        self.licence = ", ".join(dict.fromkeys(eye.licence for eye in eyes))
        self.source = ", ".join(dict.fromkeys(eye.source for eye in eyes))
        self.groups = tuple(group for eye in eyes for group in eye.groups)

    def statistics(self, images: Array) -> Array:
        """Return the statistics of all eyes, (B, D)."""
        return np.concatenate([eye.statistics(at_size(images, eye.size)) for eye in self.eyes], 1)

    def maps(self, images: Array) -> list[Array]:
        """Return the maps of all stages of all eyes."""
        return [stage for eye in self.eyes for stage in eye.maps(at_size(images, eye.size))]


def at_size(images: Array, size: int) -> Array:
    """Return images at ``size`` x ``size`` pixels."""
    if images.shape[-1] == size:
        return images
    from PIL import Image

    channels = images.astype(np.float32, copy=False).reshape(-1, *images.shape[2:])
    resized = [
        np.asarray(Image.fromarray(each).resize((size, size), Image.Resampling.BICUBIC)) for each in channels
    ]
    return np.stack(resized).reshape(*images.shape[:2], size, size).clip(0, 1)


class SoftmaxEye(Eye):
    """A trained classifier: an eye with logits. Its statistics are the features that these come from."""

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    metadata: dict[str, Any]
    """How it was trained."""

    @abstractmethod
    def logits_and_features(self, images: Array) -> tuple[Array, Array]:
        """Return logits (B, M) and features (B, F) of images in [0, 1]."""

    def statistics(self, images: Array) -> Array:
        """Return the features, (B, F)."""
        return self.logits_and_features(images)[1]

    def last_layer(self) -> tuple[Array, Array] | None:
        """Return weights (M, F) and biases (M,), if logits are linear in the mean of :meth:`maps`."""
        return None

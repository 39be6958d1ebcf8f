"""What a name means: the eye of a photo model, a softmax classifier to adopt, a tree of classes."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError, did_you_mean, require_extra
from candid._support.numbers import Array
from candid._support.options import checked_names
from candid.data import class_names as imagenet
from candid.data.formats import kinds_above
from candid.data.images import Preprocessing, path_of
from candid.models.checkpoint import is_bundled, named_model
from candid.models.photo.efficientnet import PackagedEye, package_folder, read_weights, weights_file
from candid.models.photo.eye import FILES, TIMM, Eye, JoinedEyes, SoftmaxEye
from candid.models.photo.eye_files import FileEye, OnnxEye, described, hub_eye
from candid.models.photo.eyes import EYES, EyeInfo
from candid.models.zoo import HUB
from candid.trust.tree import Tree

EARLY = 2
"""Stages of an eye whose statistics are features, too."""


class PackagedSoftmax(SoftmaxEye):
    """An EfficientNet-Lite with its classifier of the 1000 classes of ImageNet.

    Its features are those that the classifier reads, and the statistics of its two earliest stages, which
    show what the classifier has learned to ignore: textures and colours that no photo of ImageNet has.

    >>> eye = PackagedSoftmax(EYES["lite0"])
    >>> eye.class_names[1], eye.groups
    ('goldfish', (1280, 384))
    """

    def __init__(self, info: EyeInfo, class_names: Sequence[str] | None = None) -> None:
        self.eye = PackagedEye(info)
        self.name, self.size, self.sha256 = info.name, info.size, info.sha256
        self.licence, self.source, self.border = info.licence, info.source, info.border
        self.image_shape = (3, info.size, info.size)
        self.metadata = {"training": {"config": {"crop": "none"}}, "source": info.source}
        weights = read_weights(weights_file(info))
        self._layer = weights["_fc.weight"], weights["_fc.bias"]
        if class_names is None:
            class_names = tuple(imagenet.names().values())
        self.class_names = checked_names(class_names, len(self._layer[1]))
        self.groups = (self._layer[0].shape[1], sum(self.eye.groups[: 2 * EARLY]))

    def logits_and_features(self, images: Array) -> tuple[Array, Array]:
        """Return the logits; the mean-pooled features that they are linear in, and early statistics."""
        statistics, pooled = self.eye.statistics_and_pooled(images)
        weight, bias = self.last_layer()
        return pooled @ weight.T + bias, np.concatenate((pooled, statistics[:, : self.groups[1]]), 1)

    def maps(self, images: Array) -> list[Array]:
        """Return the last maps, whose mean the features are."""
        return [self.eye.last_maps(images)]

    def last_layer(self) -> tuple[Array, Array]:
        """Return the weights of the classifier."""
        return self._layer


class FileSoftmax(SoftmaxEye):
    """A classifier in an ONNX or ``.pt2`` file, which takes images in [0, 1].

    Its logits are the output that is called ``logits``, or else the first one of the shape (B, M). All other
    outputs are features; of maps (B, C, h, w) they are the means and standard deviations. Without others,
    the logits are the features.
    """

    def __init__(self, given: Path | OnnxEye, class_names: Sequence[str] | None = None) -> None:
        self.eye: FileEye
        path = given.path if isinstance(given, OnnxEye) else given
        if isinstance(given, OnnxEye):
            self.eye = given
        elif path.suffix == ".onnx":
            self.eye = OnnxEye(path)
        else:
            require_extra("torch", "paper", f"The classifier '{path}'")
            from candid.models.photo.torch_eyes import ExportedEye

            self.eye = ExportedEye(path)
        self.name, self.size, self.sha256 = self.eye.name, self.eye.size, self.eye.sha256
        self.licence, self.source = self.eye.licence, self.eye.source
        self.image_shape, self.border = (3, self.size, self.size), self.eye.preprocessing.border
        self.metadata = {"training": {"config": {"crop": "none"}}}
        outputs = self.eye.outputs(np.zeros((2, *self.image_shape), np.float32))
        flat = [number for number, each in enumerate(outputs) if each.ndim == 2 and each.shape[1] > 1]
        if not flat:
            raise CandidError(
                f"'{path}' can't be adopted: it has no output of the shape (B, classes) with logits."
            )
        names = [name.removeprefix("candid_") for name in self.eye.output_names]  # of changed graphs
        self.logits_number = names.index("logits") if "logits" in names else flat[0]
        if self.logits_number not in flat:
            raise CandidError(
                f"'{path}' can't be adopted: its output 'logits' has the shape "
                f"{tuple(outputs[self.logits_number].shape)} for 2 images instead of (2, classes)."
            )
        named = self.eye.metadata.get("class_names")
        if class_names is None and named is not None:
            class_names = json.loads(named)
        elif class_names is None and isinstance(self.eye, OnnxEye) and self.eye.input is not None:
            class_names = self.eye.input.labels or None
        self.class_names = checked_names(class_names, outputs[self.logits_number].shape[1])
        self.groups = (self._divided(outputs)[1].shape[1],)

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes an image that it takes."""
        return self.eye.preprocessing

    def logits_and_features(self, images: Array) -> tuple[Array, Array]:
        """Return the logits, and all other outputs as features."""
        return self._divided(self.eye.outputs(images))

    def _divided(self, outputs: list[Array]) -> tuple[Array, Array]:
        logits = outputs[self.logits_number]
        rest = [output for output in outputs if output is not logits]
        return logits, described(rest) if rest else logits


def open_softmax(given: Any, class_names: Sequence[str] | None = None, download: bool = True) -> SoftmaxEye:
    """Return the classifier that ``given`` means.

    Args:
        given: an eye of :data:`~candid.models.photo.eyes.EYES`, which brings its classifier; an ONNX or
            ``.pt2`` file; ``hf:OWNER/NAME``; a ResNet of candid, its folder or name; or a
            :class:`~candid.models.photo.torch_eyes.ModuleSoftmax`.
        class_names: the names of the classes of a file that does not have them.
        download: whether a network of the Hugging Face Hub may be downloaded.

    Raises:
        CandidError: if there is no such classifier, or if it has no logits.

    Example:
        >>> len(open_softmax("lite0").class_names)
        1000
    """
    if isinstance(given, SoftmaxEye):
        return given
    if not isinstance(given, str | os.PathLike):
        require_extra("torch", "paper", "A network of your own")
        from candid.models.photo.torch_eyes import module_softmax

        return module_softmax(given)
    name = str(given)
    if name.startswith(HUB):
        return FileSoftmax(hub_eye(name, download), class_names)
    path = path_of(name)
    if path.suffix in FILES:
        return FileSoftmax(path, class_names)
    if name in EYES:
        return PackagedSoftmax(EYES[name], class_names)
    classifier = _resnet(name)
    if class_names is not None:
        classifier.class_names = checked_names(class_names, len(classifier.class_names))
    return classifier


def _resnet(name: str) -> SoftmaxEye:
    """Return a ResNet that is bundled or in a folder."""
    model: Any = named_model(name)
    if model is None:
        raise CandidError(
            f"There is no classifier '{name}': {did_you_mean(name, EYES)} Or name an ONNX or .pt2 file with "
            "logits, or the folder of a ResNet."
        )
    if model.density_of is not None:
        raise CandidError(
            f"'{name}' can't be adopted: a {model.kind} model has a density already. Adopt a ResNet."
        )
    from candid.models.photo.torch_eyes import ResNetSoftmax

    return ResNetSoftmax(model, absolute(name))


def open_eye(name: str, download: bool = True) -> Eye:
    """Return the eye that ``name`` means.

    Args:
        name: an eye of :data:`~candid.models.photo.eyes.EYES`; ``hf:OWNER/NAME[@REVISION][:FILE]``;
            ``timm:NAME`` if timm is installed; an ONNX or ``.pt2`` file; the folder or name of a ResNet of
            candid; or several of these, joined by ``+``.
        download: whether a network of the Hugging Face Hub may be downloaded.

    Raises:
        CandidError: if there is no such eye, or if its weights are missing or changed.

    Example:
        >>> open_eye("lite0").dimensions
        1408
    """
    if "+" in name and not Path(name).exists():
        return JoinedEyes([open_eye(part, download) for part in name.split("+")])
    if name in EYES:
        package_folder(EYES[name])  # says at once if it is not installed
        return PackagedEye(EYES[name])
    if name.startswith(HUB):
        return hub_eye(name, download)
    path = Path(name).expanduser()
    if path.suffix == ".onnx":
        return OnnxEye(path)
    model = None if name.startswith(TIMM) or path.suffix in FILES else named_model(name)
    if model is None and not name.startswith(TIMM) and path.suffix not in FILES:
        raise CandidError(
            f"There is no eye '{name}': {did_you_mean(name, EYES)} Or name an ONNX or .pt2 file, or a folder "
            "with a ResNet."
        )
    require_extra("torch", "paper", f"The eye '{name}'")
    from candid.models.photo import torch_eyes

    if path.suffix in FILES:
        return torch_eyes.ExportedEye(path)
    return torch_eyes.timm_eye(name) if model is None else torch_eyes.resnet_eye(model, absolute(name))


def absolute(name: str) -> str:
    """Return the whole path if ``name`` is a file or folder, so that it can be found from anywhere."""
    return str(Path(name).resolve()) if Path(name).exists() and not is_bundled(name) else name


def moved(name: str, folder: Path | None) -> str:
    """Return the name of an eye; files that are gone are replaced by those of their name in ``folder``."""
    if folder is None or Path(name).exists():
        return name
    parts = []
    for part in name.split("+"):
        near = folder / Path(part).name
        gone = Path(part).suffix in FILES and not Path(part).exists()
        parts.append(str(near) if gone and near.is_file() else part)
    return "+".join(parts)


def trained_eye(config: Any, folder: Path | None) -> Eye:
    """Return the eye that a model in ``folder`` was trained with, as its configuration names it."""
    eye = open_eye(moved(config.eye, folder), download=False)
    if eye.sha256 != config.eye_sha256 or eye.groups != config.groups:
        raise CandidError(
            f"The eye '{config.eye}' has other weights than the one that this model was trained with: "
            "restore it, or train the model again."
        )
    return eye


def tree_of(spec: str | None, class_names: Sequence[str], data: str = "") -> Tree | None:
    """Return the tree of classes that ``--tree`` names: "folders" of ``data``, "imagenet", or a CSV file.

    >>> from candid.models import checkpoint
    >>> tree_of("imagenet", checkpoint.load("everyday").class_names).names[-1]
    'fungus'
    """
    if spec is None:
        return None
    if spec == "folders":
        above, shown = kinds_above(data)
        return Tree.of(above, class_names, shown)
    if spec != "imagenet":
        return Tree.read(spec, class_names)
    if tuple(class_names) != tuple(imagenet.names().values()):
        raise CandidError(
            "--tree imagenet is for the 1000 classes of ImageNet, in their order: give a CSV file."
        )
    return Tree.from_dict(json.loads(imagenet.IMAGENET_TREE.read_text(encoding="utf-8")), len(class_names))

"""Softmax classifiers that can be adopted: logits and the features that they come from."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError, did_you_mean
from candid._support.files import digest
from candid.data import imagenet
from candid.data.images import path_of
from candid.models.eyes import FILES, LOADERS, absolute
from candid.models.eyes.efficientnet import read_weights
from candid.models.eyes.eye import Eye, PackagedEye, own_copy
from candid.models.eyes.files import ExportedEye, FileEye, OnnxEye, described
from candid.models.eyes.registry import EYES, EyeInfo
from candid.models.flow.config import checked_names
from candid.models.resnet import ResNet

EARLY = 2
"""Stages of an eye whose statistics are features, too."""


class SoftmaxEye(Eye):
    """A trained classifier: an eye with logits. Its statistics are the features that these come from."""

    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    metadata: dict[str, Any]
    """How it was trained."""

    @abstractmethod
    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, M) and features (B, F) of images in [0, 1]."""

    def statistics(self, images: Tensor) -> Tensor:
        """Return the features, (B, F)."""
        return self.logits_and_features(images)[1]

    def last_layer(self) -> tuple[Tensor, Tensor] | None:
        """Return weights (M, F) and biases (M,), if logits are linear in the mean of :meth:`maps`."""
        return None


class PackagedSoftmax(SoftmaxEye):
    """An EfficientNet-Lite with its classifier of the 1000 classes of ImageNet.

    Its features are those that the classifier reads, and the statistics of its two earliest stages, which
    show what the classifier has learned to ignore: textures and colours that no photo of ImageNet has.

    >>> eye = PackagedSoftmax(EYES["lite0"])
    >>> eye.class_names[1], eye.groups
    ('goldfish', (1280, 384))
    """

    def __init__(self, info: EyeInfo) -> None:
        self.eye = PackagedEye(info)
        self.name, self.size, self.sha256 = info.name, info.size, info.sha256
        self.licence, self.source, self.border = info.licence, info.source, info.border
        self.image_shape = (3, info.size, info.size)
        self.class_names = tuple(imagenet.names().values())
        self.metadata = {"training": {"config": {"crop": "none"}}, "source": info.source}
        weights = read_weights(info.weights_file())
        self._layer = weights["_fc.weight"], weights["_fc.bias"]
        self.groups = (self._layer[0].shape[1], sum(self.eye.groups[: 2 * EARLY]))

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits; the mean-pooled features that they are linear in, and early statistics."""
        statistics, pooled = self.eye.statistics_and_pooled(images)
        weight, bias = self.last_layer()
        logits = F.linear(pooled, weight.to(pooled), bias.to(pooled))
        return logits, torch.cat((pooled, statistics[:, : self.groups[1]]), 1)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the last maps, whose mean the features are."""
        return [self.eye.last_maps(images)]

    def last_layer(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the classifier."""
        return self._layer


class ResNetSoftmax(SoftmaxEye):
    """A ResNet of candid."""

    def __init__(self, model: ResNet, name: str) -> None:
        self.model, self.name, self.sha256 = model.eval(), name, model.fingerprint()
        self.image_shape, self.size = model.image_shape, model.image_shape[1]
        self.class_names, self.groups = model.class_names, (model.feature_size,)
        self.metadata = dict(model.metadata)

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the mean-pooled features that they are linear in."""
        outputs = self.model.to(images.device, images.dtype).outputs(images)
        return outputs.logits, outputs.features

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the last maps, whose mean the features are."""
        return [self.model.to(images.device, images.dtype).feature_maps(images)]

    def last_layer(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the last layer."""
        return self.model.fc.weight.detach(), self.model.fc.bias.detach()


class FileSoftmax(SoftmaxEye):
    """A classifier in an ONNX or ``.pt2`` file, which takes images in [0, 1].

    Its logits are the output that is called ``logits``, or else the first one of the shape (B, M). All other
    outputs are features; of maps (B, C, h, w) they are the means and standard deviations. Without others,
    the logits are the features.
    """

    def __init__(self, path: Path, class_names: Sequence[str] | None = None) -> None:
        self.eye: FileEye = OnnxEye(path) if path.suffix == ".onnx" else ExportedEye(path)
        self.name, self.size, self.sha256 = self.eye.name, self.eye.size, self.eye.sha256
        self.differentiable = self.eye.differentiable  # type: ignore[misc]
        self.image_shape = (3, self.size, self.size)
        self.metadata = {"training": {"config": {"crop": "none"}}}
        with torch.no_grad():
            outputs = self.eye._outputs(torch.zeros(2, *self.image_shape))
        flat = [number for number, each in enumerate(outputs) if each.ndim == 2 and each.shape[1] > 1]
        if not flat:
            raise CandidError(
                f"'{path}' can't be adopted: it has no output of the shape (B, classes) with logits."
            )
        names = self.eye.output_names
        self._logits = names.index("logits") if "logits" in names else flat[0]
        if self._logits not in flat:
            raise CandidError(
                f"'{path}' can't be adopted: its output 'logits' has the shape "
                f"{tuple(outputs[self._logits].shape)} for 2 images instead of (2, classes)."
            )
        named = self.eye.metadata.get("class_names")
        if class_names is None and named is not None:
            class_names = json.loads(named)
        self.class_names = checked_names(class_names, outputs[self._logits].shape[1])
        self.groups = (self.logits_and_features(torch.zeros(1, *self.image_shape))[1].shape[1],)

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and all other outputs as features."""
        outputs = self.eye._outputs(images)
        logits = outputs.pop(self._logits)
        return logits, described(outputs) if outputs else logits


class ModuleSoftmax(SoftmaxEye):
    """Any ``nn.Module`` that returns logits.

    Its features are the input of the linear layer whose output the logits are; without one, the logits.

    Args:
        module: the network, which is copied; it gets images in [0, 1], or ``(image - mean) / std`` if these
            are given.
        size: height and width of the images.
        class_names: one name per class; the class numbers if None.
        mean: subtracted from each channel.
        std: divides each channel.
        border: pixels that are cut off an image: 32 for the usual 'resize to 256, crop 224'.
        name: what people call it.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> ModuleSoftmax(network, size=8, class_names=("cat", "dog")).groups
    (5,)
    """

    def __init__(
        self,
        module: nn.Module,
        size: int,
        class_names: Sequence[str] | None = None,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        border: int = 0,
        name: str = "module",
    ) -> None:
        self.module = own_copy(module)
        self.name, self.size, self.border = name, size, border
        self.image_shape = (3, size, size)
        self.metadata = {"training": {"config": {"crop": "none"}}}
        self.mean, self.std = (torch.tensor(each)[:, None, None] for each in (mean, std))
        self.sha256 = digest(list(mean), list(std), border, *module.state_dict().values()).hexdigest()
        with torch.no_grad():
            logits, features = self.logits_and_features(torch.zeros(2, *self.image_shape))
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise CandidError(
                f"The network can't be adopted: it returns {tuple(logits.shape)} for 2 images instead of "
                "logits (2, classes)."
            )
        self.class_names = checked_names(class_names, logits.shape[1])
        self.groups = (features.shape[1],)

    def logits_and_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the input of the layer that they come from."""
        self.module.to(images.device, images.dtype)
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
            for layer in self.module.modules()
            if isinstance(layer, nn.Linear)
        ]
        try:
            mean, std = (each.to(images) for each in (self.mean, self.std))
            logits: Tensor = self.module((images - mean) / std)
        finally:
            for hook in hooks:
                hook.remove()
        features = next((before for before, after in seen if after is logits and before.ndim == 2), logits)
        return logits, features


def open_softmax(given: Any, class_names: Sequence[str] | None = None) -> SoftmaxEye:
    """Return the classifier that ``given`` means.

    Args:
        given: an eye of :data:`~candid.models.eyes.registry.EYES`, which brings its classifier; an ONNX or
            ``.pt2`` file; a ResNet of candid, its folder or name; or a :class:`ModuleSoftmax`.
        class_names: the names of the classes of a file that does not have them.

    Raises:
        CandidError: if there is no such classifier, or if it has no logits.

    Example:
        >>> len(open_softmax("lite0").class_names)
        1000
    """
    if isinstance(given, ResNet):
        given = ResNetSoftmax(own_copy(given), "module")
    if isinstance(given, SoftmaxEye):
        return given
    if isinstance(given, nn.Module):
        raise CandidError(
            f"A {type(given).__name__} says nothing about its images: give "
            "candid.models.heads.softmax.ModuleSoftmax(network, size=224, class_names=[...])."
        )
    name = str(given)
    path = path_of(name)
    if path.suffix in FILES:
        return FileSoftmax(path, class_names)
    found: SoftmaxEye = PackagedSoftmax(EYES[name]) if name in EYES else _resnet(name)
    if class_names is not None:
        found.class_names = checked_names(class_names, len(found.class_names))
    return found


def _resnet(name: str) -> ResNetSoftmax:
    """Return a ResNet that is bundled or in a folder."""
    model = next((found for load in LOADERS if (found := load(name))), None)
    if model is None:
        raise CandidError(
            f"There is no classifier '{name}': {did_you_mean(name, EYES)} Or name an ONNX or .pt2 file with "
            "logits, or the folder of a ResNet."
        )
    if not isinstance(model, ResNet):
        raise CandidError(
            f"'{name}' can't be adopted: a {model.kind} model has a density already. Adopt a ResNet."
        )
    return ResNetSoftmax(model, absolute(name))

"""Eyes and classifiers that torch runs: networks of files, of timm, of candid and of the user's own."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid._support.numbers import Array, digest
from candid._support.options import checked_names
from candid.models.flow.network import array_of
from candid.models.photo.efficientnet import SCALE, SHIFT, STD_EPSILON, Conv, Network
from candid.models.photo.eye import TIMM, Eye, SoftmaxEye
from candid.models.photo.eye_files import FileEye
from candid.models.resnet import ResNet

Module = TypeVar("Module", bound=nn.Module)
STAGES = 4
"""How many of the last stages of a network of timm are used."""
LARGE = 400
"""Pixels above which transformers of timm get smaller images."""


class EfficientNetLite(nn.Module):
    """The network of a :class:`~candid.models.photo.efficientnet.PackagedEye`: it returns its statistics."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.info, self.layout = network.info, network.layout
        for conv, parts in network.convolutions.items():
            for part, values in zip(("weight", "bias"), parts, strict=True):
                self.register_buffer(f"{_key(conv)}_{part}", torch.from_numpy(values))

    def forward(self, x: Tensor) -> Tensor:
        return statistics(self.maps(x))

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the maps of the stages, before any activation, each (B, C, h, w)."""
        x = self._conv((x * 255 - SHIFT) / SCALE, self.layout.stem)
        stages = []
        for number, block in enumerate(self.layout.blocks):
            start = x
            for conv in block.convs:
                x = self._conv(x, conv)
            x = x + start if block.residual else x
            if number in self.info.stages:
                stages.append(x)
        return stages

    def pooled(self, maps: list[Tensor]) -> Tensor:
        """Return the mean-pooled features that the network's own classifier reads, (B, 1280)."""
        return self.last_maps(maps).mean((2, 3))

    def last_maps(self, maps: list[Tensor]) -> Tensor:
        """Return the last maps of the network from those of its stages, (B, 1280, h, w)."""
        return self._conv(maps[-1], self.layout.head)

    def _conv(self, x: Tensor, conv: Conv) -> Tensor:
        weight, bias = (self.get_buffer(f"{_key(conv)}_{part}") for part in ("weight", "bias"))
        kernel = weight.shape[-1]
        across, down = (_same(side, kernel, conv.stride) for side in (x.shape[3], x.shape[2]))
        x = F.conv2d(F.pad(x, (*across, *down)), weight, bias, conv.stride, groups=conv.groups)
        return F.relu6(x) if conv.activation else x


def _key(conv: Conv) -> str:
    return conv.name.strip("_").replace(".", "_")


def _same(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after a side: TensorFlow's SAME, the odd pixel comes at the end."""
    total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
    return total // 2, total - total // 2


def statistics(maps: list[Tensor]) -> Tensor:
    """Return the statistics of :func:`candid.models.photo.efficientnet.statistics`."""
    parts = []
    for stage in maps:
        variance, mean = torch.var_mean(stage, (2, 3), correction=0)
        parts += [mean, (variance + STD_EPSILON).sqrt()]
    return torch.cat(parts, 1)


def described(outputs: list[Tensor]) -> Tensor:
    return torch.cat([statistics([each]) if each.ndim == 4 else each for each in outputs], 1)


def own_copy(module: Module) -> Module:
    """Return a copy of a network for inference: the user's own stays in its mode and on its device."""
    try:
        return copy.deepcopy(module).eval().requires_grad_(False)
    except Exception as error:  # modules may hold anything
        raise CandidError(f"The network can't be copied: {error}") from error


def placed(module: Module, x: Tensor) -> Module:
    """Return a network where the images are, in their type; exports need one that is there untouched."""
    held = (*module.parameters(), *module.buffers())
    there = all(
        each.device == x.device and (each.dtype == x.dtype or not each.is_floating_point()) for each in held
    )
    return module if there else module.to(x.device, x.dtype)


def tensor_for(module: nn.Module, images: Array) -> Tensor:
    """Return images as a tensor where the weights of ``module`` are."""
    weights = next((each for each in (*module.parameters(), *module.buffers())), torch.empty(0))
    return torch.as_tensor(images).to(weights.device)


class TorchEye(Eye):
    """An eye that torch runs."""

    module: nn.Module

    @abstractmethod
    def tensor_maps(self, x: Tensor) -> list[Tensor]:
        """Return the maps of the stages, which gradients can follow."""

    def tensor_statistics(self, x: Tensor) -> Tensor:
        """Return the statistics of images, (B, D), which gradients can follow."""
        return statistics(self.tensor_maps(x))

    @torch.no_grad()
    def statistics(self, images: Array) -> Array:
        """Return the statistics of the layers' maps, (B, D)."""
        return array_of(self.tensor_statistics(self._tensor(images)))

    @torch.no_grad()
    def maps(self, images: Array) -> list[Array]:
        """Return the outputs of the layers."""
        return [array_of(each) for each in self.tensor_maps(self._tensor(images))]

    def _tensor(self, images: Array) -> Tensor:
        return tensor_for(self.module, images)


class ModuleEye(TorchEye):
    """Any ``nn.Module``, read at the layers that are named.

    Args:
        module: the network, which is copied; it gets images in [0, 1], or ``(image - mean) / std`` if these
            are given.
        layers: names of submodules whose outputs (B, C, h, w) are the stages.
        size: height and width of the images.
        name: what people call it.
        mean: subtracted from each channel.
        std: divides each channel.

    >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 3))
    >>> ModuleEye(network, ["0", "2"], size=32).statistics(np.zeros((2, 3, 32, 32), np.float32)).shape
    (2, 24)
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[str],
        size: int,
        name: str = "module",
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        self.name, self.size, self.layers = name, size, tuple(layers)
        self.module = own_copy(module)
        modules = dict(module.named_modules())
        for layer in layers:
            if layer not in modules:
                raise CandidError(
                    f"The network has no layer '{layer}': it has {', '.join(list(modules)[1:9])} …"
                )
        if not layers:
            raise CandidError("Name at least one layer of the network whose maps are kept.")
        self.mean, self.std = (torch.tensor(each)[:, None, None] for each in (mean, std))
        self.sha256 = digest(
            list(self.layers), list(mean), list(std), *module.state_dict().values()
        ).hexdigest()
        maps = self.maps(np.zeros((1, 3, size, size), np.float32))
        self.groups = tuple(stage.shape[1] for stage in maps for _ in range(2))

    def tensor_maps(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the layers."""
        placed(self.module, x)
        outputs: dict[str, Tensor] = {}
        modules = dict(self.module.named_modules())
        hooks = [
            modules[layer].register_forward_hook(
                lambda module, inputs, output, layer=layer: outputs.__setitem__(layer, output)
            )
            for layer in self.layers
        ]
        try:
            self.module((x - self.mean.to(x)) / self.std.to(x))
        finally:
            for hook in hooks:
                hook.remove()
        for layer in self.layers:
            if layer not in outputs or outputs[layer].ndim != 4:
                raise CandidError(f"The layer '{layer}' gives no maps (B, C, h, w): name another one.")
        return [outputs[layer] for layer in self.layers]


class ExportedEye(FileEye):
    """A program that ``torch.export.save`` wrote (``.pt2``)."""

    def _open(self) -> None:
        try:
            program = torch.export.load(self.path)
            (shape,) = [
                tuple(value.shape)
                for node in program.graph.nodes
                if node.name in program.graph_signature.user_inputs
                for value in [node.meta["val"]]
            ]
            if isinstance(shape[0], int):
                raise ValueError(f"its batch is fixed at {shape[0]}, export it with a dynamic one.")
            self.size = int(shape[3])
            self.module = program.module()
        except Exception as error:  # torch raises whatever it likes for a foreign file
            raise CandidError(
                f"'{self.path}' is not a program of torch.export that takes one batch of images: {error}"
            ) from error

    def tensor_outputs(self, x: Tensor) -> list[Tensor]:
        """Return all outputs of the network, which gradients can follow."""
        outputs = self.module(x)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def tensor_statistics(self, x: Tensor) -> Tensor:
        """Return what describes the images, (B, D), which gradients can follow."""
        return described(self.tensor_outputs(x))

    @torch.no_grad()
    def outputs(self, images: Array) -> list[Array]:
        """Return all outputs of the network."""
        return [array_of(each) for each in self.tensor_outputs(torch.as_tensor(images))]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "module"}


class TimmEye(TorchEye):
    """A network of timm: the maps of its last four stages or blocks, and its pooled features.

    It sees the whole centre square at its own size, normalized as in its training.

    Args:
        network: what ``timm.create_model`` returned.
        name: what people call it.
        size: height and width of the images.
        mean: subtracted from each channel.
        std: divides each channel.
    """

    def __init__(
        self, network: nn.Module, name: str, size: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.name, self.size, self.module = name, size, own_copy(network)
        self.mean, self.std = (torch.tensor(each)[:, None, None] for each in (mean, std))
        weights = network.state_dict().values()
        self.sha256 = digest("timm maps", size, list(mean), list(std), *weights).hexdigest()
        with torch.no_grad():
            pooled, *maps = self._outputs(torch.zeros(1, 3, size, size))
        info: Any = self.module.feature_info
        stages = [(each["num_chs"], each["reduction"]) for each in list(info)[-STAGES:]]
        wanted = [(channels, *([size // int(by)] * 2)) for channels, by in stages]
        shapes = [tuple(each.shape[1:]) for each in maps]
        if pooled.ndim != 2 or shapes != wanted:
            raise CandidError(
                f"'{name}' can't be an eye: its maps are {shapes}, but timm says that they are {wanted} "
                "(channels, height, width)."
            )
        self.groups = (pooled.shape[1], *(each.shape[1] for each in maps for _ in range(2)))

    def _outputs(self, x: Tensor) -> list[Tensor]:
        """Return the pooled features (B, C) and the maps (B, C, h, w)."""
        network: Any = placed(self.module, x)
        x = (x - self.mean.to(x)) / self.std.to(x)
        last, maps = network.forward_intermediates(x, indices=STAGES, output_fmt="NCHW")
        return [network.forward_head(last, pre_logits=True), *maps]

    def tensor_maps(self, x: Tensor) -> list[Tensor]:
        """Return the pooled features and the maps of the stages."""
        return self._outputs(x)

    def tensor_statistics(self, x: Tensor) -> Tensor:
        """Return the pooled features, and the statistics of the maps, (B, D)."""
        return described(self._outputs(x))


def timm_eye(name: str) -> TimmEye:
    """Return a network of timm with its published weights.

    A transformer whose images have more than 400 pixels gets images of 224: its positions are resized.
    """
    try:
        import timm  # type: ignore[import-not-found]
    except ImportError as error:
        raise CandidError(f"The eye '{name}' needs timm: get it with 'pip install timm'.") from error
    wanted, options = name.removeprefix(TIMM), {}
    try:
        network = timm.create_model(wanted, pretrained=False)
        size = timm.data.resolve_model_data_config(network)["input_size"][-1]
        if size > LARGE and hasattr(network, "pos_embed"):
            options, size = {"img_size": 224}, 224
        network = timm.create_model(wanted, pretrained=True, **options)
        settings = timm.data.resolve_model_data_config(network)
    except Exception as error:  # an unknown name, no weights, no network
        raise CandidError(f"timm can't open '{wanted}': {error}") from error
    if not hasattr(network, "forward_intermediates") or not hasattr(network, "feature_info"):
        raise CandidError(f"'{name}' can't be an eye: timm gives no maps of its stages.")
    return TimmEye(network, name, size, settings["mean"], settings["std"])


def resnet_eye(model: Any, name: str) -> ModuleEye:
    """Return the eye that a loaded ResNet is."""
    if not isinstance(model, ResNet) or model.image_shape[0] != 3 or len({*model.image_shape[1:]}) > 1:
        raise CandidError(f"'{name}' can't be an eye: it must be a ResNet that takes square colour images.")
    layers = [f"layer{stage}" for stage in range(1, len(model.config.blocks) + 1)][-4:]
    return ModuleEye(model, layers, model.image_shape[1], name)


class TorchSoftmax(SoftmaxEye):
    """A classifier that torch runs."""

    module: nn.Module

    @abstractmethod
    def tensor_logits_and_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, M) and features (B, F) that gradients can follow."""

    @torch.no_grad()
    def logits_and_features(self, images: Array) -> tuple[Array, Array]:
        """Return logits (B, M) and features (B, F) of images in [0, 1]."""
        logits, features = self.tensor_logits_and_features(tensor_for(self.module, images))
        return array_of(logits), array_of(features)


class ResNetSoftmax(TorchSoftmax):
    """A ResNet of candid. Its features are the mean-pooled ones that the logits are linear in."""

    module: ResNet

    def __init__(self, model: ResNet, name: str) -> None:
        self.module, self.name, self.sha256 = model.eval(), name, model.fingerprint()
        self.image_shape, self.size = model.image_shape, model.image_shape[1]
        self.class_names, self.groups = model.class_names, (model.feature_size,)
        self.metadata = dict(model.metadata)

    def tensor_logits_and_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the features."""
        outputs = placed(self.module, x).tensor_outputs(x)
        return outputs.logits, outputs.features

    @torch.no_grad()
    def maps(self, images: Array) -> list[Array]:
        """Return the last maps, whose mean the features are."""
        x = tensor_for(self.module, images)
        return [array_of(placed(self.module, x).feature_maps(x))]

    def last_layer(self) -> tuple[Array, Array]:
        """Return the weights of the last layer."""
        return array_of(self.module.fc.weight), array_of(self.module.fc.bias)


class ModuleSoftmax(TorchSoftmax):
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
        logits, features = self.logits_and_features(np.zeros((2, *self.image_shape), np.float32))
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise CandidError(
                f"The network can't be adopted: it returns {tuple(logits.shape)} for 2 images instead of "
                "logits (2, classes)."
            )
        self.class_names = checked_names(class_names, logits.shape[1])
        self.groups = (features.shape[1],)

    def tensor_logits_and_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the input of the layer that they come from."""
        placed(self.module, x)
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
            for layer in self.module.modules()
            if isinstance(layer, nn.Linear)
        ]
        try:
            logits: Tensor = self.module((x - self.mean.to(x)) / self.std.to(x))
        finally:
            for hook in hooks:
                hook.remove()
        features = next((before for before, after in seen if after is logits and before.ndim == 2), logits)
        return logits, features


def module_softmax(network: Any) -> SoftmaxEye:
    """Return the classifier that a network given in Python is."""
    if isinstance(network, ResNet):
        return ResNetSoftmax(own_copy(network), "module")
    raise CandidError(
        f"A {type(network).__name__} says nothing about its images: give "
        "candid.ModuleSoftmax(network, size=224, class_names=[...])."
    )

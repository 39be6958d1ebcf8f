"""Importer of the ResNet weights that torchvision publishes, such as ``resnet50-0676ba61.pth``.

The file is a pickled state dictionary, read without running code from it. The layout is inferred
from shapes; every name and shape is checked. torchvision itself is not needed.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from candid.models.checkpoint import load_weights
from candid.models.flow.network import array_of
from candid.models.importers.released import foreign, read_dictionary
from candid.models.resnet import EXPANSION, ResNet, ResNetConfig

KIND = "a torchvision ResNet-50, 101 or 152"
COUNTER = ".num_batches_tracked"


def import_torchvision(path: str | os.PathLike[str], class_names: list[str] | None = None) -> ResNet:
    """Return the torchvision file ``path`` of a ResNet-50, 101 or 152 as a model in evaluation mode.

    Args:
        path: a file of weights, such as ``resnet50-0676ba61.pth``.
        class_names: one name per class; the class numbers if None.

    Returns:
        The model.

    Raises:
        CheckpointError: if the file is cut or holds another network.

    Example:
        >>> import_torchvision("resnet50-0676ba61.pth")
        Traceback (most recent call last):
        ...
        candid._support.errors.CheckpointError: There is no file 'resnet50-0676ba61.pth' to import.
    """
    source = Path(path)
    return build_torchvision(read_dictionary(source, KIND), source, class_names)


def build_torchvision(content: dict[Any, Any], source: Path, class_names: list[str] | None) -> ResNet:
    for name, tensor in content.items():
        if not isinstance(name, str) or not _is_plain(tensor):
            raise foreign(source, KIND, f"the entry '{name}' is no named tensor")
    if sum(tensor.nbytes for tensor in content.values()) > source.stat().st_size:
        raise foreign(source, KIND, "its tensors claim more numbers than the file holds")
    try:
        config = _infer_config(content)
    except ValueError as error:
        raise foreign(source, KIND, str(error).rstrip(".")) from error
    with torch.device("meta"):
        model = ResNet(config, class_names)
    state = {name: array_of(tensor) for name, tensor in content.items()}
    if not any(name.endswith(COUNTER) for name in state):  # older files have none
        state |= {name: np.array(0) for name in model.state_dict() if name.endswith(COUNTER)}
    load_weights(model, state, str(source))
    model.metadata = {"imported_from": source.name}
    return model


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _infer_config(state: dict[str, Tensor]) -> ResNetConfig:
    if _shape(state, "conv1.weight", 4)[1:] != (3, 7, 7):
        raise ValueError("its first convolution is not of 7 x 7 pixels with 3 colours")
    _shape(state, "layer1.0.conv1.weight", 4)
    blocks: list[int] = []
    widths: list[int] = []
    while f"layer{len(blocks) + 1}.0.conv1.weight" in state:
        layer = f"layer{len(blocks) + 1}"
        widths.append(_bottleneck_width(state, f"{layer}.0"))
        blocks.append(1)
        while f"{layer}.{blocks[-1]}.conv1.weight" in state:
            blocks[-1] += 1
    classes, _ = _shape(state, "fc.weight", 2)
    return ResNetConfig(classes=classes, blocks=tuple(blocks), widths=tuple(widths))


def _bottleneck_width(state: dict[str, Tensor], block: str) -> int:
    if f"{block}.conv3.weight" not in state:
        raise ValueError("its blocks have two convolutions, like those of ResNet-18 and 34, not three")
    width, channels, *_ = _shape(state, f"{block}.conv2.weight", 4)
    if channels != width:
        raise ValueError("its convolutions are in groups, like those of ResNeXt")
    channels = _shape(state, f"{block}.conv3.weight", 4)[0]
    if channels != EXPANSION * width:
        raise ValueError(f"'{block}' widens {width} channels to {channels}, like a wide ResNet's blocks")
    return width


def _shape(state: dict[str, Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    if name not in state or state[name].dim() != dimensions:
        raise ValueError(f"it has no tensor '{name}' with {dimensions} dimensions")
    return tuple(state[name].shape)

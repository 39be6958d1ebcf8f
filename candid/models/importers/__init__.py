"""Checkpoints of other projects as models."""

import os
from pathlib import Path

from candid.models.flow.classifier import GenerativeClassifier
from candid.models.importers import released, torchvision
from candid.models.resnet import ResNet


def import_any(
    path: str | os.PathLike[str], class_names: list[str] | None = None
) -> GenerativeClassifier | ResNet:
    """Return a released checkpoint or a torchvision file as a model; its content tells which it is."""
    source, either = Path(path), f"{released.KIND} or {torchvision.KIND}"
    content = released.read_dictionary(source, either)
    if "inn" in content:
        return released.build_released(content, source, class_names)
    if "conv1.weight" in content:
        return torchvision.build_torchvision(content, source, class_names)
    raise released.foreign(source, either, "it has neither 'inn' nor 'conv1.weight'")

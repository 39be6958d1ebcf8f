"""Generative image classifiers that can be trusted: exact p(image | class) from invertible networks."""

from candid.baseline import ResNet, ResNetConfig
from candid.checkpoint import load, load_any, save
from candid.classifier import GenerativeClassifier
from candid.errors import CandidError, CheckpointError, NonFiniteError
from candid.flow import FlowConfig
from candid.loss import information_bottleneck_loss
from candid.presets import PRESETS, ClassifierConfig
from candid.released import import_released
from candid.torchvision_weights import import_torchvision
from candid.version import __version__

__all__ = [
    "PRESETS",
    "CandidError",
    "CheckpointError",
    "ClassifierConfig",
    "FlowConfig",
    "GenerativeClassifier",
    "NonFiniteError",
    "ResNet",
    "ResNetConfig",
    "__version__",
    "import_released",
    "import_torchvision",
    "information_bottleneck_loss",
    "load",
    "load_any",
    "save",
]

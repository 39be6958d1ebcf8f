"""Generative image classifiers that can be trusted: exact p(image | class) from invertible networks."""

from importlib import import_module
from typing import TYPE_CHECKING

from candid.errors import CandidError, CheckpointError, NonFiniteError
from candid.version import __version__

if TYPE_CHECKING:
    from candid.baseline import ResNet, ResNetConfig
    from candid.checkpoint import load, load_any, save
    from candid.classifier import GenerativeClassifier
    from candid.flow import FlowConfig
    from candid.loss import information_bottleneck_loss
    from candid.presets import PRESETS, ClassifierConfig
    from candid.released import import_released
    from candid.torchvision_weights import import_torchvision

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

# These need torch, which takes seconds to import: they are imported when they are first used.
_LAZY = {
    "baseline": ("ResNet", "ResNetConfig"),
    "checkpoint": ("load", "load_any", "save"),
    "classifier": ("GenerativeClassifier",),
    "flow": ("FlowConfig",),
    "loss": ("information_bottleneck_loss",),
    "presets": ("PRESETS", "ClassifierConfig"),
    "released": ("import_released",),
    "torchvision_weights": ("import_torchvision",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would believe in every name

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return import_module(f"candid.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'candid' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"candid.{_HOME[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME, *_LAZY})

"""The named configurations of generative classifiers; they need no torch."""

from dataclasses import fields, replace
from typing import Any

from candid._support.errors import CandidError, did_you_mean
from candid.models.flow.config import ClassifierConfig, FlowConfig

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


PRESETS: dict[str, ClassifierConfig] = {}
"""The named configurations."""
RECIPE_OF_PRESET: dict[str, str] = {}
"""The recipe that each one is trained by, if no other is named."""


def register_preset(name: str, config: ClassifierConfig, recipe: str) -> None:
    """Add a preset: all it takes is one call in this file, and the recipe."""
    PRESETS[name], RECIPE_OF_PRESET[name] = config, recipe


register_preset(
    "imagenet",
    ClassifierConfig(
        FlowConfig(3, 224, 224, blocks=(3, 4, 6, 3), widths=(64, 128, 256, 512)),
        classes=1000,
        rank=128,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    recipe="imagenet",
)
register_preset(
    "tiny",
    ClassifierConfig(
        FlowConfig(3, 64, 64, blocks=(2, 3, 3), widths=(48, 64, 96), entry_width=32),
        classes=200,
        rank=32,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    recipe="tiny-imagenet",
)
register_preset(
    "cifar",
    ClassifierConfig(
        FlowConfig(3, 32, 32, blocks=(2, 3, 3), widths=(32, 64, 96), entry="none", clamp=2.0),
        classes=10,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
    ),
    recipe="cifar10-quick",
)
register_preset(
    "digits",
    ClassifierConfig(
        FlowConfig(
            1,
            8,
            8,
            blocks=(1, 2, 1),
            widths=(24, 48, 64),
            entry="none",
            pointwise_width=16,
            mixing="permutation",
        ),
        classes=10,
        mean=(0.3,),
        std=(0.38,),
    ),
    recipe="digits",
)


def preset(name: str, **changes: Any) -> ClassifierConfig:
    """Return the preset ``name`` with keys of its classifier or flow part changed.

    >>> preset("cifar", classes=100, rank=16, mixing="permutation").flow.mixing
    'permutation'
    """
    if name not in PRESETS:
        raise CandidError(f"There is no preset '{name}': {did_you_mean(name, PRESETS)}")
    config = PRESETS[name]
    own, flow = ({field.name for field in fields(part)} for part in (config, config.flow))
    for key in changes:
        if key not in own | flow:
            raise CandidError(f"Presets have no key '{key}': {did_you_mean(key, own | flow)}")
    inner = {key: value for key, value in changes.items() if key in flow}
    outer = {key: value for key, value in changes.items() if key in own}
    return replace(config, **{"flow": replace(config.flow, **inner), **outer})

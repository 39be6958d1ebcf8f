"""How a model is trained: a frozen dataclass, its recipes in TOML, and what may change on resuming."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from candid._support.config import MaybeInfinite, check_fields, check_range, from_dict, to_dict
from candid._support.errors import CandidError, did_you_mean
from candid.data.images import Crop, current_crop
from candid.data.shards import is_shards
from candid.models.flow.invertible import Memory
from candid.models.flow.presets import PRESETS, ClassifierConfig, preset

RECIPE_OF_PRESET = {
    "imagenet": "imagenet",
    "tiny": "tiny-imagenet",
    "cifar": "cifar10-quick",
    "digits": "digits",
}
MACHINE_KEYS = frozenset({"data", "val_data", "workers", "save_minutes", "tensorboard"})
"""Keys that don't change what is computed: they may differ when a run is resumed."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes; ``config.toml`` of a run folder holds it.

    >>> TrainConfig(data="digits", beta=float("inf")).beta
    inf
    """

    data: str
    """``digits``, a folder, or tar shards."""
    preset: str = "digits"
    model: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the preset to change, such as ``height`` or ``blocks``."""
    beta: MaybeInfinite = 1.0
    """Weight of the classification loss: 0, a positive number or inf."""
    baseline: bool = False
    """Train the ResNet beside the preset instead."""
    start: str | None = None
    """A model's folder to start from."""
    means_only: bool = False
    """Train only the class means of ``start``."""
    epochs: int = 30
    batch: int = 128
    """Images a step, over all processes."""
    accumulate: int = 1
    """Parts that each process cuts its share of a batch into, to save memory."""
    optimiser: Literal["sgd", "adamw"] = "adamw"
    schedule: Literal["one-cycle", "plateau"] = "one-cycle"
    learning_rate: float = 4e-3
    """The highest one."""
    means_rate: float = 0.1
    """Learning rate of the class means as a share of the others': they have as many numbers as the image,
    and steps of the full size would blur the density."""
    scales_rate: float = 5.0
    """The same for ActNorm's scales: their parameter is ten times the scale, and moves that much slower."""
    burn_in: float = 0.15
    """Epochs (plateau) or share of the run (one-cycle) over which the learning rate rises."""
    patience: int = 5
    """Plateau: epochs without a better validation loss before the learning rate falls by 10."""
    coolings: int = 2
    """Plateau: how often it falls; one plateau later the run ends."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    """Of convolution weights."""
    clip: float = 8.0
    """Largest norm of the gradient."""
    label_smoothing: float = 0.05
    actnorm_from_data: bool = True
    """Start ActNorm so that a first batch has zero mean and unit variance after it."""
    crop: Crop = "none"
    flip: bool = False
    holdout: float = 0.05
    """Share of the training images kept for validation if the data has no val folder."""
    split_seed: int = 0
    split: Literal["hash", "shuffled"] = "hash"
    """How folders without val and test parts are divided: by a hash of each image, or by a shuffle."""
    only: tuple[str, ...] = ()
    """Names of the classes of the data to use, in this order; empty: all."""
    val_data: str | None = None
    """Tar shards to validate on."""
    epoch_images: int | None = None
    """Tar shards: images an epoch."""
    skip_bad: bool = False
    """Leave out images that can't be read."""
    seed: int = 0
    precision: Literal["32", "bf16"] = "32"
    """bf16: convolutions in bfloat16; couplings, log-determinants and the mixture stay in float32."""
    memory: Memory = "plain"
    compile: bool = False
    """Let torch compile the network first: minutes once, then faster steps on a GPU."""
    workers: int = 2
    """Processes that load images, for each training process; images held in memory need none."""
    save_minutes: float = 10.0
    """A checkpoint is written this often, and after every epoch."""
    tensorboard: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "crop", current_crop(self.crop))
        check_fields(self)
        if not self.beta >= 0:
            raise CandidError(f"'beta' must be zero, a positive number or inf, not {self.beta}.")
        check_range(self, 1, 10**9, "epochs", "batch", "accumulate", "patience")
        check_range(
            self, 0, 10**9, "seed", "split_seed", "workers", "coolings", "weight_decay", "save_minutes"
        )
        check_range(self, 0, 1, "label_smoothing", "momentum", "holdout")
        if self.momentum == 1:
            raise CandidError("'momentum' must be below 1: with 1 a gradient would never be forgotten.")
        for text in (self.data, self.val_data or "", self.start or "", *self.only):
            if text != text.encode(errors="replace").decode():
                raise CandidError(f"{text!r} has bytes that are no text, for config.toml: rename it.")
        for name in ("learning_rate", "means_rate", "scales_rate", "clip"):
            if getattr(self, name) <= 0:
                raise CandidError(f"'{name}' must be positive, not {getattr(self, name)}.")
        if not 0 <= self.burn_in <= (0.9 if self.schedule == "one-cycle" else self.epochs):
            raise CandidError(
                "'burn_in' is a share of the run from 0 to 0.9 for a one-cycle schedule, "
                f"a number of epochs for a plateau schedule, not {self.burn_in}."
            )
        if self.means_only and (self.baseline or self.start is None):
            raise CandidError("'means_only' fine-tunes a trained generative model: name it with --start.")
        if len(set(self.only)) < len(self.only):
            raise CandidError(f"'only' names a class twice: {', '.join(self.only)}.")
        if self.compile and self.memory == "inverse":
            raise CandidError("'compile' works with memory = 'plain' only: leave one of the two out.")
        self.model_config(classes=2)

    def model_config(self, classes: int) -> ClassifierConfig:
        """The preset with its changes, for ``classes`` classes unless the changes say otherwise."""
        changes = {"classes": classes, **self.model}
        if not isinstance(changes["classes"], int):
            raise CandidError(f"'classes' must be a whole number, not {changes['classes']!r}.")
        if changes["classes"] < classes:
            raise CandidError(
                f"The data has {classes} classes, more than the model's {changes['classes']}: "
                "leave 'classes' out of the model's keys, or use fewer class folders."
            )
        return preset(self.preset, **changes)


def load_config(recipe: str | Path | None = None, **flags: Any) -> TrainConfig:
    """The recipe's keys, overridden by the flags that are not None.

    Without a recipe it is the one of the preset; without a preset, the recipe's own or ``digits``.

    >>> load_config(data="digits", beta=2.0).beta
    2.0
    """
    flags = {key: value for key, value in flags.items() if value is not None}
    if recipe is None:
        name = flags.get("preset", "digits")
        if name not in PRESETS:
            raise CandidError(f"There is no preset '{name}': {did_you_mean(str(name), PRESETS)}")
        recipe = RECIPE_OF_PRESET[name]
    values = read_toml(_recipe_file(recipe))
    table = values.get("model", {})
    if not isinstance(table, dict):
        raise CandidError(f"'model' of the recipe '{recipe}' must be a table of the preset's keys.")
    values["model"] = {**table, **flags.pop("model", {})}
    return from_dict(TrainConfig, {**values, **flags})


def recipes() -> dict[str, Path]:
    """The recipes that come with candid, by name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


def _recipe_file(recipe: str | Path) -> Path:
    bundled = recipes()
    if str(recipe) in bundled:
        return bundled[str(recipe)]
    path = Path(recipe)
    if not path.is_file():
        raise CandidError(f"There is no recipe '{recipe}': {did_you_mean(str(recipe), bundled)}")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, or one sentence on what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CandidError(f"'{path}' can't be read as TOML: {error}.") from error


def write_toml(config: TrainConfig) -> str:
    """``config`` as TOML; keys that are None are left out."""
    values = {key: value for key, value in to_dict(config).items() if value is not None}
    table = values.pop("model")
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    if table:
        lines += ["", "[model]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def resumed(recorded: TrainConfig, flags: Mapping[str, Any]) -> TrainConfig:
    """The recorded configuration of a run with the flags that may change; others must agree with it."""
    changed = {}
    for key, value in flags.items():
        if value is None or value == getattr(recorded, key):
            continue
        if key == "model" and value.items() <= recorded.model.items():
            continue
        longer = key == "epochs" and recorded.schedule == "plateau"
        dealt = key == "workers" and is_shards(recorded.data)  # each worker reads shards of its own
        if (key not in MACHINE_KEYS or dealt) and not longer:
            raise CandidError(
                f"The run was started with {key} = {_toml(getattr(recorded, key))}: it can't change in a "
                "resumed run; leave the option out, or start a new run with another --out."
            )
        changed[key] = value
    return replace(recorded, **changed)

"""The options of training: one declaration for the command, the Python call, recipes and config.toml."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from candid._support.errors import CandidError
from candid._support.old_formats import without_later
from candid._support.options import MaybeInfinite, Option, check_fields, named_option, to_dict
from candid.data import FEATURES_FILE, Crop, SplitRule
from candid.inference.options import Devices, ReadOptions, SkipBad, Workers
from candid.models.flow.config import ClassifierConfig, Memory, preset
from candid.models.photo.eyes import DEFAULT_EYE, EYES

Schedule = Literal["one-cycle", "plateau"]
MeansStart = Literal["random", "pooled", "blocks"]
MACHINE_KEYS = frozenset({"data", "val_data", "workers", "save_minutes", "tensorboard"})
"""Options that don't change what is computed: they may differ when a run is resumed."""
ENOUGH = 1000
"""From this many training photos on, some are held out; of fewer, all are used and scored out of fold."""
SHARE = 0.2
HOLDOUT = Option(
    "Held-out share of the training images, if the data has no val part. "
    "With 0, photos are scored out of fold.",
    least=0,
    below=1,
    default=f"photos: {SHARE} from {ENOUGH} photos on, else 0; networks: 0.05, more if there are few images",
)
TREE = Option(
    "Kinds above the classes: 'folders' (the innermost folders are the classes), 'imagenet' (WordNet's, for "
    "its 1000 classes), or a CSV file that names a class or kind and the kind above it on each line.",
    metavar="TREE",
    default="none",
)


@dataclass(frozen=True)
class RunOptions:
    """What all trainings share."""

    data: Annotated[str, Option("What to train on; see 'candid train'.", hidden=True)]
    split_seed: Annotated[int, Option("Seed of the division into training and held-out images.", least=0)] = 0
    skip_bad: SkipBad = False
    seed: Annotated[
        int, Option("Seed of the folds; for networks, of weights, batches and augmentation.", least=0)
    ] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TrainingOptions(RunOptions):
    """What trainings on photos and on pixels share."""

    holdout: Annotated[float | None, HOLDOUT] = None
    val_data: Annotated[str | None, Option("Tar shards to validate on.", metavar="SHARDS")] = None
    only: Annotated[
        tuple[str, ...], Option("Train only on this class. Repeat for more.", metavar="CLASS")
    ] = ()


@dataclass(frozen=True)
class PhotoOptions(TrainingOptions):
    """Everything that decides what a training on photos computes."""

    eye: Annotated[
        str,
        Option(f"Pretrained network: {', '.join(EYES)}, several joined by +, a file, or see 'candid eyes'."),
    ] = DEFAULT_EYE
    priors: Annotated[
        Literal["frequency", "uniform"], Option("How probable classes are before a photo is seen.")
    ] = "frequency"
    tree: Annotated[str | None, TREE] = None
    together: Annotated[
        str | None,
        Option(
            "Photos of one object, scene or day count once and are on one side of every division: by a "
            "column of a table with a 'path', or by 'folder' (the folders within that of a class). 'none' "
            "joins near-duplicates only.",
            metavar="FILE.csv:COLUMN",
            default="found by likeness with times and numbers of names",
        ),
    ] = None
    strict: Annotated[
        bool, Option("Stop at a photo that can't be used, instead of leaving it out and listing it.")
    ] = False
    thumbnails: Annotated[
        bool,
        Option("Keep small pictures of up to 20 photos of each class, to show the nearest ones."),
    ] = True

    def deciding(self) -> dict[str, Any]:
        """Return the options that decide the result."""
        values = {**without_later(to_dict(self)), "skip_bad": False}  # as earlier versions had it
        return {key: value for key, value in values.items() if key not in ("data", "val_data", "strict")}


@dataclass(frozen=True)
class VectorOptions(RunOptions):
    """Everything that decides what a training on features computes.

    >>> VectorOptions(data="features.npz").beta
    1.0
    """

    preset: Annotated[Literal["vector"], Option("What is trained.", hidden=True)] = "vector"
    eye: Annotated[str | None, Option("Pretrained network that photos are seen through.")] = None
    beta: Annotated[MaybeInfinite, Option("Weight of the classification loss; it can be inf.", least=0)] = 1.0
    couplings: Annotated[int, Option("Coupling blocks of the network.", least=1, most=64)] = 4
    width: Annotated[int, Option("Width of the two hidden layers in a coupling.", least=1)] = 512
    noise: Annotated[
        float,
        Option(
            "Standard deviation of the noise on features, in standard deviations of their group. Without "
            "noise there is no density.",
            above=0,
        ),
    ] = 0.05
    epochs: Annotated[int, Option("Passes over the training features.", least=1)] = 6
    batch: Annotated[int, Option("Features per step.", least=2)] = 250
    learning_rate: Annotated[float, Option("Highest learning rate.", above=0)] = 1e-3
    label_smoothing: Annotated[float, Option("Share of a label for all classes.", least=0, most=1)] = 0.0
    priors: Annotated[
        Literal["frequency", "uniform"], Option("How probable classes are before features are seen.")
    ] = "frequency"
    holdout: Annotated[float, Option("Held-out share, if there is no val part.", above=0, below=1)] = SHARE
    tree: Annotated[str | None, TREE] = None

    @property
    def stored(self) -> bool:
        """Whether the features are in a file."""
        return self.data.endswith(FEATURES_FILE)

    @property
    def eye_name(self) -> str | None:
        """The eye that features come from; None of stored ones for which none is named."""
        return self.eye or (None if self.stored else DEFAULT_EYE)


@dataclass(frozen=True)
class TrainOptions(TrainingOptions):
    """Everything that decides what a training run computes; ``config.toml`` of a run folder stores it.

    >>> TrainOptions(data="digits", beta=float("inf")).beta
    inf
    """

    preset: Annotated[
        str,
        Option(
            "Size of the network: imagenet, tiny, cifar or digits; or vector.",
            default="tiny, cifar or digits, by the size of the images",
        ),
    ] = "digits"
    model: Annotated[Mapping[str, Any], Option("Keys of the preset to change.", hidden=True)] = field(
        default_factory=dict
    )
    beta: Annotated[MaybeInfinite, Option("Weight of the classification loss; it can be inf.", least=0)] = 1.0
    baseline: Annotated[bool, Option("Train the ResNet that matches the preset instead.")] = False
    start: Annotated[str | None, Option("Start from the weights of this model.", metavar="MODEL")] = None
    means_only: Annotated[bool, Option("Train only the class means of --start.")] = False
    epochs: Annotated[int, Option("Passes over the training images.", least=1)] = 30
    batch: Annotated[int, Option("Images per step, over all processes.", least=1)] = 128
    grad_accumulation: Annotated[int, Option("Parts in which each process computes its batch.", least=1)] = 1
    optimiser: Annotated[Literal["sgd", "adamw"], Option("Optimisation algorithm.")] = "adamw"
    schedule: Annotated[
        Schedule, Option("Learning rate: one rise and fall, or divided by 10 at plateaus.")
    ] = "one-cycle"
    learning_rate: Annotated[float, Option("Highest learning rate.", above=0)] = 4e-3
    # The class means have as many numbers as the image: steps of the full size would blur the density.
    means_rate: Annotated[float, Option("Learning rate of class means, times --learning-rate.", above=0)] = (
        0.1
    )
    means_start: Annotated[
        MeansStart,
        Option(
            "Class means at the start: random (0.7 sigma apart), pooled (the same without a part beyond the "
            "mean-pooled coefficients) or in blocks (3.5 sigma)."
        ),
    ] = "random"
    rest_rate: Annotated[
        float | None,
        Option(
            "Learning rate of class means beyond the mean-pooled coefficients, times --learning-rate.",
            above=0,
            default="that of the means",
        ),
    ] = None
    rest_decay: Annotated[
        float, Option("Weight decay of class means beyond the mean-pooled coefficients.", least=0)
    ] = 0.0
    # Their parameter is ten times the scale, and moves that much slower.
    scales_rate: Annotated[float, Option("Rate of ActNorm's scales, times --learning-rate.", above=0)] = 5.0
    warmup: Annotated[
        float, Option("Rise of the rate: share of the run (one-cycle) or epochs (plateau).", least=0)
    ] = 0.15
    patience: Annotated[int, Option("Epochs without improvement that make a plateau.", least=1)] = 5
    lr_decays: Annotated[int, Option("Plateaus with a decay; the next one ends the run.", least=0)] = 2
    momentum: Annotated[float, Option("Momentum of SGD, first beta of AdamW.", least=0, below=1)] = 0.9
    weight_decay: Annotated[float, Option("Weight decay of convolution weights.", least=0)] = 1e-4
    clip: Annotated[float, Option("Largest norm of the gradient.", above=0)] = 8.0
    clip_means: Annotated[
        bool,
        Option("Whether the class means are part of that norm.", flag="--clip-means/--no-clip-means"),
    ] = True
    label_smoothing: Annotated[float, Option("Share of a label for all classes.", least=0, most=1)] = 0.05
    actnorm_from_data: Annotated[bool, Option("Start ActNorm with the statistics of a first batch.")] = True
    crop: Annotated[Crop, Option("Random crops of training images.")] = "none"
    flip: Annotated[bool, Option("Mirror training images at random.", flag="--flip/--no-flip")] = False
    holdout: Annotated[float, HOLDOUT] = 0.05
    split: Annotated[SplitRule, Option("Divide images without parts by a hash or a shuffle.")] = "hash"
    epoch_images: Annotated[int | None, Option("Tar shards: images per epoch.")] = None
    precision: Annotated[Literal["32", "bf16"], Option("bf16: convolutions in bfloat16.")] = "32"
    memory: Annotated[Memory, Option("inverse: recompute activations, for less memory.")] = "plain"
    compile: Annotated[bool, Option("Compile the network first: minutes once, then faster steps.")] = False
    workers: Workers = 2
    save_minutes: Annotated[float, Option("Save this often, and after every epoch.", least=0)] = 10.0
    tensorboard: Annotated[bool, Option("Write the metrics of every epoch for TensorBoard.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in (self.data, self.val_data or "", self.start or "", *self.only):
            if text != text.encode(errors="replace").decode():
                raise CandidError(f"{text!r} has bytes that are no text, for config.toml: rename it.")
        if not 0 <= self.warmup <= (0.9 if self.schedule == "one-cycle" else self.epochs):
            raise CandidError(
                "'warmup' is a share of the run from 0 to 0.9 for a one-cycle schedule, "
                f"a number of epochs for a plateau schedule, not {self.warmup}."
            )
        if self.means_only and (self.baseline or self.start is None):
            raise CandidError("'means_only' fine-tunes a trained generative model: name it with --start.")
        if len(set(self.only)) < len(self.only):
            raise CandidError(f"'only' names a class twice: {', '.join(self.only)}.")
        if self.compile and self.memory == "inverse":
            raise CandidError("'compile' works with memory = 'plain' only: leave one of the two out.")
        self.model_config(classes=2)

    def model_config(self, classes: int) -> ClassifierConfig:
        """Return the preset with its changes, for ``classes`` classes unless the changes say otherwise."""
        changes = {"classes": classes, **self.model}
        if not isinstance(changes["classes"], int):
            raise CandidError(f"'classes' must be a whole number, not {changes['classes']!r}.")
        if changes["classes"] < classes:
            raise CandidError(
                f"The data has {classes} classes, more than the model's {changes['classes']}: "
                "leave 'classes' out of the model's keys, or use fewer class folders."
            )
        return preset(self.preset, **changes)

    def deciding(self) -> dict[str, Any]:
        """Return the options that a resumed run must not change: those that decide its result."""
        from candid.data.shards import is_shards

        free = MACHINE_KEYS - {"workers"} if is_shards(self.data) else MACHINE_KEYS
        if self.schedule == "plateau":
            free |= {"epochs"}
        return {key: value for key, value in without_later(to_dict(self)).items() if key not in free}

    def resumed(self, flags: Mapping[str, Any]) -> "TrainOptions":
        """Return these options of a run with the ``flags`` that may change; the others must agree with it."""
        given = {key: value for key, value in flags.items() if value is not None}
        if "model" in given:
            given["model"] = {**self.model, **given["model"]}
        changed = replace(self, **given)
        before, after = self.deciding(), changed.deciding()
        for key in before | after:
            if key not in before or key not in after or before[key] != after[key]:
                raise CandidError(
                    f"The run was started with {key} = {getattr(self, key)!r}: it can't change in a "
                    "resumed run; leave the option out, or start a new run in another folder."
                )
        return changed


def check_call(data: str | None, out: object, recipe: object, resume: bool) -> None:
    """Raise an error if a run can't start because data or an unambiguous folder is missing."""
    if resume and out is None:
        raise CandidError(f"Name the run to resume with {named_option('out')}.")
    if resume and recipe is not None:
        raise CandidError(f"A resumed run has its own options: leave {named_option('recipe')} out.")
    if not resume and data is None:
        raise CandidError("Name the data to train on, such as 'digits' or a folder of images.")


@dataclass(frozen=True, kw_only=True)
class PlaneOptions(ReadOptions):
    """How a model is fine-tuned after its class means were moved to a plane."""

    means_only: Annotated[bool, Option("Fine-tune only the means, not the network.")] = False
    epochs: Annotated[int, Option("Epochs of fine-tuning.", least=1)] = 3
    learning_rate: Annotated[float, Option("Highest learning rate.", above=0)] = 2e-3
    batch: Annotated[int | None, Option("Images of a step.", least=1, default="as the model's training")] = (
        None
    )
    beta: Annotated[
        MaybeInfinite | None,
        Option("Weight of the classification loss.", above=0, default="the model's"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AdoptOptions(ReadOptions):
    """Which images are held out, and how they are read."""

    held_out: Annotated[
        str | None,
        Option(
            "Images to hold out for verdicts; class sets need labels.",
            metavar="DATA",
            default="half of IMAGES",
        ),
    ] = None
    class_names: Annotated[
        Path | None,
        Option("A text file with one class name on each line.", metavar="FILE", default="the classifier's"),
    ] = None
    together: Annotated[
        str | None,
        Option(
            "Images of one object, scene or day count once and are not divided, by a column of a table with "
            "a 'path'.",
            metavar="FILE.csv:COLUMN",
        ),
    ] = None
    tree: Annotated[str | None, TREE] = None
    devices: Devices = None

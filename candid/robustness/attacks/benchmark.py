"""The attack benchmark: how far models are from being fooled, how confident they are then, who notices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from candid._support.config import build
from candid._support.distributed import first_error, gathered, launch
from candid._support.errors import CandidError
from candid._support.files import cache_file, read_sealed, write_sealed
from candid._support.files import digest as content_digest
from candid._support.progress import SILENT, Progress
from candid._support.randomness import generator
from candid.data.splits import Split
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.inference.study import Note, labelled_images, named_models
from candid.models.protocol import Model
from candid.robustness.attacks.carlini_wagner import carlini_wagner
from candid.robustness.attacks.metrics import (
    AttackMetrics,
    attack_metrics,
    median_log_density,
    without_lone_detection,
)
from candid.robustness.attacks.options import AttackOptions
from candid.robustness.attacks.projected_gradient import projected_gradient
from candid.robustness.attacks.search import NUMBERS_A_BATCH, AttackResult
from candid.trust.judge import HeldOut

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHUNK = 50
"""Images that are attacked at once, and then cached; fewer if they are large."""
VERSION = 3
"""The version of what an attack computes: cached files of another one are not used."""
EIGHT_BIT = "eight_bit."
NO_DETECTION = "no-detection"
"""The topic of the note that detection is not measured."""


@dataclass(frozen=True)
class AttackInputs:
    """The images under attack, on the CPU."""

    images: Tensor
    """8-bit, (N, C, H, W)."""
    labels: Tensor
    targets: Tensor | None
    """Target classes, (N,); None for untargeted attacks."""
    names: tuple[str, ...]
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A model, and what its attacks need."""

    name: str
    runner: Runner
    split: Split
    inputs: AttackInputs
    held_out: HeldOut | None
    median: float | None
    """The median of the scores that its detection was fitted to, per dimension."""


@dataclass(frozen=True)
class AttackedModel:
    """One model under all attacks."""

    name: str
    model: Model
    inputs: AttackInputs
    clean: Predictions
    attacks: dict[tuple[float, float], AttackResult]
    """Results by kappa and d."""
    metrics: tuple[AttackMetrics, ...]

    @property
    def beta(self) -> float | None:
        """The beta that the model was trained with."""
        return self.model.record.beta


@dataclass(frozen=True)
class AttackResults:
    """The result of :func:`candid.attack`: every model under every attack."""

    data: str
    """The data set that the images are from."""
    options: AttackOptions
    models: tuple[AttackedModel, ...]
    """The metrics and attacked images of each model."""
    notes: tuple[Note, ...] = ()
    """What was left out, and why."""

    def __iter__(self) -> Iterator[AttackedModel]:
        return iter(self.models)

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics as JSON."""
        metrics = [each.to_dict() for model in self.models for each in model.metrics]
        return {"attack": self.options.described(self.data), "metrics": metrics}


def attack(models: Any, data: str, progress: Progress = SILENT, **options: Any) -> AttackResults | None:
    """Attack models and measure what it took, and whether the attacked images can be detected.

    Args:
        models: a model, a bundled name, a model folder, a run folder, or a list or dictionary of these.
        data: a data set with labels, as for :func:`candid.train`.
        progress: shows what is being done.
        options: the fields of :class:`~candid.robustness.attacks.options.AttackOptions`.

    Returns:
        The attacked images and the metrics of each model; None in all processes but the first.

    Example:
        >>> import candid
        >>> found = candid.attack("cifar10-beta1", "digits", kapa=1)
        Traceback (most recent call last):
        ...
        candid._support.errors.CandidError: There is no option 'kapa': did you mean 'kappa'?
    """
    chosen = build(AttackOptions, options)
    fabric = launch(chosen.devices)
    progress = progress if fabric.is_global_zero else SILENT
    given = named_models(models)
    targets = [_target(chosen, data, model, name, fabric, progress) for name, model in given.items()]
    _check_together(chosen, data, targets)
    found = [_attacked_model(chosen, target) for target in targets]
    if not fabric.is_global_zero:
        return None
    notes = [
        Note(NO_DETECTION, f"Detection of attacks on {target.name} is not measured: {reason}.")
        for target in targets
        if target.median is None and any(d > 0 for _, d in chosen.settings)
        for reason in [_without_density(target.runner.model)]
        if reason
    ]
    if chosen.method == "carlini-wagner" and not any(d > 0 for d in chosen.d):
        text = "Detection is not measured: it means nothing without the attack that fools it (--d 0,66,1000)."
        notes.append(Note(NO_DETECTION, text))
    return AttackResults(data, chosen, tuple(each for each in found if each is not None), tuple(notes))


def _target(
    options: AttackOptions, data: str, model: Model, name: str, fabric: "Fabric", progress: Progress
) -> Target:
    held_out = None if model.density_of is None else HeldOut.of(model)
    if model.density_of is not None and held_out is None and any(d > 0 for _, d in options.settings):
        raise CandidError(
            f"'{name}' has no held-out scores, whose median fools the detection: add them with "
            f"'candid calibrate {name} DATA', or attack the decision alone with --d 0."
        )
    if held_out is not None and "log_density" not in held_out.statistics:
        held_out = None  # of photos that were scored out of fold, the density is not known
    _, split = labelled_images(model, data, options, progress)
    if not split.can_index:
        raise CandidError("Tar shards are read from end to end: attack images of a folder instead.")
    batches = list(split.named_batches(model.preprocessing, CHUNK, 0, 1, options.workers))
    labels = torch.cat([batch[1] for batch in batches])
    inputs = AttackInputs(
        torch.cat([batch[0] for batch in batches]),
        labels,
        None if options.untargeted else other_classes(labels, len(model.class_names), options.seed),
        tuple(each for batch in batches for each in batch[2]),
        model.class_names,
    )
    runner = Runner(model, fabric, options.out / "predictions", options.workers, progress)
    return Target(
        name, runner, split, inputs, held_out, None if held_out is None else median_log_density(model)
    )


def _without_density(model: Model) -> str | None:
    """Return why a model with a density has no held-out densities."""
    if model.density_of is None:
        return None
    return "its photos were scored out of fold, and their densities are not known"


def _check_together(options: AttackOptions, data: str, targets: Sequence[Target]) -> None:
    """Check that all models see the same images, and that at least one of them can be attacked."""
    first = targets[0]
    for other in targets[1:]:
        one, two = first.inputs, other.inputs
        if (one.names, one.class_names) != (two.names, two.class_names) or not one.labels.equal(two.labels):
            raise CandidError(
                f"'{first.name}' and '{other.name}' have different classes, or different test images of "
                f"'{data}': attack them separately."
            )
    if all(d > 0 for _, d in options.settings) and all(target.median is None for target in targets):
        raise CandidError("There is no held-out likelihood to fool: add 0 to --d, or attack another model.")


def _attacked_model(options: AttackOptions, target: Target) -> AttackedModel | None:
    model, inputs = target.runner.model, target.inputs
    clean = target.runner.predictions(target.split, model.preprocessing, f"{target.name}, clean")
    attacks: dict[tuple[float, float], AttackResult] = {}
    for kappa, d in options.settings:
        if d > 0 and target.median is None:
            continue  # a ResNet has no likelihood to fool
        found = _attacked(options, target, kappa, d)
        if found is not None:
            attacks[kappa, d] = found
    if clean is None:
        return None
    name, beta = target.name, model.record.beta
    metrics = [
        attack_metrics(name, beta, setting, found, inputs.images, clean, target.held_out, inputs.targets)
        for setting, found in attacks.items()
    ]
    if model.density_of == "features":  # which has no bits/dim
        metrics = [each.without_bits() for each in metrics]
    return AttackedModel(name, model, inputs, clean, attacks, tuple(without_lone_detection(metrics)))


def other_classes(labels: Tensor, classes: int, seed: int) -> Tensor:
    """Return a random class that differs from the label for each image, (N,).

    >>> targets = other_classes(torch.tensor([0, 1, 2, 1]), 3, seed=0)
    >>> bool((targets != torch.tensor([0, 1, 2, 1])).all())
    True
    """
    if classes < 2:
        raise CandidError("A model of one class can't be fooled: attack one with two classes or more.")
    return (labels + torch.randint(1, classes, labels.shape, generator=generator(seed, 11))) % classes


def _attacked(options: AttackOptions, target: Target, kappa: float, d: float) -> AttackResult | None:
    """Attack all images, in chunks shared by the processes; return None in all but the first."""
    runner, fabric = target.runner, target.runner.fabric
    size = max(1, min(CHUNK, NUMBERS_A_BATCH // target.inputs.images[0].numel()))
    chunks = torch.arange(len(target.inputs.images)).split(size)
    own = chunks[fabric.global_rank :: fabric.world_size]
    title = f"{target.name}, {options.setting_name(kappa)}, d = {d:g}"
    made, error = [], None
    try:
        for chunk in runner.progress.track(own, title, len(own), size * fabric.world_size):
            made.append(_cached_or_made(options, target, chunk, kappa, d, title))
    except CandidError as problem:
        error = problem
    error = first_error(fabric, error)
    if error is not None:
        raise error
    by_process = gathered(fabric, made)
    if not by_process:
        return None
    return joined([by_process[i % len(by_process)][i // len(by_process)] for i in range(len(chunks))])


def _cached_or_made(
    options: AttackOptions, target: Target, chunk: Tensor, kappa: float, d: float, title: str
) -> AttackResult:
    runner, inputs = target.runner, target.inputs
    images, labels = inputs.images[chunk], inputs.labels[chunk]
    targets = None if inputs.targets is None else inputs.targets[chunk]
    arguments = options.arguments(kappa, d, target.median)
    digest = runner.model_hash.copy()
    digest.update(repr((VERSION, options.method, runner.model.config, arguments)).encode())
    digest.update(content_digest(images, labels, *(() if targets is None else (targets,))).digest())
    file = cache_file(options.out / "attacks", f"{title}, {int(chunk[0])}", digest)
    cached = _load(file)
    if cached is not None:
        return cached
    function = carlini_wagner if options.method == "carlini-wagner" else projected_gradient
    found = function(runner.frozen, images, targets, labels=labels, **arguments)
    try:
        write_sealed(_columns(found), file)
    except (OSError, SafetensorError) as error:
        raise CandidError(
            f"Can't write to '{file.parent}' ({error}): free some space, or change --out."
        ) from error
    return found


def _columns(attack: AttackResult) -> dict[str, Tensor]:
    """Return all that is cached of an attack, and below ``eight_bit.`` that of its 8-bit images."""
    values = {each.name: getattr(attack, each.name) for each in fields(attack)}
    found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if attack.eight_bit is not None:
        found |= {EIGHT_BIT + name: value for name, value in _columns(attack.eight_bit).items()}
    return found


def _from_columns(columns: Mapping[str, Tensor]) -> AttackResult:
    """Return the attack whose :func:`_columns` these are.

    Raises:
        TypeError: if one is missing.
    """
    own: dict[str, Any] = {name: value for name, value in columns.items() if not name.startswith(EIGHT_BIT)}
    rounded = {
        name.removeprefix(EIGHT_BIT): value for name, value in columns.items() if name.startswith(EIGHT_BIT)
    }
    eight_bit = _from_columns(rounded) if rounded else None
    return AttackResult(**{"log_density": None, "traces": None, **own}, eight_bit=eight_bit)


def _load(file: Path) -> AttackResult | None:
    """Return a cached attack; None if there is no whole file."""
    try:
        return _from_columns(read_sealed(file)[0])
    except (ValueError, TypeError):
        return None


def joined(parts: Sequence[AttackResult]) -> AttackResult:
    """Return all images of ``parts``, without their paths."""
    columns = [_columns(part) for part in parts]
    return _from_columns({name: torch.cat([each[name] for each in columns]) for name in columns[0]})

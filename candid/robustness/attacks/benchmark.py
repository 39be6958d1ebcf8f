"""The attack benchmark: how far models are from being fooled, how confident they are then, who notices."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from candid._support.errors import CandidError, require_extra
from candid._support.files import cache_file, read_sealed, write_sealed, write_texts
from candid._support.numbers import Array
from candid._support.numbers import digest as content_digest
from candid._support.options import build
from candid._support.processes import Processes, first_error, gathered, launch
from candid._support.progress import SILENT, Progress
from candid._support.randomness import draws
from candid._support.text import Cell, Grid, area_cell, in_all_formats, with_interval
from candid.data.batches import named_batches
from candid.data.splits import Split
from candid.inference.runner import Runner
from candid.inference.study import Note, labelled_images, named_models
from candid.judging.held_out import HeldOut
from candid.models.protocol import Model
from candid.robustness.attacks.metrics import (
    AttackedImages,
    AttackedModel,
    AttackInputs,
    AttackMetrics,
    AttackResult,
    Measured,
    attack_metrics,
    median_log_density,
    without_lone_detection,
)
from candid.robustness.options import FRESH, NUMBERS_A_BATCH, AttackOptions

CHUNK = 50
"""Images that are attacked at once, and then cached; fewer if they are large."""
VERSION = 3
"""The version of what an attack computes: cached files of another one are not used."""
NO_DETECTION = "no-detection"
"""The topic of the note that detection is not measured."""
HEAD = (
    "model", "kappa", "d", "image", "label", "target", "predicted_before", "predicted_after",
    "already_misclassified", "success", "rounded_success", "l2", "margin", "posterior_wrong",
    "log_density_before", "log_density_after", "steps", "eight_bit_success", "eight_bit_l2",
    "eight_bit_log_density",
)  # fmt: skip
NOTES = (
    "'wrong': images that the model misclassifies before the attack; 'already': of these, as the target; "
    "they are in no other column.",
    "'real': real-valued images; '8-bit': images that work as a file, which succeed only if they reach kappa "
    f"with the model's own noise pattern and with {FRESH} others that the attack has not seen. 'rounded': "
    "the share of the real-valued images that still fool the model when they are just rounded to 8 bits. "
    "The median is over all images, means are over the fooled ones.",
    "AUC: attacked images against their originals by log q(x), fitted to held-out images; 'adaptive': the "
    "lowest among the attacks that also fool the detection, with the success rate of the one that is lowest "
    "two-tailed. They aim at the median; for the one-tailed test a higher aim would be worse.",
    "In parentheses: 95 % intervals (success: exact binomial; L2: order statistics; AUC: DeLong, pairs).",
)


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

    def attack(self, method: str) -> Callable[..., AttackedImages]:
        """Return the attack on the model, a function of images and what is asked for."""
        from candid.robustness.attacks.carlini_wagner import carlini_wagner
        from candid.robustness.attacks.search import projected_gradient

        function = carlini_wagner if method == "carlini-wagner" else projected_gradient
        return partial(function, self.victim)

    @cached_property
    def victim(self) -> Any:
        """The model in torch, whose gradients an attack follows."""
        from candid.robustness.attacks.search import differentiable

        return differentiable(self.runner.frozen)


def attack(models: Any, data: str, progress: Progress = SILENT, **options: Any) -> AttackResult | None:
    """Attack models and measure what it took, and whether the attacked images can be detected.

    Args:
        models: a model, a bundled name, a model folder, a run folder, or a list or dictionary of these.
        data: a data set with labels, as for :func:`candid.train`.
        progress: shows what is being done.
        options: the fields of :class:`~candid.robustness.options.AttackOptions`.

    Returns:
        The attacked images and the metrics of each model; None in all processes but the first.

    Example:
        >>> import candid
        >>> result = candid.attack("cifar10-beta1", "digits", kapa=1)
        Traceback (most recent call last):
        ...
        candid._support.errors.CandidError: There is no option 'kapa': did you mean 'kappa'?
    """
    chosen = build(AttackOptions, options)
    require_extra("torch", "paper", "An attack")
    processes = launch(chosen.devices)
    progress = progress if processes.is_global_zero else SILENT
    named = named_models(models)
    targets = [_target(chosen, data, model, name, processes, progress) for name, model in named.items()]
    _check_together(chosen, data, targets)
    attacked = [_attacked_model(chosen, target) for target in targets]
    if not processes.is_global_zero:
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
    return AttackResult(data, chosen, tuple(model for model in attacked if model is not None), tuple(notes))


def _target(
    options: AttackOptions, data: str, model: Model, name: str, processes: Processes, progress: Progress
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
    batches = named_batches(split, model.preprocessing, CHUNK, workers=options.workers)
    images, labels, names = zip(*batches, strict=True)
    true = np.concatenate(labels)
    inputs = AttackInputs(
        np.concatenate(images),
        true,
        None if options.untargeted else other_classes(true, len(model.class_names), options.seed),
        tuple(name for some in names for name in some),
        model.class_names,
    )
    runner = Runner(model, processes, options.out / "predictions", options.workers, progress)
    median = None if held_out is None else median_log_density(model)
    return Target(name, runner, split, inputs, held_out, median)


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
        if (one.names, one.class_names) != (two.names, two.class_names) or not np.array_equal(
            one.labels, two.labels
        ):
            raise CandidError(
                f"'{first.name}' and '{other.name}' have different classes, or different test images of "
                f"'{data}': attack them separately."
            )
    if all(d > 0 for _, d in options.settings) and all(target.median is None for target in targets):
        raise CandidError("There is no held-out likelihood to fool: add 0 to --d, or attack another model.")


def _attacked_model(options: AttackOptions, target: Target) -> AttackedModel | None:
    model, inputs = target.runner.model, target.inputs
    clean = target.runner.predictions(target.split, model.preprocessing, f"{target.name}, clean")
    attacks: dict[tuple[float, float], AttackedImages] = {}
    for kappa, d in options.settings:
        if d > 0 and target.median is None:
            continue  # a ResNet has no likelihood to fool
        attacked = _attacked(options, target, kappa, d)
        if attacked is not None:
            attacks[kappa, d] = attacked
    if clean is None:
        return None
    name, beta = target.name, model.record.beta
    metrics = [
        attack_metrics(name, beta, setting, attacked, inputs.images, clean, target.held_out, inputs.targets)
        for setting, attacked in attacks.items()
    ]
    if model.density_of != "pixels":  # which has no bits/dim
        metrics = [one.without_bits() for one in metrics]
    return AttackedModel(name, model, inputs, clean, attacks, tuple(without_lone_detection(metrics)))


def other_classes(labels: Array, classes: int, seed: int) -> Array:
    """Return a random class that differs from the label for each image, (N,).

    >>> targets = other_classes(np.array([0, 1, 2, 1]), 3, seed=0)
    >>> bool((targets != np.array([0, 1, 2, 1])).all())
    True
    """
    if classes < 2:
        raise CandidError("A model of one class can't be fooled: attack one with two classes or more.")
    return (labels + 1 + draws(seed, 11).integers(classes - 1, len(labels))) % classes


def _attacked(options: AttackOptions, target: Target, kappa: float, d: float) -> AttackedImages | None:
    """Attack all images, in chunks shared by the processes; return None in all but the first."""
    runner, processes = target.runner, target.runner.processes
    images = len(target.inputs.images)
    size = max(1, min(CHUNK, NUMBERS_A_BATCH // target.inputs.images[0].size))
    chunks = [slice(start, start + size) for start in range(0, images, size)]
    share = chunks[processes.global_rank :: processes.world_size]
    title = f"{target.name}, {options.setting_name(kappa)}, d = {d:g}"
    made, error = [], None
    try:
        for chunk in runner.progress.track(share, title, len(share), size * processes.world_size):
            made.append(_cached_or_made(options, target, chunk, kappa, d, title))
    except CandidError as problem:
        error = problem
    error = first_error(processes, error)
    if error is not None:
        raise error
    by_process = gathered(processes, made)
    if not by_process:
        return None
    return AttackedImages.joined(
        [by_process[i % len(by_process)][i // len(by_process)] for i in range(len(chunks))]
    )


def _cached_or_made(
    options: AttackOptions, target: Target, chunk: slice, kappa: float, d: float, title: str
) -> AttackedImages:
    runner, inputs = target.runner, target.inputs
    images, labels = inputs.images[chunk], inputs.labels[chunk]
    targets = None if inputs.targets is None else inputs.targets[chunk]
    arguments = options.arguments(kappa, d, target.median)
    digest = runner.model_hash.copy()
    digest.update(repr((VERSION, options.method, runner.model.config, arguments)).encode())
    digest.update(content_digest(images, labels, *(() if targets is None else (targets,))).digest())
    file = cache_file(options.out / "attacks", f"{title}, {chunk.start}", digest)
    cached = _load(file)
    if cached is not None:
        return cached
    attacked = target.attack(options.method)(images, targets, labels=labels, **arguments)
    try:
        write_sealed(attacked.columns(), file)
    except (OSError, SafetensorError) as error:
        raise CandidError(
            f"Can't write to '{file.parent}' ({error}): free some space, or change --out."
        ) from error
    return attacked


def _load(file: Path) -> AttackedImages | None:
    """Return a cached attack; None if there is no whole file."""
    try:
        return AttackedImages.of_columns(read_sealed(file)[0])
    except (ValueError, TypeError):
        return None


def write_attack_tables(result: AttackResult, out: Path) -> list[Path]:
    """Write ``attacks`` as .json (all metrics), .csv (one line per image), .md, .tex and .html."""
    asked = ", ".join(f"{key} {value}" for key, value in result.options.described(result.data).items())
    notes = (f"Attack: {asked}.", *NOTES)
    return write_texts(
        in_all_formats("Attacks", result.to_dict(), _lines(result), attack_tables(result), notes), out
    )


def attack_tables(result: AttackResult) -> dict[str, Grid]:
    """Return one table for each kappa, by its caption; one line per model, d and kind of image."""
    head = ["model", "d", "images", "wrong", "already", "success (%)", "rounded (%)", "L2 median", "L2 mean"]
    head += ["RMS (levels)", "confidence (%)", "entropy (nats)", "contrast (%)", "bits/dim", "most steps"]
    head += ["AUC one-tailed (%)", "adaptive (%)", "AUC two-tailed (%)", "adaptive (%)", "its success (%)"]
    tables: dict[str, Grid] = {}
    for kappa in dict.fromkeys(kappa for kappa, _ in result.options.settings):
        attacks = [attack for model in result for attack in model.metrics if attack.kappa == kappa]
        kinds = [(attack, kind) for attack in attacks for kind in (attack, attack.eight_bit)]
        rows = [_row(attack, kind) for attack, kind in kinds if kind is not None]
        tables[result.options.setting_name(kappa)] = (head, rows)
    return tables


def _row(attack: AttackMetrics, measured: Measured) -> list[Cell]:
    """Return the line of the images that ``measured`` is of: real-valued or 8-bit ones."""
    ends, real = measured.intervals, measured is attack
    areas: dict[str, float | None] = {}
    if measured.detection is not None:
        areas = vars(measured.detection) | {
            "adaptive_one_tailed": measured.adaptive_one_tailed,
            "adaptive_two_tailed": measured.adaptive_two_tailed,
        }
    shown: list[str | Cell] = [
        attack.model,
        f"{attack.d:g}",
        "real" if real else "8-bit",
        f"{attack.misclassified}/{attack.images}",
        f"{attack.already_misclassified}/{attack.images}",
        with_interval(measured.success, ends.get("success")),
        with_interval(attack.rounded_success, ends.get("rounded_success")) if real else "–",
        _length(measured.l2_median, ends.get("l2_median")),
        _number(measured.l2_mean, 1, ".3f"),
        _number(measured.per_pixel, 255, ".2f"),
        _number(measured.confidence, 100, ".1f"),
        _change(measured.entropy_before, measured.entropy_after),
        _number(measured.contrast, 100, ".1f"),
        _change(measured.bits_before, measured.bits_after),
        f"{attack.most_steps}" if real else "–",
        *(
            area_cell(areas.get(name), ends.get(name))
            for name in ("one_tailed", "adaptive_one_tailed", "two_tailed", "adaptive_two_tailed")
        ),
        "–" if not areas else with_interval(measured.adaptive_success, ends.get("adaptive_success")),
    ]
    return [(cell, "") if isinstance(cell, str) else cell for cell in shown]


def _change(before: float | None, after: float | None) -> str:
    return "–" if before is None else f"{_number(before, 1, '.2f')} → {_number(after, 1, '.2f')}"


def _length(value: float | None, interval: Sequence[float] | None) -> str:
    """Return an L2 norm with three digits, and its interval."""
    if value is None or interval is None:
        return "–"
    shown, low, high = ("∞" if math.isinf(end) else f"{end:#.3g}" for end in (value, *interval))
    return f"{shown} ({low} to {high})"


def _number(value: float | None, scale: float, form: str) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else format(scale * value, form)


def _lines(result: AttackResult) -> Iterator[Sequence[object]]:
    """Yield one line per model, setting and image."""
    yield HEAD
    for model in result:
        inputs, before = model.inputs, model.clean

        def named(classes: Array | None, inputs: AttackInputs = inputs) -> list[str | None]:
            numbers = [None] * len(inputs.names) if classes is None else classes.tolist()
            return [None if y is None else inputs.class_names[y] for y in numbers]

        for setting, attacked in model.attacks.items():
            after = attacked.posterior.argmax(1)
            wrong = after if inputs.targets is None else inputs.targets
            classes = (inputs.labels, inputs.targets, before.logits.argmax(1), after)
            flags = (attacked.already_misclassified, attacked.success, attacked.rounded_success)
            of_wrong = attacked.posterior[np.arange(len(wrong)), wrong]
            columns = (
                *(inputs.names, *map(named, classes), *(flag.astype(int).tolist() for flag in flags)),
                *(attacked.distance.tolist(), attacked.margin.tolist(), of_wrong.tolist()),
                *(_listed(before.log_density, len(after)), _listed(attacked.log_density, len(after))),
                attacked.steps.tolist(),
                *_eight_bit_columns(attacked),
            )
            yield from ([model.name, *setting, *row] for row in zip(*columns, strict=True))


def _eight_bit_columns(attacked: AttackedImages) -> Iterator[list[Any]]:
    rounded, images = attacked.eight_bit, len(attacked)
    yield _listed(None if rounded is None else rounded.success.astype(int), images)
    yield _listed(None if rounded is None else rounded.distance, images)
    yield _listed(None if rounded is None else rounded.log_density, images)


def _listed(values: Array | None, images: int) -> list[Any]:
    return [None] * images if values is None else values.tolist()

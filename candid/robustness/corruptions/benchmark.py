"""Corrupted images, and the benchmark on them: errors, entropies and detection of models.

Importing this module registers all corruptions.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid._support.options import build
from candid._support.processes import Processes, launch
from candid._support.progress import SILENT, Progress
from candid._support.randomness import draws
from candid.data.images import image_keys
from candid.data.splits import Split
from candid.inference.metrics import area_under_curve, error_rate, mean_entropy, paired_placements
from candid.inference.predictions import Measure, Predictions
from candid.inference.runner import Runner, Transform
from candid.inference.study import Note, labelled_images, named_models
from candid.judging.detection import Detection, unseen
from candid.judging.held_out import HeldOut, measures_of
from candid.models.protocol import Model
from candid.robustness.corruptions import (  # noqa: F401  they register themselves
    CORRUPTIONS,
    SEVERITIES,
    blur,
    check_names,
    check_severities,
    digital,
    noise,
    weather,
)
from candid.robustness.corruptions.blur import truncated
from candid.robustness.corruptions.metrics import CorruptedModel, CorruptionResult, Reference, area_intervals
from candid.robustness.options import CorruptOptions
from candid.trust.scores import SCORES

__all__ = ["CORRUPTIONS", "SEVERITIES", "CorruptionResult", "alexnet", "check_names", "corrupt", "corrupted"]

NO_MCE = "no-mce"
"""The topic of the note that there is no mean corruption error."""
VERSION = 2
"""The version of the random numbers: cached predictions of another one are not used."""
SMALLEST = 8
VALUES = 1 << 20
"""Values of images that are corrupted at once: memory stays small, and the parts fit into the cache."""


def corrupted(images: Array, name: str, severity: int, random: np.random.Generator) -> Array:
    """Return corrupted images; each image has random numbers of its own.

    The same generator gives the same bits, whatever the batch size.

    Args:
        images: 8-bit images (B, C, H, W) with 1 or 3 channels.
        name: one of the fifteen corruptions of ImageNet-C, such as ``"fog"``.
        severity: 1 to 5.
        random: where the random numbers come from.

    Returns:
        8-bit images of the same shape; results are truncated to whole levels, as published.

    Example:
    >>> grey = np.full((2, 3, 32, 32), 100, np.uint8)
    >>> corrupted(grey, "brightness", 5, np.random.default_rng(0))[0, :, 0, 0]
    array([176, 176, 176], dtype=uint8)
    """
    check_names([name])
    check_severities([severity])
    _check(images)
    corruption = CORRUPTIONS[name]
    parameters = corruption.parameters_for(min(images.shape[2:]), severity)
    seeds = random.integers(1 << 62, size=len(images)).tolist()
    at_once = max(1, VALUES // prod(images.shape[1:]))
    changed = np.empty_like(images)
    for start in range(0, len(images), at_once):
        part = slice(start, start + at_once)
        generators = [np.random.default_rng(seed) for seed in seeds[part]]
        changed[part] = truncated(corruption.apply(images[part].astype(np.float32), generators, *parameters))
    return changed


def _check(images: Array) -> None:
    if images.dtype != np.uint8:
        raise CandidError(f"Corruptions need 8-bit images (uint8, 0 to 255), not {images.dtype}.")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise CandidError(
            f"Corruptions need images of shape (B, C, H, W) with 1 or 3 channels, not {images.shape}."
        )
    height, width = images.shape[2:]
    if min(height, width) < SMALLEST:
        raise CandidError(
            f"Images of {height} x {width} pixels are too small to be corrupted: "
            f"enlarge them to {SMALLEST} x {SMALLEST} or more."
        )


def alexnet() -> Reference:
    """Return AlexNet's errors, as published with ImageNet-C."""
    errors = {name: entry.alexnet for name, entry in CORRUPTIONS.items() if entry.alexnet is not None}
    return Reference("AlexNet", 0.435, errors, published=True)


def corrupt(models: Any, data: str, progress: Progress = SILENT, **options: Any) -> CorruptionResult | None:
    """Measure models on corrupted images: errors, entropies and whether corruptions are detected.

    Args:
        models: a model, a bundled name, a model folder, a run folder, or a list or dictionary of these.
        data: a data set with labels, as for :func:`candid.train`.
        progress: shows what is being done.
        options: the fields of :class:`~candid.robustness.options.CorruptOptions`.

    Returns:
        The metrics of each model; None in all processes but the first.

    Example:
        >>> import candid
        >>> result = candid.corrupt("cifar10-beta1", "digits", corruptions=["frog"])
        Traceback (most recent call last):
        ...
        candid._support.errors.CandidError: Unknown corruption 'frog': did you mean 'fog'?
    """
    chosen = build(CorruptOptions, options)
    check_names(chosen.corruptions)
    if chosen.score not in SCORES:
        raise CandidError(f"There is no score '{chosen.score}': {did_you_mean(chosen.score, SCORES)}")
    named = named_models(models)
    sources = list(
        dict.fromkeys(map(str, models if isinstance(models, list | tuple | Mapping) else [models]))
    )
    extra = {}
    if chosen.baseline is not None and chosen.baseline not in sources:
        extra = named_models(chosen.baseline)
    networks = any("network" in model.can for model in (*named.values(), *extra.values()))
    processes = launch(chosen.devices, network=networks)
    progress = progress if processes.is_global_zero else SILENT
    measured = [
        _measured(chosen, data, name, model, processes, progress)
        for name, model in (*named.items(), *extra.items())
    ]
    if not processes.is_global_zero:
        return None
    present = tuple(model for model in measured if model is not None)
    reference = None
    if chosen.baseline is not None:
        reference = present[-1 if extra else sources.index(chosen.baseline)].as_reference()
    elif {len(model.class_names) for model in named.values()} == {1000} and chosen.severities == SEVERITIES:
        reference = alexnet()
    notes = (Note(NO_MCE, "There is no mCE: name the model that it is relative to with --baseline."),)
    return CorruptionResult(present[: len(named)], reference, chosen, () if reference else notes)


def _measured(
    options: CorruptOptions, data: str, name: str, model: Model, processes: Processes, progress: Progress
) -> CorruptedModel | None:
    """Return the metrics of one model; None in all processes but the first."""
    runner = Runner(model, processes, options.out / "predictions", options.workers, progress)
    _, split = labelled_images(model, data, options, progress)
    chosen, measures = options.corruptions or CORRUPTIONS, measures_of(model)
    clean = runner.predictions(split, model.preprocessing, f"{name}, clean", measures)
    passes = (_passes(options, split, runner, name, corruption, measures) for corruption in chosen)
    if clean is None:
        for _ in passes:  # the other processes share the work
            pass
        return None
    held_out, columns = HeldOut.of(model), clean.statistics
    detection = None
    if held_out is not None:
        detection = Detection(held_out.statistics, unseen(columns, held_out)[0], {})
    errors: dict[str, list[float]] = {}
    entropies: dict[str, list[float]] = {}
    auc: dict[str, dict[str, float]] = {}
    placed: dict[str, dict[str, Array]] = {}
    by_image, names, paired = [_errors([clean])], _names(clean), True
    images: list[int] = []
    for corruption, predictions in zip(chosen, passes, strict=True):
        images += map(len, predictions)
        paired = paired and all(_names(one) == names for one in predictions)
        errors[corruption] = [error_rate(one.logits, one.labels) for one in predictions]
        entropies[corruption] = [mean_entropy(one.posterior) for one in predictions]
        if paired:
            by_image.append(_errors(predictions))
        if detection is None:
            continue
        for score, values in detection.values(Predictions.joined(predictions).statistics).items():
            inside = detection.values_inside[score]
            auc.setdefault(score, {})[corruption] = area_under_curve(inside, values)
            if paired:
                rows = np.isin(columns["keys"], detection.inside["keys"]).nonzero()[0]
                placements = paired_placements(inside, values.reshape(len(predictions), -1), rows)
                placed.setdefault(score, {})[corruption] = placements
    intervals = {score: area_intervals(one) for score, one in placed.items()} if paired else {}
    return CorruptedModel(
        name,
        model.record.beta,
        error_rate(clean.logits, clean.labels),
        mean_entropy(clean.posterior),
        errors,
        entropies,
        auc,
        options.score,
        min(images),
        options.severities,
        {score: ends for score, (ends, _) in intervals.items()},
        {score: mean for score, (_, mean) in intervals.items()},
        np.stack(by_image, 1) if paired else None,
    )


def _passes(
    options: CorruptOptions,
    split: Split,
    runner: Runner,
    name: str,
    corruption: str,
    measures: Mapping[str, Measure],
) -> list[Predictions]:
    """Return the predictions at all severities of a corruption; none in all processes but the first."""
    model, passes = runner.model, []
    for severity in options.severities:
        changed, transform = split, _transform(corruption, severity, options.seed)
        if options.corrupted is not None:
            folder = str(options.corrupted / corruption / str(severity))
            (_, changed), transform = labelled_images(model, folder, options, runner.progress, "all"), None
        title = f"{name}, {corruption} {severity}"
        passes.append(runner.predictions(changed, model.preprocessing, title, measures, transform))
    return [predictions for predictions in passes if predictions is not None]


def _errors(passes: Sequence[Predictions]) -> Array:
    """Return the share of ``passes`` in which each image is wrong, (N,)."""
    return np.mean([one.logits.argmax(1) != one.labels for one in passes], 0)


def _names(predictions: Predictions) -> list[str]:
    """Return the images' names with their class folders: the same for a photo and its corrupted versions."""
    return ["/".join(path.split("/")[-2:]) for path in predictions.paths]


def _transform(corruption: str, severity: int, seed: int) -> Transform | None:
    """Return the corruption; its random numbers are a function of the seed and of the batch's pixels."""
    key = f"{corruption} {severity} {seed} {VERSION}"
    return Transform(key, partial(_apply, corruption, severity, seed))


def _apply(corruption: str, severity: int, seed: int, images: Array) -> Array:
    pixels = int(image_keys(images).sum()) % 2**63
    random = draws(seed, CORRUPTIONS[corruption].number, severity, pixels).numpy
    return corrupted(images, corruption, severity, random)

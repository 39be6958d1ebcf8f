"""Evaluate a classifier from stored arrays: everything that needs no network."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from candid._support.config import fields
from candid._support.errors import CandidError
from candid.data.groups import GroupTable
from candid.evaluation.calibration_error import BINS
from candid.evaluation.groups import group_metrics
from candid.evaluation.options import EvaluateOptions
from candid.evaluation.result import (
    Evaluation,
    JudgedSet,
    as_json,
    judged_set,
    performance,
    selective,
    verdict_metrics,
)
from candid.inference.predictions import Predictions
from candid.inference.study import Note
from candid.models.flow.config import checked_names
from candid.trust.array_file import KEYS, ArrayFile, about
from candid.trust.arrays import checked_labels
from candid.trust.calibrate import held_out_scores, scored
from candid.trust.combined import Combined
from candid.trust.detection import Detection, unseen_rows
from candid.trust.monitor import Monitor
from candid.trust.promises import Promises
from candid.trust.scores import Score, Statistics, statistics_of
from candid.trust.verdict import Examination

PART = "test"
NAME = "classifier"
"""What a classifier is called that was given no name."""
NEED_NETWORK = (
    *("part", "images", "skip_bad", "devices", "workers"),
    *("ensemble", "ten_crop", "as_published"),
)


def evaluate_arrays(options: EvaluateOptions) -> Evaluation:
    """Return the evaluation of stored arrays: ``held_out``, ``test`` and the files of ``ood``."""
    held_out, test, others = _read(options)
    names = checked_names(held_out.class_names, held_out.arrays.logits.shape[1])
    if PART in others:
        raise CandidError(f"The name '{PART}' is taken by the test images: choose another for --ood.")
    files = {PART: test, **others}
    for each in files.values():
        _check_alike(each, held_out)
    monitor = _monitor(held_out, names, options)
    found = {name: each.predictions for name, each in files.items()}
    judged, promises = {}, {}
    for name, each in files.items():
        judged[name], promises[name] = _judged(monitor, each, found[name], options.by)
    detection, kept, overlap = _detection(held_out, found)
    own = found[PART]
    metrics: dict[str, Any] = {
        "model": options.name or NAME,
        "kind": "stored arrays",
        "beta": None,
        "data": str(options.test),
        "part": PART,
        "images": len(own),
        "calibration_bins": BINS,
        **as_json(performance(own)),
    }
    scaled = None
    if options.temperature:
        temperature = detection.held_out.temperature
        scaled = replace(own, logits=own.logits / temperature)
        metrics["temperature_scaled"] = {"temperature": temperature, **as_json(performance(scaled))}
    metrics |= {
        "held_out_images": len(held_out),
        "held_out_overlap": overlap,
        "false_positives": detection.false_positives(),
        "ood": detection.metrics(),
        "verdicts": verdict_metrics(monitor.promises, judged) | {"sentences": monitor.sentences()},
        "selective": selective(judged, kept),
    }
    if options.by is not None:
        groups = test.groups or [names[y] for y in own.logits.argmax(1).tolist()]
        metrics["groups"] = group_metrics(options.by, groups, judged[PART], promises[PART], monitor.promises)
    notes = []
    if overlap:
        text = f"{overlap:,} of {len(own):,} test images are among the held-out ones: they check no p-values."
        notes.append(Note("overlap", text))
    return Evaluation(None, names, metrics, own, scaled, detection, judged, tuple(notes))


def _read(options: EvaluateOptions) -> tuple[ArrayFile, ArrayFile, dict[str, ArrayFile]]:
    """Return the held-out images, the test images and other sets by name, after a check of the options."""
    for field in fields(EvaluateOptions):
        if field.name in NEED_NETWORK and getattr(options, field.name) != field.default:
            raise CandidError(
                f"{field.flag} is for images that pass a network: leave it out with --held-out."
            )
    if options.held_out is None or options.test is None:
        lacking = "--held-out" if options.held_out is None else "--test"
        raise CandidError(f"Stored arrays are given by --held-out and --test: add {lacking}.")
    if options.by in KEYS:
        raise CandidError(f"--by takes 'class' or a key with the groups of images, not '{options.by}'.")
    table = GroupTable.read(options.by)
    key = None if options.by == "class" or table is not None else options.by

    def read(file: Path, own: bool) -> ArrayFile:
        found = ArrayFile.read(file, own, key)
        if table is None:
            return found
        return replace(found, groups=tuple(table.of(found.paths, needed=own)))

    held_out, test = (read(file, True) for file in (options.held_out, options.test))
    if torch.equal(held_out.arrays.logits, test.arrays.logits):
        raise CandidError(
            f"'{test.file}' has the same images as '{held_out.file}': evaluate images that verdicts were not "
            "learned from."
        )
    return held_out, test, {name: read(Path(file), False) for name, file in options.others.items()}


def _check_alike(file: ArrayFile, held_out: ArrayFile) -> None:
    """Raise an error if the file is of another classifier than the held-out images."""
    (_, classes), (_, known) = file.arrays.logits.shape, held_out.arrays.logits.shape
    if classes != known:
        raise CandidError(
            f"'{file.file}' has logits of {classes} classes and '{held_out.file}' of {known}: give those of "
            "one classifier."
        )
    if file.class_names is not None and file.class_names != held_out.class_names:
        raise CandidError(
            f"'{file.file}' and '{held_out.file}' have different class_names: give those of one classifier, "
            "in the same order."
        )
    width, known_width = (
        "no features"
        if each.arrays.features is None
        else f"{each.arrays.features.shape[1]} features an image"
        for each in (file, held_out)
    )
    if width != known_width:
        raise CandidError(
            f"'{file.file}' has {width} and '{held_out.file}' has {known_width}: give the same in all files."
        )


def _monitor(held_out: ArrayFile, names: tuple[str, ...], options: EvaluateOptions) -> Monitor:
    monitor = Monitor(
        options.novelty,
        options.error,
        options.risk,
        options.delta,
        options.score or "combined",
        options.novelty_promise,
    )
    arrays, by = held_out.arrays, options.by if options.by == "class" else held_out.groups
    with about(held_out.file):
        checked_labels(held_out.labels, arrays, names)
    return monitor.fit(arrays.logits, held_out.labels, arrays.features, names, by)


def _judged(
    monitor: Monitor, file: ArrayFile, found: Predictions, by: str | None
) -> tuple[JudgedSet, list[Promises]]:
    """Return the verdicts on the images of a file, and what each of them promises."""
    names = tuple(dict.fromkeys(file.groups or ()))

    def examine(part: Predictions) -> list[Examination]:
        groups = None
        if by not in (None, "class"):  # a set without groups is ranked among all images
            numbers = part.columns.get("group")
            groups = [""] * len(part) if numbers is None else [names[i] for i in numbers.tolist()]
        return monitor.examine(part.logits, part.columns.get("features"), groups, part.paths)

    return judged_set(found, examine)


def _detection(held_out: ArrayFile, found: Mapping[str, Predictions]) -> tuple[Detection, Tensor, int]:
    """Return all scores of all sets, which test images are no held-out ones, (N,) bool, and how many are."""
    known = held_out_scores(held_out.predictions)
    statistics = {name: statistics_of(scored(each, known.column_scores)) for name, each in found.items()}
    own = statistics.pop(PART)
    kept, overlap = torch.ones(len(own["keys"]), dtype=torch.bool), 0
    extra: tuple[Score, ...] = (COMBINED_LOGITS,)
    if held_out.arrays.features is not None:  # logits alone can be equal for different images
        kept, overlap = unseen_rows(own["keys"], known)
        extra = ()
    inside = {name: values[kept] for name, values in own.items()}
    return Detection(known, inside, statistics, extra), kept, overlap


def _energy_and_posterior(statistics: Statistics) -> Tensor:
    return torch.stack((-statistics["log_evidence"], -statistics["max_posterior"]), 1)


COMBINED_LOGITS = Score(
    "combined", "classifier", ("log_evidence", "max_posterior"), Combined, _energy_and_posterior
)
"""The combined score of logits alone; see :func:`candid.trust.combined.parts_for`."""

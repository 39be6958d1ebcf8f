"""Evaluate a classifier from stored arrays: everything that needs no network."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.options import checked_names, fields
from candid.data.groups import GroupTable
from candid.evaluation.calibration_error import BINS
from candid.evaluation.options import EvaluateOptions
from candid.evaluation.result import (
    EvaluationResult,
    ImageGroups,
    as_json,
    performance,
    statistics_of,
    with_verdicts,
)
from candid.inference.metrics import fit_temperature
from candid.inference.predictions import Predictions
from candid.inference.study import Note
from candid.judging.detection import Detection
from candid.trust.arrays import KEYS, ArrayFile, about, checked_labels
from candid.trust.rule import Rule
from candid.trust.scores import Columns

PART = "test"
NAME = "classifier"
"""What a classifier is called that was given no name."""
NEED_NETWORK = (
    *("part", "images", "skip_bad", "devices", "workers"),
    *("ensemble", "ten_crop", "as_published"),
)


def evaluate_arrays(options: EvaluateOptions) -> EvaluationResult:
    """Return the evaluation of stored arrays: ``held_out``, ``test`` and the files of ``ood``."""
    held_out, test, others = _read(options)
    names = checked_names(held_out.class_names, held_out.arrays.logits.shape[1])
    if PART in others:
        raise CandidError(f"The name '{PART}' is taken by the test images: choose another for --ood.")
    files = {PART: test, **others}
    for file in files.values():
        _check_alike(file, held_out)
    groups, sets = _groups(held_out, names, options.by), _predictions(files)
    with about(held_out.file):
        labels = checked_labels(held_out.labels, held_out.arrays, names)
    columns = Columns(held_out.arrays.columns, labels)
    rule = Rule.fit(columns, labels, None if groups is None else groups.held_out, held_out.together, options)
    seen = np.zeros(len(test), dtype=bool)
    if held_out.arrays.features is not None:  # logits alone can be equal for different images
        seen = np.isin(test.keys(), held_out.keys())
    kept, overlap = seen if seen.all() else ~seen, int(seen.sum())
    statistics = statistics_of(sets, groups)
    detection = Detection(columns, statistics.pop(PART).rows(kept), statistics, rule)
    metrics: dict[str, Any] = {
        "model": options.name or NAME,
        "kind": "stored arrays",
        "beta": None,
        "data": str(options.test),
        "part": PART,
        "images": len(test),
        "calibration_bins": BINS,
        **as_json(performance(sets[PART])),
        "held_out_images": len(held_out),
        "held_out_overlap": overlap,
    }
    notes: tuple[Note, ...] = ()
    if overlap:
        text = (
            f"{overlap:,} of {len(test):,} test images are among the held-out ones: they check no p-values."
        )
        notes = (Note("overlap", text),)
    result = EvaluationResult(None, names, metrics, sets[PART], notes=notes)
    temperature = fit_temperature(held_out.arrays.logits, labels) if options.temperature else None
    return with_verdicts(result, sets, rule, detection, kept, temperature, groups)


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
    if options.together in KEYS:
        raise CandidError(f"--together takes a key with names or FILE.csv:COLUMN, not '{options.together}'.")
    table, series = GroupTable.read(options.by), GroupTable.read(options.together)
    key = None if options.by == "class" or table is not None else options.by

    def read(file: Path, labelled: bool) -> ArrayFile:
        together = options.together if file == options.held_out else None
        arrays = ArrayFile.read(file, labelled, key, None if series is not None else together)
        if series is not None and together is not None:
            arrays = replace(arrays, together=tuple(series.of(arrays.paths)))
        if table is None:
            return arrays
        return replace(arrays, groups=tuple(table.of(arrays.paths, needed=labelled)))

    held_out, test = (read(file, True) for file in (options.held_out, options.test))
    if np.array_equal(held_out.arrays.logits, test.arrays.logits):
        raise CandidError(
            f"'{test.file}' has the same images as '{held_out.file}': evaluate images that verdicts were not "
            "learned from."
        )
    return held_out, test, {name: read(Path(file), False) for name, file in options.others.items()}


def _check_alike(file: ArrayFile, held_out: ArrayFile) -> None:
    """Raise an error if the file is of another classifier than the held-out images."""
    (_, classes), (_, held_out_classes) = file.arrays.logits.shape, held_out.arrays.logits.shape
    if classes != held_out_classes:
        raise CandidError(
            f"'{file.file}' has logits of {classes} classes and '{held_out.file}' of {held_out_classes}: "
            "give those of one classifier."
        )
    if file.class_names is not None and file.class_names != held_out.class_names:
        raise CandidError(
            f"'{file.file}' and '{held_out.file}' have different class_names: give those of one classifier, "
            "in the same order."
        )
    width, held_out_width = (
        "no features" if arrays.features is None else f"{arrays.features.shape[1]} features per image"
        for arrays in (file.arrays, held_out.arrays)
    )
    if width != held_out_width:
        raise CandidError(
            f"'{file.file}' has {width} and '{held_out.file}' has {held_out_width}: give the same in all "
            "files."
        )


def _predictions(files: Mapping[str, ArrayFile]) -> dict[str, Predictions]:
    """Return the arrays of files as predictions, with the names of groups in the column ``group``."""
    predictions = {}
    for name, file in files.items():
        columns = {} if file.arrays.features is None else {"features": file.arrays.features}
        if file.groups is not None:
            columns["group"] = np.array(file.groups)
        classes = file.arrays.logits.shape[1]
        log_priors = np.full(classes, -math.log(classes))
        predictions[name] = Predictions(file.paths, file.labels, file.arrays.logits, log_priors, columns)
    return predictions


def _groups(held_out: ArrayFile, class_names: tuple[str, ...], by: str | None) -> ImageGroups | None:
    """Return the groups within which levels hold, if these were asked for."""
    if by is None:
        return None
    if held_out.groups is None:
        return ImageGroups.by_class(class_names, held_out.arrays.logits.argmax(1))

    def names(part: Predictions) -> list[str]:
        unknown = np.full(len(part), "")  # such images are ranked among those of all groups
        return part.columns.get("group", unknown).tolist()

    return ImageGroups.by_name(by, held_out.groups, names)

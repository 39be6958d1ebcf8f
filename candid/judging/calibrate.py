"""Calibrate a model: measure held-out images and store their scores with it."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from candid._support.errors import CandidError, CheckpointError
from candid._support.numbers import Array
from candid._support.options import build
from candid._support.progress import SILENT, Progress
from candid.data import Part
from candid.data.batches import named_batches
from candid.data.datasets import open_part, trained_on
from candid.data.groups import GroupTable
from candid.data.images import Preprocessing, image_keys
from candid.data.splits import FileSplit, Split, seen_in_training
from candid.inference.metrics import fit_temperature, measured_distances, measured_uncertainty
from candid.inference.options import CalibrateOptions
from candid.inference.predictions import FEATURES, Predictions
from candid.inference.runner import Runner, launch_for
from candid.judging.held_out import OUT_OF_FOLD, HeldOut, measures_for
from candid.models import checkpoint, saving
from candid.models.protocol import Model
from candid.trust.arrays import FEWEST_SERIES, firsts, fixed_halves, series_of
from candid.trust.learned import LearnedScore
from candid.trust.ranking import fit_learners
from candid.trust.scores import SCORES, Columns, learning_scores
from candid.trust.tree import Tree

MOST_IMAGES = 20_000
"""The most training images for features, and the most held-out ones; larger sets are subsampled evenly."""
FEWEST_IMAGES = 20
MOST_CLASSES = 100
"""Up to this number of classes, the uncertainty between each two of them is measured, too."""


def calibrate(
    model: Model | str | os.PathLike[str], data: str, progress: Progress = SILENT, **options: Any
) -> HeldOut | None:
    """Measure held-out images of ``data`` and store their scores with the model: p-values come from them.

    They are the images that were kept out of training; of data that the model was not trained on, the part
    that would be evaluated. Scores of features are fitted to training images; see :func:`measure` for what
    happens without them.

    Args:
        model: a model, which then carries the scores; or a model folder, whose scores are replaced.
        data: a data set with labels.
        progress: where to show messages and bars.
        **options: fields of :class:`~candid.inference.options.CalibrateOptions`.

    Returns:
        The held-out scores; None in all processes but the first.

    Example:
        >>> import candid
        >>> model = candid.GenerativeClassifier.from_preset("digits").eval()
        >>> len(calibrate(model, "digits", images=50))
        50
    """
    chosen = build(CalibrateOptions, options)
    folder = checkpoint.own_folder(model) if isinstance(model, str | os.PathLike) else None
    loaded = _loaded(folder) if folder is not None else model
    assert not isinstance(loaded, str | os.PathLike)
    processes = launch_for(loaded, chosen.devices)
    progress = progress if processes.is_global_zero else SILENT
    runner = Runner(loaded, processes, None, chosen.workers, progress)
    splits = calibration_splits(loaded, data, chosen, progress)
    held_out = measure(runner, *splits, loaded.preprocessing, chosen.together)
    if held_out is not None:
        held_out.attach(loaded)
        if folder is not None:
            saving.save_held_out(loaded, folder)
    return held_out


def _loaded(folder: Path) -> Model:
    """Return the model; held-out scores that can't be read are left out, since they are replaced."""
    try:
        return cast(Model, checkpoint.load(folder))
    except CheckpointError:
        return cast(Model, checkpoint.load(folder, held_out=False))


def calibration_splits(
    model: Model, data: str, options: CalibrateOptions, progress: Progress
) -> tuple[Split | None, Split]:
    """Return the training images, if there are any, and the held-out images."""
    training = model.record.config
    kept_out: Part | None = "val" if trained_on(data, training) else None
    if kept_out is not None and options.part in ("train", "all"):
        raise CandidError(
            f"'{data}' is what the model was trained on, and p-values need images that it has not "
            "seen: leave --part out, or choose val or test."
        )
    if kept_out is not None and options.part is None and OUT_OF_FOLD in model.held_out:
        raise CandidError(
            f"The model was trained on all training images of '{data}' and carries their scores out of fold: "
            "there are no others to hold out. Choose --part test, or name other images."
        )
    chosen = open_part(data, model.class_names, options.part or kept_out, training)

    def prepared(split: Split, name: str) -> Split:
        return split.preprocess(model.preprocessing, options.skip_bad, progress, name)

    held_out = prepared(chosen.split.subsample(options.images), "held-out images")
    if chosen.part == "all":
        return None, held_out
    try:
        train = open_part(data, model.class_names, "train", training).split
        return prepared(fewer(train), "training images"), held_out
    except CandidError as error:
        progress.log(
            "The training images can't be read, so that scores of features are fitted to one half of the "
            f"held-out images, or left out if the model has a density: {error}"
        )
        return None, held_out


def measure(
    runner: Runner,
    train: Split | None,
    held_out: Split,
    preprocessing: Preprocessing,
    together: str | None = None,
) -> HeldOut | None:
    """Return the scores of held-out images; None in all processes but the first.

    Args:
        runner: runs the model.
        train: training images, which scores of features are fitted to. If None, they are fitted to one half
            of the held-out images of a model without a density, and the other half is held out; a model
            with a density does without them.
        held_out: labelled images that the model was not trained on.
        preprocessing: how the model sees them.
        together: ``FILE.csv:COLUMN``, the object, scene or day of each held-out image.
    """
    table = None if together is None else GroupTable.together(together)
    known = None
    if train is not None:
        known = runner.features(fewer(train), preprocessing, "features of training images", MOST_IMAGES)
    measures = {**measures_for(SCORES.values()), **FEATURES}
    images = runner.predictions(fewer(held_out), preprocessing, "held-out images", measures)
    if images is None:
        return None
    if (images.labels < 0).any():
        raise CandidError("Held-out images need labels: give a data set with class folders.")
    images = without_training_images(images, runner.model, runner.progress)
    if known is not None:
        images = without(images, known.columns["keys"], "those that scores are fitted to", runner.progress)
    if table is not None:
        trained = train.paths if isinstance(train, FileSplit) else ()
        images = in_named_series(images, table, map(str, trained), runner.progress)
    if len(images) < FEWEST_IMAGES:
        raise CandidError(f"{len(images)} held-out images are too few: give at least {FEWEST_IMAGES}.")
    distances = runner.model.geometry.distances() if "mixture" in runner.model.can else None
    return held_out_scores(images, known, runner.model.tree, distances)


def in_named_series(
    images: Predictions, table: GroupTable, trained: Iterable[str], progress: Progress
) -> Predictions:
    """Return the held-out images with their series; without those whose series was trained on."""
    names = np.array(table.of(images.paths))
    seen = np.isin(names, [name for name in table.of(trained, needed=False) if name])
    if seen.any():
        progress.log(f"{int(seen.sum()):,} held-out images are left out: their series is trained on")
        images, names = images[np.flatnonzero(~seen)], names[~seen]
    different, series = np.unique(names, return_inverse=True)
    if len(different) < FEWEST_SERIES:
        raise CandidError(
            f"--together leaves {len(different)} series of held-out images: name at least {FEWEST_SERIES} "
            "objects, scenes or days, or leave it out."
        )
    progress.log(f"{len(names):,} held-out images in {len(different):,} series: each series counts once")
    return replace(images, columns={**images.columns, "series": series})


def without_training_images(images: Predictions, model: Model, progress: Progress) -> Predictions:
    """Return the held-out images without those that ``model`` was trained on, as far as it knows them."""
    return without(images, model.held_out.get("training_keys"), "the training images", progress)


def without(images: Predictions, keys: Array | None, which: str, progress: Progress) -> Predictions:
    """Return the images without those that are among others, ``which`` have these ``keys``."""
    seen = seen_in_training(images.columns["keys"], keys)
    if not seen.any():
        return images
    progress.log(
        f"{int(seen.sum()):,} of {len(images):,} held-out images are among {which}: they are left out"
    )
    return images[np.flatnonzero(~seen)]


def held_out_scores(
    images: Predictions,
    known: Predictions | None = None,
    tree: Tree | None = None,
    distances: Array | None = None,
) -> HeldOut:
    """Return the scores of held-out images from what a model says of them.

    Args:
        images: labelled images that the model was not trained on.
        known: other images, with features, that scores of features are fitted to. If None, they are fitted to
            one half of ``images`` if it has features and no density, and the other half is held out; no copy
            of an image, and no other one of its series, is in the other half.
        tree: kinds above the classes.
        distances: of the class means of a trained mixture, (M, M); they are then measured on the images.
    """
    pairs = apart = None
    if images.logits.shape[1] <= MOST_CLASSES:
        pairs = measured_uncertainty(images.posterior, images.labels).astype(np.float32)
        if distances is not None:
            apart = measured_distances(images.logits, images.labels, distances).astype(np.float32)
            apart = apart if np.isfinite(apart).all() else None  # some class has no images
    keys, temperature = None, fit_temperature(images.logits, images.labels)
    if known is None and images.log_density is None and "features" in images.columns:
        series = series_of(images.statistics, images.columns.get("series"))
        if firsts(series).sum() >= 2 * FEWEST_IMAGES:
            known, images = (images[half] for half in fixed_halves(series))
            keys = known.columns["keys"]
    learned = {}
    if known is not None:
        columns = score_columns(known)
        learned = fit_learners(learning_scores(columns), columns)
    statistics = scored(images, learned).statistics.statistics()
    if tree is not None:
        statistics["kind_ratio"], statistics["kind_mass"] = tree.reach(images.posterior, images.labels)
    return HeldOut(
        Columns(statistics),
        temperature,
        learned,
        keys,
        pair_uncertainty=pairs,
        pair_distances=apart,
        tree=tree,
    )


def scored(images: Predictions, scores: Mapping[str, LearnedScore]) -> Predictions:
    """Return the predictions with the values of fitted scores as columns, in place of the features."""
    columns = {name: score.score(score_columns(images)) for name, score in scores.items()}
    columns |= {name: column for name, column in images.columns.items() if name not in FEATURES}
    return replace(images, columns=columns)


def held_out_groups(table: GroupTable, model: Model, data: str, held_out: HeldOut) -> list[str]:
    """Return the groups of held-out images, which are looked up in ``data`` by their pixels."""
    training = model.record.config
    parts: tuple[Part | None, ...] = ("val",) if trained_on(data, training) else (None,)
    advice = f"calibrate it with 'candid calibrate MODEL {data}'"
    if held_out.out_of_fold:
        parts = ("train", "val")
        advice = "name the data that it was trained on, or calibrate it with other labelled images"
    names: dict[int, str] = {}
    for part in parts:
        split = open_part(data, model.class_names, part, training).split
        for images, _, paths in named_batches(split, model.preprocessing, 256):
            names |= zip(image_keys(images).tolist(), paths, strict=True)
    keys = held_out.statistics["keys"].tolist()
    if missing := sum(key not in names for key in keys):
        raise CandidError(
            f"{missing:,} of the model's {len(keys):,} held-out images are not in '{data}', so that their "
            f"groups are unknown: {advice}."
        )
    return table.of(names[key] for key in keys)


def attach_held_out(runner: Runner, train: Split, held_out: Split, preprocessing: Preprocessing) -> None:
    """Measure held-out images and store their scores with the model, unless there are too few images."""
    if len(held_out) < FEWEST_IMAGES:
        runner.progress.log(
            f"no p-values: only {len(held_out)} images were held out, of {FEWEST_IMAGES} needed; train with "
            "more images or a larger --holdout"
        )
        return
    measured = measure(runner, train, held_out, preprocessing)
    if measured is not None:
        measured.attach(runner.model)


def fewer(split: Split) -> Split:
    """Return at most ``MOST_IMAGES`` of it; all of tar shards."""
    return split.subsample(min(MOST_IMAGES, len(split))) if split.can_index else split


def score_columns(predictions: Predictions) -> Columns:
    """Return the columns that fitted scores need."""
    labels = predictions.labels if (predictions.labels >= 0).all() else None
    return Columns({"logits": predictions.logits, "features": predictions.columns["features"]}, labels)

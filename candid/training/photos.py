"""Train a photo model: statistics through an eye, a head in closed form, held-out scores, a report."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from candid._support.errors import CandidError, CheckpointError
from candid._support.numbers import Array
from candid._support.options import to_dict
from candid._support.processes import Processes, launch
from candid._support.progress import SILENT, Progress
from candid._support.text import listed
from candid.data.datasets import open_dataset
from candid.data.formats import Query, format_of
from candid.data.splits import FileSplit, Split
from candid.inference.predictions import Predictions
from candid.judging.calibrate import held_out_scores
from candid.models import checkpoint, saving
from candid.models.photo.eye import Eye
from candid.models.photo.head import ClosedForm, fit_head, out_of_fold_z
from candid.models.photo.known_photos import KnownPhotos
from candid.models.photo.model import PhotoModel
from candid.models.photo.opening import open_eye, tree_of
from candid.models.photo.taught import Seen
from candid.training.features import Extraction, FeatureCache, Features
from candid.training.options import ENOUGH, SHARE, PhotoOptions
from candid.training.photo_report import DataReport, in_series, named_series
from candid.training.remembered import Remembered
from candid.training.run_folder import RESTORE, RunFolder, splits_digest, state_digest

FEWEST_HELD_OUT = 20
PART_WORDS = {"val": "held-out", "test": "test"}
MOST_NAMED = 5
"""Classes that a warning names."""
HEAD_SECONDS = 2e-3
"""Seconds that fitting the head takes for each photo."""


@dataclass(frozen=True)
class PhotoData:
    """The photos of each part; without ``val``, all training photos are scored out of fold."""

    parts: dict[str, Split]
    """By name: train, maybe val, maybe test."""
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, options: PhotoOptions) -> "PhotoData":
        """Open the data, and decide which photos are held out."""
        data = open_dataset(
            options.data,
            holdout=options.holdout or SHARE,
            split_seed=options.split_seed,
            val_spec=options.val_data,
            only=options.only,
            nested=options.tree == "folders",
        )
        parts = {"train": data.train, "val": data.val, "test": data.test}
        if isinstance(data.train, FileSplit) and isinstance(data.val, FileSplit):
            few = len(data.train) + len(data.val) < ENOUGH if options.holdout is None else not options.holdout
            if few and not has_val(options.data, options.tree == "folders"):
                paths, labels = (*data.train.paths, *data.val.paths), (data.train.labels, data.val.labels)
                parts |= {"train": FileSplit(paths, np.concatenate(labels)), "val": None}
        elif data.train.can_index:
            raise CandidError(f"'{options.data}' is no folder of photos: train a pixel model with --preset.")
        return cls({name: part for name, part in parts.items() if part is not None}, data.class_names)

    @property
    def digest(self) -> str:
        """The SHA-256 of the photos, their labels and the class names."""
        return splits_digest(self.class_names, self.parts.values())

    def described(self) -> str:
        """Return what was understood, in one sentence."""
        train = self.parts["train"]
        each = ""
        if isinstance(train, FileSplit):
            counts = np.bincount(train.labels, minlength=len(self.class_names))
            least, most = int(counts.min()), int(counts.max())
            each = f" ({least} each)" if least == most else f" ({least} to {most} each)"
        held_out = "all of them scored out of fold"
        if "val" in self.parts:
            count = len(self.parts["val"])
            held_out = f"{count:,} held out"
            if count < FEWEST_HELD_OUT:
                held_out += f", fewer than {FEWEST_HELD_OUT}: p-values are out of fold"
        tested = f", {len(self.parts['test']):,} to test" if "test" in self.parts else ""
        return f"{len(train):,} photos of {len(self.class_names)} classes{each} to fit, {held_out}{tested}"

    def missing(self) -> list[str]:
        """Return a warning for each part that lacks photos of some classes."""
        warnings = []
        for name, part in self.parts.items():
            if isinstance(part, FileSplit) and name != "train":
                counts = np.bincount(part.labels, minlength=len(self.class_names)).tolist()
                absent = [each for each, count in zip(self.class_names, counts, strict=True) if not count]
                if absent:
                    rest = [f"{len(absent) - MOST_NAMED} more"] if len(absent) > MOST_NAMED else []
                    warnings.append(
                        f"warning: no {PART_WORDS[name]} photos of {listed(absent[:MOST_NAMED] + rest)}: "
                        f"{PART_WORDS[name]} results say nothing about {'it' if len(absent) == 1 else 'them'}"
                    )
        return warnings


def has_val(data: str, nested: bool) -> bool:
    """Return whether the data set has its own part to validate on."""
    read = format_of(data).read
    return read is not None and "val" in read(Query(data, True, nested=nested)).parts


def train_photos(
    options: PhotoOptions, folder: RunFolder, resume: bool, devices: int | None, progress: Progress
) -> dict[str, Any]:
    """Train a photo model into ``folder`` and return its results.

    Statistics that an earlier or a killed run computed are taken from the cache, so that a run that is
    started again goes on where it was.
    """
    folder.check_new(resume)
    eye, processes = open_eye(options.eye), launch(devices, network=False)
    show = progress if processes.is_global_zero else SILENT
    with folder.held(processes, resume):
        return _train(options, folder, eye, processes, show)


def _train(
    options: PhotoOptions, folder: RunFolder, eye: Eye, processes: Processes, show: Progress
) -> dict[str, Any]:
    data = PhotoData.of(options)
    tree_of(options.tree, data.class_names, options.data)  # mistakes show before photos are computed
    named_series(options)
    digests = {"data": data.digest, "options": state_digest(options.deciding())}
    earlier = earlier_results(folder, digests)
    if earlier is not None:
        show.log(f"this run is finished: {folder.path}")
        return earlier
    if processes.is_global_zero:
        folder.create(options)
    extraction = Extraction(eye, FeatureCache(eye, show), processes, show, options.skip_bad)
    _announce(data, extraction)
    try:
        parts = {name: extraction(part, f"{name} photos") for name, part in data.parts.items()}
    except KeyboardInterrupt:
        show.log(f"go on with: candid train --resume --out {quote(str(folder.path))}")
        raise
    if not processes.is_global_zero:
        return {}
    _check_counts(parts["train"], data.class_names)
    return _finish(options, parts, data.class_names, eye, folder, show, digests)


def _announce(data: PhotoData, extraction: Extraction) -> None:
    """Say what was understood, what will be done and how long it will take."""
    log, eye = extraction.progress.log, extraction.eye
    log(data.described())
    for warning in data.missing():
        log(warning)
    new, seconds = extraction.estimate(list(data.parts.values()))
    old = sum(map(len, data.parts.values())) - new
    through = f"a photo model through the eye '{eye.name}' ({eye.size} pixels, {eye.licence})"
    cached = f"; the statistics of {old:,} photos are cached already" if old else ""
    total = seconds + len(data.parts["train"]) * HEAD_SECONDS + 2
    log(f"{through}: about {math.ceil(total)} seconds{cached}")


def _check_counts(train: Features, class_names: tuple[str, ...]) -> None:
    counts = np.bincount(train.labels, minlength=len(class_names)).tolist()
    for name, count in zip(class_names, counts, strict=True):
        if count < 2:
            raise CandidError(
                f"The class '{name}' has {count or 'no'} training photo: add more (20 or better 50), or "
                "remove it."
            )


def earlier_results(folder: RunFolder, digests: dict[str, str]) -> dict[str, Any] | None:
    """Return the results of a finished run; None of a new one, and of one that was killed at its end.

    Raises:
        CandidError: if the run has a model of other data or options, or results without a model.
    """
    results = folder.results
    if not folder.has_best:
        if results is not None:
            raise CheckpointError(f"The run's model '{folder.best}' is missing: {RESTORE}")
        return None
    recorded = checkpoint.load(folder.best).metadata.get("training", {}).get("digests", {})
    for name, current in digests.items():
        if recorded.get(name, current) != current:
            what = {"data": "photos or labels", "options": "options"}[name]
            raise CandidError(f"The {what} are not those that the run was started with: {RESTORE}")
    return results


def _finish(
    options: PhotoOptions,
    parts: dict[str, Features],
    class_names: tuple[str, ...],
    eye: Eye,
    folder: RunFolder,
    progress: Progress,
    digests: dict[str, str],
) -> dict[str, Any]:
    """Fit the head, save the model with its held-out scores, and write what is worth a look."""
    progress.log("fitting the head")
    parts, series = in_series(options, parts, progress)
    train, uniform = parts["train"], options.priors == "uniform"
    given = train.values, train.labels, len(class_names), eye.groups, uniform
    head = fit_head(*given, seed=options.seed, series=series["train"])
    model = PhotoModel.of(head, eye, class_names)
    model.tree = tree_of(options.tree, class_names, options.data)
    config = {**to_dict(options), "holdout": options.holdout or SHARE, "split": "hash", "crop": "none"}
    model.metadata = {
        "training": {
            "config": {key: value for key, value in config.items() if value is not None},
            "digests": digests,
        },
        "head": {**head.described(), "photos": len(train)},
    }
    val = parts["val"] if "val" in parts and len(parts["val"]) >= FEWEST_HELD_OUT else None
    if options.thumbnails:
        _keep_photos(model, val or train)
    held_out = _hold_out(options, model, head, train, val, series["train" if val is None else "val"])
    if len(held_out) < FEWEST_HELD_OUT:
        progress.log(
            f"no p-values and verdicts: only {len(held_out)} photos could be scored, of {FEWEST_HELD_OUT} "
            "needed; add photos"
        )
    saving.save(model, folder.best)
    unseen = head.out_of_fold
    predictions = {
        "train": _predictions(model, train, unseen.logits, {"novelty": unseen.novelty}),
        **{name: _predicted(model, part) for name, part in parts.items() if name != "train"},
    }
    results: dict[str, Any] = {"val": _metrics(predictions.get("val", held_out))}
    results |= {"out_of_fold": "val" not in parts, "head": model.metadata["head"]}
    if "test" in parts:
        results["test"] = _metrics(predictions["test"])
    skipped = [line for part in parts.values() for line in part.skipped]
    folder.write_skipped(skipped, "photo", progress)
    report = DataReport.of(parts, predictions, class_names)
    folder.write_text("photos.csv", report.csv())
    folder.write_text("photos.html", report.html())
    for line in report.sentences(folder.path):
        progress.log(line)
    results["report"] = report.counts()
    folder.write_results(results)
    return results


def _hold_out(
    options: PhotoOptions,
    model: PhotoModel,
    head: ClosedForm,
    train: Features,
    val: Features | None,
    alike: Array,
) -> Predictions:
    """Attach the scores of held-out photos, if there are enough, and return what was predicted of them.

    ``alike`` has the series of each of them.
    """
    held_out, remembered = _held_out(model, head, train, val)
    if len(np.unique(alike)) < len(alike):
        held_out = replace(held_out, columns={**held_out.columns, "series": alike})
        remembered = replace(remembered, series=alike)
    model.held_out = {"training_keys": np.unique(train.keys)}
    if len(held_out) >= FEWEST_HELD_OUT:
        own_val = val is not None and has_val(options.data, options.tree == "folders")
        scores = held_out_scores(held_out, tree=model.tree)
        occasions = options.together is None and not own_val
        replace(scores, out_of_fold=val is None, occasions=occasions).attach(model)
        model.held_out |= remembered.columns()
    return held_out


def _keep_photos(model: PhotoModel, photos: Features) -> None:
    """Keep thumbnails of some photos with the model: held-out ones where there are any."""
    paths = [Path(name) for name in photos.names]
    if not all(path.is_file() for path in paths):  # samples of tar shards
        return
    places = model.places(model.latent_of(photos.values))
    kept = KnownPhotos.of(paths, photos.labels, places, len(model.class_names))
    model.thumbnails = {} if kept is None else kept.to_tensors()


def _predicted(model: PhotoModel, photos: Features) -> Predictions:
    outputs = model.outputs_of(photos.values)
    assert outputs.log_density_terms is not None and outputs.novelty is not None
    columns = {"log_density_terms": outputs.log_density_terms, "novelty": outputs.novelty}
    return _predictions(model, photos, outputs.logits, columns)


def _predictions(
    model: PhotoModel, photos: Features, logits: Array, columns: dict[str, Array]
) -> Predictions:
    columns = {**columns, "keys": photos.keys}
    return Predictions(photos.names, photos.labels, logits.astype(np.float32), model.log_priors, columns)


def _held_out(
    model: PhotoModel, head: ClosedForm, train: Features, val: Features | None
) -> tuple[Predictions, Remembered]:
    """Return what is known of held-out photos; of all training photos, out of fold, if there are none."""
    if val is not None:
        return _predicted(model, val), Remembered(model.fitted_part(val.values), val.labels, val.keys)
    fold = head.out_of_fold
    z = out_of_fold_z(head, train.values, train.labels)
    novelty = fold.novelty.astype(np.float32)
    seen = Seen(z, fold.scores, fold.logits, fold.novelty, None)
    held_out = _predictions(model, train, fold.logits, {"novelty": novelty})
    return held_out, Remembered(seen, train.labels, train.keys)


def _metrics(predictions: Predictions) -> dict[str, float]:
    losses = -np.take_along_axis(predictions.log_posterior, predictions.labels[:, None], 1)
    right = predictions.logits.argmax(1) == predictions.labels
    return {"accuracy": float(right.mean()), "cross_entropy": float(losses.mean())}

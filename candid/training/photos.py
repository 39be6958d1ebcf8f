"""Train a photo model: statistics through an eye, a head in closed form, held-out scores, a report."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from candid._support.config import to_dict
from candid._support.distributed import launch
from candid._support.errors import CandidError, CheckpointError
from candid._support.progress import SILENT, Progress
from candid._support.text import listed, plural
from candid.data.datasets import open_dataset
from candid.data.formats import Query, format_of
from candid.data.splits import FileSplit, Split
from candid.inference.predictions import Predictions
from candid.models import checkpoint
from candid.models.eyes import open_eye
from candid.models.eyes.eye import Eye
from candid.models.heads.closed_form import ClosedForm, fit_head, out_of_fold_z
from candid.models.heads.known_photos import KnownPhotos
from candid.models.heads.photo import PhotoModel
from candid.models.heads.taught import Seen
from candid.training.features import Extraction, FeatureCache, Features
from candid.training.photo_options import ENOUGH, SHARE, PhotoOptions
from candid.training.photo_report import DataReport
from candid.training.remembered import Remembered
from candid.training.run_folder import RESTORE, RunFolder, splits_digest, state_digest
from candid.trust.calibrate import held_out_scores

if TYPE_CHECKING:
    from lightning_fabric import Fabric

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
        )
        parts = {"train": data.train, "val": data.val, "test": data.test}
        if isinstance(data.train, FileSplit) and isinstance(data.val, FileSplit):
            few = len(data.train) + len(data.val) < ENOUGH if options.holdout is None else not options.holdout
            if few and not _has_val(options.data):
                paths, labels = (*data.train.paths, *data.val.paths), (data.train.labels, data.val.labels)
                parts |= {"train": FileSplit(paths, torch.cat(labels)), "val": None}
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
            counts = torch.bincount(train.labels, minlength=len(self.class_names))
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
        found = []
        for name, part in self.parts.items():
            if isinstance(part, FileSplit) and name != "train":
                counts = torch.bincount(part.labels, minlength=len(self.class_names)).tolist()
                absent = [each for each, count in zip(self.class_names, counts, strict=True) if not count]
                if absent:
                    more = [f"{len(absent) - MOST_NAMED} more"] if len(absent) > MOST_NAMED else []
                    found.append(
                        f"warning: no {PART_WORDS[name]} photos of {listed(absent[:MOST_NAMED] + more)}: "
                        f"{PART_WORDS[name]} results say nothing about {'it' if len(absent) == 1 else 'them'}"
                    )
        return found


def _has_val(data: str) -> bool:
    """Return whether the data set has its own part to validate on."""
    read = format_of(data).read
    return read is not None and "val" in read(Query(data, True)).parts


def train_photos(
    options: PhotoOptions, folder: RunFolder, resume: bool, devices: int | None, progress: Progress
) -> dict[str, Any]:
    """Train a photo model into ``folder`` and return its results.

    Statistics that an earlier or a killed run computed are taken from the cache, so that a run that is
    started again goes on where it was.
    """
    folder.check_new(resume)
    eye, fabric = open_eye(options.eye), launch(devices)
    show = progress if fabric.is_global_zero else SILENT
    with folder.held(fabric, resume):
        return _train(options, folder, eye, fabric, show)


def _train(
    options: PhotoOptions, folder: RunFolder, eye: Eye, fabric: "Fabric", show: Progress
) -> dict[str, Any]:
    data = PhotoData.of(options)
    digests = {"data": data.digest, "options": _digest_of(options)}
    earlier = _earlier(folder, digests)
    if earlier is not None:
        show.log(f"this run is finished: {folder.path}")
        return earlier
    if fabric.is_global_zero:
        folder.create(options)
    extraction = Extraction(eye, FeatureCache(eye, show), fabric, show, options.skip_bad)
    _announce(data, extraction)
    try:
        parts = {name: extraction(part, f"{name} photos") for name, part in data.parts.items()}
    except KeyboardInterrupt:
        show.log(f"go on with: candid train --resume --out {folder.path}")
        raise
    if not fabric.is_global_zero:
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
    known = sum(map(len, data.parts.values())) - new
    through = f"a photo model through the eye '{eye.name}' ({eye.size} pixels, {eye.licence})"
    cached = f"; the statistics of {known:,} photos are cached already" if known else ""
    total = seconds + len(data.parts["train"]) * HEAD_SECONDS + 2
    log(f"{through}: about {math.ceil(total)} seconds{cached}")


def _check_counts(train: Features, class_names: tuple[str, ...]) -> None:
    counts = torch.bincount(train.labels, minlength=len(class_names)).tolist()
    for name, count in zip(class_names, counts, strict=True):
        if count < 2:
            raise CandidError(
                f"The class '{name}' has {count or 'no'} training photo: add more (20 or better 50), or "
                "remove it."
            )


def _earlier(folder: RunFolder, digests: dict[str, str]) -> dict[str, Any] | None:
    """Return the results of a finished run; None of a new one, and of one that was killed at its end.

    Raises:
        CandidError: if the run has a model of other data or options, or results without a model.
    """
    results = folder.results
    if not folder.has_best:
        if results is not None:
            raise CheckpointError(f"The run's model '{folder.best}' is missing: {RESTORE}")
        return None
    known = checkpoint.load(folder.best).metadata.get("training", {})
    for name, found in digests.items():
        if known.get("digests", {}).get(name, found) != found:
            what = {"data": "photos or labels", "options": "options"}[name]
            raise CandidError(f"The {what} are not those that the run was started with: {RESTORE}")
    return results


def _digest_of(options: PhotoOptions) -> str:
    values = to_dict(options).items()
    return state_digest({key: value for key, value in values if key not in ("data", "val_data")})


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
    train, uniform = parts["train"], options.priors == "uniform"
    head = fit_head(train.values, train.labels, len(class_names), eye.groups, uniform, seed=options.seed)
    model = PhotoModel.of(head, eye, class_names)
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
    held_out, remembered = _held_out(model, head, train, val)
    model.held_out = {"training_keys": train.keys.unique()}
    if len(held_out) >= FEWEST_HELD_OUT:
        replace(held_out_scores(held_out), out_of_fold=val is None).attach(model)
        model.held_out |= remembered.tensors()
    else:
        progress.log(
            f"no p-values and verdicts: only {len(held_out)} photos could be scored, of {FEWEST_HELD_OUT} "
            "needed; add photos"
        )
    checkpoint.save(model, folder.best)
    own = head.out_of_fold
    predictions = {
        "train": _predictions(model, train, own.logits, {"novelty": own.novelty}),
        **{name: _predicted(model, part) for name, part in parts.items() if name != "train"},
    }
    results: dict[str, Any] = {"val": _metrics(predictions.get("val", held_out))}
    results |= {"out_of_fold": "val" not in parts, "head": model.metadata["head"]}
    if "test" in parts:
        results["test"] = _metrics(predictions["test"])
    skipped = [line for part in parts.values() for line in part.skipped]
    if skipped:
        folder.write_text("skipped.txt", "\n".join(skipped) + "\n")
        left_out, listed_in = plural(len(skipped), "photo"), folder.path / "skipped.txt"
        progress.log(f"left out {left_out} that can't be used: {listed_in}")
    report = DataReport.of(parts, predictions, class_names)
    folder.write_text("photos.csv", report.csv())
    folder.write_text("photos.html", report.html())
    for line in report.sentences():
        progress.log(line)
    results["report"] = report.counts()
    folder.write_results(results)
    return results


def _keep_photos(model: PhotoModel, photos: Features) -> None:
    """Keep thumbnails of some photos with the model: held-out ones where there are any."""
    with torch.no_grad():
        places = model.places(model.latent_of(photos.values))
    paths = [Path(name) for name in photos.names]
    if not all(path.is_file() for path in paths):  # samples of tar shards
        return
    kept = KnownPhotos.of(paths, photos.labels, places, len(model.class_names))
    model.thumbnails = {} if kept is None else kept.to_tensors()


def _predicted(model: PhotoModel, photos: Features) -> Predictions:
    with torch.no_grad():
        outputs = model.outputs_of(photos.values)
    assert outputs.log_density_terms is not None and outputs.novelty is not None
    columns = {"log_density_terms": outputs.log_density_terms, "novelty": outputs.novelty}
    return _predictions(model, photos, outputs.logits, columns)


def _predictions(
    model: PhotoModel, photos: Features, logits: Tensor, columns: dict[str, Tensor]
) -> Predictions:
    columns = {**columns, "keys": photos.keys}
    return Predictions(photos.names, photos.labels, logits.float(), model.log_priors, columns)


def _held_out(
    model: PhotoModel, head: ClosedForm, train: Features, val: Features | None
) -> tuple[Predictions, Remembered]:
    """Return what is known of held-out photos; of all training photos, out of fold, if there are none."""
    if val is not None:
        with torch.no_grad():
            seen = model.fitted_part(val.values)
        return _predicted(model, val), Remembered(seen, val.labels, val.keys)
    fold = head.out_of_fold
    z = out_of_fold_z(head, train.values, train.labels)
    found = _predictions(model, train, fold.logits, {"novelty": fold.novelty.float()})
    seen = Seen(z, fold.scores, fold.logits, fold.novelty, None)
    return found, Remembered(seen, train.labels, train.keys)


def _metrics(found: Predictions) -> dict[str, float]:
    losses = -found.log_posterior.gather(1, found.labels[:, None])
    right = found.logits.argmax(1) == found.labels
    return {"accuracy": right.double().mean().item(), "cross_entropy": losses.mean().item()}

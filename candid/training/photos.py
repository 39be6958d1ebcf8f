"""Train a photo model: statistics through an eye, a head in closed form, held-out scores, a report."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import to_dict
from candid._support.processes import Processes, launch
from candid._support.progress import SILENT, Progress
from candid.inference.predictions import Predictions
from candid.judging.by_class import ByClass
from candid.judging.calibrate import held_out_scores
from candid.judging.held_out import HeldOut
from candid.models import saving
from candid.models.photo.eye import Eye
from candid.models.photo.head import ClosedForm, fit_head
from candid.models.photo.known_photos import KnownPhotos
from candid.models.photo.model import PhotoModel
from candid.models.photo.opening import open_eye, tree_of
from candid.training.again import CHANGED, Difference, Earlier, compared, counted, differences, lists, used
from candid.training.features import Extraction, FeatureCache, Features
from candid.training.many_photos import Whole, are_many, fit_shares
from candid.training.options import SHARE, PhotoOptions
from candid.training.photo_data import FEWEST_HELD_OUT, PhotoData, earlier_results, has_val
from candid.training.photo_report import DataReport
from candid.training.photo_series import Series, in_series, named_table, sentence
from candid.training.remembered import Remembered
from candid.training.run_folder import RunFolder, state_digest

MOST_ON_CARD = 200
"""A model of more classes does not carry its results by class."""
NOTHING = "no photos"
UNCHANGED = "nothing has changed since the last training: the model in %s stays as it is"
HEAD_SECONDS = 2e-3
"""Seconds that fitting the head takes for each photo."""


def train_photos(
    options: PhotoOptions,
    folder: RunFolder,
    resume: bool,
    devices: int | None,
    progress: Progress,
    keep_old: bool = False,
) -> dict[str, Any]:
    """Train a photo model into ``folder`` and return its results.

    Statistics that an earlier or a killed run computed are taken from the cache, so that a run that is
    started again goes on where it was, and only new photos pass the eye. A model that is in the folder is
    replaced once the new one is whole.

    Args:
        options: what decides the result.
        folder: the folder of the run.
        resume: whether to continue a run, whose photos and options must not have changed.
        devices: the number of processes.
        progress: where to show messages and bars.
        keep_old: whether to copy the run folder first, as NAME.1.
    """
    old = None if resume else Earlier.of(folder)
    started = resume or old is not None or not folder.has_anything
    folder.check_new(started)
    eye, processes = open_eye(options.eye), launch(devices, network=False)
    show = progress if processes.is_global_zero else SILENT
    with folder.held(processes, started):
        return _train(options, folder, eye, processes, show, old, keep_old)


def _train(
    options: PhotoOptions,
    folder: RunFolder,
    eye: Eye,
    processes: Processes,
    show: Progress,
    old: Earlier | None,
    keep_old: bool,
) -> dict[str, Any]:
    data = PhotoData.of(options)
    tree_of(options.tree, data.class_names, options.data)  # mistakes show before photos are computed
    named_table(options.together)
    digests = {"data": data.digest, "options": state_digest(options.deciding())}
    finished = earlier_results(folder, digests) if old is None else old.results(digests)
    if finished is not None:
        show.log(f"this run is finished: {folder.path}" if old is None else UNCHANGED % folder.path)
        return finished
    many = are_many(data.parts)
    listed = processes.is_global_zero and not many  # the list of many would not fit, and each would be read
    now = used(data.parts, data.class_names, options.data) if listed else []
    changed: list[Difference] = []
    keep_old = keep_old or many
    if old is not None and listed and not old.shares(now):
        keep_old = True
        show.log(f"none of these photos was trained on in {folder.path}")
    elif old is not None and listed and old.photos is not None:
        changed = differences(old.photos, now)
        if changed:
            show.log(f"since the last training: {counted(changed)}; see {folder.path / CHANGED}")
    if processes.is_global_zero and old is None:
        folder.create(options)
    cache = FeatureCache(eye, show)
    extraction = Extraction(eye, cache, processes, show, not options.strict)
    _announce(data, extraction)
    whole = None
    try:
        if many:
            whole = fit_shares(data.parts, extraction, options, data.class_names)
            parts = {} if whole is None else whole.parts
        else:
            parts = {name: extraction(part, f"{name} photos") for name, part in data.parts.items()}
    except KeyboardInterrupt:
        again = f"candid train {quote(options.data)}" if old is not None else "candid train --resume"
        show.log(f"go on with: {again} --out {quote(str(folder.path))}")
        raise
    if not processes.is_global_zero:
        return {}
    if whole is None:
        _check_counts(parts["train"], data.class_names)
    results = {"extracted": cache.stored, "digests": digests}
    job = _Job(options, data.class_names, eye, folder, show, digests, old, keep_old, counted(changed))
    results |= job.finish(parts, whole)
    for name, text in lists(now, changed).items():
        folder.write_text(name, text)
    if not changed:
        (folder.path / CHANGED).unlink(missing_ok=True)  # of the training before
    folder.write_results(results)
    return results


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


@dataclass(frozen=True)
class _Job:
    """What turns statistics into a model, its report and its results."""

    options: PhotoOptions
    class_names: tuple[str, ...]
    eye: Eye
    folder: RunFolder
    progress: Progress
    digests: dict[str, str]
    old: Earlier | None
    """The model that is replaced."""
    keep_old: bool
    changed: str
    """Which photos differ from those of the old model, in words."""

    def finish(self, parts: dict[str, Features], many: Whole | None = None) -> dict[str, Any]:
        """Fit the head, save the model with its held-out scores, and write what is worth a look.

        ``many`` has the head of photos of which ``parts`` are a sample.
        """
        options, log = self.options, self.progress.log
        log("fitting the head")
        whole = parts
        parts, series = in_series(options.together, parts, self.class_names, self.progress)
        model, head = self._fitted(parts["train"], series, many)
        train = parts["train"]
        val = parts["val"] if "val" in parts and len(parts["val"]) >= FEWEST_HELD_OUT else None
        if options.thumbnails:
            _keep_photos(model, val or train)
        alike = series.numbers["train" if val is None else "val"]
        held_out = _hold_out(options, model, head, train, val, alike)
        if len(held_out) < FEWEST_HELD_OUT:
            log(
                f"no p-values and verdicts: only {len(held_out)} photos could be scored, of "
                f"{FEWEST_HELD_OUT} needed; add photos"
            )
        unseen = head.out_of_fold
        predictions = {
            "train": _predictions(model, train, unseen.logits, {"novelty": unseen.novelty}),
            **{name: _predicted(model, part) for name, part in parts.items() if name != "train"},
        }
        results: dict[str, Any] = {"val": _metrics(predictions.get("val", held_out))}
        results |= {"out_of_fold": "val" not in parts, "head": model.metadata["head"]}
        if "test" in parts:
            results["test"] = _metrics(predictions["test"])
        if many is not None:
            results["all"] = many.results
        elif series.several:
            apart = self._apart(whole, model, head)
            results["series"] = {"count": series.several, "photos": series.joined, "accuracy_without": apart}
            how = "out of fold" if "val" not in parts else "on held-out photos"
            log(sentence(series, apart, results["val"]["accuracy"], how))
        table = self._by_class(model, predictions, held_out, train)
        results["by_class"] = table.to_dict()
        if len(self.class_names) <= MOST_ON_CARD:
            model.metadata["by_class"] = results["by_class"]
        results |= self._replaced(model, parts, predictions)
        report = DataReport.of(
            parts, predictions, self.class_names, table, None if many is None else many.findings
        )
        self._report(parts, report, results)
        return results

    def _fitted(self, train: Features, series: Series, many: Whole | None) -> tuple[PhotoModel, ClosedForm]:
        options, classes = self.options, len(self.class_names)
        counts = np.bincount(train.labels, minlength=classes) if many is None else many.counts
        given = train.values, train.labels, classes, self.eye.groups, options.priors == "uniform"
        if many is None:
            head = fit_head(*given, seed=options.seed, series=series.numbers["train"])
        else:
            head = many.head
        model = PhotoModel.of(head, self.eye, self.class_names)
        model.tree = tree_of(options.tree, self.class_names, options.data)
        config = {**to_dict(options), "holdout": options.holdout or SHARE, "split": "hash", "crop": "none"}
        model.metadata = {
            "training": {
                "config": {key: value for key, value in config.items() if value is not None},
                "digests": self.digests,
            },
            "head": {
                **head.described(),
                "photos": int(counts.sum()),
                "counts": counts.astype(int).tolist(),
            },
        }
        return model, head

    def _apart(self, parts: dict[str, Features], model: PhotoModel, head: ClosedForm) -> float:
        """Return what the accuracy would be if the photos of a series were divided one by one."""
        if "val" in parts:
            return _metrics(_predicted(model, parts["val"]))["accuracy"]
        train, regression = parts["train"], head.posterior == "logistic"
        uniform, seed = self.options.priors == "uniform", self.options.seed
        given = train.values, train.labels, len(self.class_names), self.eye.groups, uniform, regression
        logits = fit_head(*given, seed=seed).out_of_fold.logits
        return float((logits.argmax(1) == train.labels).mean())

    def _by_class(
        self, model: PhotoModel, predictions: dict[str, Predictions], held_out: Predictions, train: Features
    ) -> ByClass:
        """Return results by class on test photos or on held-out ones, whichever are more.

        The verdicts on held-out photos are of levels that these photos have set.
        """
        trained, kinds = model.metadata["head"]["counts"], None
        tested = max((held_out, *(predictions[name] for name in predictions if name == "test")), key=len)
        scores = HeldOut.of(model)
        if scores is not None:
            judged = scores.rule().examine(tested.statistics, tested.paths, self.class_names)
            kinds = [str(each.verdict) for each in judged]
        table = ByClass.of_predictions(tested, self.class_names, kinds, trained)
        for line in table.sentences():
            self.progress.log(line)
        return table

    def _replaced(
        self, model: PhotoModel, parts: dict[str, Features], predictions: dict[str, Predictions]
    ) -> dict[str, Any]:
        """Save the model in place of the old one, and return how the two compare."""
        old, log, results = self.old, self.progress.log, {}
        if old is not None:
            comparison = compared(old.model, model, parts, predictions)
            if comparison is not None:
                log(comparison.sentence())
                results["compared"] = comparison._asdict()
            lost = old.lost()
            if self.keep_old or lost:
                log(f"the old model is kept in {old.keep()}")
            for text in lost:
                log(f"warning: the new model does not have this change of the old one: {text}")
            changed = "" if self.changed == NOTHING else f": {self.changed}"
            model = old.carried_over(model, f"trained again{changed}", self.progress)
            (self.folder.path / "results.json").unlink(missing_ok=True)
            old.replace_with(model)
        else:
            saving.save(model, self.folder.best)
        self.folder.create(self.options)
        return results

    def _report(self, parts: dict[str, Features], report: DataReport, results: dict[str, Any]) -> None:
        """Write the report on the photos and the list of those that were left out."""
        folder, log = self.folder, self.progress.log
        skipped = [line for part in parts.values() for line in part.skipped]
        folder.write_skipped(skipped, "photo", self.progress)
        folder.write_text("photos.csv", report.csv())
        folder.write_text("photos.html", report.html())
        for line in report.sentences(folder.path):
            log(line)
        results["report"] = report.counts()


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
    held_out = _predictions(model, train, fold.logits, {"novelty": fold.novelty.astype(np.float32)})
    return held_out, Remembered.out_of_fold(head, train.values, train.labels, train.keys)


def _metrics(predictions: Predictions) -> dict[str, float]:
    losses = -np.take_along_axis(predictions.log_posterior, predictions.labels[:, None], 1)
    right = predictions.logits.argmax(1) == predictions.labels
    return {"accuracy": float(right.mean()), "cross_entropy": float(losses.mean())}

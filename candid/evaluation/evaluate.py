"""Evaluate a model: predictions for its data and for other images, then all metrics of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import build
from candid._support.progress import SILENT, Progress
from candid.data.datasets import open_images
from candid.data.groups import GroupTable
from candid.data.splits import Split, seen_in_training
from candid.evaluation.calibration_error import BINS
from candid.evaluation.options import EvaluateOptions
from candid.evaluation.result import (
    EvaluationResult,
    ImageGroups,
    as_json,
    class_metrics,
    classification,
    performance,
    right_ones,
    statistics_of,
    with_verdicts,
)
from candid.evaluation.selective import selective_metrics
from candid.evaluation.stored import evaluate_arrays
from candid.inference.metrics import log_odds
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner, launch_for
from candid.inference.study import Note, labelled_images, prepared
from candid.judging.calibrate import held_out_groups
from candid.judging.detection import Detection, unseen_rows
from candid.judging.held_out import HeldOut, measures_of, needed
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.trust.rule import Rule


def evaluate(
    model: Any = None, data: str | None = None, progress: Progress = SILENT, **options: Any
) -> EvaluationResult | None:
    """Measure accuracy, likelihood, calibration error, detection and verdicts of a model.

    Args:
        model: a model, a bundled name, a model folder or a run folder; None with stored arrays, the options
            ``held_out`` and ``test``.
        data: a data set with labels, as for :func:`candid.train`; None with stored arrays.
        progress: shows what is being done.
        options: the fields of :class:`~candid.evaluation.options.EvaluateOptions`; ``ood`` may also be a
            dictionary of other sets by name.

    Returns:
        The metrics and all predictions; None in all processes but the first.

    Example:
        >>> import candid
        >>> model = candid.GenerativeClassifier.from_preset("digits").eval()
        >>> result = candid.evaluate(model, "digits", images=50, workers=0)
        >>> result.metrics["images"], len(result.predictions)
        (50, 50)
    """
    if isinstance(options.get("ood"), Mapping):
        options["ood"] = tuple(f"{name}={path}" for name, path in options["ood"].items())
    chosen = build(EvaluateOptions, options)
    if chosen.held_out is not None or chosen.test is not None:
        if model is not None or data is not None:
            raise CandidError("Give a model and data, or --held-out and --test, but not both.")
        return evaluate_arrays(chosen)
    if model is None or data is None:
        raise CandidError("Give MODEL and DATA, or stored arrays by --held-out and --test.")
    study = _Study(model, data, chosen, progress)
    passes = study.predictions()
    return None if passes is None else study.result(*passes)


class _Crops(NamedTuple):
    """What the model says of other crops of the data."""

    ten: Array | None
    """Log posteriors averaged over ten crops, (N, M)."""
    published: Predictions | None
    """Predictions for the images as the paper's authors showed them."""


class _Study:
    """One evaluation: what was asked for, and the loaded models."""

    def __init__(self, model: Any, data: str, options: EvaluateOptions, progress: Progress) -> None:
        self.data, self.options = data, options
        source = str(model) if isinstance(model, str | Path) else getattr(model, "kind", "model")
        self.name, self.source = options.name or source, source
        self.model = checkpoint.resolve(model)
        self.companions = {path: checkpoint.resolve(path) for path in options.ensemble}
        self.processes = launch_for(self.model, options.devices)
        self.progress = progress if self.processes.is_global_zero else SILENT
        if options.together is not None:
            raise CandidError(
                "--together is about held-out images: give it to 'candid calibrate', or with --held-out."
            )
        self.table = GroupTable.read(options.by)
        if options.by not in (None, "class") and self.table is None:
            raise CandidError(
                f"--by takes 'class' or a column of a table such as 'photos.csv:site', not '{options.by}'."
            )
        self.held_out, self.groups, self.rule = self._held_out(), None, None
        if self.held_out is not None:
            self.groups = self._groups(self.held_out)
            self.rule = self.held_out.rule(options, None if self.groups is None else self.groups.held_out)
        if options.as_published:
            self._check_published()
        self.part, self.splits = self._splits()

    def _groups(self, held_out: HeldOut) -> ImageGroups | None:
        """Return the groups within which levels hold, if these were asked for."""
        by, table = self.options.by, self.table
        if table is None:
            names, predicted = self.model.class_names, held_out.statistics["predicted"]
            return None if by is None else ImageGroups.by_class(names, predicted)
        known = held_out_groups(table, self.model, self.data, held_out)
        return ImageGroups.by_name(str(by), known, lambda part: table.of(part.paths, needed=False))

    def _check_published(self) -> None:
        """Refuse models that do not see a crop of a larger photo."""
        shown = self.model.preprocessing
        if shown.crop != "resized" or shown.height != shown.width:
            raise CandidError(
                "--as-published is for models that see a square crop of a larger photo: leave it out, as "
                f"'{self.name}' sees whole images."
            )

    def _held_out(self) -> HeldOut | None:
        """Return the held-out scores of the model, with those of its ensemble."""
        asked = ("ood", "ensemble", "temperature", "score", "novelty", "error", "risk", "by")
        if not any(getattr(self.options, option) for option in asked):
            return HeldOut.of(self.model)
        held_out = needed(self.model, self.source)
        others = {path: needed(model, path) for path, model in self.companions.items()}
        if not others:
            return held_out
        all_statistics = [known.statistics for known in (held_out, *others.values())]
        if not all("log_density" in statistics for statistics in all_statistics):
            raise CandidError("An ensemble is for generative classifiers: a ResNet has no likelihood.")
        for path, other in others.items():
            same = np.array_equal(other.statistics["keys"], held_out.statistics["keys"])
            if self.companions[path].image_shape != self.model.image_shape or not same:
                raise CandidError(
                    f"'{path}' was calibrated on different images: calibrate all models of an ensemble on "
                    "the same images."
                )
        densities = np.stack([statistics["log_density"] for statistics in all_statistics], 1)
        return replace(held_out, statistics=held_out.statistics.with_columns({"log_densities": densities}))

    def _splits(self) -> tuple[str, dict[str, Split]]:
        """Return the name of the part of the data, and all sets as the model sees them."""
        part, split = labelled_images(self.model, self.data, self.options, self.progress)
        if self.options.as_published and split.in_memory:
            raise CandidError(
                "--as-published crops photo files: leave it out, as the images of "
                f"'{self.data}' all have one size."
            )
        splits: dict[str, Split] = {part: split}
        for name, spec in self.options.others.items():
            if name in splits:
                raise CandidError(f"The name '{name}' is taken by the test images: choose another for --ood.")
            images = open_images(spec, self.model.preprocessing)
            splits[name] = prepared(self.model, images, name, self.options, self.progress)
        return part, splits

    def predictions(self) -> tuple[dict[str, Predictions], _Crops] | None:
        """Run all models over all sets; return what the first process found, and other crops of the data."""
        predictions, runner = self._run(self.model, "predictions")
        data = self.splits[self.part], self.model.preprocessing, self.part
        published = runner.published_predictions(*data) if self.options.as_published else None
        ten = runner.ten_crops(*data, self.options.as_published) if self.options.ten_crop else None
        others = [self._run(model, "predictions/ensemble")[0] for model in self.companions.values()]
        if not self.processes.is_global_zero:
            return None
        together = {
            name: _with_ensemble(images, [other[name] for other in others])
            for name, images in predictions.items()
        }
        return together, _Crops(ten, published)

    def _run(self, model: Model, folder: str) -> tuple[dict[str, Predictions], Runner]:
        out, measures = self.options.out, measures_of(model)
        cache = None if out is None else out / folder
        runner = Runner(model, self.processes, cache, self.options.workers, self.progress)
        predictions = {
            name: runner.predictions(split, model.preprocessing, name, measures)
            for name, split in self.splits.items()
        }
        return {name: images for name, images in predictions.items() if images is not None}, runner

    def result(self, predictions: dict[str, Predictions], crops: _Crops) -> EvaluationResult:
        """Return all metrics of the ``predictions``."""
        tested, beta = predictions[self.part], self.model.record.beta
        metrics = {
            "model": self.name,
            "kind": self.model.kind,
            "beta": None if beta is None else str(beta),
            "data": self.data,
            "part": self.part,
            "images": len(tested),
            "calibration_bins": BINS,
            **as_json(performance(tested, self.model)),
        }
        where = metrics
        if crops.published is not None:
            where = metrics["as_published"] = as_json(performance(crops.published, self.model))
        if crops.ten is not None:
            where["ten_crop"] = as_json(classification(crops.ten, tested.labels))
        result = EvaluationResult(
            self.model, self.model.class_names, metrics, tested, notes=self._training_note(tested)
        )
        metrics["by_class"] = class_metrics(result)
        if self.held_out is not None and self.rule is not None:
            return self._judged(result, predictions, self.held_out, self.rule)
        text = f"There are no p-values and verdicts: to add them, run 'candid calibrate {self.source} DATA'."
        metrics["selective"] = selective_metrics(log_odds(tested.logits), right_ones(tested))
        return replace(result, notes=(*result.notes, Note("no-held-out", text)))

    def _judged(
        self, result: EvaluationResult, predictions: dict[str, Predictions], held_out: HeldOut, rule: Rule
    ) -> EvaluationResult:
        """Return the result with all that held-out scores add."""
        images, notes = result.predictions, result.notes
        if self.table is not None:
            self.table.of(images.paths)  # each of them needs a group
        kept, overlap = unseen_rows(images.columns["keys"], held_out)
        if overlap:
            how = (
                "checked on the others"
                if overlap < len(images)
                else "not checked by them; evaluate other images"
            )
            seen = f"{overlap:,} of {len(images):,} images are this model's held-out images"
            text = f"{seen}: p-values are {how}."
            notes = (*notes, Note("overlap", text))
        counts = {"held_out_images": len(held_out), "held_out_overlap": overlap}
        statistics = statistics_of(predictions, self.groups)
        inside = statistics.pop(self.part).rows(kept)
        detection = Detection(held_out.statistics, inside, statistics, rule)
        temperature = held_out.temperature if self.options.temperature else None
        return with_verdicts(
            replace(result, metrics=result.metrics | counts, notes=notes),
            predictions,
            rule,
            detection,
            kept,
            temperature,
            self.groups,
        )

    def _training_note(self, images: Predictions) -> tuple[Note, ...]:
        """Say how many of the images the model was trained on, if it has the keys of its training images."""
        seen = int(seen_in_training(images.columns["keys"], self.model.held_out.get("training_keys")).sum())
        if not seen:
            return ()
        these = f"{seen:,} of {len(images):,} images"
        return (
            Note(
                "training-images", f"{these} are among this model's training images: the metrics flatter it."
            ),
        )


def _with_ensemble(own: Predictions, others: Sequence[Predictions]) -> Predictions:
    """Return the predictions with the log densities that the models of an ensemble give to the images."""
    if not others:
        return own
    densities = [images.log_density for images in (own, *others) if images.log_density is not None]
    return replace(own, columns={**own.columns, "log_densities": np.stack(densities, 1)})

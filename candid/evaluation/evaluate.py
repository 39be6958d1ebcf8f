"""Evaluate a model: predictions for its data and for other images, then all metrics of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from candid._support.config import build
from candid._support.distributed import launch
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid.data.datasets import open_images
from candid.data.groups import GroupTable
from candid.data.splits import Split, seen_in_training
from candid.evaluation.calibration_error import BINS
from candid.evaluation.groups import group_metrics
from candid.evaluation.options import EvaluateOptions
from candid.evaluation.result import (
    Evaluation,
    JudgedSet,
    as_json,
    classification,
    judged_set,
    performance,
    right_ones,
    selective,
    verdict_metrics,
)
from candid.evaluation.selective import selective_metrics
from candid.evaluation.stored import evaluate_arrays
from candid.inference.metrics import log_odds
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.inference.study import Note, labelled_images, prepared
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.trust.calibrate import held_out_groups
from candid.trust.detection import Detection, share, unseen_rows
from candid.trust.grouped import GroupedJudge
from candid.trust.judge import LEVEL, HeldOut, Judge, measures_of, needed
from candid.trust.scores import statistics_of
from candid.trust.verdict import Examination

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def evaluate(
    model: Any = None, data: str | None = None, progress: Progress = SILENT, **options: Any
) -> Evaluation | None:
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
        >>> found = candid.evaluate(model, "digits", images=50, workers=0)
        >>> found.metrics["images"], len(found.predictions)
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
    found = study.predictions()
    return None if found is None else study.evaluation(*found)


class _Crops(NamedTuple):
    """What the model says of other crops of the data."""

    ten: Tensor | None
    """Log posteriors averaged over ten crops, (N, M)."""
    published: Predictions | None
    """Predictions for the images as the paper's authors showed them."""


class _Study:
    """One evaluation: what was asked for, and the loaded models."""

    def __init__(self, model: Any, data: str, options: EvaluateOptions, progress: Progress) -> None:
        self.data, self.options = data, options
        source = str(model) if isinstance(model, str | Path) else getattr(model, "kind", "model")
        self.name, self.source = options.name or source, source
        self.fabric: Fabric = launch(options.devices)
        self.progress = progress if self.fabric.is_global_zero else SILENT
        self.model = checkpoint.resolve(model)
        self.companions = {path: checkpoint.resolve(path) for path in options.ensemble}
        self.table = GroupTable.read(options.by)
        self._check_groups()
        self.held_out = self._held_out()
        self.judge: Judge | None = None
        if self.held_out is not None:
            levels = options.score, options.novelty, options.error, self.held_out
            more = options.risk, options.delta, options.novelty_promise
            self.judge = Judge.of(self.model, *levels, *more)
        if options.as_published:
            self._check_published()
        self.part, self.splits = self._splits()

    def _check_groups(self) -> None:
        """Refuse groups that can't be formed, before anything is computed."""
        by = self.options.by
        if by is not None and self.table is None and by != "class":
            raise CandidError(
                f"--by takes 'class' or a column of a table such as 'photos.csv:site', not '{by}'."
            )
        if by is not None and self.options.risk is not None:
            raise CandidError("--risk holds over the images of all groups: leave out --by or --risk.")

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
        own = needed(self.model, self.source)
        known = {path: needed(each, path) for path, each in self.companions.items()}
        if not known:
            return own
        if not all("log_density" in each.statistics for each in (own, *known.values())):
            raise CandidError("An ensemble is for generative classifiers: a ResNet has no likelihood.")
        for path, each in known.items():
            same = torch.equal(each.statistics["keys"], own.statistics["keys"])
            if self.companions[path].image_shape != self.model.image_shape or not same:
                raise CandidError(
                    f"'{path}' was calibrated on different images: calibrate all models of an ensemble on "
                    "the same images."
                )
        densities = [each.statistics["log_density"] for each in (own, *known.values())]
        statistics = {**own.statistics, "log_densities": torch.stack(densities, 1)}
        return replace(own, statistics=statistics)

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
        found, runner = self._run(self.model, "predictions")
        own = self.splits[self.part], self.model.preprocessing, self.part
        published = runner.published_predictions(*own) if self.options.as_published else None
        ten = runner.ten_crops(*own, self.options.as_published) if self.options.ten_crop else None
        theirs = [self._run(each, "predictions/ensemble")[0] for each in self.companions.values()]
        if not self.fabric.is_global_zero:
            return None
        return {
            name: _with_ensemble(each, [other[name] for other in theirs]) for name, each in found.items()
        }, _Crops(ten, published)

    def _run(self, model: Model, folder: str) -> tuple[dict[str, Predictions], Runner]:
        out, measures = self.options.out, measures_of(model)
        cache = None if out is None else out / folder
        runner = Runner(model, self.fabric, cache, self.options.workers, self.progress)
        found = {
            name: runner.predictions(split, model.preprocessing, name, measures)
            for name, split in self.splits.items()
        }
        return {name: each for name, each in found.items() if each is not None}, runner

    def evaluation(self, predictions: dict[str, Predictions], crops: _Crops) -> Evaluation:
        """Return all metrics of the ``predictions``."""
        own = predictions[self.part]
        beta = self.model.record.beta
        metrics = {
            "model": self.name,
            "kind": self.model.kind,
            "beta": None if beta is None else str(beta),
            "data": self.data,
            "part": self.part,
            "images": len(own),
            "calibration_bins": BINS,
            **as_json(performance(own, self.model)),
        }
        where = metrics
        if crops.published is not None:
            where = metrics["as_published"] = as_json(performance(crops.published, self.model))
        if crops.ten is not None:
            where["ten_crop"] = as_json(classification(crops.ten, own.labels))
        notes = self._training_note(own)
        if self.held_out is None or self.judge is None:
            text = (
                f"There are no p-values and verdicts: to add them, run 'candid calibrate {self.source} DATA'."
            )
            metrics["selective"] = selective_metrics(log_odds(own.logits), right_ones(own))
            names = self.model.class_names
            return Evaluation(self.model, names, metrics, own, notes=(*notes, Note("no-held-out", text)))
        statistics = {name: statistics_of(each) for name, each in predictions.items()}
        kept, overlap = unseen_rows(own.columns["keys"], self.held_out)
        inside = {name: values[kept] for name, values in statistics[self.part].items()}
        if overlap:
            how = (
                "checked on the others"
                if overlap < len(own)
                else "not checked by them; evaluate other images"
            )
            text = f"{overlap:,} of {len(own):,} images are this model's held-out images: p-values are {how}."
            notes.append(Note("overlap", text))
        detection = Detection(
            self.held_out, inside, {name: each for name, each in statistics.items() if name != self.part}
        )
        ranked = {name: self.judge.p_values(each) for name, each in statistics.items()}
        judged, groups, too_small = self._judged(predictions, {name: p for name, (p, _) in ranked.items()})
        scaled = None
        if self.options.temperature:
            temperature = self.held_out.temperature
            scaled = replace(own, logits=own.logits.double() / temperature)
            values = as_json(performance(scaled, self.model))
            metrics["temperature_scaled"] = {"temperature": temperature, **values}
        metrics |= {
            "held_out_images": len(self.held_out),
            "held_out_overlap": overlap,
            "false_positives": detection.false_positives(),
            "ood": detection.metrics(),
            "detected_in_class": {name: share(p <= LEVEL) for name, (_, p) in ranked.items()},
            "verdicts": verdict_metrics(self.judge.promises, judged, too_small),
            "selective": selective(judged, kept),
            **({} if groups is None else {"groups": groups}),
        }
        names = self.model.class_names
        return Evaluation(self.model, names, metrics, own, scaled, detection, judged, tuple(notes))

    def _judged(
        self, predictions: Mapping[str, Predictions], p_values: Mapping[str, Tensor]
    ) -> tuple[dict[str, JudgedSet], dict[str, Any] | None, tuple[str, ...]]:
        """Return images with verdicts; metrics by group, and small groups, if groups were asked for."""
        judge = self.judge
        assert judge is not None
        if self.options.by is not None:
            return self._in_groups(predictions)
        judged = {}
        for name, each in predictions.items():
            kinds = [verdict.kind for verdict in judge.verdicts(each, p_values[name])]
            judged[name] = JudgedSet(each, judge.examine, p_values[name], kinds)
        return judged, None, ()

    def _in_groups(
        self, predictions: Mapping[str, Predictions]
    ) -> tuple[dict[str, JudgedSet], dict[str, Any], tuple[str, ...]]:
        """Return images with verdicts whose levels hold within groups, metrics by group, and small groups."""
        names, table, options, by = self.model.class_names, self.table, self.options, self.options.by
        assert self.judge is not None and by is not None

        def make(held_out: HeldOut) -> Judge:
            levels = options.score, options.novelty, options.error, held_out
            return Judge.of(self.model, *levels, novelty_promise=options.novelty_promise)

        def groups(part: Predictions) -> list[str]:
            if table is None:
                return [names[y] for y in part.logits.argmax(1).tolist()]
            return table.of(part.paths, needed=False)

        known = [names[y] for y in self.judge.held_out.statistics["predicted"].tolist()]
        if table is not None:
            table.of(predictions[self.part].paths)  # each of them needs a group
            known = held_out_groups(table, self.model, self.data, self.judge.held_out)
        judge = GroupedJudge.of(self.judge, make, known)

        def examine(part: Predictions) -> list[Examination]:
            return judge.examine(part, groups(part))

        judged, promises = {}, {}
        for name, each in predictions.items():
            judged[name], promises[name] = judged_set(each, examine)
        own = judged[self.part]
        found = group_metrics(by, groups(own.predictions), own, promises[self.part], self.judge.promises)
        return judged, found, judge.too_small

    def _training_note(self, own: Predictions) -> list[Note]:
        """Say how many of the images the model was trained on, if it has the keys of its training images."""
        seen = int(seen_in_training(own.columns["keys"], self.model.held_out.get("training_keys")).sum())
        if not seen:
            return []
        text = (
            f"{seen:,} of {len(own):,} images are among this model's training images: the metrics flatter it."
        )
        return [Note("training-images", text)]


def _with_ensemble(own: Predictions, others: Sequence[Predictions]) -> Predictions:
    """Return the predictions with the log densities that the models of an ensemble give to the images."""
    if not others:
        return own
    densities = [each.log_density for each in (own, *others) if each.log_density is not None]
    return replace(own, columns={**own.columns, "log_densities": torch.stack(densities, 1)})

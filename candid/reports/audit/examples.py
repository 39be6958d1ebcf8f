"""A few images that are examined one by one, chosen by what the models say about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from candid._support.files import replacing
from candid._support.numbers import Array
from candid._support.progress import Progress
from candid.data.batches import named_batches
from candid.data.datasets import open_images, open_part
from candid.data.images import to_png
from candid.evaluation.result import EvaluationResult
from candid.explanations.explainer import Explainer
from candid.judging.examine import Examiner
from candid.reports.audit.options import AuditOptions
from candid.reports.audit.record import AuditedModel, Example, Opinion
from candid.trust.verdict import KINDS, Examination


def examples(
    data: str,
    options: AuditOptions,
    models: Sequence[AuditedModel],
    evaluations: Sequence[EvaluationResult],
    progress: Progress,
) -> list[Example]:
    """Return at most ``options.examples`` images; none if no model is generative."""
    generative = [pair for pair in zip(models, evaluations, strict=True) if pair[0].is_generative]
    if not generative or not options.examples:
        return []
    model, evaluation = max(generative, key=lambda pair: bool(pair[0].held_out))
    files = _Files(data, options, evaluation, progress)
    chosen: list[Example] = []
    for why, source, index in _chosen(model, evaluation):
        path = files.path(source, index)
        if path is not None:
            chosen.append(Example(why, source, path, files.true_class(source, index), []))
        if len(chosen) == options.examples:
            break
    for other, _ in generative:
        examiner, explainer = Examiner(other.model, other.path, evidence=True), Explainer(other.model)
        judged = examiner.examine([example.path for example in chosen])
        for example, examined in zip(chosen, judged, strict=True):
            if isinstance(examined, Examination):
                example.opinions.append(Opinion(other, examined, explainer.explain(examined)))
    return chosen


def _chosen(model: AuditedModel, evaluation: EvaluationResult) -> Iterator[tuple[str, str, int]]:
    """Yield why, the set, and the number in it: the first image of each kind."""
    part, predictions = evaluation.metrics["part"], evaluation.predictions
    confidence, predicted = predictions.posterior.max(1), predictions.posterior.argmax(1)
    right = predicted == predictions.labels
    judged = evaluation.judged.get(part)
    kinds = np.array([""] * len(predictions) if judged is None else list[str](judged.kinds))
    used: set[int] = set()

    def first(flags: Array) -> Iterator[int]:
        for index in np.flatnonzero(flags).tolist():
            if index not in used:
                used.add(index)
                yield index
                return

    for index in first(np.isin(kinds, ("accept", "")) & right):
        yield (
            f"the first image that {model.name} {'accepts and ' * bool(judged)}classifies correctly",
            part,
            index,
        )
    if not right.all():
        worst = np.where(right, -1, confidence).argmax()
        for index in first(np.arange(len(right)) == worst):
            yield f"the most confident mistake of {model.name}", part, index
    for name in evaluation.judged:
        if name != part:
            yield f"the first image of '{name}'", name, 0
            break
    for kind in reversed(KINDS):
        for index in first(kinds == kind) if kind != "accept" else ():
            yield f"the first image that {model.name} calls {KINDS[kind].word}", part, index


@dataclass(frozen=True)
class _Files:
    """The images of an evaluation as files."""

    data: str
    options: AuditOptions
    evaluation: EvaluationResult
    progress: Progress

    def true_class(self, source: str, index: int) -> str | None:
        """Return the class of an image of the data; None of other sets."""
        if source != self.evaluation.metrics["part"]:
            return None
        return self.evaluation.class_names[int(self.evaluation.predictions.labels[index])]

    def path(self, source: str, index: int) -> Path | None:
        """Return the image's file; if the data set has no files, one is written into the audit's folder.

        Images of tar shards can't be looked up: None.
        """
        model, options = self.evaluation.model, self.options
        assert model is not None
        own = source == self.evaluation.metrics["part"]
        seen = self.evaluation.predictions if own else self.evaluation.judged[source].predictions
        if Path(seen.paths[index]).is_file():
            return Path(seen.paths[index])
        if own:
            split = open_part(self.data, model.class_names, options.part, model.record.config).split
        else:
            split = open_images(options.image_sets[source], model.preprocessing)
        if not split.can_index:
            return None
        few = split.subsample(options.images)
        ready = few.preprocess(model.preprocessing, options.skip_bad, self.progress, source)
        ((images, _, (name,)),) = named_batches(ready.subset(np.array([index])), model.preprocessing, 1)
        path = options.out / "examples" / f"{source}-{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(to_png(images[0]))
        return path

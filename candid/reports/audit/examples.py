"""A few images that are examined one by one: chosen by what the models make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from candid._support.files import replacing
from candid._support.progress import Progress
from candid.data.datasets import open_images, open_part
from candid.data.images import to_png
from candid.data.loader import named_batches
from candid.evaluation.evaluate import Evaluation
from candid.explanations.explainer import Explainer, Explanation
from candid.reports.audit.models import AuditedModel
from candid.reports.audit.options import AuditOptions as Request
from candid.trust.examine import Examiner
from candid.trust.verdict import Examination


@dataclass(frozen=True)
class Opinion:
    """What one model says of an image, and why."""

    model: str
    class_names: tuple[str, ...]
    examined: Examination
    explanation: Explanation


@dataclass(frozen=True)
class Example:
    """An image, why it was chosen, and what the generative models say of it."""

    why: str
    source: str
    """The set that it is from."""
    path: Path
    true_class: str | None
    opinions: list[Opinion]


def examples(
    request: Request, models: Sequence[AuditedModel], evaluations: Sequence[Evaluation], progress: Progress
) -> list[Example]:
    """At most as many as asked for; none if no model is generative."""
    generative = [
        (model, each) for model, each in zip(models, evaluations, strict=True) if model.is_generative
    ]
    if not generative or not request.examples:
        return []
    model, evaluation = max(generative, key=lambda pair: bool(pair[0].held_out))
    chosen, paths = [], []
    for why, source, index in _chosen(model, evaluation):
        path = _file(request, model, evaluation, source, index, progress)
        if path is not None:
            chosen.append((why, source, index))
            paths.append(path)
        if len(paths) == request.examples:
            break
    opinions: list[list[Opinion]] = [[] for _ in chosen]
    for other, each in generative:
        names = other.model.class_names
        examiner, explainer = Examiner(each.model, other.path, evidence=True), Explainer(each.model)
        for own, found in zip(opinions, examiner.examine(paths), strict=True):
            if isinstance(found, Examination):
                own.append(Opinion(other.name, names, found, explainer.explain(found)))
    return [
        Example(why, source, path, _true_class(evaluation, source, index), own)
        for (why, source, index), path, own in zip(chosen, paths, opinions, strict=True)
    ]


def _chosen(model: AuditedModel, evaluation: Evaluation) -> Iterator[tuple[str, str, int]]:
    """Why, the set, and the number in it: the first image of each kind."""
    part, found = evaluation.metrics["part"], evaluation.predictions
    confidence, predicted = found.posterior.max(1)
    right = predicted == found.labels
    own = evaluation.opinions.get(part)
    kinds = [""] * len(found) if own is None else [verdict.kind for verdict in own.verdicts]
    used: set[int] = set()

    def first(flags: Tensor) -> Iterator[int]:
        for index in flags.nonzero()[:, 0].tolist():
            if index not in used:
                used.add(index)
                yield index
                return

    accepted = torch.tensor([kind in ("accept", "") for kind in kinds])
    for index in first(accepted & right):
        why = "accepted, and right" if own else "right"
        yield f"the first image that {model.name} classifies as it should: {why}", part, index
    if not right.all():
        surest = torch.where(right, -1, confidence).argmax()
        for index in first(torch.arange(len(right)) == surest):
            yield f"the surest mistake of {model.name}", part, index
    for name in evaluation.opinions:
        if name != part:
            yield f"the first image of '{name}'", name, 0
            break
    for kind in ("ambiguous", "novel"):
        for index in first(torch.tensor([each == kind for each in kinds])):
            yield f"the first image that {model.name} calls {kind}", part, index


def _true_class(evaluation: Evaluation, source: str, index: int) -> str | None:
    if source != evaluation.metrics["part"]:
        return None
    return evaluation.model.class_names[int(evaluation.predictions.labels[index])]


def _file(
    request: Request, model: AuditedModel, evaluation: Evaluation, source: str, index: int, progress: Progress
) -> Path | None:
    """The image's own file; of a data set without files, one that is written into the audit's folder.

    None of tar shards, where no image can be looked up.
    """
    own = source == evaluation.metrics["part"]
    seen = evaluation.predictions if own else evaluation.opinions[source].predictions
    if Path(seen.paths[index]).is_file():
        return Path(seen.paths[index])
    preprocessing = model.model.preprocessing
    if own:
        training = model.model.record.config
        split = open_part(request.data, model.model.class_names, request.part, training).split
    else:
        split = open_images(request.ood[source], preprocessing)
    if not split.can_index:
        return None
    few = split.subsample(request.images)
    ready = few.preprocess(preprocessing, request.skip_bad, progress, source)
    ((images, _, (name,)),) = named_batches(ready.subset(torch.tensor([index])), preprocessing, 1)
    path = request.out / "examples" / f"{source}-{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(to_png(images[0]))
    return path

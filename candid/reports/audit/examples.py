"""A few images that are examined one by one, chosen by what the models say about them."""

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
from candid.evaluation.result import Evaluation
from candid.explanations.explainer import Explainer, Explanation
from candid.reports.audit.models import AuditedModel
from candid.reports.audit.options import AuditOptions
from candid.trust.examine import Examiner
from candid.trust.verdict import Examination


@dataclass(frozen=True)
class Opinion:
    """What one model says about an image, and why."""

    model: AuditedModel
    examined: Examination
    explanation: Explanation


@dataclass(frozen=True)
class Example:
    """An image, why it was chosen, and what the generative models say about it."""

    why: str
    source: str
    """The name of its set."""
    path: Path
    true_class: str | None
    opinions: list[Opinion]


def examples(
    data: str,
    options: AuditOptions,
    models: Sequence[AuditedModel],
    evaluations: Sequence[Evaluation],
    progress: Progress,
) -> list[Example]:
    """Return at most ``options.examples`` images; none if no model is generative."""
    generative = [pair for pair in zip(models, evaluations, strict=True) if pair[0].is_generative]
    if not generative or not options.examples:
        return []
    model, evaluation = max(generative, key=lambda pair: bool(pair[0].held_out))
    files = _Files(data, options, evaluation, progress)
    found: list[Example] = []
    for why, source, index in _chosen(model, evaluation):
        path = files.path(source, index)
        if path is not None:
            found.append(Example(why, source, path, files.true_class(source, index), []))
        if len(found) == options.examples:
            break
    for other, _ in generative:
        examiner, explainer = Examiner(other.model, other.path, evidence=True), Explainer(other.model)
        judged = examiner.examine([each.path for each in found])
        for example, examined in zip(found, judged, strict=True):
            if isinstance(examined, Examination):
                example.opinions.append(Opinion(other, examined, explainer.explain(examined)))
    return found


def _chosen(model: AuditedModel, evaluation: Evaluation) -> Iterator[tuple[str, str, int]]:
    """Yield why, the set, and the number in it: the first image of each kind."""
    part, found = evaluation.metrics["part"], evaluation.predictions
    confidence, predicted = found.posterior.max(1)
    right = predicted == found.labels
    own = evaluation.judged.get(part)
    kinds = [""] * len(found) if own is None else list[str](own.kinds)
    used: set[int] = set()

    def first(flags: Tensor) -> Iterator[int]:
        for index in flags.nonzero()[:, 0].tolist():
            if index not in used:
                used.add(index)
                yield index
                return

    accepted = torch.tensor([kind in ("accept", "") for kind in kinds])
    for index in first(accepted & right):
        yield (
            f"the first image that {model.name} {'accepts and ' * bool(own)}classifies correctly",
            part,
            index,
        )
    if not right.all():
        worst = torch.where(right, -1, confidence).argmax()
        for index in first(torch.arange(len(right)) == worst):
            yield f"the most confident mistake of {model.name}", part, index
    for name in evaluation.judged:
        if name != part:
            yield f"the first image of '{name}'", name, 0
            break
    for kind in ("ambiguous", "novel"):
        for index in first(torch.tensor([each == kind for each in kinds])):
            yield f"the first image that {model.name} calls {kind}", part, index


@dataclass(frozen=True)
class _Files:
    """The images of an evaluation as files."""

    data: str
    options: AuditOptions
    evaluation: Evaluation
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
            split = open_images(options.others[source], model.preprocessing)
        if not split.can_index:
            return None
        few = split.subsample(options.images)
        ready = few.preprocess(model.preprocessing, options.skip_bad, self.progress, source)
        ((images, _, (name,)),) = named_batches(ready.subset(torch.tensor([index])), model.preprocessing, 1)
        path = options.out / "examples" / f"{source}-{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(to_png(images[0]))
        return path

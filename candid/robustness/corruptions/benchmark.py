"""The corruption benchmark: errors, entropies and detection of models on corrupted images."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from candid._support.config import build
from candid._support.distributed import launch
from candid._support.errors import CandidError, did_you_mean
from candid._support.progress import SILENT, Progress
from candid._support.randomness import generator
from candid.data.images import image_keys
from candid.data.splits import Split
from candid.inference.intervals import share_interval
from candid.inference.metrics import error_rate, mean_entropy
from candid.inference.predictions import Measure, Predictions
from candid.inference.roc import area_under_curve, paired_placements
from candid.inference.runner import Runner, Transform
from candid.inference.study import Note, labelled_images, named_models
from candid.models.protocol import Model
from candid.robustness.corruptions.apply import CORRUPTIONS, SEVERITIES, corrupted
from candid.robustness.corruptions.intervals import Ends, area_intervals, error_intervals
from candid.robustness.corruptions.options import CorruptOptions
from candid.robustness.corruptions.registry import check_names
from candid.trust.detection import Detection, unseen
from candid.trust.judge import HeldOut, measures_of
from candid.trust.scores import SCORES, statistics_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

NO_MCE = "no-mce"
"""The topic of the note that there is no mean corruption error."""


@dataclass(frozen=True)
class Reference:
    """Errors that corruption errors are relative to, as shares: means over the five severities."""

    name: str
    clean: float
    errors: Mapping[str, float]
    by_image: Tensor | None = field(default=None, compare=False, repr=False)
    """The errors on each image, as :attr:`CorruptedModel.by_image`."""
    published: bool = False
    """Whether the errors are numbers from a paper, which do not vary with the images."""

    def for_intervals(self, corruptions: Iterable[str]) -> Tensor | None:
        """Return the errors as :func:`error_intervals` takes them; None if they are not known by image."""
        if not self.published:
            return self.by_image
        return torch.tensor([self.clean, *(self.errors[name] for name in corruptions)], dtype=torch.float64)


def alexnet() -> Reference:
    """Return AlexNet's errors, as published with ImageNet-C."""
    errors = {name: each.alexnet for name, each in CORRUPTIONS.items() if each.alexnet is not None}
    return Reference("AlexNet", 0.435, errors, published=True)


@dataclass(frozen=True)
class CorruptedModel:
    """One model on all corruptions and severities."""

    name: str
    beta: float | None
    clean_error: float
    clean_entropy: float
    """Mean entropy of the posterior, in nats."""
    errors: dict[str, list[float]]
    """Errors by corruption, one for each severity, as shares."""
    entropies: dict[str, list[float]]
    """Mean entropies, in nats."""
    auc: dict[str, dict[str, float]] = field(default_factory=dict)
    """Areas under the ROC curve of corrupted against clean images, by score and corruption; of a model with
    held-out scores only."""
    score: str = "two-tailed"
    """The score in the table."""
    images: int = 0
    """Number of images of each corruption and severity."""
    severities: tuple[int, ...] = SEVERITIES
    auc_intervals: dict[str, dict[str, Ends]] = field(default_factory=dict)
    """The 95 % intervals of the areas by score and corruption; empty if the images are not known to be the
    same for all corruptions."""
    mean_auc_intervals: dict[str, Ends] = field(default_factory=dict)
    """The 95 % intervals of the mean areas by score."""
    by_image: Tensor | None = field(default=None, compare=False, repr=False)
    """The errors on each image, (N, 1 + corruptions): on the clean image, then the share of severities at
    which it is wrong; None if the images are not known to be the same for all corruptions."""

    @property
    def mean_errors(self) -> dict[str, float]:
        """Mean errors over the severities, by corruption."""
        return {name: _mean(each) for name, each in self.errors.items()}

    @property
    def mean_error(self) -> float:
        """Mean error over all corruptions and severities."""
        return _mean(self.mean_errors.values())

    @property
    def loss(self) -> float:
        """Share of images that only corruptions make wrong."""
        return self.mean_error - self.clean_error

    @property
    def entropy_increase(self) -> float:
        """Mean increase of the entropy over all corruptions and severities, in nats."""
        return _mean(_mean(each) for each in self.entropies.values()) - self.clean_entropy

    def as_reference(self) -> Reference:
        """Return the errors as a reference for other models."""
        return Reference(self.name, self.clean_error, self.mean_errors, self.by_image)

    def corruption_errors(self, reference: Reference) -> dict[str, float | None]:
        """Return ``CE_c = sum_s E_sc / sum_s E_sc(reference)`` by corruption; None if that makes no errors.

        Corruptions that the reference was not measured on are left out.
        """
        known = {name: own for name, own in self.mean_errors.items() if name in reference.errors}
        return {name: _ratio(own, reference.errors[name]) for name, own in known.items()}

    def relative_errors(self, reference: Reference) -> dict[str, float | None]:
        """Return ``sum_s (E_sc - E_clean) / sum_s (E_sc - E_clean)(reference)`` by corruption."""
        return {
            name: _ratio(own - self.clean_error, reference.errors[name] - reference.clean)
            for name, own in self.mean_errors.items()
            if name in reference.errors
        }

    def intervals(self, reference: Reference | None) -> dict[str, Any]:
        """Return the 95 % intervals that are known, under the names of their metrics."""
        found: dict[str, Any] = {"auc": self.auc_intervals, "mean_auc": self.mean_auc_intervals}
        if self.by_image is None:
            return found
        found["clean_error"] = share_interval(self.by_image[:, 0] > 0)[1:]
        if reference is None or not self.errors.keys() <= reference.errors.keys():
            return found
        other = reference.for_intervals(self.errors)
        if other is not None and other.shape in (self.by_image.shape, self.by_image.shape[1:]):
            mce, relative = error_intervals(self.by_image, other)
            found |= {"mce": mce, "relative_mce": relative}
        return found

    def to_dict(self, reference: Reference | None) -> dict[str, Any]:
        """Return the metrics as JSON; rates are shares."""
        found: dict[str, Any] = {
            "model": self.name,
            "beta": None if self.beta is None else str(self.beta),
            "images": self.images,
            "severities": list(self.severities),
            "clean_error": self.clean_error,
            "entropy_increase_nats": self.entropy_increase,
            "errors": self.errors,
            "auc": self.auc,
            "mean_auc": {score: _mean(values.values()) for score, values in self.auc.items()},
            "score": self.score,
            "intervals": self.intervals(reference),
        }
        if reference is not None:
            own, relative = self.corruption_errors(reference), self.relative_errors(reference)
            found |= {
                "reference": reference.name,
                "ce": own,
                "mce": _mean_if_known(own.values()),
                "relative_mce": _mean_if_known(relative.values()),
            }
        return found


@dataclass(frozen=True)
class CorruptionResults:
    """The result of :func:`candid.corrupt`: every model on every corruption."""

    models: tuple[CorruptedModel, ...]
    """The metrics of each model by corruption and severity."""
    reference: Reference | None
    """The errors that corruption errors are relative to."""
    options: CorruptOptions
    notes: tuple[Note, ...] = ()
    """What was left out, and why."""

    def __iter__(self) -> Iterator[CorruptedModel]:
        return iter(self.models)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The metrics of each model as JSON."""
        return [each.to_dict(self.reference) for each in self.models]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the metrics of each model as JSON."""
        return self.records


def corrupt(models: Any, data: str, progress: Progress = SILENT, **options: Any) -> CorruptionResults | None:
    """Measure models on corrupted images: errors, entropies and whether corruptions are detected.

    Args:
        models: a model, a bundled name, a model folder, a run folder, or a list or dictionary of these.
        data: a data set with labels, as for :func:`candid.train`.
        progress: shows what is being done.
        options: the fields of :class:`~candid.robustness.corruptions.options.CorruptOptions`.

    Returns:
        The metrics of each model; None in all processes but the first.

    Example:
        >>> import candid
        >>> found = candid.corrupt("cifar10-beta1", "digits", corruptions=["frog"])
        Traceback (most recent call last):
        ...
        candid._support.errors.CandidError: Unknown corruption 'frog': did you mean 'fog'?
    """
    chosen = build(CorruptOptions, options)
    check_names(chosen.corruptions)
    if chosen.score not in SCORES:
        raise CandidError(f"There is no score '{chosen.score}': {did_you_mean(chosen.score, SCORES)}")
    fabric = launch(chosen.devices)
    progress = progress if fabric.is_global_zero else SILENT
    given = named_models(models)
    found = [_measured(chosen, data, name, model, fabric, progress) for name, model in given.items()]
    reference = None
    if chosen.baseline is not None:
        listed = models if isinstance(models, list | tuple | Mapping) else [models]
        sources = list(dict.fromkeys(map(str, listed)))
        if chosen.baseline in sources:
            base = found[sources.index(chosen.baseline)]
        else:
            ((name, model),) = named_models(chosen.baseline).items()
            base = _measured(chosen, data, name, model, fabric, progress)
        reference = None if base is None else base.as_reference()
    elif {len(model.class_names) for model in given.values()} == {1000} and chosen.severities == SEVERITIES:
        reference = alexnet()
    if not fabric.is_global_zero:
        return None
    notes = (Note(NO_MCE, "There is no mCE: name the model that it is relative to with --baseline."),)
    present = tuple(each for each in found if each is not None)
    return CorruptionResults(present, reference, chosen, () if reference else notes)


def _measured(
    options: CorruptOptions, data: str, name: str, model: Model, fabric: "Fabric", progress: Progress
) -> CorruptedModel | None:
    """Return the metrics of one model; None in all processes but the first."""
    runner = Runner(model, fabric, options.out / "predictions", options.workers, progress)
    _, split = labelled_images(model, data, options, progress)
    chosen, measures = options.corruptions or CORRUPTIONS, measures_of(model)
    clean = runner.predictions(split, model.preprocessing, f"{name}, clean", measures)
    passes = (_passes(options, split, runner, name, corruption, measures) for corruption in chosen)
    if clean is None:
        for _ in passes:  # the other processes share the work
            pass
        return None
    held_out, statistics = HeldOut.of(model), statistics_of(clean)
    detection = None if held_out is None else Detection(held_out, unseen(statistics, held_out)[0], {})
    errors: dict[str, list[float]] = {}
    entropies: dict[str, list[float]] = {}
    auc: dict[str, dict[str, float]] = {}
    placed: dict[str, dict[str, Tensor]] = {}
    by_image, names, paired = [_errors([clean])], _names(clean), True
    images: list[int] = []
    for corruption, found in zip(chosen, passes, strict=True):
        images += map(len, found)
        paired = paired and all(_names(each) == names for each in found)
        errors[corruption] = [error_rate(each.logits, each.labels) for each in found]
        entropies[corruption] = [mean_entropy(each.posterior) for each in found]
        if paired:
            by_image.append(_errors(found))
        if detection is None:
            continue
        parts = [statistics_of(each) for each in found]
        together = {key: torch.cat([each[key] for each in parts]) for key in parts[0]}
        for score, values in detection.values(together).items():
            inside = detection.values_inside[score]
            auc.setdefault(score, {})[corruption] = area_under_curve(inside, values)
            if paired:
                rows = torch.isin(statistics["keys"], detection.inside["keys"]).nonzero().flatten()
                placements = paired_placements(inside, values.view(len(found), -1), rows)
                placed.setdefault(score, {})[corruption] = placements
    intervals = {score: area_intervals(each) for score, each in placed.items()} if paired else {}
    return CorruptedModel(
        name,
        model.record.beta,
        error_rate(clean.logits, clean.labels),
        mean_entropy(clean.posterior),
        errors,
        entropies,
        auc,
        options.score,
        min(images),
        options.severities,
        {score: each for score, (each, _) in intervals.items()},
        {score: mean for score, (_, mean) in intervals.items()},
        torch.stack(by_image, 1) if paired else None,
    )


def _passes(
    options: CorruptOptions,
    split: Split,
    runner: Runner,
    name: str,
    corruption: str,
    measures: Mapping[str, Measure],
) -> list[Predictions]:
    """Return the predictions at all severities of a corruption; none in all processes but the first."""
    model, found = runner.model, []
    for severity in options.severities:
        changed, transform = split, _transform(corruption, severity, options.seed)
        if options.corrupted is not None:
            folder = str(options.corrupted / corruption / str(severity))
            (_, changed), transform = labelled_images(model, folder, options, runner.progress, "all"), None
        title = f"{name}, {corruption} {severity}"
        found.append(runner.predictions(changed, model.preprocessing, title, measures, transform))
    return [each for each in found if each is not None]


def _errors(found: Sequence[Predictions]) -> Tensor:
    """Return the share of predictions that are wrong for each image, (N,)."""
    return torch.stack([each.logits.argmax(1) != each.labels for each in found]).double().mean(0)


def _names(found: Predictions) -> list[str]:
    """Return the images' names with their class folders: the same for a photo and its corrupted versions."""
    return ["/".join(path.split("/")[-2:]) for path in found.paths]


def _transform(corruption: str, severity: int, seed: int) -> Transform | None:
    """Return the corruption; its random numbers are a function of the seed and of the batch's pixels."""
    return Transform(f"{corruption} {severity} {seed}", partial(_apply, corruption, severity, seed))


def _apply(corruption: str, severity: int, seed: int, images: Tensor) -> Tensor:
    pixels = int(image_keys(images).sum()) % 2**63
    key = generator(seed, CORRUPTIONS[corruption].number, severity, pixels)
    return corrupted(images, corruption, severity, key)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _mean_if_known(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known or not known else _mean(value for value in known if value is not None)


def _ratio(value: float, of: float) -> float | None:
    return value / of if of > 0 else None

"""All studies of one or more models; what is finished is kept, so that a stopped audit goes on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError, NonFiniteError
from candid._support.progress import SILENT, Progress
from candid._support.text import short_names
from candid.data.parts import Part, open_images, open_part, subsample
from candid.data.splits import ShardSplit, Split
from candid.evaluation import evaluate as evaluation
from candid.evaluation.evaluate import Evaluation
from candid.evaluation.output import remove_older
from candid.evaluation.output import write as write_evaluation
from candid.explanations import overview as explanation
from candid.explanations.overview import Overview
from candid.explanations.receptive_field import ReceptiveField
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.reports.audit.examples import Example, examples
from candid.robustness.attacks import benchmark as attacking
from candid.robustness.attacks.benchmark import DS, KAPPAS, Assaulted
from candid.robustness.attacks.tables import write_attack_tables
from candid.robustness.corruptions import benchmark as sweeping
from candid.robustness.corruptions.apply import CORRUPTIONS, SEVERITIES
from candid.robustness.corruptions.benchmark import Reference, Sweep
from candid.robustness.corruptions.tables import write_tables
from candid.trust.held_out import HeldOut


@dataclass(frozen=True)
class Request:
    """What to audit, and how thoroughly."""

    models: tuple[Path, ...]
    data: str
    out: Path
    """Passes, attacks, tables and figures are kept here: an audit that was stopped goes on where it was."""
    part: Part | None = None
    ood: Mapping[str, str] = field(default_factory=dict)
    """Other sets of images by name."""
    images: int | None = None
    """Of each set; None: all."""
    corruption_images: int | None = None
    """Of each corruption and severity; None: as many as ``images``, 0: no corruptions."""
    attack_images: int = 200
    """0: no attacks."""
    examples: int = 4
    """Images that are examined, with a page for each generative model."""
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[int, ...] = SEVERITIES
    kappas: tuple[float, ...] = KAPPAS
    ds: tuple[float, ...] = DS
    steps: int | None = None
    """Of attacks, at most."""
    ten_crop: bool = False
    quick: bool = False
    """Whether the numbers above are those of a quick look: the page says so."""
    skip_bad: bool = False
    workers: int = 2


@dataclass(frozen=True)
class Subject:
    """A model under audit."""

    name: str
    path: Path
    model: Model
    beta: float | None
    held_out: int
    """Images that its p-values come from; 0 if it was not calibrated."""

    @property
    def is_generative(self) -> bool:
        return self.model.density_of is not None

    @property
    def folder(self) -> str:
        """Its name, for a folder."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip(".-") or "model"


@dataclass(frozen=True)
class Attacked:
    """All models under attack."""

    request: attacking.Request
    found: list[Assaulted]


@dataclass(frozen=True)
class Audit:
    """All that was found; lists are in the order of the subjects."""

    request: Request
    subjects: list[Subject]
    evaluations: list[Evaluation]
    sweeps: list[Sweep]
    """Empty if no corruptions were asked for."""
    reference: Reference | None
    attacked: Attacked | None
    overviews: dict[str, Overview]
    """By name, of generative models."""
    fields: dict[str, ReceptiveField]
    examples: list[Example]
    absent: dict[str, str]
    """Studies that there are none of, and why."""


def audit(request: Request, progress: Progress = SILENT) -> Audit:
    """Every study of ``request``, after everything that can be wrong with it was looked at."""
    subjects, in_shards = _checked(request)
    absent: dict[str, str] = {}
    evaluations = []
    for subject in subjects:
        progress.log(f"evaluating {subject.name}")
        evaluations.append(_evaluated(request, subject, progress))
    sweeps: list[Sweep] = []
    reference = None
    if request.corruption_images == 0:
        absent["corruptions"] = "No corruptions were asked for (--corruption-images 0)."
    else:
        progress.log("corrupting images")
        sweeps, reference = _swept(request, subjects, progress)
    attacked = None
    if request.attack_images == 0:
        absent["attacks"] = "No attacks were asked for (--attack-images 0)."
    elif in_shards:
        absent["attacks"] = "Tar shards are read from end to end: attacks need a folder of images."
    else:
        progress.log("attacking")
        attacked = _attacked(request, subjects, progress)
    overviews: dict[str, Overview] = {}
    fields: dict[str, ReceptiveField] = {}
    for subject in subjects:
        if subject.is_generative:
            progress.log(f"explaining {subject.name}")
            try:
                overviews[subject.name] = _explained(request, subjects, subject, in_shards, fields, progress)
            except NonFiniteError as error:  # some networks can't be inverted far from real images
                absent[f"explanations of {subject.name}"] = f"{subject.name} can't be explained: {error}"
    if not any(subject.is_generative for subject in subjects):
        absent["explanations"] = "A ResNet has no latent to explain it by: add a generative model."
    elif in_shards:
        absent["examples"] = "Of tar shards no image can be looked up: examples need a folder of images."
    ordered = {subject.name: fields[subject.name] for subject in subjects if subject.name in fields}
    shown = [] if in_shards else examples(request, subjects, evaluations, progress)
    return Audit(
        request, subjects, evaluations, sweeps, reference, attacked, overviews, ordered, shown, absent
    )


def _checked(request: Request) -> tuple[list[Subject], bool]:
    """The models, and whether the data is in tar shards; mistakes are said before anything long runs."""
    if not request.models:
        raise CandidError("Name at least one model to audit.")
    if request.out.is_file():
        raise CandidError(f"'{request.out}' is a file: name a folder for the audit with --out.")
    if min(request.attack_images, request.examples, request.corruption_images or 0) < 0:
        raise CandidError("The numbers of images must not be negative: 0 leaves a study out.")
    if request.steps is not None and request.steps < 1:
        raise CandidError(f"--steps takes a number from 1 on, not {request.steps}.")
    paths = list(dict.fromkeys(request.models))
    subjects = []
    for path, name in zip(paths, short_names(paths), strict=True):
        model = checkpoint.load_any(path)
        held_out = HeldOut.of(model)
        subjects.append(
            Subject(name, path, model, model.record.beta, 0 if held_out is None else len(held_out))
        )
    folders = [subject.folder for subject in subjects]
    for subject in subjects:
        if folders.count(subject.folder) > 1:
            raise CandidError(
                f"'{subject.name}' is named too much like another model to have its own folder: rename it."
            )
    first, *others = subjects
    for other in others:
        if other.model.class_names != first.model.class_names:
            raise CandidError(f"'{first.path}' and '{other.path}' have other classes: audit them one by one.")
    split, part = _opened(request, first)
    subsample(split, request.corruption_images or None)
    for other in others:
        same, _ = _opened(request, other)
        if not _same(split, same):
            raise CandidError(
                f"'{first.path}' and '{other.path}' have other test images of '{request.data}': audit them "
                "one by one."
            )
    if part in request.ood:
        raise CandidError(f"'{part}' is already what the images of DATA are called: choose another name.")
    for spec in request.ood.values():
        subsample(open_images(spec, first.model.preprocessing), request.images)
    sweep_request(request, subjects)  # these two check what they are given
    attack_request(request, subjects)
    return subjects, isinstance(split, ShardSplit)


def _opened(request: Request, subject: Subject) -> tuple[Split, str]:
    chosen = open_part(request.data, subject.model.class_names, request.part, subject.model.record.config)
    return subsample(chosen.split, request.images), chosen.part


def _same(one: Split, two: Split) -> bool:
    if isinstance(one, ShardSplit) or isinstance(two, ShardSplit):
        return one == two
    return one.fingerprint() == two.fingerprint()


def _shared(request: Request) -> dict[str, Any]:
    """What all studies of images are asked for alike."""
    return {
        "data": request.data,
        "out": request.out,
        "part": request.part,
        "skip_bad": request.skip_bad,
        "devices": 1,
        "workers": request.workers,
    }


def evaluation_request(request: Request, subject: Subject) -> evaluation.Request:
    """As for 'candid evaluate'; a model without held-out scores has no tests."""
    return evaluation.Request(
        model=subject.path,
        ood=request.ood if subject.held_out else {},
        ten_crop=request.ten_crop,
        temperature=bool(subject.held_out),
        images=request.images,
        **_shared(request),
    )


def _evaluated(request: Request, subject: Subject, progress: Progress) -> Evaluation:
    found = evaluation.evaluate(evaluation_request(request, subject), progress)
    assert found is not None
    folder = request.out / "evaluation" / subject.folder
    remove_older(folder, write_evaluation(found, folder))
    return found


def sweep_request(request: Request, subjects: Sequence[Subject]) -> sweeping.Request:
    """As for 'candid corrupt'; errors are relative to those of the first ResNet, if there is one."""
    resnets = [subject.path for subject in subjects if not subject.is_generative]
    images = request.images if request.corruption_images is None else request.corruption_images
    return sweeping.Request(
        models=tuple(subject.path for subject in subjects),
        corruptions=request.corruptions,
        severities=request.severities,
        baseline=resnets[0] if resnets else None,
        images=images,
        **_shared(request),
    )


def _swept(
    request: Request, subjects: Sequence[Subject], progress: Progress
) -> tuple[list[Sweep], Reference | None]:
    found = sweeping.sweep(sweep_request(request, subjects), _Without(progress, "no mCE"))
    assert found is not None
    write_tables(*found, request.out / "corruptions")
    return found


class _Without(Progress):
    """Leaves out messages that advise an option which an audit does not have."""

    def __init__(self, progress: Progress, start: str) -> None:
        self.track = progress.track  # type: ignore[method-assign]
        self.log = lambda text: None if text.startswith(start) else progress.log(text)  # type: ignore[method-assign]


def attack_request(request: Request, subjects: Sequence[Subject]) -> attacking.Request:
    """As for 'candid attack'; without held-out scores there is no detection to fool."""
    calibrated = all(subject.held_out or not subject.is_generative for subject in subjects)
    return attacking.Request(
        models=tuple(subject.path for subject in subjects),
        images=request.attack_images,
        kappas=request.kappas,
        ds=request.ds if calibrated and any(s.is_generative for s in subjects) else (0.0,),
        steps=request.steps,
        **_shared(request),
    )


def attack_groups(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Models that can be attacked alike: those without held-out scores have a detection to fool not."""
    bare = [subject for subject in subjects if subject.is_generative and not subject.held_out]
    return [group for group in ([s for s in subjects if s not in bare], bare) if group]


def _attacked(request: Request, subjects: Sequence[Subject], progress: Progress) -> Attacked:
    found: dict[str, Assaulted] = {}
    for group in attack_groups(subjects):
        made = attacking.campaign(attack_request(request, group), _Without(progress, "no detection figures"))
        assert made is not None
        found |= {
            subject.name: _renamed(each, subject.name) for subject, each in zip(group, made, strict=True)
        }
    asked = attack_request(request, attack_groups(subjects)[0])
    ordered = [found[subject.name] for subject in subjects]
    write_attack_tables(ordered, asked, request.out / "attack-tables")
    return Attacked(asked, ordered)


def _renamed(found: Assaulted, name: str) -> Assaulted:
    """As it is called beside all models."""
    return replace(found, name=name, figures=tuple(replace(each, model=name) for each in found.figures))


def explanation_request(
    request: Request, subjects: Sequence[Subject], subject: Subject, in_shards: bool = False
) -> explanation.Request:
    """As for 'candid explain'; the first generative model has the receptive fields of ResNets beside it."""
    first = next(each for each in subjects if each.is_generative)
    beside = [
        each.path
        for each in subjects
        if not each.is_generative
        and each.model.image_shape == subject.model.image_shape
        and subject is first
        and not in_shards
    ]
    return explanation.Request(
        model=subject.path,
        data=None if in_shards else request.data,
        part=request.part,
        beside=tuple(beside),
        skip_bad=request.skip_bad,
        workers=request.workers,
    )


def _explained(
    request: Request,
    subjects: Sequence[Subject],
    subject: Subject,
    in_shards: bool,
    fields: dict[str, ReceptiveField],
    progress: Progress,
) -> Overview:
    asked = explanation_request(request, subjects, subject, in_shards)
    found = explanation.overview(asked, progress)
    names = {each.path: each.name for each in subjects}
    for path, own in zip((asked.model, *asked.beside), found.fields.values(), strict=False):
        fields[names[path]] = own
    return found

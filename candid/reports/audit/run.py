"""All studies of one or more models; what is finished is kept, so that a stopped audit goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from candid._support.errors import CandidError, NonFiniteError
from candid._support.progress import SILENT, Progress
from candid._support.text import short_names
from candid.data.datasets import open_images, open_part
from candid.data.splits import Split
from candid.evaluation import evaluate as evaluation
from candid.evaluation.evaluate import Evaluation
from candid.evaluation.output import remove_older
from candid.evaluation.output import write as write_evaluation
from candid.explanations.options import ExplainOptions
from candid.explanations.overview import Overview, explain
from candid.explanations.receptive_field import ReceptiveField
from candid.models import checkpoint
from candid.reports.audit.examples import Example, examples
from candid.reports.audit.models import AuditedModel
from candid.reports.audit.options import AuditOptions as Request
from candid.robustness.attacks import benchmark as attacking
from candid.robustness.attacks.benchmark import Assaulted
from candid.robustness.attacks.tables import write_attack_tables
from candid.robustness.corruptions import benchmark as sweeping
from candid.robustness.corruptions.benchmark import Reference, Sweep
from candid.robustness.corruptions.tables import write_tables
from candid.trust.judge import HeldOut


@dataclass(frozen=True)
class Audit:
    """Everything that was found; lists are in the order of the models."""

    options: Request
    models: list[AuditedModel]
    evaluations: list[Evaluation]
    corruptions: list[Sweep]
    """Empty if there is no study of corruptions."""
    reference: Reference | None
    """The model that corruption errors are relative to."""
    attacks: tuple[list[Assaulted], attacking.Request] | None
    overviews: dict[str, Overview]
    """Explanations of generative models, by name."""
    fields: dict[str, ReceptiveField]
    """Receptive fields by name."""
    examples: list[Example]
    absent: dict[str, str]
    """Studies that were left out, by topic, and why."""


def audit(request: Request, progress: Progress = SILENT) -> Audit:
    """Every study of ``request``, after everything that can be wrong with it was looked at."""
    models, in_shards = _checked(request)
    absent: dict[str, str] = {}
    evaluations = []
    for model in models:
        progress.log(f"evaluating {model.name}")
        evaluations.append(_evaluated(request, model, progress))
    sweeps: list[Sweep] = []
    reference = None
    if request.corruption_images == 0:
        absent["corruptions"] = "No corruptions were asked for (--corruption-images 0)."
    else:
        progress.log("corrupting images")
        sweeps, reference = _swept(request, models, progress)
    attacked = None
    if request.attack_images == 0:
        absent["attacks"] = "No attacks were asked for (--attack-images 0)."
    elif in_shards:
        absent["attacks"] = "Tar shards are read from end to end: attacks need a folder of images."
    else:
        progress.log("attacking")
        attacked = _attacked(request, models, progress)
    overviews: dict[str, Overview] = {}
    fields: dict[str, ReceptiveField] = {}
    for model in models:
        if model.is_generative:
            progress.log(f"explaining {model.name}")
            try:
                overviews[model.name] = _explained(request, models, model, in_shards, fields, progress)
            except NonFiniteError as error:  # some networks can't be inverted far from real images
                absent[f"explanations of {model.name}"] = f"{model.name} can't be explained: {error}"
    if not any(model.is_generative for model in models):
        absent["explanations"] = "A ResNet has no latent to explain it by: add a generative model."
    elif in_shards:
        absent["examples"] = "Of tar shards no image can be looked up: examples need a folder of images."
    ordered = {model.name: fields[model.name] for model in models if model.name in fields}
    shown = [] if in_shards else examples(request, models, evaluations, progress)
    return Audit(request, models, evaluations, sweeps, reference, attacked, overviews, ordered, shown, absent)


def _checked(request: Request) -> tuple[list[AuditedModel], bool]:
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
    models = []
    for path, name in zip(paths, short_names(paths), strict=True):
        loaded = checkpoint.load_any(path)
        held_out = HeldOut.of(loaded)
        count = 0 if held_out is None else len(held_out)
        models.append(AuditedModel(name, path, loaded, loaded.record.beta, count))
    folders = [model.folder for model in models]
    for model in models:
        if folders.count(model.folder) > 1:
            raise CandidError(
                f"'{model.name}' is named too much like another model to have its own folder: rename it."
            )
    first, *others = models
    for other in others:
        if other.model.class_names != first.model.class_names:
            raise CandidError(f"'{first.path}' and '{other.path}' have other classes: audit them one by one.")
    split, part = _opened(request, first)
    split.subsample(request.corruption_images or None)
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
        open_images(spec, first.model.preprocessing).subsample(request.images)
    sweep_request(request, models)  # these two check what they are given
    attack_request(request, models)
    return models, not split.can_index


def _opened(request: Request, model: AuditedModel) -> tuple[Split, str]:
    chosen = open_part(request.data, model.model.class_names, request.part, model.model.record.config)
    return chosen.split.subsample(request.images), chosen.part


def _same(one: Split, two: Split) -> bool:
    if not one.can_index or not two.can_index:
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


def evaluation_request(request: Request, model: AuditedModel) -> evaluation.Request:
    """As for 'candid evaluate'; a model without held-out scores has no tests."""
    return evaluation.Request(
        model=model.path,
        ood=request.ood if model.held_out else {},
        ten_crop=request.ten_crop,
        temperature=bool(model.held_out),
        images=request.images,
        **_shared(request),
    )


def _evaluated(request: Request, model: AuditedModel, progress: Progress) -> Evaluation:
    found = evaluation.evaluate(evaluation_request(request, model), progress)
    assert found is not None
    folder = request.out / "evaluation" / model.folder
    remove_older(folder, write_evaluation(found, folder))
    return found


def sweep_request(request: Request, models: Sequence[AuditedModel]) -> sweeping.Request:
    """As for 'candid corrupt'; errors are relative to those of the first ResNet, if there is one."""
    resnets = [model.path for model in models if not model.is_generative]
    images = request.images if request.corruption_images is None else request.corruption_images
    return sweeping.Request(
        models=tuple(model.path for model in models),
        corruptions=request.corruptions,
        severities=request.severities,
        baseline=resnets[0] if resnets else None,
        images=images,
        **_shared(request),
    )


def _swept(
    request: Request, models: Sequence[AuditedModel], progress: Progress
) -> tuple[list[Sweep], Reference | None]:
    found = sweeping.sweep(sweep_request(request, models), _Without(progress, "no mCE"))
    assert found is not None
    write_tables(*found, request.out / "corruptions")
    return found


class _Without(Progress):
    """Leaves out messages that advise an option which an audit does not have."""

    def __init__(self, progress: Progress, start: str) -> None:
        self.track = progress.track  # type: ignore[method-assign]
        self.log = lambda text: None if text.startswith(start) else progress.log(text)  # type: ignore[method-assign]


def attack_request(request: Request, models: Sequence[AuditedModel]) -> attacking.Request:
    """As for 'candid attack'; without held-out scores there is no detection to fool."""
    calibrated = all(model.held_out or not model.is_generative for model in models)
    return attacking.Request(
        models=tuple(model.path for model in models),
        images=request.attack_images,
        kappas=request.kappas,
        ds=request.ds if calibrated and any(s.is_generative for s in models) else (0.0,),
        steps=request.steps,
        **_shared(request),
    )


def attack_groups(models: Sequence[AuditedModel]) -> list[list[AuditedModel]]:
    """Models that can be attacked alike: those without held-out scores have a detection to fool not."""
    bare = [model for model in models if model.is_generative and not model.held_out]
    return [group for group in ([s for s in models if s not in bare], bare) if group]


def _attacked(
    request: Request, models: Sequence[AuditedModel], progress: Progress
) -> tuple[list[Assaulted], attacking.Request]:
    found: dict[str, Assaulted] = {}
    for group in attack_groups(models):
        made = attacking.campaign(attack_request(request, group), _Without(progress, "no detection figures"))
        assert made is not None
        found |= {model.name: _renamed(each, model.name) for model, each in zip(group, made, strict=True)}
    asked = attack_request(request, attack_groups(models)[0])
    ordered = [found[model.name] for model in models]
    write_attack_tables(ordered, asked, request.out / "attack-tables")
    return ordered, asked


def _renamed(found: Assaulted, name: str) -> Assaulted:
    """As it is called beside all models."""
    return replace(found, name=name, figures=tuple(replace(each, model=name) for each in found.figures))


def explanation_request(
    request: Request, models: Sequence[AuditedModel], model: AuditedModel, in_shards: bool = False
) -> tuple[ExplainOptions, list[AuditedModel]]:
    """Return the options of 'candid explain', and for the first generative model the ResNets to compare."""
    first = next(each for each in models if each.is_generative)
    others = [
        each
        for each in models
        if not each.is_generative
        and each.model.image_shape == model.model.image_shape
        and model is first
        and not in_shards
    ]
    options = ExplainOptions(
        data=None if in_shards else request.data,
        part=request.part,
        skip_bad=request.skip_bad,
        workers=request.workers,
    )
    return options, others


def _explained(
    request: Request,
    models: Sequence[AuditedModel],
    model: AuditedModel,
    in_shards: bool,
    fields: dict[str, ReceptiveField],
    progress: Progress,
) -> Overview:
    options, others = explanation_request(request, models, model, in_shards)
    compared = [each.model for each in others]
    found = explain(model.model, compare_with=compared, progress=progress, **vars(options))
    for each, own in zip((model, *others), found.fields.values(), strict=False):
        fields[each.name] = own
    return found

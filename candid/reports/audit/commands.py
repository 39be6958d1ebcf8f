"""The commands that repeat the studies of an audit one by one."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from candid._support.text import number, short_name
from candid.reports.audit.models import AuditedModel
from candid.reports.audit.options import AuditOptions as Request
from candid.reports.audit.run import (
    Audit,
    attack_groups,
    attack_request,
    evaluation_request,
    explanation_request,
    sweep_request,
)
from candid.robustness.attacks.benchmark import DS, KAPPAS
from candid.robustness.corruptions.apply import CORRUPTIONS, SEVERITIES


def _line(*words: object) -> str:
    return shlex.join(["candid", *map(str, words)])


def _common(request: Request) -> list[object]:
    part: list[object] = ["--part", request.part] if request.part else []
    return part + (["--skip-bad"] if request.skip_bad else [])


def _images(images: int | None) -> list[object]:
    return [] if images is None else ["--images", images]


def evaluations(found: Audit) -> list[str]:
    """One a model."""
    lines = []
    for model in found.models:
        asked = evaluation_request(found.options, model)
        ood = [word for name, spec in asked.ood.items() for word in ("--ood", f"{name}={spec}")]
        options: list[object] = [*ood, *(["--ten-crop"] if asked.ten_crop else [])]
        options += ["--temperature"] if asked.temperature else []
        options += [*_images(asked.images), *_common(found.options)]
        if model.folder != short_name(model.path):  # two models would have the same folder
            options += ["--out", Path("evaluation") / model.folder]
        lines.append(_line("evaluate", asked.model, asked.data, *options))
    return lines


def comparison(found: Audit) -> list[str]:
    """Of the evaluations above, in their own folders."""
    return [_line("compare", *(Path("evaluation") / model.folder for model in found.models))]


def sweep(found: Audit) -> list[str]:
    """All models at once."""
    asked = sweep_request(found.options, found.models)
    options: list[object] = [] if asked.baseline is None else ["--baseline", asked.baseline]
    if asked.corruptions != tuple(CORRUPTIONS):
        options += ["--corruptions", ",".join(asked.corruptions)]
    if asked.severities != SEVERITIES:
        options += ["--severities", ",".join(map(str, asked.severities))]
    options += [*_images(asked.images), *_common(found.options)]
    return [_line("corrupt", *asked.models, asked.data, *options)]


def attacks(found: Audit) -> list[str]:
    """Models without held-out scores apart."""
    request, lines = found.options, []
    for group in attack_groups(found.models):
        asked = attack_request(request, group)
        options: list[object] = ["--images", asked.images]
        for name, values, usual in (("kappa", asked.kappas, KAPPAS), ("d", asked.ds, DS)):
            if values != usual:
                options += [f"--{name}", ",".join(number(value).replace("∞", "inf") for value in values)]
        options += [] if asked.steps is None else ["--steps", asked.steps]
        lines.append(_line("attack", *_paths(group), request.data, *options, *_common(request)))
    return lines


def explanations(found: Audit) -> list[str]:
    """One a generative model."""
    lines = []
    for model in found.models:
        if model.name in found.overviews:
            asked, others = explanation_request(found.options, found.models, model, not found.fields)
            data: list[object] = [] if asked.data is None else ["--data", asked.data]
            compared = [word for each in others for word in ("--compare-with", each.path)]
            lines.append(_line("explain", model.path, *data, *compared, *_common(found.options)))
    return lines


def examinations(found: Audit) -> list[str]:
    """One a generative model, for all example images."""
    paths = [example.path for example in found.examples]
    return [
        _line("examine", model.path, *paths, "--figures", Path("pages") / model.folder)
        for model in found.models
        if model.is_generative and paths
    ]


def _paths(models: Sequence[AuditedModel]) -> list[Path]:
    return [model.path for model in models]

"""The tables of the paper's appendix on attacks, as Markdown, CSV, LaTeX and HTML."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from candid._support.files import write_texts
from candid._support.tables import Cell, Grid, area_cell, as_csv, html_page, latex, markdown
from candid.robustness.attacks.benchmark import Assaulted, Request, setting_name
from candid.robustness.attacks.metrics import AttackFigures

HEAD = (
    "model", "kappa", "d", "image", "label", "target", "predicted_before", "predicted_after", "already",
    "success", "rounded_success", "l2", "margin", "posterior_wrong", "log_density_before",
    "log_density_after", "steps",
)  # fmt: skip
NOTES = (
    "'wrong': images that the model misclassifies before the attack; 'already': of these, as the target; "
    "they are in no other figure.",
    "Mean figures are of the fooled images, as real numbers; '8-bit': the share that is still fooled when "
    "rounded to 8 bits.",
    "AUC: attacked images against their originals by log q(x), fitted to held-out images; 'adaptive': the "
    "lowest among the attacks that fool the detection, too, with the success rate of the one that is lowest "
    "two-tailed. They aim at the median; for the one-tailed test a higher aim would be worse.",
)


def write_attack_tables(found: Sequence[Assaulted], request: Request, out: Path) -> list[Path]:
    """``attacks`` as .json (all figures), .csv (a line an image), .md, .tex and .html."""
    tables = attack_tables(found, request)
    asked = ", ".join(f"{key} {value}" for key, value in request.described().items())
    notes = (f"Attack: {asked}.", *NOTES)
    return write_texts(
        {
            "attacks.json": json.dumps(record(found, request), indent=1, allow_nan=False) + "\n",
            "attacks.csv": as_csv(_lines(found)),
            "attacks.md": markdown(tables, notes),
            "attacks.tex": latex(tables),
            "attacks.html": html_page("Attacks", tables, notes),
        },
        out,
    )


def record(found: Sequence[Assaulted], request: Request) -> dict[str, Any]:
    """As JSON."""
    figures = [figures.record() for each in found for figures in each.figures]
    return {"attack": request.described(), "figures": figures}


def attack_tables(found: Sequence[Assaulted], request: Request) -> dict[str, Grid]:
    """One for each kappa, by its caption; a line a model and d."""
    head = ["model", "d", "wrong", "already", "success (%)", "8-bit (%)", "L2 mean", "L2 median"]
    head += ["RMS (levels)", "confidence (%)", "entropy (nats)", "contrast (%)", "bits/dim", "most steps"]
    head += ["AUC one-tailed (%)", "adaptive (%)", "AUC two-tailed (%)", "adaptive (%)", "its success (%)"]
    tables: dict[str, Grid] = {}
    for kappa in dict.fromkeys(kappa for kappa, _ in request.settings):
        rows = [_row(each) for model in found for each in model.figures if each.kappa == kappa]
        tables[setting_name(request, kappa)] = (head, rows)
    return tables


def _row(figures: AttackFigures) -> list[Cell]:
    areas: tuple[float | None, ...] = (None,) * 4
    success = None
    if figures.detection is not None:
        one, two = figures.detection.one_tailed, figures.detection.two_tailed
        areas = one, figures.adaptive_one_tailed, two, figures.adaptive_two_tailed
        success = figures.adaptive_success
    texts = [
        figures.model,
        f"{figures.d:g}",
        f"{figures.misclassified}/{figures.images}",
        f"{figures.already}/{figures.images}",
        _number(figures.success, 100, ".1f"),
        _number(figures.rounded_success, 100, ".1f"),
        _number(figures.l2_mean, 1, ".3f"),
        _number(figures.l2_median, 1, ".3f"),
        _number(figures.per_pixel, 255, ".2f"),
        _number(figures.confidence, 100, ".1f"),
        _change(figures.entropy_before, figures.entropy_after),
        _number(figures.contrast, 100, ".1f"),
        _change(figures.bits_before, figures.bits_after),
        f"{figures.most_steps}",
    ]
    return [*((text, "") for text in texts), *map(area_cell, areas), (_number(success, 100, ".1f"), "")]


def _change(before: float | None, after: float | None) -> str:
    return "–" if before is None else f"{_number(before, 1, '.2f')} → {_number(after, 1, '.2f')}"


def _number(value: float | None, scale: float, form: str) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else format(scale * value, form)


def _lines(found: Sequence[Assaulted]) -> Iterator[Sequence[object]]:
    """A line a model, setting and image."""
    yield HEAD
    for model in found:
        names, scene, before = model.scene.class_names, model.scene, model.clean
        for (kappa, d), attack in model.attacks.items():
            for i, image in enumerate(scene.names):
                after = int(attack.posterior[i].argmax())
                wrong = after if scene.targets is None else int(scene.targets[i])
                densities = [
                    None if each is None else float(each[i])
                    for each in (before.log_density, attack.log_density)
                ]
                yield [
                    model.name,
                    kappa,
                    d,
                    image,
                    names[int(scene.labels[i])],
                    None if scene.targets is None else names[int(scene.targets[i])],
                    names[int(before.logits[i].argmax())],
                    names[after],
                    *(int(each[i]) for each in (attack.already, attack.success, attack.rounded_success)),
                    float(attack.distance[i]),
                    float(attack.margin[i]),
                    float(attack.posterior[i, wrong]),
                    *densities,
                    int(attack.steps[i]),
                ]

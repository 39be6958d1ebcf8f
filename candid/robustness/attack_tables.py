"""The tables of the paper's appendix on attacks, as Markdown, CSV, LaTeX and HTML."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from candid.robustness.campaign import Assaulted, Request, setting_name
from candid.robustness.figures import AttackFigures
from candid.robustness.formats import (
    Cell,
    Grid,
    area_cell,
    as_csv,
    html_page,
    latex,
    markdown,
    write_texts,
)

HEAD = (
    "model", "kappa", "d", "image", "label", "target", "predicted_before", "predicted_after", "already",
    "success", "rounded_success", "l2", "margin", "confidence", "log_density_before", "log_density_after",
    "steps",
)  # fmt: skip
NOTES = (
    "Mean figures are of the fooled images; those that a model took for the target before are counted under "
    "'already' and left out.",
    "AUC: attacked images against their originals by log q(x), fitted to held-out images; 'adaptive' is the "
    "lowest two-tailed one among the attacks that fool the detection, too, with its success rate.",
    "'8-bit': success once rounded to 8 bits.",
)


def write_attack_tables(found: Sequence[Assaulted], request: Request, out: Path) -> list[Path]:
    """``attacks`` as .json (all figures), .csv (a line an image), .md, .tex and .html."""
    tables = attack_tables(found, request)
    records = [figures.record() for each in found for figures in each.figures]
    return write_texts(
        {
            "attacks.json": json.dumps(records, indent=1, allow_nan=False) + "\n",
            "attacks.csv": as_csv(_lines(found)),
            "attacks.md": markdown(tables, NOTES),
            "attacks.tex": latex(tables),
            "attacks.html": html_page("Attacks", tables, NOTES),
        },
        out,
    )


def attack_tables(found: Sequence[Assaulted], request: Request) -> dict[str, Grid]:
    """One for each kappa, by its caption; a line a model and d."""
    head = ["model", "d", "already", "success (%)", "8-bit (%)", "L2 mean", "L2 median", "RMS (levels)"]
    head += ["confidence (%)", "entropy (nats)", "contrast (%)", "bits/dim"]
    head += ["AUC one-tailed (%)", "AUC two-tailed (%)", "adaptive AUC (%)", "its success (%)"]
    tables: dict[str, Grid] = {}
    for kappa in dict.fromkeys(kappa for kappa, _ in request.settings):
        rows = [_row(each) for model in found for each in model.figures if each.kappa == kappa]
        tables[setting_name(request, kappa)] = (head, rows)
    return tables


def _row(figures: AttackFigures) -> list[Cell]:
    detection = figures.detection
    areas = (
        (detection.one_tailed, detection.two_tailed, figures.adaptive_two_tailed)
        if detection
        else (None,) * 3
    )
    texts = [
        figures.model,
        f"{figures.d:g}",
        f"{figures.already}/{figures.images}",
        _number(figures.success, 100, ".1f"),
        _number(figures.rounded_success, 100, ".1f"),
        _number(figures.l2_mean, 1, ".3f"),
        _number(figures.l2_median, 1, ".3f"),
        _number(figures.per_pixel, 255, ".2f"),
        _number(figures.confidence, 100, ".1f"),
        f"{_number(figures.entropy_before, 1, '.2f')} → {_number(figures.entropy_after, 1, '.2f')}",
        _number(figures.contrast, 100, ".1f"),
        f"{_number(figures.bits_before, 1, '.2f')} → {_number(figures.bits_after, 1, '.2f')}"
        if figures.bits_after is not None
        else "–",
    ]
    return [
        *((text, "") for text in texts),
        *map(area_cell, areas),
        (_number(figures.adaptive_success if detection else None, 100, ".1f"), ""),
    ]


def _number(value: float | None, scale: float, form: str) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else format(scale * value, form)


def _lines(found: Sequence[Assaulted]) -> Iterator[Sequence[object]]:
    """A line a model, setting and image."""
    yield HEAD
    for model in found:
        names, scene, before = model.class_names, model.scene, model.clean
        for (kappa, d), attack in model.attacks.items():
            for i, image in enumerate(scene.names):
                wrong = int(attack.posterior[i].argmax())
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
                    names[wrong],
                    *(int(each[i]) for each in (attack.already, attack.success, attack.rounded_success)),
                    float(attack.distance[i]),
                    float(attack.margin[i]),
                    float(attack.posterior[i, wrong]),
                    *densities,
                    int(attack.steps[i]),
                ]

"""The tables of the paper's appendix on attacks, as Markdown, CSV, LaTeX and HTML."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from candid._support.files import write_texts
from candid._support.tables import Cell, Grid, area_cell, as_csv, html_page, latex, markdown, with_interval
from candid.robustness.attacks.benchmark import AttackInputs, AttackResults
from candid.robustness.attacks.eight_bit import FRESH
from candid.robustness.attacks.metrics import AttackMetrics, Measured
from candid.robustness.attacks.search import AttackResult

HEAD = (
    "model", "kappa", "d", "image", "label", "target", "predicted_before", "predicted_after",
    "already_misclassified", "success", "rounded_success", "l2", "margin", "posterior_wrong",
    "log_density_before", "log_density_after", "steps", "eight_bit_success", "eight_bit_l2",
    "eight_bit_log_density",
)  # fmt: skip
NOTES = (
    "'wrong': images that the model misclassifies before the attack; 'already': of these, as the target; "
    "they are in no other column.",
    "'real': real-valued images; '8-bit': images that work as a file, which succeed only if they reach kappa "
    f"with the model's own noise pattern and with {FRESH} others that the attack has not seen. 'rounded': "
    "the share of the real-valued images that still fool the model when they are just rounded to 8 bits. "
    "The median is over all images, means are over the fooled ones.",
    "AUC: attacked images against their originals by log q(x), fitted to held-out images; 'adaptive': the "
    "lowest among the attacks that also fool the detection, with the success rate of the one that is lowest "
    "two-tailed. They aim at the median; for the one-tailed test a higher aim would be worse.",
    "In parentheses: 95 % intervals (success: exact binomial; L2: order statistics; AUC: DeLong, pairs).",
)


def write_attack_tables(results: AttackResults, out: Path) -> list[Path]:
    """Write ``attacks`` as .json (all metrics), .csv (one line per image), .md, .tex and .html."""
    tables = attack_tables(results)
    asked = ", ".join(f"{key} {value}" for key, value in results.options.described(results.data).items())
    notes = (f"Attack: {asked}.", *NOTES)
    return write_texts(
        {
            "attacks.json": json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n",
            "attacks.csv": as_csv(_lines(results)),
            "attacks.md": markdown(tables, notes),
            "attacks.tex": latex(tables),
            "attacks.html": html_page("Attacks", tables, notes),
        },
        out,
    )


def attack_tables(results: AttackResults) -> dict[str, Grid]:
    """Return one table for each kappa, by its caption; one line per model, d and kind of image."""
    head = ["model", "d", "images", "wrong", "already", "success (%)", "rounded (%)", "L2 median", "L2 mean"]
    head += ["RMS (levels)", "confidence (%)", "entropy (nats)", "contrast (%)", "bits/dim", "most steps"]
    head += ["AUC one-tailed (%)", "adaptive (%)", "AUC two-tailed (%)", "adaptive (%)", "its success (%)"]
    tables: dict[str, Grid] = {}
    for kappa in dict.fromkeys(kappa for kappa, _ in results.options.settings):
        own = [each for model in results for each in model.metrics if each.kappa == kappa]
        rows = [_row(each, kind) for each in own for kind in (each, each.eight_bit) if kind is not None]
        tables[results.options.setting_name(kappa)] = (head, rows)
    return tables


def _row(attack: AttackMetrics, found: Measured) -> list[Cell]:
    """Return the line of the images that ``found`` is of: real-valued or 8-bit ones."""
    ends, real = found.intervals, found is attack
    areas: dict[str, float | None] = {}
    if found.detection is not None:
        areas = vars(found.detection) | {
            "adaptive_one_tailed": found.adaptive_one_tailed,
            "adaptive_two_tailed": found.adaptive_two_tailed,
        }
    shown: list[str | Cell] = [
        attack.model,
        f"{attack.d:g}",
        "real" if real else "8-bit",
        f"{attack.misclassified}/{attack.images}",
        f"{attack.already_misclassified}/{attack.images}",
        with_interval(found.success, ends.get("success")),
        with_interval(attack.rounded_success, ends.get("rounded_success")) if real else "–",
        _length(found.l2_median, ends.get("l2_median")),
        _number(found.l2_mean, 1, ".3f"),
        _number(found.per_pixel, 255, ".2f"),
        _number(found.confidence, 100, ".1f"),
        _change(found.entropy_before, found.entropy_after),
        _number(found.contrast, 100, ".1f"),
        _change(found.bits_before, found.bits_after),
        f"{attack.most_steps}" if real else "–",
        *(
            area_cell(areas.get(name), ends.get(name))
            for name in ("one_tailed", "adaptive_one_tailed", "two_tailed", "adaptive_two_tailed")
        ),
        "–" if not areas else with_interval(found.adaptive_success, ends.get("adaptive_success")),
    ]
    return [(each, "") if isinstance(each, str) else each for each in shown]


def _change(before: float | None, after: float | None) -> str:
    return "–" if before is None else f"{_number(before, 1, '.2f')} → {_number(after, 1, '.2f')}"


def _length(value: float | None, interval: Sequence[float] | None) -> str:
    """Return an L2 norm with three digits, and its interval."""
    if value is None or interval is None:
        return "–"
    shown, low, high = ("∞" if math.isinf(each) else f"{each:#.3g}" for each in (value, *interval))
    return f"{shown} ({low} to {high})"


def _number(value: float | None, scale: float, form: str) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else format(scale * value, form)


def _lines(results: AttackResults) -> Iterator[Sequence[object]]:
    """Yield one line per model, setting and image."""
    yield HEAD
    for model in results:
        inputs, before = model.inputs, model.clean

        def named(classes: Tensor | None, inputs: AttackInputs = inputs) -> list[str | None]:
            numbers = [None] * len(inputs.names) if classes is None else classes.tolist()
            return [None if y is None else inputs.class_names[y] for y in numbers]

        for setting, found in model.attacks.items():
            after = found.posterior.argmax(1)
            wrong = after if inputs.targets is None else inputs.targets
            classes = (inputs.labels, inputs.targets, before.logits.argmax(1), after)
            flags = (found.already_misclassified, found.success, found.rounded_success)
            sizes = (found.distance, found.margin, found.posterior.gather(1, wrong[:, None])[:, 0])
            nothing = [None] * len(found)
            columns = (
                *(inputs.names, *map(named, classes), *(each.int().tolist() for each in flags)),
                *(each.tolist() for each in sizes),
                *(
                    nothing if each is None else each.tolist()
                    for each in (before.log_density, found.log_density)
                ),
                found.steps.tolist(),
                *_eight_bit_columns(found),
            )
            yield from ([model.name, *setting, *row] for row in zip(*columns, strict=True))


def _eight_bit_columns(found: AttackResult) -> Iterator[list[Any]]:
    rounded, nothing = found.eight_bit, [None] * len(found)
    yield nothing if rounded is None else rounded.success.int().tolist()
    yield nothing if rounded is None else rounded.distance.tolist()
    yield nothing if rounded is None or rounded.log_density is None else rounded.log_density.tolist()

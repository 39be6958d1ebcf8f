"""The tables of the paper's appendix on attacks, as Markdown, CSV, LaTeX and HTML."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from candid._support.files import write_texts
from candid._support.tables import Cell, Grid, area_cell, as_csv, html_page, latex, markdown
from candid.robustness.attacks.benchmark import AttackInputs, AttackResults
from candid.robustness.attacks.metrics import AttackMetrics

HEAD = (
    "model", "kappa", "d", "image", "label", "target", "predicted_before", "predicted_after",
    "already_misclassified", "success", "rounded_success", "l2", "margin", "posterior_wrong",
    "log_density_before", "log_density_after", "steps",
)  # fmt: skip
NOTES = (
    "'wrong': images that the model misclassifies before the attack; 'already': of these, as the target; "
    "they are in no other column.",
    "Means are of the fooled images, as real numbers; '8-bit': the share that is still fooled when "
    "rounded to 8 bits.",
    "AUC: attacked images against their originals by log q(x), fitted to held-out images; 'adaptive': the "
    "lowest among the attacks that also fool the detection, with the success rate of the one that is lowest "
    "two-tailed. They aim at the median; for the one-tailed test a higher aim would be worse.",
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
    """Return one table for each kappa, by its caption; one line per model and d."""
    head = ["model", "d", "wrong", "already", "success (%)", "8-bit (%)", "L2 mean", "L2 median"]
    head += ["RMS (levels)", "confidence (%)", "entropy (nats)", "contrast (%)", "bits/dim", "most steps"]
    head += ["AUC one-tailed (%)", "adaptive (%)", "AUC two-tailed (%)", "adaptive (%)", "its success (%)"]
    tables: dict[str, Grid] = {}
    for kappa in dict.fromkeys(kappa for kappa, _ in results.options.settings):
        rows = [_row(each) for model in results for each in model.metrics if each.kappa == kappa]
        tables[results.options.setting_name(kappa)] = (head, rows)
    return tables


def _row(found: AttackMetrics) -> list[Cell]:
    areas: tuple[float | None, ...] = (None,) * 4
    success = None
    if found.detection is not None:
        one, two = found.detection.one_tailed, found.detection.two_tailed
        areas = one, found.adaptive_one_tailed, two, found.adaptive_two_tailed
        success = found.adaptive_success
    texts = [
        found.model,
        f"{found.d:g}",
        f"{found.misclassified}/{found.images}",
        f"{found.already_misclassified}/{found.images}",
        _number(found.success, 100, ".1f"),
        _number(found.rounded_success, 100, ".1f"),
        _number(found.l2_mean, 1, ".3f"),
        _number(found.l2_median, 1, ".3f"),
        _number(found.per_pixel, 255, ".2f"),
        _number(found.confidence, 100, ".1f"),
        _change(found.entropy_before, found.entropy_after),
        _number(found.contrast, 100, ".1f"),
        _change(found.bits_before, found.bits_after),
        f"{found.most_steps}",
    ]
    return [*((text, "") for text in texts), *map(area_cell, areas), (_number(success, 100, ".1f"), "")]


def _change(before: float | None, after: float | None) -> str:
    return "–" if before is None else f"{_number(before, 1, '.2f')} → {_number(after, 1, '.2f')}"


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
            )
            yield from ([model.name, *setting, *row] for row in zip(*columns, strict=True))

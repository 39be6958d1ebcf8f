"""Compare several evaluated models: the rows of the paper's Table 2 and Figure 3."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from candid._support.config import build
from candid._support.errors import CandidError
from candid._support.files import write_texts
from candid._support.tables import no_formula
from candid.evaluation.options import CompareOptions

Row = dict[str, Any]
METRICS = ("L_X", "L_Y", "bits_per_dim", "accuracy", "cross_entropy", "ece", "mce", "oce", "top1_ece")
ACCEPTED = ("coverage", "accepted_accuracy", "plain_accuracy", "ambiguous_accuracy", "augrc", "aurc")
"""Selective metrics: of verdicts, of a plain confidence threshold at the same coverage, areas."""
COLUMNS = ("name", "beta", "crops", *METRICS, "as_published", *ACCEPTED)


def compare(folders: Sequence[str | Path], **options: Any) -> list[Row]:
    """Compare evaluated models and write ``comparison.csv``.

    Args:
        folders: folders that :func:`candid.evaluate` and 'candid evaluate' wrote, or their metrics.json.
        options: the fields of :class:`~candid.evaluation.options.CompareOptions`.

    Returns:
        One row of metrics per model, by rising beta, ResNets last.

    Example:
        >>> import candid
        >>> candid.compare(["nowhere"])
        Traceback (most recent call last):
        ...
        candid._support.errors.CandidError: 'nowhere/metrics.json' is not what 'candid evaluate' writes ...
    """
    chosen = build(CompareOptions, options)
    rows = read_rows([Path(folder) for folder in folders])
    write_table(rows, chosen.out)
    return rows


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Return one row per evaluation, by rising beta, models without one last.

    Metrics are as published if all evaluations have these (``--as-published``), and accuracies are of ten
    crops if all have them.
    """
    found = [_metrics(folder) for folder in folders]
    if len({(each["data"], each["part"], each["images"]) for each in found}) > 1:
        raise CandidError("The models were evaluated on different images: evaluate them on the same ones.")
    published = all("as_published" in each for each in found)
    shown = [each["as_published"] if published else each for each in found]
    crops = all("ten_crop" in each for each in shown)
    rows = [
        {
            "name": _name(folder),
            "kind": each["kind"],
            "beta": _beta(each),
            "crops": 10 if crops else 1,
            "as_published": published,
        }
        | {key: metrics.get(key) for key in METRICS}
        | _accepted(each.get("selective", {}))
        | ({"accuracy": metrics["ten_crop"]["accuracy"]} if crops else {})
        for folder, each, metrics in zip(folders, found, shown, strict=True)
    ]
    return sorted(rows, key=lambda row: (row["beta"] is None, row["beta"] or 0.0, row["name"]))


def _accepted(found: dict[str, Any]) -> dict[str, Any]:
    """Return selective metrics; None for those that an evaluation does not have."""
    rule, plain = found.get("verdicts", {}), found.get("plain", {})
    values = (rule.get("coverage"), rule.get("accepted"), plain.get("accepted"), rule.get("ambiguous"))
    return dict(zip(ACCEPTED, (*values, found.get("augrc"), found.get("aurc")), strict=True))


def _name(folder: Path) -> str:
    return (folder.parent if folder.suffix == ".json" else folder).resolve().name


def _beta(metrics: dict[str, Any]) -> float | None:
    if metrics["kind"] != "generative":
        return None
    if metrics["beta"] is None:
        raise CandidError(f"'{metrics['model']}' has no record of its training: its beta is not known.")
    return float(metrics["beta"])


def _metrics(folder: Path) -> dict[str, Any]:
    path = folder if folder.suffix == ".json" else folder / "metrics.json"
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        if not {"model", "kind", "beta", "data", "part", "images", "accuracy"} <= metrics.keys():
            raise ValueError("it lacks some metrics")
    except (OSError, ValueError, AttributeError) as error:
        raise CandidError(
            f"'{path}' is not what 'candid evaluate' writes ({error}): evaluate the model first."
        ) from error
    return metrics


def write_table(rows: Sequence[Row], out: Path) -> Path:
    """Write ``comparison.csv`` into the folder ``out``."""
    lines = [COLUMNS, *([no_formula(row[column]) for column in COLUMNS] for row in rows)]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    return write_texts({"comparison.csv": table.getvalue()}, out)[0]

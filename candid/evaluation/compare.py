"""Comparisons of evaluated models, as in the paper's Table 2 and Figure 3, and of groups of images."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError
from candid._support.files import write_texts
from candid._support.options import build
from candid._support.text import as_csv, no_formula, percent
from candid.evaluation.options import CompareOptions
from candid.judging.by_class import MOST_SHOWN, ByClass
from candid.trust.verdict import KINDS

Row = dict[str, Any]
METRICS = ("L_X", "L_Y", "bits_per_dim", "accuracy", "cross_entropy", "ece", "mce", "oce", "top1_ece")
ACCEPTED = ("coverage", "accepted_accuracy", "plain_accuracy", "ambiguous_accuracy", "augrc", "aurc")
"""Selective metrics: of verdicts, of a plain threshold at the same coverage (none novel), areas."""
COLUMNS = ("name", "beta", "crops", *METRICS, "as_published", *ACCEPTED)


def compare(folders: Sequence[str | Path], **options: Any) -> list[Row]:
    """Compare evaluated models and write ``comparison.csv`` and ``by_class.csv``.

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
        candid._support.errors.CandidError: 'nowhere' is not the folder of an evaluation, with ...
    """
    chosen = build(CompareOptions, options)
    places = [Path(folder) for folder in folders]
    rows = read_rows(places)
    write_table(rows, chosen.out)
    write_texts({"by_class.csv": as_csv(_class_lines(class_results(places)))}, chosen.out)
    return rows


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Return one row per evaluation, by rising beta, models without one last.

    Metrics are as published if all evaluations have these (``--as-published``), and accuracies are of ten
    crops if all have them.
    """
    evaluations = [_metrics(folder) for folder in folders]
    if len({(metrics["data"], metrics["part"], metrics["images"]) for metrics in evaluations}) > 1:
        raise CandidError("The models were evaluated on different images: evaluate them on the same ones.")
    published = all("as_published" in metrics for metrics in evaluations)
    shown = [metrics["as_published"] if published else metrics for metrics in evaluations]
    crops = all("ten_crop" in metrics for metrics in shown)
    rows = [
        {
            "name": _name(folder),
            "kind": whole["kind"],
            "beta": _beta(whole),
            "crops": 10 if crops else 1,
            "as_published": published,
        }
        | {key: metrics.get(key) for key in METRICS}
        | _accepted(whole.get("selective", {}))
        | ({"accuracy": metrics["ten_crop"]["accuracy"]} if crops else {})
        for folder, whole, metrics in zip(folders, evaluations, shown, strict=True)
    ]
    return sorted(rows, key=lambda row: (row["beta"] is None, row["beta"] or 0.0, row["name"]))


def class_results(folders: Sequence[Path]) -> dict[str, ByClass]:
    """Return the results by class of each evaluation that has them, by the name of the model."""
    stored = {_name(folder): _metrics(folder).get("by_class") for folder in folders}
    return {name: ByClass.from_dict(results) for name, results in stored.items() if results is not None}


def class_table(results: dict[str, ByClass], most: int = MOST_SHOWN) -> tuple[list[str], list[list[str]]]:
    """Return the recall of each class by model in percent; classes that models differ in most come first."""
    recalls: dict[str, dict[str, float | None]] = {}
    for model, table in results.items():
        for row in table.tested:
            recalls.setdefault(row.name, {})[model] = row.recall

    def spread(name: str) -> tuple[float, float]:
        shares = [share for share in recalls[name].values() if share is not None]
        return min(shares) - max(shares), min(shares)

    rows = [
        [name, *(percent(recalls[name].get(model), sign=False) for model in results)]
        for name in sorted(recalls, key=spread)[:most]
    ]
    return ["recall (%)", *results], rows


def _class_lines(results: dict[str, ByClass]) -> Iterator[Sequence[object]]:
    for i, (model, table) in enumerate(results.items()):
        head, *rows = table.csv_rows()
        if not i:
            yield "model", *head
        yield from ((model, *row) for row in rows)


def _accepted(selective: dict[str, Any]) -> dict[str, Any]:
    """Return selective metrics; None for those that an evaluation does not have."""
    rule, plain = selective.get("verdicts", {}), selective.get("plain", {})
    values = (rule.get("coverage"), rule.get("accepted"), plain.get("accepted"), rule.get("ambiguous"))
    return dict(zip(ACCEPTED, (*values, selective.get("augrc"), selective.get("aurc")), strict=True))


def _name(folder: Path) -> str:
    return (folder.parent if folder.suffix == ".json" else folder).resolve().name


def _beta(metrics: dict[str, Any]) -> float | None:
    if "L_X" not in metrics:  # only what is trained on a likelihood of pixels has one
        return None
    if metrics["beta"] is None:
        raise CandidError(f"'{metrics['model']}' has no record of its training: its beta is not known.")
    return float(metrics["beta"])


def _metrics(folder: Path) -> dict[str, Any]:
    path = folder if folder.suffix == ".json" else folder / "metrics.json"
    if not path.is_file():
        raise CandidError(
            f"'{folder}' is not the folder of an evaluation, with a metrics.json: to compare models, run "
            "'candid evaluate MODEL DATA --out FOLDER' for each, and give the folders."
        )
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


def group_title(metrics: dict[str, Any]) -> str:
    """Return what :func:`group_table` shows."""
    return (
        f"groups by '{metrics['by']}'; each is ranked among its own held-out images, unless there are too few"
    )


def group_table(metrics: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of groups; shares in percent."""
    rows = [
        [
            name,
            f"{group['images']:,}",
            f"{group['n_reference']:,}" + ("" if group["own_levels"] else " of small groups"),
            *(f"{100 * group[kind]:.1f}" for kind in KINDS),
            percent(group["accepted_accuracy"], sign=False),
        ]
        for name, group in metrics["groups"].items()
    ]
    shares = (f"{kind} (%)" for kind in (*KINDS, "right of accepted"))
    return ["group", "images", "ranked among", *shares], rows

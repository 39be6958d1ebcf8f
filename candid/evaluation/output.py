"""An evaluation on disk: metrics.json, images.csv (a row per image), ood.csv (a row per set and score)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from candid._support.files import write_texts
from candid._support.tables import as_csv
from candid.evaluation.result import Evaluation
from candid.trust.scores import SCORES

RESULTS = ("ood", "ood_zones", "roc", "auc")
"""The files that not every evaluation has."""


def remove_older(out: Path, written: Sequence[Path]) -> None:
    """Remove results of an earlier evaluation in ``out`` that this one has not ``written`` again."""
    for name in {*RESULTS} - {path.stem for path in written}:
        for ending in ("csv", "png", "svg"):
            (out / f"{name}.{ending}").unlink(missing_ok=True)


def write(evaluation: Evaluation, out: Path) -> list[Path]:
    """Write the files into ``out`` and return their paths."""
    texts = {
        "metrics.json": json.dumps(evaluation.metrics, indent=1, allow_nan=False) + "\n",
        "images.csv": as_csv(_image_rows(evaluation)),
    }
    if evaluation.metrics.get("ood"):
        texts["ood.csv"] = as_csv(_ood_rows(evaluation))
    return write_texts(texts, out)


def _image_rows(evaluation: Evaluation) -> Iterator[Sequence[object]]:
    """Yield the set, the true label and the keys of ``Examination.to_dict`` of every image."""
    names, head = evaluation.class_names, False
    for set_name, label, examined in evaluation.examinations():
        values = examined.to_dict()
        if not head:
            yield "set", "true_label", *values
            head = True
        yield set_name, names[label] if label >= 0 else "", *map(_cell, values.values())


def _cell(value: Any) -> object:
    """Return what stands in a cell: eight digits, names separated by semicolons, tables as JSON."""
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, list):
        return ";".join(value)
    return json.dumps(value) if isinstance(value, dict) else value


def _ood_rows(evaluation: Evaluation) -> Iterator[Sequence[object]]:
    yield "set", "score", "family", "auc", "fpr_at_95_tpr", "detected_at_5_percent", "auc_low", "auc_high"
    for name, scores in evaluation.metrics["ood"].items():
        for score, metrics in scores.items():
            values = (metrics[key] for key in ("auc", "fpr95", "detected"))
            yield name, score, SCORES[score].family, *values, *metrics["intervals"]["auc"]

"""An evaluation on disk: metrics.json, images.csv (a line an image), ood.csv (a line a set and test)."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from candid._support.files import write_texts
from candid.evaluation.evaluate import Evaluation
from candid.inference.predictions import Predictions
from candid.trust.scores import SCORES

RESULTS = ("ood", "ood_zones", "roc", "auc")
"""What not every evaluation has."""


def remove_older(out: Path, written: Sequence[Path]) -> None:
    """Away with results of an earlier evaluation in ``out`` that this one has not ``written`` anew."""
    for name in {*RESULTS} - {path.stem for path in written}:
        for ending in ("csv", "png", "svg"):
            (out / f"{name}.{ending}").unlink(missing_ok=True)


def write(evaluation: Evaluation, out: Path) -> list[Path]:
    """The files that were written into ``out``."""
    texts = {
        "metrics.json": json.dumps(evaluation.metrics, indent=1, allow_nan=False) + "\n",
        "images.csv": _csv(_image_rows(evaluation)),
    }
    if evaluation.metrics.get("ood"):
        texts["ood.csv"] = _csv(_ood_rows(evaluation))
    return write_texts(texts, out)


def _csv(rows: Iterator[Sequence[Any]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    return table.getvalue()


def _image_rows(evaluation: Evaluation) -> Iterator[Sequence[Any]]:
    names = evaluation.model.class_names
    density, judged = evaluation.model.density_of == "pixels", bool(evaluation.opinions)
    yield [
        *("set", "image", "label", "predicted", "posterior"),
        *(("log_density_nats", "bits_per_dim") if density else ()),
        *(("p_value", "p_value_in_class", "verdict", "classes") if judged else ()),
    ]
    if not judged:
        yield from _basics(evaluation, evaluation.metrics["part"], evaluation.predictions)
    for name, found in evaluation.opinions.items():
        columns = zip(
            _basics(evaluation, name, found.predictions),
            found.p_value.tolist(),
            found.class_p_value.tolist(),
            found.verdicts,
            strict=True,
        )
        for basics, p, own, verdict in columns:
            classes = ";".join(names[y] for y in verdict.classes)
            yield [*basics, f"{p:.6g}", f"{own:.6g}", verdict.kind, classes]


def _basics(evaluation: Evaluation, name: str, predictions: Predictions) -> Iterator[list[str]]:
    names, model = evaluation.model.class_names, evaluation.model
    confidence, predicted = predictions.posterior.max(1)
    density = predictions.log_density
    for i, path in enumerate(predictions.paths):
        label = int(predictions.labels[i])
        known = names[label] if label >= 0 else ""
        row = [name, path, known, names[int(predicted[i])], f"{confidence[i]:.6g}"]
        if density is not None and model.density_of == "pixels":
            bits = -float(density[i]) / (model.dimensions * math.log(2))
            row += [f"{density[i]:.8g}", f"{bits:.6g}"]
        yield row


def _ood_rows(evaluation: Evaluation) -> Iterator[Sequence[Any]]:
    kinds = {score.name: score.family for score in SCORES.values()}
    yield "set", "test", "kind", "auc", "fpr_at_95_tpr", "detected_at_5_percent"
    for name, tests in evaluation.metrics["ood"].items():
        for test, figures in tests.items():
            yield name, test, kinds[test], *(f"{figures[key]:.6g}" for key in ("auc", "fpr95", "detected"))

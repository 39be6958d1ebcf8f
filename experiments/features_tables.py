"""The tables of ``docs/results/features.md`` as functions of what was measured."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import linregress, t

from candid._support.files import write_text
from experiments.tables import Cell, Results, area, at, bold, decimal, filled, interval, shown, table, text

PAGE = Path(__file__).parent.parent / "docs" / "results"
RESULTS, WORDS = PAGE / "features.json", PAGE / "features.md"
SETS = {"tiny20": "Tiny ImageNet", "mnist": "MNIST", "bloodcells8": "blood cells", "clothing10": "clothes"}
SHOWN = ("two-tailed", "combined", "max-posterior")
"""Scores whose areas are shown."""
TRENDS: dict[str, tuple[str, Cell]] = {
    "accuracy": ("accuracy (%)", shown(2, 100, "accuracy")),
    "nats_per_feature": ("nats per feature", shown(3, 1, "nats_per_feature")),
    "oce": ("OCE", shown(2, 1, "oce")),
    "ece": ("ECE (%)", shown(2, 100, "ece")),
}


def page(records: Sequence[dict[str, Any]]) -> None:
    """Write the JSON of the records, in order, and the tables of the page."""
    ordered = sorted(records, key=lambda one: (one["labels"], _number(one["beta"]), one["seed"]))
    write_text(json.dumps({"models": ordered}, indent=1) + "\n", RESULTS)
    write_text(filled_page(WORDS.read_text(encoding="utf-8")), WORDS)


def filled_page(words: str) -> str:
    """Return the page with the tables of what was measured."""
    return filled(words, tables(json.loads(RESULTS.read_text(encoding="utf-8"))))


def tables(results: Results) -> dict[str, str]:
    """Return the tables by their marks on the page."""
    models = [{"title": _title(one["beta"]), **one} for one in results["models"]]
    made = {}
    for labels in ("hard", "smoothed"):
        of_labels = [one for one in models if one["labels"] == labels]
        first = [one for one in of_labels if one["seed"] == 0]
        made[f"classification-{labels}"] = _classification(first)
        made[f"calibration-{labels}"] = _calibration(first)
        made[f"detection-{labels}"] = _detection(first)
    made["geometry"] = _geometry([one for one in models if one["seed"] == 0 and "plane" in one])
    made["seeds"] = _seeds(models)
    made["trends"] = _trends(models)
    return made


def _number(beta: Any) -> float:
    return math.inf if beta == "inf" else 1e300 if beta == "softmax" else float(beta)


def _title(beta: Any) -> str:
    return "softmax" if beta == "softmax" else "β = ∞" if beta == "inf" else f"β = {beta:g}"


def _classification(models: Sequence[Results]) -> str:
    return table(
        models,
        (
            ("", bold("title")),
            ("accuracy (%)", interval("accuracy", 100, 2)),
            ("cross-entropy", shown(3, 1, "cross_entropy")),
            ("L_X", shown(3, 1, "L_X")),
            ("nats per feature", shown(3, 1, "nats_per_feature")),
        ),
    )


def _calibration(models: Sequence[Results]) -> str:
    return table(
        models,
        (
            ("", bold("title")),
            ("confident (≥ 99.7 %)", lambda one: f"{one['confident']:,}"),
            ("of them wrong", lambda one: f"{one['wrong']:,}"),
            ("OCE", interval("oce", 1, 2)),
            ("ECE (%)", interval("ece", 100, 2)),
            ("MCE (%)", interval("mce", 100, 1)),
            ("temperature", shown(2, 1, "scaled", "temperature")),
            ("then confident", lambda one: f"{one['scaled']['confident']:,}"),
            ("then OCE", interval("oce", 1, 2, "scaled")),
            ("then ECE (%)", interval("ece", 100, 2, "scaled")),
        ),
    )


def _detection(models: Sequence[Results]) -> str:
    def found(name: str, score: str) -> Cell:
        def cell(one: Any) -> str:
            measured = at(one, "detection", name, score)
            return "–" if measured is None else area(measured["auc"], measured["intervals"]["auc"])

        return cell

    columns = [
        (f"{shown_name}: {score}", found(name, score)) for name, shown_name in SETS.items() for score in SHOWN
    ]
    return table(models, (("", bold("title")), *columns))


def _geometry(models: Sequence[Results]) -> str:
    return table(
        models,
        (
            ("", lambda one: f"**{one['title']}**, {one['labels']}"),
            ("distance of class means (σ)", shown(1, 1, "mean_distance")),
            ("similarity and confusions: means", shown(2, 1, "rank_correlation", "means")),
            ("held-out latents", shown(2, 1, "rank_correlation", "held_out")),
            ("plane of ten classes: accuracy (%)", shown(1, 100, "plane", "accuracy")),
            ("in its 90 % region (%)", shown(1, 100, "plane", "inside")),
        ),
    )


def _seeds(models: Sequence[Results]) -> str:
    """Return mean and standard deviation over the seeds of models with more than one."""

    def rows() -> Iterator[dict[str, Any]]:
        names = dict.fromkeys((one["labels"], one["title"]) for one in models)
        for labels, title in names:
            same = [one for one in models if (one["labels"], one["title"]) == (labels, title)]
            if len(same) > 1:
                yield {"title": f"**{title}**, {labels}", "seeds": len(same), "models": same}

    def over(factor: float, digits: int, *keys: str) -> Cell:
        def cell(row: Any) -> str:
            values = [factor * value for one in row["models"] if (value := at(one, *keys)) is not None]
            return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}" if len(values) > 1 else "–"

        return cell

    return table(
        list(rows()),
        (
            ("", text("title")),
            ("seeds", text("seeds")),
            ("accuracy (%)", over(100, 2, "accuracy")),
            ("nats per feature", over(1, 3, "nats_per_feature")),
            ("OCE", over(1, 2, "oce")),
            ("ECE (%)", over(100, 2, "ece")),
        ),
    )


def _trends(models: Sequence[Results]) -> str:
    """Return the slopes over log2(1 + beta), with their 95 % intervals, of betas from 1 to 32."""
    rows = []
    for labels in ("hard", "smoothed"):
        finite = [one for one in models if one["labels"] == labels and 1 <= _number(one["beta"]) <= 32]
        metrics: dict[str, tuple[float, tuple[str, ...]]] = {
            "accuracy (points)": (100, ("accuracy",)),
            "nats per feature": (1, ("nats_per_feature",)),
            "OCE": (1, ("oce",)),
            "OCE after temperature scaling": (1, ("scaled", "oce")),
            "ECE (points)": (100, ("ece",)),
            **{
                f"{name}, {score}: AUC (points)": (100, ("detection", key, score, "auc"))
                for key, name in SETS.items()
                for score in ("two-tailed", "combined")
            },
        }
        for name, (factor, keys) in metrics.items():
            points = [(math.log2(_number(one["beta"])), at(one, *keys)) for one in finite]
            points = [(x, factor * y) for x, y in points if y is not None]
            if len(points) > 2:
                x, y = zip(*points, strict=True)
                line = linregress(x, y)
                half = float(t.ppf(0.975, len(points) - 2)) * line.stderr
                rows.append(
                    {
                        "name": f"{name}, {labels}",
                        "slope": f"{decimal(line.slope, 3, 1)} ± {half:.3f}",
                        "verdict": "rises"
                        if line.slope > half
                        else "falls"
                        if line.slope < -half
                        else "not clear",
                    }
                )
    columns = (
        ("", text("name")),
        ("change per doubling of β, 1 to 32", text("slope")),
        ("with 95 %", text("verdict")),
    )
    return table(rows, columns)

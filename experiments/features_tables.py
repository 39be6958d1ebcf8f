"""The tables of ``docs/results/features.md`` as functions of what was measured."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from scipy.stats import linregress, t

from candid._support.files import write_text
from experiments.tables import (
    Cell,
    Results,
    area,
    at,
    bold,
    decimal,
    filled,
    interval,
    ranged,
    shown,
    table,
    text,
)
from experiments.trends import rank_correlation

PAGE = Path(__file__).parent.parent / "docs" / "results"
RESULTS, WORDS = PAGE / "features.json", PAGE / "features.md"
SETS = {"tiny20": "Tiny ImageNet", "mnist": "MNIST", "bloodcells8": "blood cells", "clothing10": "clothes"}
SCORES = ("two-tailed", "combined", "max-posterior")
"""Scores whose areas are shown."""
FEWEST = 4
"""Models that a slope needs."""
LEVEL = 0.95


Ends = tuple[float, Sequence[float] | None]
"""A number, and the ends of its interval if there is one."""


class Metric(NamedTuple):
    """A number whose change with beta is shown."""

    name: str
    keys: tuple[str, ...]
    factor: float = 1
    digits: int = 2
    zero: bool = False
    """Whether it means something at beta 0, which does not learn to classify."""


METRICS = (
    Metric("accuracy (%)", ("accuracy",), 100),
    Metric("nats per feature", ("nats_per_feature",), 1, 3, zero=True),
    Metric("confident predictions", ("confident",), 1, 0),
    Metric("OCE", ("oce",)),
    Metric("OCE at the best temperature", ("scaled", "oce")),
    Metric("errors of the most confident half (%)", ("error_of_half",), 100),
    Metric("ECE (%)", ("ece",), 100),
    Metric("MCE (%)", ("mce",), 100, 1),
    *(
        Metric(f"{name} found, {score} (AUC, %)", ("detection", key, score, "auc"), 100, 1, zero=True)
        for key, name in SETS.items()
        for score in SCORES[:2]
    ),
    *(
        Metric(f"corruptions found, {score} (AUC, %)", ("corruptions", score, "auc"), 100, 1, zero=True)
        for score in SCORES[:2]
    ),
)


def page(
    models: Sequence[dict[str, Any]], comparisons: Sequence[dict[str, Any]], attacks: Sequence[dict[str, Any]]
) -> None:
    """Write the JSON of the records, in order, and the tables of the page."""
    results = {
        "models": sorted(models, key=lambda one: (one["labels"], _place(one["beta"]), one["seed"])),
        "comparisons": sorted(comparisons, key=lambda one: (one["per_class"], _place(one["beta"]))),
        "attacks": sorted(attacks, key=lambda one: one["radius"]),
    }
    write_text(json.dumps(results, indent=1) + "\n", RESULTS)
    write_text(filled_page(WORDS.read_text(encoding="utf-8")), WORDS)


def filled_page(words: str) -> str:
    """Return the page with the tables of what was measured."""
    return filled(words, tables(json.loads(RESULTS.read_text(encoding="utf-8"))))


def tables(results: Results) -> dict[str, str]:
    """Return the tables by their marks on the page."""
    models = [{"title": _title(one["beta"]), **one} for one in results["models"]]
    first = [one for one in models if one["seed"] == 0]
    made = {}
    for labels in ("hard", "smoothed"):
        rows = [one for one in first if one["labels"] == labels]
        made[f"classification-{labels}"] = _classification(rows)
        made[f"calibration-{labels}"] = _calibration(rows)
        made[f"detection-{labels}"] = _detection(rows)
        made[f"trends-{labels}"] = _trends([one for one in models if one["labels"] == labels])
    made["corruptions"] = _corruptions([one for one in first if "corruptions" in one])
    made["geometry"] = _geometry([one for one in first if "plane" in one])
    made["seeds"] = _seeds(models)
    made["comparisons"] = _comparisons(results["comparisons"])
    made["attacks"] = _attacks(results["attacks"])
    return made


def _number(beta: Any) -> float:
    """Return beta; NaN of other models."""
    return math.inf if beta == "inf" else math.nan if isinstance(beta, str) else float(beta)


def _place(beta: Any) -> tuple[int, float]:
    """Return where a model comes: betas by their size, then the others."""
    others = ("softmax", "closed form")
    return (1 + others.index(beta), 0.0) if beta in others else (0, _number(beta))


def _title(beta: Any) -> str:
    return beta if beta in ("softmax", "closed form") else "β = ∞" if beta == "inf" else f"β = {beta:g}"


def _with_labels(one: Any) -> str:
    return f"**{one['title']}**" if one["title"] == "closed form" else f"**{one['title']}**, {one['labels']}"


def _classification(models: Sequence[Results]) -> str:
    return table(
        models,
        (
            ("", bold("title")),
            ("accuracy (%)", interval("accuracy", 100, 2)),
            ("cross-entropy", shown(3, 1, "cross_entropy")),
            ("at the best temperature", shown(3, 1, "scaled", "cross_entropy")),
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
            ("errors of the most confident half (%)", interval("error_of_half", 100, 2)),
            ("temperature", shown(2, 1, "scaled", "temperature")),
            ("then confident", lambda one: f"{one['scaled']['confident']:,}"),
            ("then OCE", interval("oce", 1, 2, "scaled")),
            ("then ECE (%)", interval("ece", 100, 2, "scaled")),
        ),
    )


def _found(*keys: str) -> Cell:
    """Return the cell with the area below these keys."""

    def cell(one: Any) -> str:
        measured = at(one, *keys)
        return "–" if measured is None else area(measured["auc"], measured["intervals"]["auc"])

    return cell


def _detection(models: Sequence[Results]) -> str:
    columns = [
        (f"{name}: {score}", _found("detection", key, score))
        for key, name in SETS.items()
        for score in SCORES
    ]
    return table(models, (("", bold("title")), *columns))


def _corruptions(models: Sequence[Results]) -> str:
    return table(
        models,
        (
            ("", _with_labels),
            ("error (%)", ranged("corruptions", "error")),
            *((f"found: {score}", _found("corruptions", score)) for score in SCORES),
        ),
    )


def _geometry(models: Sequence[Results]) -> str:
    return table(
        models,
        (
            ("", _with_labels),
            ("distance of class means (σ)", shown(1, 1, "mean_distance")),
            ("similarity and confusions: means", shown(2, 1, "rank_correlation", "means")),
            ("held-out latents", shown(2, 1, "rank_correlation", "held_out")),
            ("plane of ten classes: accuracy (%)", ranged("plane", "accuracy")),
            ("in its 90 % region (%)", shown(1, 100, "plane", "inside")),
        ),
    )


def _seeds(models: Sequence[Results]) -> str:
    """Return mean and standard deviation over the seeds of models with more than one."""

    def rows() -> Iterator[dict[str, Any]]:
        for name in dict.fromkeys(map(_with_labels, models)):
            same = [one for one in models if _with_labels(one) == name]
            if len(same) > 1:
                yield {"title": name, "seeds": len(same), "models": same}

    def over(factor: float, digits: int, *keys: str) -> Cell:
        def cell(row: Any) -> str:
            values = [factor * value for one in row["models"] if (value := at(one, *keys)) is not None]
            return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}" if len(values) > 1 else "–"

        return cell

    columns = (
        ("", text("title")),
        ("seeds", text("seeds")),
        ("accuracy (%)", over(100, 2, "accuracy")),
        ("nats per feature", over(1, 3, "nats_per_feature")),
        ("OCE", over(1, 2, "oce")),
        ("OCE at the best temperature", over(1, 2, "scaled", "oce")),
        ("ECE (%)", over(100, 2, "ece")),
        ("corruptions: two-tailed (%)", over(100, 1, "corruptions", "two-tailed", "auc")),
        ("combined (%)", over(100, 1, "corruptions", "combined", "auc")),
    )
    return table(list(rows()), columns)


def _trends(models: Sequence[Results]) -> str:
    """Return how numbers change with beta: first seeds at both ends and in order, slopes of all seeds."""
    rows = [row for metric in METRICS if (row := _trend(metric, models)) is not None]
    columns = (
        ("", text("name")),
        ("β = 1", text("first")),
        ("β = ∞", text("last")),
        ("difference", text("difference")),
        ("betas", text("betas")),
        ("rank correlation with β", text("rank")),
        ("per doubling of β, 1 to 32", text("slope")),
    )
    return table(rows, columns)


def _trend(metric: Metric, models: Sequence[Results]) -> dict[str, str] | None:
    known = [
        (_number(one["beta"]), float(value), one)
        for one in models
        if _number(one["beta"]) >= (0 if metric.zero else 0.5)
        and (value := at(one, *metric.keys)) is not None
    ]
    points = {
        beta: (value, at(one, *metric.keys[:-1], "intervals", metric.keys[-1]))
        for beta, value, one in known
        if one["seed"] == 0
    }
    if not {1.0, math.inf} <= points.keys():
        return None
    ends = [points[beta] for beta in (1.0, math.inf)]
    shown_ends = [decimal(value, metric.digits, metric.factor) for value, _ in ends]
    row = {"name": metric.name, "first": shown_ends[0], "last": shown_ends[1], "betas": str(len(points))}
    row |= {"rank": "–", "slope": "–", "difference": _difference(metric, *ends)}
    if len(points) >= FEWEST:
        rank, low, high = rank_correlation([(beta, *point) for beta, point in sorted(points.items())])
        row["rank"] = f"{rank:+.2f} ({low:+.2f} to {high:+.2f})"
    finite = [(math.log2(beta), metric.factor * value) for beta, value, _ in known if 1 <= beta <= 32]
    if len({x for x, _ in finite}) >= FEWEST:
        line = linregress(*zip(*finite, strict=True))
        half = float(t.ppf((1 + LEVEL) / 2, len(finite) - 2)) * line.stderr
        digits = metric.digits + 1
        row["slope"] = f"{line.slope:+.{digits}f} ± {half:.{digits}f}"
    return row


def _difference(metric: Metric, first: Ends, last: Ends) -> str:
    """Return the last number minus the first, with the interval that follows from theirs."""
    (one, of_one), (two, of_two) = first, last
    value = f"{metric.factor * (two - one):+.{metric.digits}f}"
    if of_one is None or of_two is None:
        return value
    low = two - one - math.hypot(two - of_two[0], of_one[1] - one)
    high = two - one + math.hypot(of_two[1] - two, one - of_one[0])
    shown_ends = (f"{metric.factor * end:+.{metric.digits}f}" for end in (low, high))
    return f"{value} ({' to '.join(shown_ends)})"


def _comparisons(records: Sequence[Results]) -> str:
    def cells(key: str, factor: float, digits: int) -> tuple[tuple[str, Cell], ...]:
        def difference(one: Any) -> str:
            low, high = one[key]["intervals"]["difference"]
            value, ends = factor * one[key]["difference"], (factor * low, factor * high)
            return f"{value:+.{digits}f} ({ends[0]:+.{digits}f} to {ends[1]:+.{digits}f})"

        name = "accuracy (%)" if key == "accuracy" else "cross-entropy"
        return (
            (f"{name}: closed form", shown(digits, factor, key, "closed_form")),
            ("network", shown(digits, factor, key, "network")),
            ("difference", difference),
        )

    columns = (
        ("images of a class", text("per_class")),
        ("network", lambda one: f"**{_title(one['beta'])}**"),
        *cells("accuracy", 100, 2),
        *cells("cross_entropy", 1, 4),
    )
    return table(records, columns)


def _attacks(records: Sequence[Results]) -> str:
    rows = [{"radius": record["radius"], **one} for record in records for one in record["metrics"]]
    columns = (
        ("radius (L2)", lambda one: f"{one['radius']:g}"),
        ("", lambda one: f"**β = {'∞' if one['model'] == 'inf' else one['model']}**"),
        ("images", text("images")),
        ("wrong before", text("already_misclassified")),
        ("success (%)", ranged("success")),
    )
    return table(rows, columns)

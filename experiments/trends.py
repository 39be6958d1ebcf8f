"""How what was measured changes with beta: a row of ``docs/results`` for each number."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from candid._support.numbers import Array
from experiments.imagenet import paper
from experiments.tables import Results, at, decimal, second_seed, table

DRAWS = 10_000
"""Sets of numbers that an interval comes from."""
NORMAL = 2 * 1.959963984540054
"""Width of the 95 % interval of a normal distribution, in standard deviations."""
FEWEST = 3
"""Betas that a trend needs."""
Point = tuple[float, float, tuple[float, float] | None]
"""Beta, the number that was measured, and the ends of its 95 % interval."""


class Trend(NamedTuple):
    """How a number changes with beta."""

    name: str
    points: list[Point]
    """By rising beta."""
    paper: Sequence[float | None]
    """The paper's numbers at all its betas, by rising beta."""
    digits: int
    factor: float = 1


def rank_correlation(points: Sequence[Point]) -> tuple[float, float, float]:
    """Return the rank correlation of a number with beta, and its 95 % interval by chance of images.

    Each number is drawn again and again from a normal distribution as wide as its own interval.

    >>> rank_correlation([(1, 0.8, (0.79, 0.81)), (2, 0.9, (0.89, 0.91)), (4, 0.95, (0.94, 0.96))])
    (1.0, 1.0, 1.0)
    """
    values = np.array([value for _, value, _ in points])
    widths = np.array([0 if ends is None else ends[1] - ends[0] for *_, ends in points]) / NORMAL
    drawn = values + widths * np.random.default_rng(0).standard_normal((DRAWS, len(values)))
    low, high = np.quantile(_with_order(drawn), [0.025, 0.975])
    return float(_with_order(values[None])[0]), float(low), float(high)


def _with_order(values: Array) -> Array:
    """Return Spearman's rank correlation of each row of numbers, (R, B), with their order, (R,)."""
    ranks = rankdata(values, axis=1)
    order = np.arange(values.shape[1]) - (values.shape[1] - 1) / 2
    ranks -= ranks.mean(1, keepdims=True)
    norms = np.sqrt(np.square(ranks).sum(1) * np.square(order).sum())
    return np.divide(ranks @ order, norms, out=np.zeros(len(ranks)), where=norms > 0)


def trends_table(results: Results) -> str:
    """Return the table: the ends of the range of beta, and the rank correlation with beta."""

    def end(place: int) -> Any:
        def cell(trend: Trend) -> str:
            beta, value, _ = trend.points[place]
            return f"{decimal(value, trend.digits, trend.factor)} (β = {decimal(beta, 0)})"

        return cell

    def correlation(trend: Trend) -> str:
        value, low, high = rank_correlation(trend.points)
        return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"

    def published(trend: Trend) -> str:
        values = [value for value in trend.paper if value is not None]
        return f"{float(_with_order(np.array([values]))[0]):+.2f}" if values else "–"

    return table(
        [trend for trend in trends(results) if len(trend.points) >= FEWEST],
        (
            ("", lambda trend: f"**{trend.name}**"),
            ("betas", lambda trend: str(len(trend.points))),
            ("at the smallest", end(0)),
            ("at the largest", end(-1)),
            ("rank correlation with beta", correlation),
            ("*on ImageNet*", published),
        ),
    )


def trends(results: Results) -> Iterator[Trend]:
    """Yield how each number changes with beta."""
    models = {
        float(model["beta"]): {"name": name, **model}
        for name, model in results["models"].items()
        if model["beta"] is not None and not second_seed(name)
    }
    by_name = {each["name"]: beta for beta, each in models.items()}
    classifying = {beta: model for beta, model in models.items() if beta > 0}
    corrupted = {by_name[each["model"]]: each for each in results["corruptions"] if each["model"] in by_name}
    harmed = {beta: each for beta, each in corrupted.items() if beta > 0}
    attacked = {
        by_name[each["model"]]: each
        for each in results["attacks"]["metrics"]
        if each["model"] in by_name and each["kappa"] == 0.01 and each["d"] == 0
    }
    yield Trend("bits/dim", _points(models, "bits_per_dim"), _paper(paper.TABLE_2, 2), 2)
    yield Trend("accuracy (%)", _points(classifying, "accuracy"), (), 1, 100)
    ten_crops = {beta: model["ten_crops"] for beta, model in classifying.items()}
    yield Trend("accuracy, ten crops (%)", _points(ten_crops, "accuracy"), _paper(paper.TABLE_2, 3), 1, 100)
    for name, key, number in (("ECE (%)", "ece", 0), ("MCE (%)", "mce", 1)):
        digits = 2 - number
        yield Trend(name, _points(classifying, key), _paper(paper.CALIBRATION, number), digits, 100)
    yield Trend("ECE, top class (%)", _points(classifying, "top1_ece"), (), 2, 100)
    yield Trend("mCE of corrupted images (%)", _points(harmed, "mce"), _paper(paper.CORRUPTIONS, 1), 1, 100)
    for score, published in (("two-tailed", _paper(paper.CORRUPTIONS, 4)), ("joint", ())):
        points = _points(corrupted, "mean_auc", score)
        yield Trend(f"corrupted images found, {score} (AUC, %)", points, published, 1, 100)
    for other, what in (("tiny", "other photos"), ("mnist", "digits")):
        for score in ("two-tailed", "joint"):
            sets = {beta: at(model, "ood", other, score) for beta, model in models.items()}
            yield Trend(f"{what} found, {score} (AUC, %)", _points(sets, "auc"), (), 1, 100)
    eight_bit = {beta: each["eight_bit"] for beta, each in attacked.items()}
    yield Trend("median L2 of the smallest 8-bit attack", _points(eight_bit, "l2_median"), (), 3)


def _points(records: Mapping[float, Results], *keys: str) -> list[Point]:
    """Return what is below these keys in each record that has it, by rising beta."""
    points: list[Point] = []
    for beta, record in sorted(records.items()):
        value, ends = at(record, *keys), at(record, "intervals", *keys)
        if value is not None and math.isfinite(float(value)):  # infinities are text, as in JSON
            points.append((beta, float(value), None if ends is None else (float(ends[0]), float(ends[1]))))
    return points


def _paper(figures: Mapping[str, Sequence[float | None]], number: int) -> list[float | None]:
    """Return the paper's numbers, by rising beta."""
    betas = sorted(
        (beta for beta in figures if beta != "ResNet"), key=lambda beta: float(beta.replace("∞", "inf"))
    )
    return [figures[beta][number] for beta in betas]

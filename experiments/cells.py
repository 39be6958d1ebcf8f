"""Rows and cells of the tables of ``docs/results``: values with their intervals, in Markdown."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from candid._support.text import number

Results = Mapping[str, Any]
"""The contents of ``results.json``."""
Table = tuple[Sequence[str], Iterator[Sequence[str]]]
"""The head, and the rows."""


def title(name: str) -> str:
    """Return how a table calls the model ``name``.

    >>> title("cifar10-betainf"), title("cifar10-resnet-unsmoothed"), title("cifar10-beta1-seed1")
    ('β = ∞', 'ResNet, hard labels', 'β = 1, second seed')
    """
    beta = re.search(r"beta(\d+|inf)", name)
    kind = "ResNet" if beta is None else f"β = {number(float(beta[1]))}"
    if "unsmoothed" in name:
        return f"{kind}, hard labels"
    return f"{kind}, second seed" if second_seed(name) else kind


def second_seed(name: str) -> bool:
    """Return whether this model was trained only to see what chance does."""
    return name.endswith("-seed1")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))


def decimal(value: float | str | None, digits: int, factor: float = 1) -> str:
    """Return a value with this number of digits; infinities may be text, as in JSON."""
    if value is None:
        return "–"
    return "∞" if float(value) == math.inf else f"{factor * float(value):.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share with its sign of percent."""
    return "–" if share is None else f"{100 * share:.1f} %"


def area(share: float, ends: Sequence[float] | None = None) -> str:
    """Return an AUC in percent with half the width of its interval; good ones are bold, as in the paper."""
    shown = f"**{100 * share:.1f}**" if share >= 0.85 else f"{100 * share:.1f}"
    return shown if ends is None else f"{shown} ± {50 * (ends[1] - ends[0]):.1f}"


def between(share: float | None, ends: Sequence[float] | None) -> str:
    """Return a share in percent, with its interval if there is one."""
    if share is None or ends is None:
        return decimal(share, 1, 100)
    return f"{100 * share:.1f} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"


def with_interval(record: Mapping[str, Any], key: str, factor: float, digits: int) -> str:
    """Return a metric of ``record`` with its interval."""
    if record.get(key) is None:
        return "never sure" if key == "oce" else "–"
    low, high = (decimal(end, digits, factor) for end in record["intervals"][key])
    return f"{decimal(record[key], digits, factor)} ({low} to {high})"

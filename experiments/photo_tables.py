"""The tables of photo models in Markdown, from the figures of ``experiments.photos``."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from experiments.cells import Table, markdown

Results = Mapping[str, Any]
ROWS = {
    "accuracy": "accuracy (%)",
    "nll": "NLL (nats)",
    "ece": "ECE of the top class (%)",
    "coverage": "coverage at 1 % error (%)",
    "unknown": "AUROC, unknown class (%)",
    "far": "AUROC, caltech99 (%)",
    "false_alarms_0.01": "false alarms at 1 % (%)",
    "false_alarms_0.05": "false alarms at 5 % (%)",
    "false_alarms_0.1": "false alarms at 10 % (%)",
    "missed": "class sets at 5 % that miss the true class (%)",
}


def tables(results: Results) -> dict[str, str]:
    """Return the tables of the sections that were measured, by their marks on the page."""
    found = {name: table for name, table in TABLES.items() if name in results}
    return {
        name: "\n\n".join(markdown(*each) for each in table(results[name])) for name, table in found.items()
    }


def spread(values: Sequence[float], factor: float = 100, digits: int = 1) -> str:
    """Return the mean and the standard deviation of values.

    >>> spread([0.5, 0.7]), spread([0.5])
    ('60.0 ± 14.1', '50.0')
    """
    shown = f"{factor * mean(values):.{digits}f}"
    return f"{shown} ± {factor * stdev(values):.{digits}f}" if len(values) > 1 else shown


def _splits(results: Results) -> Iterator[Table]:
    for name, methods in results.items():
        head = [name, "Candid", "logistic regression", "logistic regression, standardised channels"]
        rows = [(title, *(_cell(runs, key) for runs in methods.values())) for key, title in ROWS.items()]
        yield head, iter(rows)


def _cell(runs: Sequence[Mapping[str, float]], key: str) -> str:
    """Return one figure; of a logistic regression, the better one of its two scores."""
    if key in runs[0]:
        values = [run[key] for run in runs]
        return spread(values, 1, 3) if key == "nll" else spread(values)
    scores = {
        kind: [run[f"{key}_{kind}"] for run in runs] for kind in ("msp", "energy") if f"{key}_msp" in runs[0]
    }
    if not scores:
        return "–"
    best = max(scores, key=lambda kind: mean(scores[kind]))
    return f"{spread(scores[best])} ({best})"


def _left_out(results: Results) -> Iterator[Table]:
    head = [
        "",
        "classes",
        "AUROC of the class, mean (%)",
        "worst class",
        "AUROC of caltech99, mean (%)",
        "worst run",
        "false alarms at 5 %, mean (%)",
        "largest",
    ]

    def rows() -> Iterator[Sequence[str]]:
        for name, found in results.items():
            runs = [run for each in found.values() for run in each]
            by_class = {each: mean(run["unknown"] for run in own) for each, own in found.items()}
            worst = min(by_class, key=by_class.__getitem__)
            far, alarms = ([run[key] for run in runs] for key in ("far", "false_alarms_0.05"))
            yield (
                name,
                str(len(found)),
                f"{100 * mean(by_class.values()):.1f}",
                f"{100 * by_class[worst]:.1f} ({worst})",
                f"{100 * mean(far):.1f}",
                f"{100 * min(far):.1f}",
                f"{100 * mean(alarms):.1f}",
                f"{100 * max(alarms):.1f}",
            )

    yield head, rows()


def _few(results: Results) -> Iterator[Table]:
    head = [
        "",
        "photos of a class",
        "accuracy (%)",
        "minus logistic regression's on pooled features",
        "on the same features",
        "false alarms at 5 % (%)",
        "class sets at 5 % that miss (%)",
    ]

    def rows() -> Iterator[Sequence[str]]:
        for name, sizes in results.items():
            for size, found in sizes.items():
                differences = [_difference(each) for each in found["differences"].values()]
                levels = [
                    spread([run[key] for run in found["levels"]]) for key in ("false_alarms_0.05", "missed")
                ]
                yield name, size, f"{100 * found['accuracy']['candid']:.1f}", *differences, *levels

    yield head, rows()


def _difference(interval: Sequence[float]) -> str:
    value, low, high = (100 * each for each in interval)
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


TABLES = {"splits": _splits, "left_out": _left_out, "few": _few}
"""By the section of the figures, which is also the mark on the page."""

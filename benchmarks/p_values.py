"""Do p-values hold? False positives over random splits of one set of images into held-out and new ones.

Takes the predictions that ``candid evaluate`` keeps::

    python -m benchmarks.p_values evaluation/NAME/predictions/test-<hash>.safetensors

Of each split, nine tenths are held out. If p-values are valid, the mean false-positive rate is at most the
level. The rate of a single split varies: as binomial counts of its new images do, and because its held-out
images are a sample, too. The band "binomial" has only the first, "exact" both (a beta-binomial count).
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import betabinom, binom

from benchmarks.common import console, parsed, parser, show, write
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.inference.predictions import Predictions
from candid.trust.conformal import DensityDetector, TwoTailed
from candid.trust.ranking import new_detector
from candid.trust.scores import Columns, Score, available_scores

LEVELS = (0.01, 0.05, 0.1)
HELD_OUT = 0.9


def rates(test: Score, columns: Columns, splits: int) -> Array:
    """False-positive rates of each split and level."""
    values = test.of(columns)
    rates = []
    for split in range(splits):
        order = draws(split).permutation(len(values))
        known, new = np.split(order, [round(HELD_OUT * len(values))])
        p = new_detector(test).fit(values[known]).p_value(values[new])
        rates.append([float(np.mean(p <= level)) for level in LEVELS])
    return np.array(rates)


def bands(images: int, level: float, test: Score) -> dict[str, tuple[float, float]]:
    """Where 95 % of splits should have their rate; of densities, half of the held-out images rank the new."""
    held_out = round(HELD_OUT * images)
    new = images - held_out
    if isinstance(new_detector(test), DensityDetector):
        held_out -= held_out // 2
    tails = 2 if isinstance(new_detector(test), TwoTailed) else 1
    ranks = max(1, tails * int(level / tails * (held_out + 1)))
    exact = betabinom(new, ranks, held_out + 1 - ranks).interval(0.95)
    return {
        "binomial": tuple(count / new for count in binom(new, level).interval(0.95)),
        "exact": tuple(count / new for count in exact),
    }


def main() -> int:
    options = parser("benchmarks.p_values", __doc__)
    options.add_argument("predictions", type=Path, help="a file that candid evaluate kept")
    options.add_argument("--splits", type=int, default=200)
    chosen = parsed(options)
    found = Predictions.load(chosen.predictions)
    if found is None:
        console.print(f"[red]'{chosen.predictions}' is not a file of predictions.[/]")
        return 2
    columns = Columns(found.statistics.statistics())
    rows: list[tuple[str, ...]] = []
    results: dict[str, Any] = {}
    missed: list[str] = []
    for test in available_scores(columns):
        measured = rates(test, columns, chosen.splits)
        cells = []
        for level, column in zip(LEVELS, measured.T, strict=True):
            inside = {
                name: float(np.mean((column >= low) & (column <= high)))
                for name, (low, high) in bands(len(found), level, test).items()
            }
            low, high = bands(len(found), level, test)["binomial"]
            if not low <= float(column.mean()) <= high:
                missed.append(test.name)
            results.setdefault(test.name, {})[str(level)] = {"mean": float(column.mean()), **inside}
            shares = " / ".join(f"{100 * share:.0f}" for share in inside.values())
            cells.append(f"{100 * float(column.mean()):.2f} %  ({shares})")
        rows.append((test.name, *cells))
    title = (
        f"False positives, mean over {chosen.splits} splits (% of splits in the binomial / exact 95 % band)"
    )
    show(title, ("test", *(f"level {level:g}" for level in LEVELS)), rows)
    write("p_values", chosen.quick, {"images": len(found), "splits": chosen.splits, "tests": results})
    if missed:
        console.print(f"[red]Mean rate outside of the binomial band of one split: {', '.join(missed)}[/]")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

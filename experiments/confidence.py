"""What a least posterior of accepted answers gives: ``python -m experiments.confidence``.

The held-out images of each bundled model are divided into random halves: one half makes the rule, the other
one is judged. Next to it stands a plain threshold on the posterior that accepts as many of the images that
pass the test of novelty.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.judging.held_out import HeldOut, needed
from candid.models import checkpoint, zoo
from candid.trust.promises import Levels
from candid.trust.ranking import ALL
from experiments.tables import markdown

CONFIDENCES = (0.0, 0.5, 0.7, 0.8, 0.9)
HALVES = 20


class Judged(NamedTuple):
    """Shares of all judged images."""

    accepted: float
    wrong: float
    """Of the accepted ones."""
    plain_wrong: float
    """Of as many that a plain threshold accepts, among images that are not novel."""
    novel: float


def judged(held_out: HeldOut, confidence: float) -> Iterator[Judged]:
    """Yield what happens in each division."""
    for number in range(HALVES):
        order = draws(number).permutation(len(held_out))
        rule = held_out.rows(order[: len(order) // 2]).rule(Levels(confidence=confidence))
        new = held_out.statistics.rows(order[len(order) // 2 :])
        largest, wrong = new["max_posterior"], new["true_posterior"] < new["max_posterior"]
        ordinary = rule.p_values(new) > rule.promises[ALL].novelty.cut
        single = new["second_posterior"] / largest < rule.smallest_ratios[ALL]
        accepted = ordinary & single & (largest >= confidence)
        yield Judged(
            accepted.mean(),
            _share(wrong, accepted),
            _plain(largest, wrong, ordinary, accepted),
            1 - ordinary.mean(),
        )


def _share(wrong: Array, rows: Array) -> float:
    return float(wrong[rows].mean()) if rows.any() else 0.0


def _plain(largest: Array, wrong: Array, ordinary: Array, accepted: Array) -> float:
    rows = np.flatnonzero(ordinary)
    best = rows[np.argsort(-largest[rows], kind="stable")][: int(accepted.sum())]
    return float(wrong[best].mean()) if len(best) else 0.0


def main() -> None:
    """Print a table: accepted images, the wrong ones of these, and those of a plain threshold."""
    rows = []
    for name in zoo.names():
        held_out = needed(checkpoint.load(name))
        cells = []
        for confidence in CONFIDENCES:
            found = np.mean([*judged(held_out, confidence)], axis=0)
            cells.append(f"{100 * found[0]:.1f} / {100 * found[1]:.1f} / {100 * found[2]:.1f}")
        rows.append((name, *cells))
        print(rows[-1], flush=True)
    print(markdown(["", *(f"{confidence:g}" for confidence in CONFIDENCES)], rows))


if __name__ == "__main__":
    main()

"""The wealth of one bettor over a stream: how large it became, since when it grew, and on which images."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from candid.trust.betting import Array, Ranks, Wealth

CARRIERS = 10
"""Images that are remembered because they carried the evidence."""


class Carrier(NamedTuple):
    """An image that carried the evidence."""

    image: int
    """Its number in the stream, from 1."""
    name: str | None
    gain: float
    """What the wealth was multiplied by when it was seen."""


@dataclass
class Martingale:
    """One bettor, and when and on which images the wealth grew."""

    wealth: Wealth
    peak: float = 0.0
    """The largest logarithm of the wealth so far."""
    low: float = 0.0
    """The smallest; the change, if there was one, came after it."""
    low_at: int = 0
    """The number of the image that it was reached with."""
    carriers: list[Carrier] = field(default_factory=list)
    """The images since then with the largest gains."""

    def step(self, factors: Array, image: int, name: str | None) -> bool:
        """Take what the bets pay on an image; return whether the wealth is the smallest so far."""
        gain = float(self.wealth.step(factors))
        level = float(self.wealth.log)
        self.peak = max(self.peak, level)
        if level <= self.low:
            self.low, self.low_at, self.carriers = level, image, []
            return True
        if gain > 0:
            found = [*self.carriers, Carrier(image, name, math.exp(gain))]
            self.carriers = sorted(found, key=lambda each: -each.gain)[:CARRIERS]
        return False


@dataclass
class Moments:
    """Number, sum and sum of squares of confidences."""

    n: int = 0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.n, self.sum, self.squares = self.n + 1, self.sum + value, self.squares + value * value

    def errors_above(self, other: "Moments") -> float:
        """Return by how many standard errors its mean is above that of ``other``; 0 if that is unknown."""
        if self.n < 2 or other.n < 2:
            return 0.0
        mean = other.sum / other.n
        variance = max(other.squares / other.n - mean * mean, 1e-12)
        return (self.sum / self.n - mean) / math.sqrt(variance * (1 / self.n + 1 / other.n))


def saved(ranks: Ranks, martingale: Martingale) -> dict[str, Any]:
    """Return the state of a watch as JSON; only bins that are not empty."""
    filled = np.flatnonzero(ranks.counts)
    return {
        "bins": filled.tolist(),
        "counts": ranks.counts[filled].tolist(),
        "shares": martingale.wealth.shares.tolist(),
        "log": float(martingale.wealth.log),
        **{name: getattr(martingale, name) for name in ("peak", "low", "low_at", "carriers")},
    }


def restored(state: dict[str, Any], bets: int, bins: int) -> tuple[Ranks, Martingale]:
    """Return what :func:`saved` got, of a watch with this number of bets and bins."""
    ranks, wealth = Ranks(bins), Wealth(bets)
    ranks.counts[np.array(state["bins"], dtype=np.int64)] = state["counts"]
    ranks.n = int(ranks.counts.sum())
    wealth.shares[:], wealth.log = state["shares"], np.array(state["log"])
    carriers = [Carrier(*each) for each in state["carriers"]]
    return ranks, Martingale(wealth, state["peak"], state["low"], state["low_at"], carriers)

"""Bets against "the images have not changed": sequential ranks, bets, and the wealth of a bettor.

Ranks among held-out images *and* all earlier ones are independent and uniform if the images are exchangeable.
No bettor gets rich on uniform numbers: the wealth is a martingale, and by Ville's inequality the probability
that it ever reaches c times its start is at most 1 / c. The formulas work on many streams at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from candid._support.errors import CandidError

Array = np.ndarray[Any, Any]
POWERS = (0.6, 0.75, 0.9)
"""Bets are k p^(k - 1), which gain when p is near 0, and k (1 - p)^(k - 1), which gain when it is near 1."""
TAILS = ((0.003, 0.03), (0.01, 0.05), (0.03, 0.05), (0.1, 0.1), (0.03, 0.2), (0.3, 0.1))
"""Bets that a share pi of the images has one of the smallest p, those below w: (w, pi)."""
FACTORS = (0.5, 0.75, 4 / 3, 2.0)
"""Bets on one class: it is this number of times as frequent as in training."""
CASH = 0.5
"""The share of the wealth that is not bet at the start."""
SCORE_CASH = 0.2
"""The same of bets on scores."""
SPREAD = {2: (0.24, 0.36, 0.2), 1: (0.5, 0.3)}
"""What is on power bets that p is small, on tail bets and on power bets that p is large, by sides."""
MOVED = 0.001
"""The share of the cash that goes to the bets after each image, and of each bet that goes back."""
SMALLEST = 2.0**-53


class Bets(Protocol):
    """Bets on a number p that is uniform if nothing has changed: the mean of each over p is 1."""

    cash: float
    """The share of the wealth that is not bet at the start."""
    weights: Array | None
    """How the rest is divided, (bets,), with the sum 1; None for equal parts."""

    def __len__(self) -> int: ...
    def factors(self, p: Array) -> Array:
        """Return what each bet pays, (...,) to (..., bets)."""


class PowerBets:
    """Six bets: three that p is small, three that it is large.

    Wealth grows with what each bet pays, so bets on small p alone also keep the level if images look less
    novel than held-out ones: their p is larger than that of exchangeable images.

    Args:
        sides: 2, or 1 for bets on small p alone.

    >>> PowerBets().factors(np.array(0.01)).round(2)
    array([3.79, 2.37, 1.43, 0.6 , 0.75, 0.9 ])
    """

    cash: float = CASH
    weights: Array | None = None
    small = len(POWERS)
    """The number of bets, the first ones, that p is small."""

    def __init__(self, sides: int = 2) -> None:
        self.sides = sides

    def __len__(self) -> int:
        return self.sides * len(POWERS)

    def factors(self, p: Array) -> Array:
        """Return k p^(k - 1) and k (1 - p)^(k - 1)."""
        powers = np.array(POWERS)
        sides = np.stack((p, 1 - p)[: self.sides], -1)[..., None]  # (..., 2, 1)
        return (powers * sides ** (powers - 1)).reshape(*p.shape, len(self))


class TailBets:
    """Bets that a share pi of the images has a p below w: they pay 1 - pi + pi / w there, else 1 - pi.

    >>> TailBets().factors(np.array(0.02)).round(2)
    array([0.97, 0.95, 2.62, 1.9 , 7.47, 1.23])
    """

    cash: float = CASH
    weights: Array | None = None

    def __len__(self) -> int:
        return len(TAILS)

    def factors(self, p: Array) -> Array:
        """Return 1 - pi + pi [p < w] / w."""
        width, share = np.array(TAILS).T
        paid: Array = 1 - share + share * (p[..., None] < width) / width
        return paid


class ScoreBets:
    """The bets of a watch of scores: power bets that p is small, tail bets, power bets that p is large.

    A few outliers lie in the tail, and a slight change of all images moves all p. Bets that p is small never
    pay more for a larger p, so that one side keeps the level if images look less novel than held-out ones.

    Args:
        sides: 2, or 1 for bets that p is small alone.

    >>> bets = ScoreBets()
    >>> len(bets), bets.small, round(bets.weights.sum(), 9)
    (12, 9, np.float64(1.0))
    """

    cash: float = SCORE_CASH
    weights: Array | None
    small = len(POWERS) + len(TAILS)
    """The number of bets, the first ones, that p is small."""

    def __init__(self, sides: int = 2) -> None:
        self._power, self._tails = PowerBets(sides), TailBets()
        counts = (len(POWERS), len(TAILS), len(POWERS))[: 1 + sides]
        parts = [np.full(n, share / n) for n, share in zip(counts, SPREAD[sides], strict=True)]
        shares = np.concatenate(parts)
        self.weights = shares / shares.sum()

    def __len__(self) -> int:
        return len(self._power) + len(self._tails)

    def factors(self, p: Array) -> Array:
        """Return what the bets of all groups pay."""
        power, few = self._power.factors(p), len(POWERS)
        return np.concatenate((power[..., :few], self._tails.factors(p), power[..., few:]), -1)


def score_bets(kind: int, shares: int) -> PowerBets | ScoreBets:
    """Return the bets that a stream began with: of the kind 1, as in the first versions, or 2."""
    made: dict[int, type[PowerBets] | type[ScoreBets]] = {1: PowerBets, 2: ScoreBets}
    for bets in (made[kind](1), made[kind](2)):
        if len(bets) == shares - 1:
            return bets
    raise ValueError(f"there are no bets with {shares} shares")


class FrequencyBets:
    """Four bets for each of K classes: it is half, 3/4, 4/3 times or twice as frequent as in training.

    Classes have numbers, and the rank of an image is the rank of the number of its class. So the p-values of
    a class lie in an interval whose length is about its frequency q. A bet pays a in that interval and
    (1 - a q) / (1 - q) elsewhere.

    Args:
        frequencies: shares of the K classes, from images that are not ranked; they are scaled to sum 1.

    >>> FrequencyBets([0.5, 0.5]).factors(np.array(0.9)).round(2)  # a small rank: class 0
    array([0.5 , 0.75, 1.33, 1.5 , 1.5 , 1.25, 0.67, 0.5 ])
    """

    cash: float = CASH
    weights: Array | None = None

    def __init__(self, frequencies: Sequence[float] | Array) -> None:
        shares = np.asarray(frequencies, dtype=np.float64)
        self.frequencies = q = shares / shares.sum()
        # a class with many images can't become twice as frequent
        self._inside = np.minimum(np.array(FACTORS), (0.5 + 0.5 / q)[:, None])  # (K, 4)
        outside = (1 - self._inside * q[:, None]) / np.maximum(1 - q, SMALLEST)[:, None]
        self._outside = np.where(q[:, None] < 1, outside, 1.0)
        self._ends = q[::-1].cumsum()[:-1]  # the last class has the smallest p-values

    def __len__(self) -> int:
        return self._inside.size

    def factors(self, p: Array) -> Array:
        """Return a where p lies in the interval of a class, and what compensates it elsewhere."""
        classes = len(self.frequencies)
        own = classes - 1 - np.searchsorted(self._ends, p, "right")
        hit = own[..., None] == np.arange(classes)
        return np.where(hit[..., None], self._inside, self._outside).reshape(*p.shape, len(self))


class Wealth:
    """The wealth of a bettor, or of one for each of several streams, who starts with 1.

    After each image a thousandth of the cash goes to the bets, as it was divided at the start, and a
    thousandth of each bet back: so bets that lost early can still win later.

    Args:
        bets: the number of bets.
        streams: the shape of the streams; () for one.
        weights: how what is bet is divided, (bets,), with the sum 1; None for equal parts.
        cash: the share that is not bet at the start.

    >>> wealth = Wealth(6)
    >>> for p in (0.01, 0.02, 0.003):
    ...     gain = wealth.step(PowerBets().factors(np.array(p)))
    >>> np.exp(wealth.log).round(2)
    np.float64(7.67)
    """

    def __init__(
        self, bets: int, streams: tuple[int, ...] = (), weights: Array | None = None, cash: float = CASH
    ) -> None:
        self.weights = np.full(bets, 1 / bets) if weights is None else weights
        self.shares = np.empty((*streams, 1 + bets))
        """Cash and what is on each bet, as shares of the wealth."""
        self.shares[..., 0], self.shares[..., 1:] = cash, (1 - cash) * self.weights
        self.log = np.zeros(streams)
        """The logarithm of the wealth."""

    @classmethod
    def on(cls, bets: Bets, streams: tuple[int, ...] = ()) -> "Wealth":
        """Return the wealth of a bettor with these bets."""
        return cls(len(bets), streams, bets.weights, bets.cash)

    def step(self, factors: Array) -> Array:
        """Take what the bets pay, (..., bets), and return the logarithm of the gain."""
        self.shares[..., 1:] *= factors
        gain = self.shares.sum(-1)
        self.shares /= gain[..., None]
        cash, on_bets = self.shares[..., :1], self.shares[..., 1:]
        back = MOVED * on_bets.sum(-1, keepdims=True)
        out = MOVED * cash * self.weights
        on_bets *= 1 - MOVED
        on_bets += out
        cash *= 1 - MOVED
        cash += back
        gained: Array = np.log(gain)
        self.log = self.log + gained
        return gained


class Ranks:
    """Counts of everything seen so far in a fixed number of bins: the state has a constant size.

    >>> ranks = Ranks(4)
    >>> ranks.count(np.array([0, 1, 1, 3]))
    >>> ranks.add(1, 0.5)  # one is greater, and with itself three are equal
    0.5
    """

    def __init__(self, bins: int) -> None:
        self.counts = np.zeros(bins, dtype=np.int64)
        self.n = 0

    def count(self, bins: Array) -> None:
        """Count held-out images."""
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.n += len(bins)

    def add(self, bin_: int, uniform: float) -> float:
        """Count one image, and return its p-value: ties are broken by a uniform number."""
        self.counts[bin_] += 1
        self.n += 1
        greater, equal = int(self.counts[bin_ + 1 :].sum()), int(self.counts[bin_])
        return min(max((greater + uniform * equal) / self.n, SMALLEST), 1 - SMALLEST)


def bins_of(scores: Array) -> Array:
    """Return a bin from 0 to 65535 of each score: its float16 value, in order.

    >>> bins_of(np.array([-np.inf, -1.0, -0.0, 0.0, 1.0, 1e9])).tolist()
    [1024, 17408, 32768, 32768, 48128, 64512]
    """
    with np.errstate(over="ignore"):
        half = scores.astype(np.float16)
    bits = half.view(np.uint16).astype(np.int64)
    return np.where(bits < 0x8000, 0x8000 + bits, 0x10000 - bits)


def uniform(*key: int) -> float:
    """Return the uniform number of a key, inside of (0, 1): the same at any time, in any process.

    >>> uniform(0, 1) == uniform(0, 1) != uniform(0, 2)
    True
    """
    (bits,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return (int(bits >> np.uint64(12)) + 0.5) * 2.0**-52


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
            carriers = [*self.carriers, Carrier(image, name, math.exp(gain))]
            self.carriers = sorted(carriers, key=lambda carrier: -carrier.gain)[:CARRIERS]
        return False


@dataclass
class RunningMean:
    """Number, sum and sum of squares of confidences."""

    n: int = 0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.n, self.sum, self.squares = self.n + 1, self.sum + value, self.squares + value * value

    def errors_above(self, other: "RunningMean") -> float:
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


def restored(state: dict[str, Any], bets: Bets, bins: int) -> tuple[Ranks, Martingale]:
    """Return what :func:`saved` got, of a watch with these bets and this number of bins."""
    ranks, wealth = Ranks(bins), Wealth.on(bets)
    ranks.counts[np.array(state["bins"], dtype=np.int64)] = state["counts"]
    ranks.n = int(ranks.counts.sum())
    wealth.shares[:], wealth.log = state["shares"], np.array(state["log"])
    carriers = [Carrier(*carrier) for carrier in state["carriers"]]
    return ranks, Martingale(wealth, state["peak"], state["low"], state["low_at"], carriers)


def numbers(what: str, values: Any) -> Array:
    """Return one number or (N,) as an array (N,)."""
    try:
        array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise CandidError(f"The {what} must be numbers, not {type(values).__name__}.") from error
    if array.ndim != 1:
        raise CandidError(f"The {what} must be one number per image, (N,), not of the shape {array.shape}.")
    if np.isnan(array).any():
        raise CandidError(f"{int(np.isnan(array).sum())} of {len(array)} {what} are NaN: find out why.")
    return array


def same_number(what: str, values: Any, n: int) -> Array:
    """Return them like :func:`numbers`, or raise an error unless there are ``n``."""
    array = numbers(what, values)
    if len(array) != n:
        raise CandidError(f"There are {len(array)} {what} and scores of {n} images.")
    return array

"""Promises: what verdicts guarantee about images of the same kind as the held-out ones.

Pure functions of numbers and arrays; docs/theory.md, section 16, has the proofs. scipy is imported only where
it is needed: plain verdicts start faster without it.
"""

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from candid._support.errors import CandidError
from candid._support.text import percent

PHI = 0.25
"""The walk starts among this share of the most confident images: fixed before any label is seen."""
LISTED = (0.01, 0.02, 0.05, 0.1)
"""The risks that are tried if the one that was asked for can't be promised."""
CONFIDENCE = 0.95
"""Of the promise "with 95 % confidence for this model"."""
MOST_ERRORS = 2**14
"""An estimate of the number of images that needs more errors than this is not given."""
NOVELTY, ERROR = 0.01, 0.05
"""Default levels of the verdict."""
NoveltyPromise = Literal["average", "confident"]
UNPROVEN = "no bound is proven, since the model has learned from held-out images, each left out in turn"


class Level(NamedTuple):
    """One promise of a verdict about a rate: false alarms, or class sets that miss the true class."""

    asked: float | None
    """What the user asked for; None for the default."""
    in_force: float
    smallest: float
    """The smallest level that this number of held-out images allows."""
    promise: NoveltyPromise
    """Whether the rate holds on average over held-out sets, or with 95 % confidence for this model."""
    proven: float
    """What is proven for the average: the level in force, more with cross-conformal scores, and 1 (nothing)
    if the model has learned from its held-out images."""
    upper: float
    """The 95 % upper end of the rate for this model, since its held-out images are one draw."""
    cut: float
    """Images with a p-value of at most this are rejected."""


NOTHING = Level(None, 1.0, 1.0, "average", 1.0, 1.0, 1.0)
"""The level of ``error`` if the held-out images have no labels: nothing is promised."""


@dataclass(frozen=True)
class Risk:
    """The promise that at most a share ``asked`` of the accepted images is wrong."""

    asked: float
    delta: float
    """The probability, over the draw of the held-out images, that the promise is wrong."""
    threshold: float
    """Images of at least this confidence are accepted."""
    coverage: float
    """The share of the tested held-out images that is accepted."""
    images: int
    """The number of held-out images that the rule was tested on: no others shaped it."""
    accepted: int
    """The number of them that the rule accepts."""
    errors: int
    """The number of wrong ones among these."""


@dataclass(frozen=True)
class Promises:
    """What verdicts promise."""

    score: str
    """The score that decides what is novel."""
    n_reference: int
    """The number of held-out images that an image is ranked among."""
    novelty: Level
    """The share of ordinary images that is called novel."""
    error: Level
    """The share of ordinary images whose class set misses the true class."""
    risk: Risk | None = None
    """The share of accepted images that is wrong; None if it was not asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the promises as JSON."""
        return asdict(self) | {"novelty": self.novelty._asdict(), "error": self.error._asdict()}

    def raised(self) -> list[str]:
        """Return a sentence for each level that had to be raised above what was asked."""
        found = []
        for name, level, default in (("novelty", self.novelty, NOVELTY), ("error", self.error, ERROR)):
            asked = default if level.asked is None else level.asked
            if asked < level.in_force < 1:
                found.append(
                    f"The level of {name} is {_percent(level.in_force)} instead of {_percent(asked)}: there "
                    "are too few held-out images for a smaller one."
                )
        return found

    def sentences(self) -> list[str]:
        """Return the promises in words; first the levels that differ from what was asked, if any do."""
        found = [
            *self.raised(),
            _rate("Novelty", self.novelty, "of ordinary images is called novel"),
            _rate("Error", self.error, "of ordinary images has a class set without its true class"),
        ]
        if self.risk is not None:
            how = f"with {_percent(1 - self.risk.delta)} confidence for this model"
            if self.novelty.proven == 1:
                how = f"as tested; {UNPROVEN}"
            found.append(
                f"Risk {_percent(self.risk.asked)}: at most this share of accepted images is wrong, {how}; "
                f"accepted are {percent(self.risk.coverage)} of {self.risk.images} held-out images."
            )
        return found


def _rate(name: str, level: Level, what: str) -> str:
    if level.in_force == 1:
        return f"{name}: nothing is promised about classes, since the held-out images have no labels."
    shown = _percent(level.in_force)
    upper = f"95 % upper end for this model: {_percent(level.upper)}."
    if level.proven == 1:
        return f"{name} about {shown}: this share {what}, as measured; {UNPROVEN}; {upper}"
    if level.promise == "confident":
        return f"{name} {shown}: at most this share {what}, with 95 % confidence for this model."
    if level.proven > level.in_force:
        return (
            f"{name} about {shown}: this share {what}, on average over held-out sets as measured; proven is "
            f"at most {_percent(level.proven)}; {upper}"
        )
    return f"{name} {shown}: at most this share {what}, on average over held-out sets; {upper}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def rounded_up(share: float) -> float:
    """Return the share with two digits, never less than it was: advice that names it can be followed.

    >>> rounded_up(1 / 41), rounded_up(0.05)
    (0.025, 0.05)
    """
    digits = 1 - math.floor(math.log10(share))
    return round(math.ceil(share * 10**digits) / 10**digits, digits)


def level(
    asked: float | None,
    default: float,
    n: int,
    promise: NoveltyPromise = "average",
    folds: int = 1,
    least_rank: int = 1,
) -> Level:
    """Return the level in force with ``n`` held-out images to rank among: what was asked, or the smallest.

    An image is rejected if its p-value, (1 + number of held-out scores at least as extreme) / (n + 1), is at
    most k / (n + 1). Given the held-out images, the share of ordinary images that this happens to has the
    distribution Beta(k, n + 1 - k). On average k = floor(level (n + 1)); with 95 % confidence it is the
    largest k whose 95 % quantile is at most the level.

    Args:
        asked: the level; None for the default.
        default: the level if none was asked for.
        n: the number of held-out images that p-values are ranks among.
        promise: on average over held-out sets, or with 95 % confidence for this model.
        folds: the number of folds of cross-conformal scores; 1 for scores of a fixed function.
        least_rank: the smallest p-value is ``least_rank / (n + 1)``.

    Example:
        >>> level(None, 0.01, 20).in_force == 1 / 21
        True
        >>> level(0.01, 0.01, 1000, "confident").cut == 5 / 1001
        True
    """
    confident = promise == "confident"
    smallest = upper_end(least_rank, n) if confident else least_rank / (n + 1)
    in_force = max(default if asked is None else asked, smallest)
    if confident:
        from scipy.special import bdtr

        rank = max(least_rank, int(np.searchsorted(bdtr(np.arange(n), n, in_force), 1 - CONFIDENCE, "right")))
        cut = rank / (n + 1)
    else:
        rank, cut = max(least_rank, math.floor(in_force * (n + 1) + 1e-9)), in_force
    upper = in_force if confident else upper_end(rank, n)
    proven = in_force if folds == 1 else cross_conformal_bound(in_force, n, folds)
    return Level(asked, in_force, smallest, promise, proven, upper, cut)


def upper_end(rank: int, n: int) -> float:
    """Return the 95 % upper end of the rate at which p-values are at most ``rank / (n + 1)``.

    The quantile of Beta(rank, n + 1 - rank): the share u with P(Bin(n, u) < rank) = 5 %.

    >>> round(upper_end(10, 1000), 4)
    0.0157
    """
    if rank > n:
        return 1.0
    below = np.arange(rank)
    log_choices = np.append(0.0, np.log((n - below[:-1]) / (below[:-1] + 1)).cumsum())
    low, high = rank / (n + 1), 1.0
    for _ in range(60):  # bisections
        u = (low + high) / 2
        terms = np.exp(log_choices + below * math.log(u) + (n - below) * math.log1p(-u))
        low, high = (u, high) if terms.sum() > 1 - CONFIDENCE else (low, u)
    return low


def cross_conformal_bound(level: float, n: int, folds: int) -> float:
    """Return what is proven about P(p <= level) of a cross-conformal p-value from n images.

    2 level + 2 (1 - level) (K - 1) / (n + K) with K folds; see docs/theory.md, section 16, and
    Gasparin & Ramdas (2025), https://arxiv.org/abs/2503.01495

    >>> round(cross_conformal_bound(0.05, 180, 5), 3)
    0.141
    """
    return min(1.0, 2 * level + 2 * (1 - level) * (folds - 1) / (n + folds))


def needed_images(risk: float, errors: int = 0, delta: float = 0.05) -> int:
    """Return the least number m of images with which ``errors`` errors show that the risk is at most this.

    The least m with P(Bin(m, risk) <= errors) <= delta.

    >>> [needed_images(risk) for risk in (0.01, 0.02, 0.05, 0.1)]
    [299, 149, 59, 29]
    """
    from scipy.special import bdtr

    most = 2 * (errors + 1)
    while bdtr(errors, most, risk) > delta:
        most *= 2
    return bisect_left(range(most), True, key=lambda m: bool(bdtr(errors, m, risk) <= delta))


def start(n: int, risk: float, delta: float = 0.05) -> int:
    """Return the rank that the walk over ``n`` images starts at; it depends on nothing else.

    The number of images that shows the risk with k errors, for the largest k that needs at most a share of
    ``PHI`` of the images; with no error if even that needs more.

    >>> start(1000, 0.05), start(100, 0.05)
    (234, 59)
    """
    from scipy.special import bdtr

    among = math.floor(PHI * n)
    errors = int(np.searchsorted(bdtr(np.arange(among + 1), among, risk), delta, "right")) - 1
    return needed_images(risk, max(errors, 0), delta)


def walk(
    confidence: ArrayLike, wrong: ArrayLike, risk: float, delta: float = 0.05, images: int | None = None
) -> Risk | None:
    """Return the confidence from which images can be accepted with at most a share ``risk`` of errors.

    With K_m errors among the m most confident images, every m from :func:`start` on passes while
    P(Bin(m, risk) <= K_m) <= delta. The walk stops at the first m that does not; the threshold is the
    confidence at the last one that did. Equal confidences are accepted together, so only the last of them is
    tested.

    The images must be independent draws that pass all other conditions of the verdict, and those conditions
    must have been fixed without them. Then the promise is wrong with a probability of at most ``delta``, if
    the risk of confident images rises through ``risk`` once as the threshold falls.

    Args:
        confidence: of the n held-out images that pass the other conditions, or anything that rises with it.
        wrong: whether the most probable class is not the true one, (n,).
        risk: the share of accepted images that may be wrong.
        delta: the probability that the promise is wrong.
        images: the number of held-out images before the other conditions; by default n.

    Returns:
        The promise; None if this risk can't be promised.

    Example:
        >>> sure = np.linspace(0.5, 1, 1000)
        >>> found = walk(sure, sure < 0.7, risk=0.05)
        >>> found.accepted, found.errors, round(found.threshold, 2)
        (621, 21, 0.69)
    """
    from scipy.special import bdtr

    confidence, wrong = np.asarray(confidence, float), np.asarray(wrong, bool)
    if confidence.shape != wrong.shape or confidence.ndim != 1 or np.isnan(confidence).any():
        raise CandidError(
            "The confidences of n images must be n numbers, with a flag for each whether it is wrong, not "
            f"{confidence.shape} and {wrong.shape}."
        )
    n = len(confidence)
    first = start(n, risk, delta)
    order = np.argsort(-confidence, kind="stable")
    confidence, errors = confidence[order], wrong[order].cumsum()
    ends = np.flatnonzero(np.append(confidence[1:] < confidence[:-1], True)) if n else np.arange(0)
    ends = ends[ends + 1 >= first]
    passed = bdtr(errors[ends], ends + 1, risk) <= delta
    count = len(passed) if passed.all() else int(passed.argmin())
    if count == 0:
        return None
    last = int(ends[count - 1])
    images = n if images is None else images
    return Risk(
        risk, delta, float(confidence[last]), (last + 1) / images, images, last + 1, int(errors[last])
    )


def no_promise(
    confidence: ArrayLike, wrong: ArrayLike, risk: float, delta: float, images: int, held_out: int
) -> str:
    """Return why a risk can't be promised, which can, and how many held-out images it would take.

    What can be promised is looked for in a fixed list, each entry at a fourth of delta, so that together
    they are wrong with a probability of at most delta.

    Args:
        confidence, wrong, risk, delta, images: as in :func:`walk`.
        held_out: the number of all held-out images, including those that fixed the other conditions.
    """
    confidence, wrong = np.asarray(confidence, float), np.asarray(wrong, bool)
    m = min(len(wrong), max(start(len(wrong), risk, delta), 1))
    surest = np.argsort(-confidence, kind="stable")[:m]
    said = (
        f"A risk of {_percent(risk)} can't be promised with {held_out} held-out images "
        f"({int(wrong[surest].sum())} errors among the {m} most confident of the {images} that test it)"
    )
    each = delta / len(LISTED)
    for tried in LISTED:
        found = walk(confidence, wrong, tried, each, images) if tried > risk else None
        if found is not None:
            said += (
                f"; {_percent(tried)} can, for about {percent(found.coverage)} of images, by risk {tried:g} "
                f"and delta {each:g} (four risks were tried, each at a fourth of delta)"
            )
            break
    else:
        said += "; leave risk out for verdicts without this promise"
    scale = held_out / max(images, 1)
    least = math.ceil(scale * needed_images(risk, 0, delta))
    said += f"; {_percent(risk)} takes at least {least:,} held-out images"
    about = _estimate(confidence, wrong, risk, delta)
    if about is not None:
        more = max(least, about * scale * images / max(len(wrong), 1))
        return f"{said}, about {_two_digits(more):,} if more images are like these."
    return f"{said} and a model with fewer errors among its most confident answers."


def _estimate(
    confidence: "np.ndarray[Any, Any]", wrong: "np.ndarray[Any, Any]", risk: float, delta: float
) -> float | None:
    """Return the number of images to walk if errors stay as frequent; None if no number is enough."""
    m = math.floor(PHI * len(wrong))
    seen = int(wrong[np.argsort(-confidence, kind="stable")[:m]].sum())
    rate = (seen + 0.5) / (m + 1)
    errors = 0
    while rate * needed_images(risk, errors, delta) > errors + 0.5:
        errors = 2 * errors + 1
        if rate >= risk or errors > MOST_ERRORS:
            return None
    return needed_images(risk, errors, delta) / PHI


def _two_digits(count: float) -> int:
    unit = int(10.0 ** max(0, math.floor(math.log10(count)) - 1))
    return math.ceil(count / unit) * unit

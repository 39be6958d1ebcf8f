"""Selective classification: how good are the images that verdicts accept, next to a plain threshold?

Pure functions of columns: a confidence, whether the most probable class is right, and a verdict for each
image. The plain rule accepts as many images as the verdicts do, those of the highest confidence.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid._support.text import percent, with_interval
from candid.inference.metrics import Interval, binomial_interval
from candid.trust.verdict import Verdict

LEVEL = 0.95
POINTS = 200
"""Most points of a stored curve."""
RESAMPLES = 500
NOVEL_LAST = -math.inf
RULES = {
    "verdicts": "verdicts",
    "plain": "plain threshold",
    "without_novelty": "no novelty test",
}
"""Rules that accept equally many images, and what tables call them."""


class Judged(NamedTuple):
    """A set of N images with verdicts."""

    confidence: Array
    """Log odds of the most probable class, (N,): see :func:`candid.inference.metrics.log_odds`."""
    kinds: Sequence[Verdict]


class RiskCoverage(NamedTuple):
    """Errors among the i most confident of n images, for i = 1, ..., n."""

    coverage: Array
    """i / n, (n,)."""
    risk: Array
    """The share of wrong ones among the i most confident, (n,)."""
    aurc: float
    """The mean of the risks: area under the risk-coverage curve."""
    augrc: float
    """The mean of the numbers of errors divided by n: area under the generalised risk-coverage curve."""


def risk_coverage(confidence: Array, right: Array) -> RiskCoverage:
    """Return the risk-coverage curve of n images and the areas under it.

    With E_i errors among the i most confident images, AURC = mean of E_i / i and AUGRC = mean of E_i / n.
    Images of equal confidence are in random order: E_i is the mean over these orders.
    AUGRC is the share of pairs in which an error is as confident as another image; it equals
    (1 - AUROC) a (1 - a) + (1 - a)^2 / 2 + (1 - a) / 2n, with the accuracy a and the AUROC of the confidence
    for right against wrong (Traub et al., NeurIPS 2024).

    Args:
        confidence: (n,); anything that rises with it.
        right: whether the most probable class is the true one, (n,) bool.

    Example:
        >>> curve = risk_coverage(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, True]))
        >>> curve.risk.round(2).tolist(), curve.augrc
        ([0.0, 0.5, 0.33, 0.25], 0.1875)
    """
    group, wrong = _ordered(confidence, right)
    return _curve(_expected_errors(group, wrong, np.ones(len(wrong), dtype=np.int64)))


def _ordered(confidence: Array, right: Array) -> tuple[Array, Array]:
    """Return in order of falling confidence the number of the group of equal ones, and 1 for errors."""
    if confidence.shape != right.shape or right.ndim != 1 or not len(right) or np.isnan(confidence).any():
        raise CandidError(
            "A risk-coverage curve needs one confidence and one flag (right or wrong) for each image, not "
            f"{confidence.shape} and {right.shape}."
        )
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    return np.append(0, (ordered[1:] != ordered[:-1]).cumsum()), 1.0 - right[order]


def _expected_errors(group: Array, wrong: Array, times: Array) -> Array:
    """Return the errors of images that were each drawn some ``times``; those of a group share theirs."""
    counts = np.bincount(group, times).astype(np.int64)
    return np.repeat(np.bincount(group, times * wrong) / np.maximum(counts, 1), counts)


def _curve(errors: Array) -> RiskCoverage:
    n, among = len(errors), np.arange(1, len(errors) + 1)
    total = errors.cumsum()
    risk = total / among
    return RiskCoverage(among / n, risk, float(risk.mean()), float(total.mean() / n))


def areas(confidence: Array, right: Array, seed: int = 0) -> tuple[Interval, Interval]:
    """Return AURC and AUGRC with 95 % bootstrap intervals; see :func:`risk_coverage`."""
    group, wrong = _ordered(confidence, right)
    n, random, resampled = len(wrong), draws(seed, 31), []
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(n, n), minlength=n)
        resampled.append(_curve(_expected_errors(group, wrong, times))[2:])
    values = risk_coverage(confidence, right)[2:]
    ends = np.quantile(resampled, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=0).T.tolist()
    aurc, augrc = (
        Interval(value, min(low, value), max(high, value))
        for value, (low, high) in zip(values, ends, strict=True)
    )
    return aurc, augrc


def selective_metrics(
    confidence: Array,
    right: Array,
    kinds: Sequence[Verdict] | None = None,
    foreign: Mapping[str, Judged] | None = None,
) -> dict[str, Any]:
    """Return what verdicts accept and how much of it is right, next to a plain threshold at equal coverage.

    Args:
        confidence: log odds of the most probable class of n images, (n,).
        right: whether the most probable class is the true one, (n,) bool.
        kinds: the verdicts; without them there is only the curve.
        foreign: other sets of images by name, which should not be accepted.

    Returns:
        ``aurc`` and ``augrc`` of the confidence and its ``curve``. With verdicts also three rules that accept
        as many images: ``verdicts``; ``plain``, a threshold on the confidence of images that are not novel;
        ``without_novelty``, a threshold on the confidence of all images. Each has the ``coverage``, the
        accuracy of ``accepted`` images and the share of each foreign set that is accepted, with exact 95 %
        intervals, and ``verdicts`` the accuracy of ``ambiguous`` images. ``difference`` is the paired
        difference of the accuracies of the first two rules, and ``novel`` is what the novelty cut costs: the
        novel images that the third rule accepts, how many of them are right, and the paired ``difference``
        of the second rule and the third. What no image enters is None.

    Example:
        >>> confidence = np.array([0.9, 0.8, 0.7, 0.6])
        >>> right = np.array([True, False, True, False])
        >>> metrics = selective_metrics(confidence, right, ["novel", "ambiguous", "accept", "accept"])
        >>> [metrics[rule]["accepted"] for rule in ("verdicts", "plain", "without_novelty")]
        [0.5, 0.5, 0.5]
        >>> metrics["difference"]["value"], metrics["novel"]["images"], metrics["novel"]["right"]
        (0.0, 1, 1)
    """
    n, curve = len(right), risk_coverage(confidence, right)
    at = np.unique(np.linspace(0, n - 1, min(n, POINTS)).round().astype(int))
    aurc, augrc = areas(confidence, right)
    metrics: dict[str, Any] = {
        "images": n,
        "aurc": aurc.value,
        "augrc": augrc.value,
        "intervals": {"aurc": list(aurc[1:]), "augrc": list(augrc[1:])},
        "curve": {"coverage": curve.coverage[at].tolist(), "risk": curve.risk[at].tolist()},
    }
    if kinds is None:
        return metrics
    accepted, novel = _are(kinds, "accept"), _are(kinds, "novel")
    last = np.where(novel, NOVEL_LAST, confidence)
    metrics["curve"]["novel_last"] = risk_coverage(last, right).risk[at].tolist()
    sets, k = foreign or {}, int(accepted.sum())
    ordinary = {name: ~_are(judged.kinds, "novel") for name, judged in sets.items()}
    plain, alone = _most_confident(last, k), _most_confident(confidence, k)
    metrics["verdicts"] = _shares(
        {"coverage": accepted, "accepted": right[accepted], "ambiguous": right[_are(kinds, "ambiguous")]},
        {name: _are(judged.kinds, "accept") for name, judged in sets.items()},
    )
    for name, rule in (("plain", plain), ("without_novelty", alone)):
        least = float(confidence[rule].min()) if k else math.inf
        confident = {name: judged.confidence >= least for name, judged in sets.items()}
        if rule is plain:
            confident = {name: flags & ordinary[name] for name, flags in confident.items()}
        shares = _shares({"coverage": rule, "accepted": right[rule]}, confident)
        metrics[name] = {"threshold": 1 / (1 + math.exp(-least)), **shares}
    lost = alone & novel
    metrics["difference"] = paired_difference(accepted, plain, right)._asdict() if k else None
    metrics["novel"] = {
        "images": int(lost.sum()),
        "right": int(right[lost].sum()),
        "difference": paired_difference(plain, alone, right)._asdict() if k else None,
    }
    return metrics


def _most_confident(confidence: Array, count: int) -> Array:
    """Return which images have the largest confidences, (n,) bool."""
    chosen = np.zeros(len(confidence), dtype=bool)
    chosen[np.argsort(-confidence, kind="stable")[:count]] = True
    return chosen


def _are(kinds: Sequence[Verdict], kind: Verdict) -> Array:
    """Return which verdicts are of one kind, (n,) bool."""
    return np.array([verdict == kind for verdict in kinds], dtype=bool)


def paired_difference(first: Array, second: Array, right: Array) -> Interval:
    """Return the accuracy among ``first`` minus that among ``second``, two equally large sets of images.

    Images in both sets cancel. Of the m images that only the one or only the other set has, shares p and q
    are right, and with k images in each set the difference is (p - q) m / k. Its 95 % interval is made from
    the exact intervals of p and q, given m (the method of variance estimates recovery; Zou & Donner, 2008).

    Args:
        first: which of n images belong to the one set, (n,) bool.
        second: which belong to the other, as many.
        right: whether the most probable class is the true one, (n,) bool.

    Example:
        >>> first, second = np.array([[True, True, False], [True, False, True]])
        >>> paired_difference(first, second, np.array([True, False, True])).value
        -0.5
    """
    one, other = right[first & ~second], right[second & ~first]
    k, m = int(first.sum()), len(one)
    if len(other) != m or k == 0:
        raise CandidError(f"Two equally large sets are compared, not {k} and {int(second.sum())} images.")
    if m == 0:
        return Interval(0.0, 0.0, 0.0)
    p, low_p, high_p = binomial_interval(int(one.sum()), m, LEVEL)
    q, low_q, high_q = binomial_interval(int(other.sum()), m, LEVEL)
    low = p - q - math.hypot(p - low_p, high_q - q)
    high = p - q + math.hypot(high_p - p, q - low_q)
    return Interval(*(share * m / k for share in (p - q, low, high)))


def _shares(shares: Mapping[str, Array], foreign: Mapping[str, Array]) -> dict[str, Any]:
    """Return shares by name, those of foreign sets under ``foreign``, and exact intervals of all."""
    values: dict[str, Any] = {"foreign": {}, "intervals": {"foreign": {}}}
    for flags, place, intervals in (
        (shares, values, values["intervals"]),
        (foreign, values["foreign"], values["intervals"]["foreign"]),
    ):
        for name, flag in flags.items():
            share = binomial_interval(int(flag.sum()), len(flag), LEVEL) if len(flag) else None
            place[name] = None if share is None else share.value
            intervals[name] = None if share is None else [share.low, share.high]
    return values


def table(metrics: Mapping[str, Any], data: str = "the data") -> list[tuple[str, ...]]:
    """Return rows of what is measured, of each rule in :data:`RULES`; shares in percent.

    Args:
        metrics: what :func:`selective_metrics` returned, with verdicts.
        data: what the images are called.
    """
    rules = [metrics[rule] for rule in RULES]
    names = {
        "coverage": f"accepted of {data}",
        "accepted": "right of accepted",
        "ambiguous": "right of ambiguous",
    }
    rows: list[tuple[str, ...]] = [
        (name, *(with_interval(rule.get(key), rule["intervals"].get(key)) for rule in rules))
        for key, name in names.items()
    ]
    rows += [
        (
            f"accepted of {name}",
            *(with_interval(rule["foreign"][name], rule["intervals"]["foreign"][name]) for rule in rules),
        )
        for name in rules[0]["foreign"]
    ]
    if (gap := metrics["difference"]) is not None:
        rows.append(
            ("right of accepted, less plain", _signed(gap), "", _signed(metrics["novel"]["difference"], -1))
        )
    return rows + [(name.upper(), "", "", _area(metrics, name)) for name in ("augrc", "aurc")]


def _signed(difference: Mapping[str, float], sign: int = 1) -> str:
    value, *ends = (100 * sign * difference[key] for key in ("value", "low", "high"))
    return f"{value:+z.2f} ({min(ends):+z.2f} to {max(ends):+z.2f})"


def _area(metrics: Mapping[str, Any], name: str) -> str:
    low, high = (f"{100 * end:.2f}" for end in metrics["intervals"][name])
    return f"{100 * metrics[name]:.2f} ({low} to {high})"


def sentences(metrics: Mapping[str, Any]) -> list[str]:
    """Return in words how the verdicts compare with a plain threshold, and what the novelty cut costs."""
    if metrics.get("difference") is None:
        return ["No image is accepted."] if "difference" in metrics else []
    value, low, high = (100 * metrics["difference"][key] for key in ("value", "low", "high"))
    clear = low > 0 or high < 0
    how = ("better than" if value > 0 else "worse than") if clear else "not clearly better or worse than"
    said = (
        f"Among images that are not novel, at equal coverage, accepted images are {how} those of a plain "
        f"confidence threshold: the accuracy differs by {value:+z.2f} points ({low:+z.2f} to {high:+z.2f})."
    )
    lost = metrics["novel"]
    if not lost["images"]:
        return [said]
    share = percent(lost["right"] / lost["images"])
    return [
        said,
        f"What the novelty cut costs: a plain threshold alone accepts {lost['images']:,} images that are "
        f"called novel, and {share} of them are right. Its accuracy at this coverage differs by "
        f"{_signed(lost['difference'], -1)} points from that of a threshold among images that are not novel.",
    ]

"""Measure the alarm of :class:`candid.Watch` on many streams: how often it is false, and how late it comes.

``python -m experiments.drift images --tiny tiny20/val --mnist mnist --peers peers``
``python -m experiments.drift``, without images: drawn scores, and classes after one was taught, in 2 minutes

``images`` is CIFAR-10 as a folder with ``test/<class>/*.png``. Streams and held-out sets are drawn with
replacement from scores of test images, so that they are exchangeable. A CUSUM that is tuned to the same rate
of false alarms sees the same streams, and so do the martingales of crepes if the folder ``peers`` has it
(``pip install --target peers --no-deps crepes pandas python-dateutil six``).
The passes are cached in ``runs/drift``, where ``drift.json`` and ``drift.md`` are written.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

import candid
from candid._support.files import write_texts
from candid._support.numbers import Array
from candid.data.datasets import open_images, open_part
from candid.data.splits import Split
from candid.inference.runner import Runner
from candid.judging.watched import WatchedScore
from candid.robustness.corruptions.benchmark import _transform
from candid.trust.bets import Bets, FrequencyBets, PowerBets, ScoreBets, Wealth, bins_of

LEVEL = 0.01
HORIZON = 4000
"""Images after a change within which it has to be found."""
SEVERITIES = (1, 3, 5)
CORRUPTION = "gaussian_noise"
DRAWN = {
    "quiet": (0.0, 0.0),
    "5 % far": (0.05, 6.0),
    "10 % far": (0.1, 6.0),
    "10 % near": (0.1, 1.0),
    "30 % near": (0.3, 1.0),
    "all, a little": (1.0, 0.3),
}
"""The share of drawn images that changed, and by how many standard deviations their scores rose."""


class Pool(NamedTuple):
    """Images that streams are drawn from."""

    scores: Array
    """What is watched, as dense ranks of its float16 values."""
    classes: Array
    """The predicted classes."""
    parts: dict[str, Array]
    """Which images are which."""
    frequencies: Array
    """Of predicted classes, among images that are not in the pool."""


def passes(name: str, data: str, foreign: dict[str, str], work: Path, images: int | None) -> Pool:
    """Return the scores of test images, corrupted ones and foreign ones by a bundled model."""
    model = candid.load(name)
    score = WatchedScore.of(model)
    runner = Runner(model, folder=work / name)
    test = open_part(data, model.class_names, "test", model.record.config).split.subsample(images)
    some = test.subsample(min(2000, len(test)))
    found: dict[str, tuple[Array, Array]] = {}

    def take(part: str, split: Split, severity: int | None = None) -> Array:
        transform = None if severity is None else _transform(CORRUPTION, severity, 0)
        got = runner.predictions(split, model.preprocessing, part, score.measures, transform)
        assert got is not None
        seen = np.array(score.sightings(got.statistics))
        found[part] = seen[:, 0], seen[:, 1]
        return got.labels

    labels = take("test", test)
    for severity in SEVERITIES:
        take(f"severity {severity}", some, severity)
    for part, spec in foreign.items():
        split = open_images(spec, model.preprocessing)
        split = split.subsample(min(2000, len(split))).preprocess(model.preprocessing)
        take(part, split)
    held_out = score.held_out.statistics["predicted"]
    return pooled(found, labels, np.bincount(held_out, minlength=len(model.class_names)))


def pooled(found: dict[str, tuple[Array, Array]], labels: Array, counts: Array) -> Pool:
    """Return the pool of several parts; those of one true class are called 'class 0', 'class 1', ..."""
    ends = np.cumsum([0, *(len(scores) for scores, _ in found.values())])
    parts = {name: np.arange(*ends[i : i + 2]) for i, name in enumerate(found)}
    parts |= {f"class {y}": np.flatnonzero(labels == y) for y in np.unique(labels)}
    scores = np.concatenate([scores for scores, _ in found.values()])
    classes = np.concatenate([classes for _, classes in found.values()]).astype(np.int64)
    dense = np.unique(bins_of(scores), return_inverse=True)[1]
    return Pool(dense, classes, parts, (counts + 1) / (counts + 1).sum())


def sequential(bins: Array, held_out: int, uniform: Array) -> Array:
    """Return the p-values of S streams among held-out images and all earlier ones, (S, T).

    Args:
        bins: small whole numbers of the held-out images, then of the stream, (S, n + T).
        held_out: n.
        uniform: numbers that break ties, (S, T).
    """
    streams, size = len(bins), 1 << int(bins.max() + 1).bit_length()
    counts = np.zeros((streams, size), dtype=np.int32)
    rows = np.arange(streams)
    np.add.at(counts, (rows[:, None], bins[:, :held_out]), 1)
    ends, low = np.arange(1, size + 1), np.arange(1, size + 1) & -np.arange(1, size + 1)
    sums = np.pad(counts.cumsum(1, dtype=np.int32), ((0, 0), (1, 0)))
    tree = np.pad(sums[:, ends] - sums[:, ends - low], ((0, 0), (1, 0)))  # Fenwick: sums of the low bits
    found = np.empty(uniform.shape)
    for t in range(uniform.shape[1]):
        own = bins[:, held_out + t]
        at = own + 1
        while (
            at <= size
        ).any():  # all streams take the same number of steps: those that are done add nothing
            inside = at <= size
            tree[rows[inside], at[inside]] += 1
            at = at + (at & -at)
        counts[rows, own] += 1
        below, at = np.zeros(streams, dtype=np.int64), own + 1
        while at.any():
            below += np.where(at > 0, tree[rows, at], 0)
            at = at & (at - 1)
        n = held_out + t + 1
        found[:, t] = (n - below + uniform[:, t] * counts[rows, own]) / n
    return found


def fixed(bins: Array, held_out: int, uniform: Array) -> Array:
    """Return the p-values of S streams among the held-out images alone: these are not independent."""
    found = np.empty(uniform.shape)
    for i, (row, u) in enumerate(zip(bins, uniform, strict=True)):
        known, new = np.sort(row[:held_out]), row[held_out:]
        below, upto = np.searchsorted(known, new, "left"), np.searchsorted(known, new, "right")
        found[i] = (held_out - upto + u * (upto - below + 1)) / (held_out + 1)
    return found


def log_wealth(bets: Bets, p: Array) -> Array:
    """Return the logarithm of the wealth after each image, (S, T)."""
    wealth, found = Wealth.on(bets, p.shape[:1]), np.empty(p.shape)
    for t in range(p.shape[1]):
        wealth.step(bets.factors(p[:, t]))
        found[:, t] = wealth.log
    return found


def cusum(p: Array) -> Array:
    """Return a CUSUM of the logarithm of the bet 0.8 + 0.2 * 0.3 p^-0.7, (S, T)."""
    gains, found = np.log(0.8 + 0.06 * p**-0.7), np.empty(p.shape)
    value = np.zeros(len(p))
    for t in range(p.shape[1]):
        value = np.maximum(value, 0) + gains[:, t]
        found[:, t] = value
    return found


def first(values: Array, threshold: float) -> Array:
    """Return the number of images until each stream reaches a threshold, (S,); infinite if it never does."""
    reached = values >= threshold
    return np.where(reached.any(1), 1.0 + reached.argmax(1), math.inf)


def drawn(pool: Pool, streams: int, n: int, length: int, seed: int) -> tuple[Array, np.random.Generator]:
    """Return numbers of quiet images, held-out ones first, (S, n + T)."""
    random = np.random.default_rng(seed)
    return random.choice(pool.parts["test"], (streams, n + length)), random


def level(pool: Pool, streams: int, n: int, length: int) -> dict[str, Any]:
    """Return the share of quiet streams that ever alarm, for sequential ranks and for fixed ones."""
    rows, random = drawn(pool, streams, n, length, 0)
    u = random.random((2, streams, length))
    found: dict[str, Any] = {"streams": streams, "images": length, "held_out": n}
    found["allowed"] = int(binom.ppf(0.975, streams, LEVEL)) / streams
    bets = ScoreBets(), FrequencyBets(pool.frequencies)
    for name, ranks in (("sequential", sequential), ("fixed", fixed)):
        scores = log_wealth(bets[0], ranks(pool.scores[rows], n, u[0]))
        classes = log_wealth(bets[1], ranks(pool.classes[rows], n, u[1]))
        rings = {
            "scores": scores.max(1) >= -math.log(LEVEL),
            "classes": classes.max(1) >= -math.log(LEVEL),
            "both": np.maximum(scores, classes).max(1) >= -math.log(LEVEL / 2),
        }
        found[name] = {key: float(value.mean()) for key, value in rings.items()}
        if name == "fixed":
            found["cusum"] = float(np.quantile(cusum(ranks(pool.scores[rows], n, u[0])).max(1), 1 - LEVEL))
    return found


Change = Callable[[Array, int, np.random.Generator], None]
"""Changes the numbers of images of streams, in place, from an image of the stream on."""


def foreign(pool: Pool, part: str, share: float) -> Change:
    """Return the change to images of which a share comes from another part."""

    def change(rows: Array, start: int, random: np.random.Generator) -> None:
        new = random.random(rows[:, start:].shape) < share
        rows[:, start:][new] = random.choice(pool.parts[part], int(new.sum()))

    return change


def slow(pool: Pool, part: str, images: int) -> Change:
    """Return the change in which the share of another part rises from 0 to 1 within a number of images."""

    def change(rows: Array, start: int, random: np.random.Generator) -> None:
        share = np.minimum(np.arange(rows.shape[1] - start) / images, 1)
        new = random.random(rows[:, start:].shape) < share
        rows[:, start:][new] = random.choice(pool.parts[part], int(new.sum()))

    return change


def changes(pool: Pool) -> dict[str, Change]:
    """Return the changes that are measured."""
    found = {
        f"{CORRUPTION.replace('_', ' ')}, severity {s}": foreign(pool, f"severity {s}", 1) for s in SEVERITIES
    }
    for part in ("tiny20", "mnist"):
        if part in pool.parts:
            found |= {f"{share:.0%} {part}": foreign(pool, part, share) for share in (0.05, 0.2)}
    # a class of ten with a share of 0.1 becomes twice as frequent: 1/9 of the others are replaced by it
    found["a class twice as frequent"] = foreign(pool, "class 3", 1 / 9)
    found["slow: to severity 3 in 4000 images"] = slow(pool, "severity 3", HORIZON)
    return found


def peers(folder: Path | None) -> dict[str, Any]:
    """Return crepes' martingales by name, from a folder that has crepes."""
    if folder is None:
        return {}
    sys.path.append(str(folder))
    crepes = import_module("crepes.martingales")
    rates = (0.0001, 0.001, 0.01, 0.1)
    return {
        "crepes SimpleJumper": crepes.SimpleJumper(),
        "crepes SleeperStayer": crepes.SleeperStayer(),
        "crepes Composite": crepes.CompositeMartingale([crepes.SimpleJumper(J=rate) for rate in rates]),
    }


class Setting(NamedTuple):
    """How changes are measured."""

    streams: int
    held_out: int
    threshold: float
    """Of the CUSUM."""
    peers: dict[str, Any]


def delays(pool: Pool, change: Change, start: int, setting: Setting) -> dict[str, Any]:
    """Return the delay of each method after a change: median, 90 % point, and the share found in time."""
    streams, n, threshold, others = setting
    rows, random = drawn(pool, streams, n, start + HORIZON, 1)
    stream = rows[:, n:]
    change(stream, start, random)
    u = random.random((2, streams, start + HORIZON))
    p = sequential(pool.scores[rows], n, u[0])
    scores = log_wealth(ScoreBets(), p)
    classes = log_wealth(FrequencyBets(pool.frequencies), sequential(pool.classes[rows], n, u[1]))
    found = {
        "both watches": first(np.maximum(scores, classes), -math.log(LEVEL / 2)),
        "scores alone": first(scores, -math.log(LEVEL)),
        "classes alone": first(classes, -math.log(LEVEL)),
        "CUSUM, tuned": first(cusum(fixed(pool.scores[rows], n, u[0])), threshold),
    }
    for name, peer in others.items():
        at = [peer.apply(each, c=1 / LEVEL) for each in p]
        found[name] = np.array([math.inf if i == len(p[0]) else 1.0 + i for i in at])
    return {name: summary(when - start) for name, when in found.items()}


def summary(delay: Array) -> dict[str, float | None]:
    """Return the median and the 90 % point of delays; those of alarms before the change are left out."""
    after = delay[delay > 0]
    points = np.quantile(after, (0.5, 0.9), method="inverted_cdf")
    median, ninety = (None if math.isinf(point) else float(point) for point in points)
    return {"median": median, "90 %": ninety, "found": float(np.isfinite(after).mean())}


def synthetic() -> Pool:
    """Return a pool of scores with many ties: counts, of which a third are 0; four classes."""
    random = np.random.default_rng(7)
    scores = random.poisson(1.1, 20_000).astype(np.float64)
    classes = random.choice(4, 20_000, p=[0.4, 0.3, 0.2, 0.1])
    counts = np.array([40, 30, 20, 10])
    return pooled({"test": (scores, classes)}, classes, counts)


def with_drawn_scores(change: str, streams: int, n: int, length: int) -> dict[str, Any]:
    """Return when a watch of drawn scores rings, which shares its level: with power bets alone, and now."""
    (share, rise), random = DRAWN[change], np.random.default_rng(0)
    scores = random.normal(size=(streams, n + length))
    scores[:, n:] += rise * (random.random((streams, length)) < share)
    bins = np.unique(scores.round(2), return_inverse=True)[1].reshape(scores.shape)
    p = sequential(bins, n, random.random((streams, length)))
    kinds: dict[str, Callable[[int], Bets]] = {"power bets": PowerBets, "now": ScoreBets}
    return {
        f"{name}, {text}": summary(first(log_wealth(kind(sides), p), -math.log(LEVEL / 2)))
        for sides, text in ((2, "two sides"), (1, "one side"))
        for name, kind in kinds.items()
    }


def after_teaching(streams: int, length: int) -> dict[str, Any]:
    """Return when the watch of classes rings if an eighth of the held-out photos are of a taught class.

    No photo of the stream is of this class, or 30 %. Of its held-out photos 2 of 38 look like a fitted class.
    """
    shares, random = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]), np.random.default_rng(0)
    taught, held_out = len(shares), 262
    old = random.choice(taught, (streams, held_out + length), p=shares)
    new = random.random((streams, length)) < 0.3
    photos = np.concatenate((np.zeros((streams, 2), dtype=np.int64), np.full((streams, 36), taught)), 1)
    found = {}
    for stream, is_new in {"no photo of the class": np.zeros_like(new), "30 % of the class": new}.items():
        classes = np.concatenate((photos, old), 1)
        classes[:, -length:][is_new] = taught
        u, n = random.random((streams, length)), classes.shape[1] - length
        counts = {"taught photos skipped": 88 * shares, "counted": np.append(88 * shares, 12)}
        for name, each in counts.items():
            path = class_wealth(classes, n, FrequencyBets(each + 1), u)
            found[f"{name}, {stream}"] = summary(first(path, -math.log(LEVEL / 2)))
    return found


def class_wealth(classes: Array, held_out: int, bets: FrequencyBets, uniform: Array) -> Array:
    """Return the wealth of a watch of classes, (S, T), which skips images of classes that it has no bets on.

    Args:
        classes: of the held-out images, then of the stream, (S, n + T).
        held_out: n.
        bets: on the first classes.
        uniform: numbers that break ties, (S, T).
    """
    fitted = len(bets.frequencies)
    counts = np.stack([np.bincount(row[row < fitted], minlength=fitted) for row in classes[:, :held_out]])
    p = np.full(uniform.shape, np.inf)
    for t, u in enumerate(uniform.T):
        rows = np.flatnonzero(classes[:, held_out + t] < fitted)
        y = classes[rows, held_out + t]
        counts[rows, y] += 1
        upto = counts[rows].cumsum(1)
        n = upto[:, -1]
        p[rows, t] = (n - upto[np.arange(len(rows)), y] + u[rows] * counts[rows, y]) / n
    seen = np.isfinite(p)
    together = np.take_along_axis(p, np.argsort(~seen, axis=1, kind="stable"), 1)
    path = log_wealth(bets, np.where(np.isfinite(together), together, 0.5))
    wealth: Array = np.take_along_axis(np.pad(path, ((0, 0), (1, 0))), seen.cumsum(1), 1)
    return wealth


def drawn_table(streams: int, length: int) -> str:
    """Return when watches of drawn streams ring, in Markdown."""
    rows = {
        f"{change}, {n} held out": with_drawn_scores(change, streams, n, length)
        for n in (150, 400)
        for change in DRAWN
    }
    taught = after_teaching(streams, length)
    lines: list[str] = []
    for name, found in {**rows, "after a class was taught": taught}.items():
        if not lines or name not in rows:
            lines += ["", f"| change | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
        lines.append(f"| {name} | {' | '.join(map(_cell, found.values()))} |")
    return "\n".join(lines) + "\n"


def table(results: dict[str, Any]) -> str:
    """Return the figures in Markdown."""
    lines = ["| quiet streams | ranks | scores | classes | both |", "|---|---|---|---|---|"]
    for name, found in results["level"].items():
        for ranks in ("sequential", "fixed"):
            cells = " | ".join(f"{100 * share:.2f} %" for share in found[ranks].values())
            lines.append(f"| {name} | {ranks} | {cells} |")
    for start, by_change in results["delays"].items():
        names = list(next(iter(by_change.values())))
        lines += ["", f"| change at image {start} | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for change, found in by_change.items():
            lines.append(f"| {change} | {' | '.join(_cell(found[name]) for name in names)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any]) -> str:
    median, ninety = ("–" if found[key] is None else f"{found[key]:.0f}" for key in ("median", "90 %"))
    return f"{median} ({ninety}; {100 * found['found']:.3g} %)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.drift", description=__doc__)
    parser.add_argument("data", metavar="DATA", nargs="?", help="CIFAR-10 as a folder of images")
    parser.add_argument("--tiny", help="photos of other kinds")
    parser.add_argument("--mnist", help="MNIST")
    parser.add_argument("--model", default="cifar10-resnet", help="a bundled model")
    parser.add_argument("--images", type=int, help="use this number of test images, evenly spread")
    parser.add_argument("--streams", type=int, default=2000, help="quiet streams")
    parser.add_argument("--length", type=int, default=5000, help="images in each")
    parser.add_argument("--held-out", type=int, default=500, help="held-out images of each")
    parser.add_argument("--changed", type=int, default=200, help="streams with each change")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/drift"), help="the folder for what is written"
    )
    parser.add_argument("--peers", type=Path, help="a folder that has crepes")
    asked = parser.parse_args(arguments)
    if asked.data is None:
        print(drawn_table(asked.streams, min(asked.length, 1000)))
        return
    others = {"tiny20": asked.tiny, "mnist": asked.mnist}
    pool = passes(
        asked.model,
        asked.data,
        {name: spec for name, spec in others.items() if spec},
        asked.work,
        asked.images,
    )
    size = asked.streams, asked.held_out, asked.length
    levels = {asked.model: level(pool, *size), "synthetic, with ties": level(synthetic(), *size)}
    threshold = levels[asked.model]["cusum"]
    setting = Setting(asked.changed, asked.held_out, threshold, peers(asked.peers))
    late = {
        str(start): {name: delays(pool, change, start, setting) for name, change in changes(pool).items()}
        for start in (0, 1000)
    }
    results = {"model": asked.model, "changed_streams": asked.changed, "level": levels, "delays": late}
    text = table(results)
    write_texts({"drift.json": json.dumps(results, indent=1) + "\n", "drift.md": text}, asked.work)
    print(text)


if __name__ == "__main__":
    main()

"""Measure by simulation whether levels hold: copies, groups, few images, false discoveries.

``python -m experiments.levels copies``: held-out images that come once, twice and five times
``python -m experiments.levels calibrated``: the same through the held-out scores of ``candid calibrate``
``python -m experiments.levels groups``: one large group, and small ones that are harder
``python -m experiments.levels few``: few held-out images, cross-fitted
``python -m experiments.levels fdr``: batches with 0, 1 and 10 % of novel images

Features are Gaussian: 64 numbers, ten classes, and the logits are the exact log posteriors of a model that
knows the class means. Each set of held-out images is a draw of its own, and so are the new images. Next to
each share is the end of its exact one-sided 95 % band: if every set kept its level exactly, the share over
all sets would be above it with a probability of at most 5 %.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import betabinom

import candid
from candid._support.numbers import Array
from candid.inference.predictions import Predictions
from candid.judging.calibrate import held_out_scores, scored
from candid.trust.conformal import discoveries, rejected_ranks
from candid.trust.promises import Levels
from candid.trust.ranking import ALL, OTHERS
from candid.trust.rule import Rule
from candid.trust.scores import Columns, available_scores
from experiments.tables import markdown

LEVELS = (0.01, 0.05, 0.1)
CLASSES, FEATURES, SPREAD = 10, 64, 0.45
UNKNOWN = {"near": 1.5, "far": 6.0}
"""How many times as far from the centre the unknown class is as known ones."""
NEW = 1000
"""New images for each set of held-out ones."""
SCORES = ("combined", "mahalanobis++", "knn")
ROWS, COPIES = (150, 400, 1000), (1, 2, 5)
SMALL_GROUPS = {0.05: (0.95, 5), 0.1: (0.9, 10), 0.01: (0.99, 2)}
"""By level: the share of the large group, and the number of small ones."""
HARDER = 1.6
"""The standard deviation of features in small groups; 1 in the large one."""
FEW = (50, 100, 180, 300)
FDR, FIXED = 0.1, 0.05
HELD_OUT, BATCH = (2000, 10_000), 1000
NOVEL = ((0.0, "near"), (0.01, "near"), (0.1, "near"), (0.01, "far"), (0.1, "far"))
Cells = list[tuple[int, int, float]]
"""New images, ranking ones and the level, by set and group."""


class World:
    """Images of known classes, and of one that is unknown."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.means = SPREAD * random.normal(size=(CLASSES + 1, FEATURES))

    def draw(self, random: np.random.Generator, n: int, scale: Any = 1.0) -> tuple[Array, Array]:
        """Return features and labels of n ordinary images; ``scale`` is the spread within classes, (n,)."""
        labels = random.integers(CLASSES, size=n)
        noise = random.normal(size=(n, FEATURES)) * np.reshape(scale, (-1, 1))
        return self.means[labels] + noise, labels

    def held_out(self, random: np.random.Generator, n: int) -> tuple[Array, Array]:
        """Return n images with at least one of each class."""
        while True:
            features, labels = self.draw(random, n)
            if len(np.unique(labels)) == CLASSES:
                return features, labels

    def unknown(self, random: np.random.Generator, n: int, kind: str) -> Array:
        """Return features of n images of the unknown class."""
        return UNKNOWN[kind] * self.means[CLASSES] + random.normal(size=(n, FEATURES))

    def logits(self, features: Array) -> Array:
        """Return what the model says, (N, CLASSES)."""
        means = self.means[:CLASSES]
        return features @ means.T - (means**2).sum(1) / 2


WORLD = World()


class Count(NamedTuple):
    """What became of a level over all sets."""

    share: float
    """Of new images that were called novel, or of sets that miss the true class."""
    band: float
    """The end of the exact one-sided 95 % band."""

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.2f} ({100 * self.band:.2f}){' **above**' if self.share > self.band else ''}"
        )


def band(cells: Cells) -> float:
    """Return the 95 % quantile of the share if each cell keeps its level: a sum of beta-binomial counts."""
    total = sum(new for new, _, _ in cells)
    size = 1 << total.bit_length()
    product = np.ones(size // 2 + 1, complex)
    for new, n, level in cells:
        rank = rejected_ranks(n, level)
        counts = betabinom.pmf(np.arange(new + 1), new, rank, n + 1 - rank) if rank else np.ones(1)
        product *= np.fft.rfft(counts, size)
    mass = np.fft.irfft(product, size).cumsum()
    return float(np.searchsorted(mass, 0.95) / total)


class Tally:
    """Counts of several levels over sets."""

    def __init__(self) -> None:
        self._hits: dict[tuple[str, float], int] = {}
        self._cells: dict[tuple[str, float], Cells] = {}

    def add(self, kind: str, level: float, hits: Array, ranking: int, in_force: float | None = None) -> None:
        """Count the hits of new images, (N,), ranked among ``ranking`` ones."""
        key = kind, level
        self._hits[key] = self._hits.get(key, 0) + int(hits.sum())
        cell = len(hits), ranking, level if in_force is None else in_force
        self._cells.setdefault(key, []).append(cell)

    def __getitem__(self, key: tuple[str, float]) -> Count:
        cells = self._cells[key]
        return Count(self._hits[key] / max(sum(new for new, _, _ in cells), 1), band(cells))

    def row(self, kind: str) -> list[str]:
        """Return the cells of a table."""
        return [str(self[kind, level]) for level in LEVELS]


def count(tally: Tally, rule: Rule, new: Columns, labels: Array) -> None:
    """Count novel images and class sets that miss, at each level."""
    p, posterior = rule.p_values(new), new["posterior"]
    true = posterior[np.arange(len(labels)), labels] / posterior.max(1)
    n, images = sum(r.distinct.count(ALL) for r in rule.rankings), rule.truths.count(ALL)
    for level in LEVELS:
        tally.add("novel", level, p <= level + 1e-12, n)
        tally.add("missed", level, true < rule.truths.smallest_ratio(ALL, level), images)


Made = Iterator[tuple[str, Rule, Callable[[Array], Columns]]]
"""Names of scores, their rules, and what makes columns of the features of new images."""


def by_monitor(features: Array, labels: Array) -> Made:
    """Yield the rules of monitors; levels are counted from p-values, so any will do."""
    for score in SCORES:
        monitor = candid.Monitor(score=score, novelty=0.5, error=0.5)
        rule = monitor.fit(WORLD.logits(features), labels, features).fitted.rule
        yield score, rule, said_of


def said_of(features: Array) -> Columns:
    """Return the columns of new images."""
    return Columns({"logits": WORLD.logits(features), "features": features.astype(np.float32)})


def by_calibrate(features: Array, labels: Array) -> Made:
    """Yield the rules of a model without a density, calibrated without training images."""

    def predictions(features: Array, labels: Array, keys: Array) -> Predictions:
        columns = {"features": features.astype(np.float16), "keys": keys}
        names = ("",) * len(features)
        return Predictions(names, labels, WORLD.logits(features), np.zeros(CLASSES), columns)

    def said(features: Array) -> Columns:
        unknown = np.full(len(features), -1)
        return scored(predictions(features, unknown, unknown), held_out.learned).statistics

    held_out = held_out_scores(
        predictions(features, labels, np.unique(features[:, 0], return_inverse=True)[1])
    )
    names = {score.name for score in available_scores(held_out.statistics)}
    # with few different images nothing is fitted to features
    for score in [score for score in SCORES if score in names] or ["energy"]:
        yield score, held_out.rule(Levels(score=score, novelty=0.5, error=0.5)), said


def _tallies(
    sets: int, n: int, times: int, make: Callable[[Array, Array], Made] = by_monitor
) -> dict[str, Tally]:
    """Return the counts of each score with sets of n rows, in which each image is there several times."""
    tallies: dict[str, Tally] = {}
    for seed in range(sets):
        random = np.random.default_rng((n, times, seed))
        features, labels = WORLD.held_out(random, n // times)
        order = random.permutation(np.repeat(np.arange(len(labels)), times))
        new, truth = WORLD.draw(random, NEW)
        for score, rule, columns in make(features[order], labels[order]):
            count(tallies.setdefault(score, Tally()), rule, columns(new), truth)
    return tallies


def copies(sets: int, make: Callable[[Array, Array], Made] = by_monitor) -> str:
    """Return how levels hold if each held-out image is there several times."""
    rows = []
    for n in ROWS:
        for times in COPIES:
            for score, tally in _tallies(sets, n, times, make).items():
                rows.append([str(n), str(times), score, *tally.row("novel")])
            rows.append([str(n), str(times), "class sets", *tally.row("missed")])
            print(rows[-len(SCORES) - 1 :], flush=True)
    return markdown(["held-out rows", "each image, times", "score", *_percents()], rows)


def few(sets: int) -> str:
    """Return how levels hold if few images are cross-fitted."""
    tallies = {n: _tallies(sets, n, 1) for n in FEW}
    rows = [
        [str(n), score, *tally.row("novel")] for n, each in tallies.items() for score, tally in each.items()
    ]
    return markdown(["held-out images", "score", *_percents()], rows)


def groups(sets: int) -> str:
    """Return how levels hold over all images and within groups, of which all but one are small."""
    rows = []
    for level, (large, smalls) in SMALL_GROUPS.items():
        tally, allowed = Tally(), []

        def draw(random: np.random.Generator, n: int, share: float, small: int) -> tuple[Array, ...]:
            group = np.where(random.random(n) < share, 0, 1 + random.integers(small, size=n))
            return group, *WORLD.draw(random, n, np.where(group == 0, 1.0, HARDER))

        for seed in range(sets):
            random = np.random.default_rng((round(1000 * level), seed))
            group, features, labels = draw(random, 1000, large, smalls)
            monitor = candid.Monitor(novelty=level, error=level, confidence=0.0)
            monitor.fit(WORLD.logits(features), labels, features, by=group)
            rule = monitor.fitted.rule
            new_group, new, truth = draw(random, NEW, large, smalls)
            columns = said_of(new)
            names = list(monitor.fitted.group_names)
            numbers = np.array([names.index(str(g)) if str(g) in names else ALL for g in new_group])
            ranked = rule.ranked_in(numbers)
            novel = rule.p_values(columns, numbers) <= [rule.cuts[g] for g in ranked]
            hit = {
                "novel": novel,
                "missed": ~rule.named(columns["posterior"], numbers)[np.arange(NEW), truth],
            }
            for cell in np.unique(ranked).tolist():
                promises, here = rule.promises[cell], ranked == cell
                where = "small groups" if cell in (OTHERS, ALL) else "large group"
                sizes = rule.rankings[0].count(cell), rule.truths.count(cell)
                forces = promises.novelty.in_force, promises.error.in_force
                for (kind, hits), size, force in zip(hit.items(), sizes, forces, strict=True):
                    for place in (where, "all images"):
                        tally.add(f"{kind}, {place}", level, hits[here], size, force)
                if where == "small groups":
                    allowed.append(forces)
        for place in ("all images", "large group", "small groups"):
            counts = [str(tally[f"{kind}, {place}", level]) for kind in ("novel", "missed")]
            means = np.mean(allowed, axis=0).tolist() if place == "small groups" else []
            in_force = [f"{100 * mean:.1f}" for mean in means] or ["", ""]
            rows.append([f"{large:.0%}, {level:.0%}", place, *counts, *in_force])
    head = ["large group, level", "", "novel (band)", "missed (band)", "novelty in force", "error in force"]
    return markdown(head, rows)


def _batch(random: np.random.Generator, share: float, kind: str) -> tuple[Array, Array]:
    """Return a batch of images, and which of them are novel."""
    novel = np.arange(BATCH) < round(share * BATCH)
    ordinary, _ = WORLD.draw(random, BATCH)
    return np.where(novel[:, None], WORLD.unknown(random, BATCH, kind), ordinary), novel


def _discovered(chosen: Array, novel: Array) -> tuple[float, float]:
    """Return the share of false discoveries, and the share of novel images that are discovered."""
    false = float((chosen & ~novel).sum()) / max(int(chosen.sum()), 1)
    return false, float(chosen[novel].mean()) if novel.any() else float("nan")


def fdr(batches: int) -> str:
    """Return false discoveries and power of ``fdr`` and of a fixed level, each batch with its own monitor."""
    rows = []
    for n in HELD_OUT:
        outcomes: dict[tuple[float, str, str], list[tuple[float, float]]] = {}
        for seed in range(batches):
            random = np.random.default_rng((n, seed))
            features, labels = WORLD.held_out(random, n)
            monitor = candid.Monitor(fdr=FDR).fit(WORLD.logits(features), labels, features)
            rule = monitor.fitted.rule
            for share, kind in NOVEL:
                new, novel = _batch(random, share, kind)
                p = rule.p_values(said_of(new))
                for name, chosen in (("fdr", discoveries(p, FDR)), ("level", p <= FIXED + 1e-12)):
                    outcomes.setdefault((share, kind, name), []).append(_discovered(chosen, novel))
        ranking = rule.rankings[0].count(ALL)
        for (share, kind, name), pairs in outcomes.items():
            false, power = np.array(pairs).T
            error = false.std(ddof=1) / len(false) ** 0.5
            shown = f"{100 * false.mean():.2f} ± {100 * error:.2f}"
            called = f"fdr {FDR:.0%}" if name == "fdr" else f"novelty {FIXED:.0%}"
            found = f"{100 * power.mean():.1f}" if share else "–"
            batch = f"{share:.0%} {kind}" if share else "none"
            rows.append([f"{n:,} ({ranking:,})", batch, called, shown, found])
    head = ["held out (ranking)", "novel images", "rule", "false discoveries (%)", "novel ones found (%)"]
    return markdown(head, rows)


def _percents() -> Iterator[str]:
    return (f"at {level:.0%} (band)" for level in LEVELS)


STUDIES: dict[str, Callable[[int], str]] = {
    "copies": copies,
    "calibrated": lambda sets: copies(sets, by_calibrate),
    "groups": groups,
    "few": few,
    "fdr": fdr,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print a table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.levels", description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--sets", type=int, help="held-out sets (60), or batches (500)")
    asked = parser.parse_args(arguments)
    print(STUDIES[asked.study](asked.sets or (500 if asked.study == "fdr" else 60)))


if __name__ == "__main__":
    main()

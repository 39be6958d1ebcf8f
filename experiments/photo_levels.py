"""Measure verdicts on photos: next to a plain threshold, and with kinds of classes.

``python -m experiments.photo_levels verdicts DATA_FOLDER``: photo sets, one of them uneven
``python -m experiments.photo_levels bundled DATA_FOLDER``: models of CIFAR-10, and ``everyday``
``python -m experiments.photo_levels trees DATA_FOLDER``: ``everyday`` on halves of ImageNet's photos
``python -m experiments.photo_levels folders DATA_FOLDER``: ``clothing10`` in nested folders

``DATA_FOLDER`` has the folders ``bloodcells8``, ``trashnet6``, ``clothing10``, ``clothing-other``,
``caltech99``, ``imagenet-val`` and ``cifar10/images``. Features, passes and models are stored in ``--work``.

The plain threshold accepts as many images as the verdicts, those with the largest posteriors of all images
that pass the same test of novelty. The difference of the two accuracies is paired; its 95 % interval comes
from 2000 bootstrap samples of the images, in each of which both rules accept equally many.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from candid._support.numbers import Array
from candid.data import Part
from candid.data.datasets import open_part
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.judging.held_out import measures_of, needed
from candid.models import checkpoint
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.eyes import EYES
from candid.trust.conformal import rejected_ranks
from candid.trust.promises import Levels
from candid.trust.ranking import ALL
from candid.trust.rule import Rule
from candid.trust.scores import Columns
from candid.trust.sets import MASS_ROUNDING, Posterior
from candid.trust.tree import LIST, NAMED, Tree
from candid.trust.verdict import Examination
from experiments.open_world.teaching import photo_model, said
from experiments.photo_sets import SPLITS, PhotoSet, Reader
from experiments.tables import decimal, markdown

UNEVEN = "trashnet6"
COUNTS = (25, 200)
"""Photos of the first two classes of the uneven set; all photos of the others."""
CIFAR = ("cifar10-beta1", "cifar10-betainf", "cifar10-resnet")
NOVELTIES = (0.01, 0.02, 0.05, 0.1, 0.2)
HALVES, SAMPLES = 400, 2000
ERRORS, CONFIDENCES = (0.01, 0.05, 0.1), (0.0, 0.8)
KINDS = ("one class", f"list of 2 or {LIST}", "kind <= 20", f"kind 21 to {NAMED}", "no common kind")
EXAMPLES = (6, 9, 6, 6, 3)
"""How many photos of each of these are shown."""
FOLDERS = {
    "tops": ("longsleeve", "outwear", "shirt", "t-shirt"),
    "bottoms": ("pants", "shorts"),
    "skirts": ("dress", "skirt"),
    "accessories": ("hat", "shoes"),
}


class Judged(NamedTuple):
    """What is said of N images of known classes, and of unknown ones; all but the last are (N,)."""

    accepted: Array
    novel: Array
    confidence: Array
    right: Array
    unknown: tuple[Array, Array, Array]
    """The first three of images of unknown kinds."""


def judged(rule: Rule, known: Columns, labels: Array, unknown: Columns | None = None) -> Judged:
    """Return what a rule says."""

    def said(columns: Columns) -> tuple[Array, Array, Array]:
        names = [""] * columns.images
        classes = tuple(map(str, range(columns["posterior"].shape[1])))
        verdicts = np.array([each.verdict for each in rule.examine(columns, names, classes)])
        return verdicts == "accept", verdicts == "novel", columns["posterior"].max(1)

    nothing = (np.zeros(0, bool),) * 3
    right = known["posterior"].argmax(1) == labels
    return Judged(*said(known), right, nothing if unknown is None else said(unknown))


def _plain(confidence: Array, allowed: Array, count: int) -> Array:
    """Return the ``count`` most confident rows of those that are allowed."""
    rows = np.flatnonzero(allowed)
    return rows[np.argsort(-confidence[rows], kind="stable")[:count]]


class Compared(NamedTuple):
    """Shares over all parts of a set."""

    accepted: float
    ambiguous: float
    novel: float
    wrong: float
    unknown: float
    plain_wrong: float
    plain_unknown: float
    difference: tuple[float, float, float]
    """The accuracy of accepted images less that of the plain threshold: value, low and high."""
    alone_wrong: float
    """Of a plain threshold that accepts novel images, too."""
    alone_unknown: float

    def cells(self) -> list[str]:
        """Return the cells of a table, in percent."""
        value, low, high = (100 * end for end in self.difference)
        shares = [decimal(None if np.isnan(share) else share, 1, 100) for share in (*self[:7], *self[8:])]
        return [*shares[:7], f"{value:+.2f} ({low:+.2f} to {high:+.2f})", *shares[7:]]


HEAD = (
    "accepted",
    "ambiguous",
    "novel",
    "wrong of accepted",
    "unknown accepted",
    "plain: wrong",
    "unknown accepted",
    "difference (points)",
    "no novelty test: wrong",
    "unknown accepted",
)


def compared(parts: Sequence[Judged]) -> Compared:
    """Return the shares; each part has its own rule."""
    everything = [np.concatenate(columns) for columns in zip(*(part[:4] for part in parts), strict=True)]
    accepted, novel, _, right = everything
    plain, alone = [], []
    unknown = np.zeros((3, 0), bool)
    for part in parts:
        k = int(part.accepted.sum())
        rows = [_plain(part.confidence, allowed, k) for allowed in (~part.novel, np.ones_like(part.novel))]
        plain.append(part.right[rows[0]])
        alone.append(part.right[rows[1]])
        least = [float(part.confidence[chosen].min()) if k else 2.0 for chosen in rows]
        verdict, strange, confidence = part.unknown
        by_plain = (confidence >= least[0]) & ~strange
        unknown = np.concatenate((unknown, [verdict, by_plain, confidence >= least[1]]), 1)
    shares = unknown.mean(1) if unknown.size else np.full(3, np.nan)
    value = _difference(parts)
    low, high = _interval(parts)
    return Compared(
        accepted.mean(),
        1 - accepted.mean() - novel.mean(),
        novel.mean(),
        1 - right[accepted].mean(),
        shares[0],
        1 - np.concatenate(plain).mean(),
        shares[1],
        (value, low, high),
        1 - np.concatenate(alone).mean(),
        shares[2],
    )


def _difference(parts: Iterable[Judged]) -> float:
    ours = plain = total = 0
    for part in parts:
        k = int(part.accepted.sum())
        ours += int(part.right[part.accepted].sum())
        plain += int(part.right[_plain(part.confidence, ~part.novel, k)].sum())
        total += k
    return (ours - plain) / max(total, 1)


def _interval(parts: Sequence[Judged]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the difference."""
    random, sampled = np.random.default_rng(0), []
    for _ in range(SAMPLES):
        drawn = []
        for part in parts:
            rows = random.integers(0, len(part.right), len(part.right))
            drawn.append(
                Judged(
                    part.accepted[rows],
                    part.novel[rows],
                    part.confidence[rows],
                    part.right[rows],
                    part.unknown,
                )
            )
        sampled.append(_difference(drawn))
    low, high = np.quantile(sampled, (0.025, 0.975))
    return float(low), float(high)


class Study:
    """Where the photos are, and where features, passes and models are stored."""

    def __init__(self, data: Path, work: Path) -> None:
        self.data, self.work = data, work
        self.eye = PackagedEye(EYES["lite0"])

    def verdicts(self) -> str:
        """Judge every photo of each set by a model that has not seen it."""
        sets = Reader(self.eye, self.work / "features").sets(self.data)
        sets[f"{UNEVEN}, uneven"] = uneven(sets[UNEVEN])
        rows, by_level = [], []
        for name, photos in sets.items():
            parts: dict[float, list[Judged]] = {level: [] for level in NOVELTIES}
            for split in range(SPLITS):
                train, held_out, test = photos.parts(split)
                model = photo_model(train, held_out, len(photos.class_names), self.eye)
                known, unknown = said(model, test), said(model, photos.unknown)
                for level, judgements in parts.items():
                    rule = needed(model).rule(Levels(novelty=level))
                    judgements.append(judged(rule, known, test.labels, unknown))
            rows.append([name, *compared(parts[0.05]).cells()])
            for kind, flags in (
                ("unknown", lambda part: part.unknown[0]),
                ("known", lambda part: part.accepted),
            ):
                shares = [np.concatenate([flags(part) for part in some]).mean() for some in parts.values()]
                by_level.append([f"{kind}, {name}", *(f"{100 * share:.0f}" for share in shares)])
            print(rows[-1], by_level[-2:], flush=True)
        levels = markdown(["accepted", *(f"{level:.0%}" for level in NOVELTIES)], by_level)
        return f"{markdown(['', *HEAD], rows)}\n\n{levels}"

    def bundled(self) -> str:
        """Judge test images; of ``everyday``, one half of the held-out photos by the other."""
        rows = []
        for name in CIFAR:
            model = checkpoint.load(name)
            seen = self._pass(model, name, "cifar10/images", "test")
            part = judged(needed(model).rule(Levels()), seen.statistics, seen.labels)
            rows.append([name, *compared([part]).cells()])
            print(rows[-1], flush=True)
        rows.append(["everyday", *compared(self._everyday_halves()).cells()])
        return markdown(["", *HEAD], rows)

    def _pass(self, model: Any, name: str, data: str, part: Part | None = None) -> Predictions:
        opened = open_part(str(self.data / data), model.class_names, part, model.record.config)
        runner = Runner(model, folder=self.work / "work" / name)
        seen = runner.predictions(opened.split, model.preprocessing, "test", measures_of(model))
        assert seen is not None
        return seen

    def _everyday_halves(self) -> list[Judged]:
        model = checkpoint.load("everyday")
        held_out, seen = needed(model), self._pass(model, "everyday", "imagenet-val")
        seen = seen[np.flatnonzero(np.isin(seen.columns["keys"], held_out.statistics["keys"]))]
        order = np.random.default_rng(0).permutation(len(seen))
        halves = order[: len(seen) // 2], order[len(seen) // 2 :]
        parts = []
        for ranking, new in (halves, halves[::-1]):
            rule = Rule.fit(seen[ranking].statistics, seen.labels[ranking], None, None, Levels(), model.tree)
            parts.append(judged(rule, seen[new].statistics, seen.labels[new]))
        return parts

    def trees(self) -> str:
        """Say what ``everyday`` answers about halves of ImageNet's validation photos."""
        model = checkpoint.load("everyday")
        seen = self._pass(model, "everyday", "imagenet-val")
        first = np.unique(seen.labels, return_index=True)[1]
        second = np.setdiff1d(np.arange(len(seen)), first)
        return _of_tree(model.tree, seen, first, second, model.class_names)

    def folders(self) -> str:
        """Train on nested folders, and say what the model answers about photos that it was not fitted to."""
        nested = self.work / "nested"
        for part in ("train", "validation", "test"):
            for kind, names in FOLDERS.items():
                for name in names:
                    (nested / part / kind / name).mkdir(parents=True, exist_ok=True)
                    for photo in (self.data / "clothing10" / part / name).iterdir():
                        link = nested / part / kind / name / photo.name
                        if not link.is_symlink():
                            link.symlink_to(photo)
        out = self.work / "nested-model"
        if not (out / "model").exists():
            import candid

            candid.train(str(nested), out=str(out), tree="folders")
        model = checkpoint.resolve(str(out))
        runner = Runner(model, folder=self.work / "work" / "nested")
        parts = []
        held_out: tuple[Part, ...] = ("val", "test")
        for which in held_out:
            split = open_part(str(nested), model.class_names, which, model.record.config).split
            seen = runner.predictions(split, model.preprocessing, which, measures_of(model))
            assert seen is not None
            parts.append(seen)
        first, second = len(parts[0]), len(parts[1])
        rows = np.arange(first), np.arange(first, first + second)
        return _of_tree(model.tree, Predictions.joined(parts), *rows, class_names=model.class_names)


def uneven(photos: PhotoSet) -> PhotoSet:
    """Return a set with few photos of the first two classes."""
    labels = photos.photos.labels
    few = [np.flatnonzero(labels == y)[:most] for y, most in enumerate(COUNTS)]
    rows = np.concatenate((*few, np.flatnonzero(labels >= len(COUNTS))))
    return replace(photos, photos=photos.photos[rows], own=())


class Answers:
    """What is said of N photos of which the k most probable classes are named, for every k."""

    def __init__(self, tree: Tree, seen: Predictions) -> None:
        posterior = seen.posterior
        order = np.argsort(-posterior, axis=1, kind="stable")
        ordered = np.take_along_axis(posterior, order, 1)
        self.ratios, self._mass = ordered / ordered[:, :1], ordered.cumsum(1)
        self.reach, self.before = tree.reach(posterior, seen.labels)
        covers = np.stack([tree.covers(row) for row in order])
        named, leaves = (covers > 0) & (tree.counts[covers] <= NAMED), tree.counts[covers]
        kinds = np.select([named & (leaves <= 20), named], [2, 3], 4)
        sizes = np.arange(posterior.shape[1])
        self._kinds = np.where(sizes < 1, 0, np.where(sizes < LIST, 1, kinds))  # (N, M): of the first k + 1

    def scores(self, confidence: float) -> Array:
        """Return from where on the answers hold the true classes, (N,)."""
        return np.where(self.before < confidence - MASS_ROUNDING, 1.0, self.reach)

    def kinds(self, rows: Array, ratio: float, confidence: float) -> Array:
        """Return the kind of answer about each of the rows, a number in :data:`KINDS`."""
        conformal = (self.ratios[rows] >= min(ratio, 1)).sum(1)
        likely = (self._mass[rows] < confidence - MASS_ROUNDING).sum(1) + 1
        named = np.maximum(conformal, likely if confidence else 1).clip(max=self.ratios.shape[1])
        return self._kinds[rows, named - 1]

    def measured(self, held_out: Array, new: Array, error: float, confidence: float) -> Array:
        """Return the share of new photos whose answer misses, and those of each kind of answer, (6,)."""
        scores = self.scores(confidence)
        rank = rejected_ranks(len(held_out), error)
        ratio = np.partition(scores[held_out], rank - 1)[rank - 1] if rank else 0.0
        shares = np.bincount(self.kinds(new, ratio, confidence), minlength=len(KINDS)) / len(new)
        return np.array([(scores[new] < ratio).mean(), *shares])


def _of_tree(
    tree: Tree | None, seen: Predictions, first: Array, second: Array, class_names: tuple[str, ...]
) -> str:
    """Return two tables: shares of answers, and examples."""
    assert tree is not None
    answers, rows = Answers(tree, seen), []
    for confidence in CONFIDENCES:
        for error in ERRORS:
            halves = []
            for seed in range(HALVES):
                order = np.random.default_rng(seed).permutation(len(seen))
                half = len(seen) // 2
                halves.append(answers.measured(order[:half], order[half:], error, confidence))
            one = answers.measured(first, second, error, confidence)
            for name, shares in ((f"{HALVES} halves", np.mean(halves, axis=0)), ("first, second", one)):
                cells = [
                    f"{100 * share:.2f}" if i == 0 else f"{100 * share:.1f}" for i, share in enumerate(shares)
                ]
                rows.append([f"{confidence:g}", f"{error:.0%}", name, *cells])
    shares = markdown(["confidence", "error", "photos", "missed", *KINDS], rows)
    return f"{shares}\n\n{_examples(answers, tree, seen, first, second, class_names)}"


def _examples(
    answers: Answers, tree: Tree, seen: Predictions, first: Array, second: Array, names: tuple[str, ...]
) -> str:
    """Return what verdicts say of some photos, evenly spread over those of each kind of answer."""
    held_out = seen[first]
    rule = Rule.fit(held_out.statistics, held_out.labels, None, None, Levels(), tree)
    kinds = answers.kinds(second, rule.smallest_ratios[ALL], rule.levels.confidence)
    rows = []
    for kind, count in enumerate(EXAMPLES):
        of_kind = second[kinds == kind]
        chosen = of_kind[np.linspace(0, len(of_kind) - 1, min(count, len(of_kind))).round().astype(int)]
        posterior, truths = seen.posterior[chosen], seen.labels[chosen]
        for row, named, y in zip(posterior, rule.named(posterior), truths.tolist(), strict=True):
            answer = rule._answer(Posterior(names, row), named, int(named.sum()))
            words = Examination("", Posterior(names, row), None, None, *answer).answer
            rows.append([names[y], words, "yes" if names[y] in answer.classes else "**no**"])
    return markdown(["photo of", "answer", "holds the class"], rows)


STUDIES: dict[str, Callable[[Study], str]] = {
    "verdicts": Study.verdicts,
    "bundled": Study.bundled,
    "trees": Study.trees,
    "folders": Study.folders,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m experiments.photo_levels", description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("data", metavar="DATA_FOLDER", type=Path, help="the folder of the photo sets")
    parser.add_argument("--work", type=Path, default=Path("runs/photo-levels"), help="what is stored")
    asked = parser.parse_args(arguments)
    print(STUDIES[asked.study](Study(asked.data.resolve(), asked.work.resolve())))


if __name__ == "__main__":
    main()

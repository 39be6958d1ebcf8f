"""Teach a photo model a class from a few photos, next to a logistic regression that is retrained."""

import math
import time
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from candid._support.numbers import Array, logsumexp, softmax
from candid._support.randomness import Draws
from candid.inference.metrics import cross_entropy
from candid.inference.predictions import Predictions
from candid.judging.calibrate import held_out_scores
from candid.judging.held_out import HeldOut
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.gaussian import class_scores
from candid.models.photo.head import fit_head
from candid.models.photo.model import PhotoModel
from candid.training.pieces import assembled
from candid.training.remembered import Remembered
from candid.trust.gaussians import unit
from candid.trust.ranking import CombinedRanks
from candid.trust.scores import Columns
from experiments.measures import missed, share
from experiments.photo_sets import Photos, PhotoSet
from experiments.photos import scaling
from experiments.tables import Cell, decimal, table, text

TASKS = (
    ("bloodcells8", "ig"),
    ("trashnet6", "trash"),
    ("clothing10", "dress"),
    ("clothing10", "hat"),
    ("clothing10", "longsleeve"),
)
NUMBERS = (5, 10, 20, 50)
SPLITS = (10, 11, 12, 13)
"""Seeds that had no part in the choice of the formula."""
DRAWS = 5
"""Draws of the photos of the new class in each split."""
PENALTIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
LEVEL = 0.05
B6_SHRINKAGE = 0.6
Figures = dict[str, float]


class Task(NamedTuple):
    """Photos of the known classes and of the new one: to fit, to rank among, to test."""

    old: tuple[Photos, Photos, Photos]
    new: tuple[Photos, Photos, Photos]
    classes: int
    """Known classes, K; the new one has the number K."""

    @classmethod
    def of(cls, photos: PhotoSet, name: str, seed: int) -> "Task":
        """Divide the photos of a set; ``name`` is the class that is taught."""
        if name in photos.class_names:
            number = photos.class_names.index(name)
            new, old = photos.photos[photos.photos.labels == number], photos.photos.without(number)
        else:
            new, old = photos.unknown, photos.photos
        random = Draws(seed)
        classes = int(old.labels.max()) + 1
        return cls(_parts(old, random), _parts(new, random), classes)

    def tested(self) -> tuple[Array, Array, Array]:
        """Return statistics, pooled features and labels of all test photos."""
        old, new = self.old[2], self.new[2]
        labels = np.concatenate((old.labels, np.full(len(new), self.classes)))
        return (
            np.concatenate((old.statistics, new.statistics)),
            np.concatenate((old.pooled, new.pooled)),
            labels,
        )


def _parts(photos: Photos, random: Draws) -> tuple[Photos, Photos, Photos]:
    n = len(photos)
    order = random.permutation(n)
    first, second = int(0.6 * n), int(0.8 * n)
    return photos[order[:first]], photos[order[first:second]], photos[order[second:]]


def recalls(logits: Array, labels: Array) -> Figures:
    """Return balanced accuracy, the recall of the new class and the mean recall of the known ones."""
    answer, new = logits.argmax(1), int(labels.max())
    each = [share(answer[labels == y] == y) for y in range(new + 1)]
    return {"balanced": mean(each), "new": each[new], "old": mean(each[:new])}


class Retrained:
    """A balanced logistic regression on all photos, with the penalty that is best on validation photos."""

    def __init__(self, task: Task, eye: PackagedEye) -> None:
        self.task = task
        self._centre, self._scale = scaling(task.old[0].statistics, eye.groups)
        self._penalties: dict[int, float] = {}

    def logits(self, own: Photos, statistics: Array) -> Array:
        """Return the logits of photos after a training with ``own`` photos of the new class."""
        number = len(own)
        if number not in self._penalties:
            held_out = np.concatenate((self.task.old[1].statistics, self.task.new[1].statistics))
            new = np.full(len(self.task.new[1]), self.task.classes)
            labels = np.concatenate((self.task.old[1].labels, new))
            balanced = {c: recalls(self._fitted(own, c, held_out), labels)["balanced"] for c in PENALTIES}
            self._penalties[number] = max(balanced, key=lambda c: balanced[c])
        return self._fitted(own, self._penalties[number], statistics)

    def _fitted(self, own: Photos, penalty: float, statistics: Array) -> Array:
        from sklearn.linear_model import LogisticRegression

        train = self.task.old[0]
        x = self._scaled(np.concatenate((train.statistics, own.statistics)))
        y = np.concatenate((train.labels, np.full(len(own), self.task.classes)))
        model = LogisticRegression(C=penalty, class_weight="balanced", tol=1e-3, max_iter=500)
        return np.asarray(model.fit(x, y).decision_function(self._scaled(statistics)))

    def _scaled(self, statistics: Array) -> Array:
        return (statistics.astype(np.float64) - self._centre) / self._scale


class PooledSpace:
    """Another space: roots of pooled features of unit length, their covariance shrunk by 0.6."""

    def __init__(self, task: Task) -> None:
        train, held_out = task.old[:2]
        x = self._roots(train.pooled)
        means = np.stack([x[train.labels == y].mean(0) for y in range(task.classes)])
        away = x - means[train.labels]
        covariance = (1 - B6_SHRINKAGE) * away.T @ away / (len(x) - task.classes)
        variance = (away**2).sum() / (len(x) - task.classes) / x.shape[1]
        self._factor = np.linalg.cholesky(covariance + B6_SHRINKAGE * variance * np.eye(x.shape[1]))
        self._centre = means.mean(0)
        self._means = self._whitened(means)
        scores = class_scores(self(held_out.pooled), self._means)
        factors = np.logspace(-3, 0.5, 36)
        losses = [cross_entropy(factor * scores, held_out.labels) for factor in factors]
        self._temperature = factors[int(np.argmin(losses))]

    def __call__(self, pooled: Array) -> Array:
        return self._whitened(self._roots(pooled))

    def _roots(self, pooled: Array) -> Array:
        return unit(np.sqrt(pooled.astype(np.float64).clip(min=0)))

    def _whitened(self, x: Array) -> Array:
        whitened: Array = solve_triangular(self._factor, (x - self._centre).T, lower=True).T
        return whitened

    def logits(self, own: Array, pooled: Array, old: Array) -> Array:
        """Return ``old`` logits and that of a class with ``own`` pooled features: odds as in this space."""
        old = old.astype(np.float64)
        z, test, n = self(own), self(pooled), len(own)
        m = z.mean(0)
        spread = ((z - m) ** 2).sum() / (n - 1)
        score = test @ m - m @ m / 2 + spread / (2 * n)
        known = self._temperature * class_scores(test, self._means)
        odds = self._temperature * score - logsumexp(known)
        return np.concatenate((old, (logsumexp(old) + odds)[:, None]), 1)


def photo_model(train: Photos, held_out: Photos, classes: int, eye: PackagedEye) -> PhotoModel:
    """Return a model as ``candid train`` leaves it."""
    head = fit_head(train.statistics, train.labels, classes, eye.groups)
    model = PhotoModel.of(head, eye, [str(y) for y in range(classes)])
    seen = model.fitted_part(held_out.statistics)
    assert seen.terms is not None
    keys = np.arange(len(held_out))
    columns = {"novelty": seen.novelty, "log_density_terms": seen.terms, "keys": keys}
    names = ("",) * len(held_out)
    predictions = Predictions(names, held_out.labels, seen.logits, model.log_priors, columns)
    held_out_scores(predictions).attach(model)
    model.held_out |= Remembered(seen, held_out.labels, keys).columns()
    return model


def said(model: PhotoModel, photos: Photos) -> Columns:
    """Return what a model says of photos."""
    outputs = model.outputs_of(photos.statistics)
    images, unknown = np.zeros((len(photos), 1)), np.full(len(photos), -1)
    return Predictions.of(outputs, model, (images, unknown, ("",) * len(photos))).statistics


def _plain(model: PhotoModel, own: Array, statistics: Array) -> Array:
    """Return logits with a new class whose logit is not damped: rho = 1."""
    z = model.fitted_part(own.astype(np.float64)).z
    test = model.fitted_part(statistics.astype(np.float64))
    m, n, t = z.mean(0), len(z), model.temperatures[0].astype(np.float64)
    score = test.z @ m - m @ m / 2 + ((z - m) ** 2).sum() / (n - 1) / (2 * n)
    first = t * (test.scores + model.priors.astype(np.float64))
    odds = t * (score - math.log(model.config.fitted)) - logsumexp(first)
    return np.concatenate((test.logits, (logsumexp(test.logits) + odds)[:, None]), 1)


def one_draw(
    task: Task, model: PhotoModel, rivals: tuple[Retrained, PooledSpace], n: int, seed: int, far: Photos
) -> dict[str, Figures]:
    """Return the figures of each method with ``n`` photos of the new class."""
    train = task.new[0]
    own = train[Draws(1000 * n + seed).permutation(len(train))[:n]]
    statistics, pooled, labels = task.tested()
    start = time.process_time()
    taught, (recall,) = assembled(model, [{"name": "new"}], [own.statistics], [np.arange(n)])
    seconds = time.process_time() - start
    after = taught.outputs_of(statistics)
    before = model.outputs_of(statistics)
    assert np.array_equal(after.logits[:, : task.classes], before.logits)
    candid = {
        **recalls(after.logits, labels),
        "seconds": seconds,
        "left_out": recall,
        "old_before": recalls_before(before.logits, labels),
        **levels(model, taught, task, far),
    }
    return {
        "candid": candid,
        "plain": recalls(_plain(model, own.statistics, statistics), labels),
        "logistic": recalls(rivals[0].logits(own, statistics), labels),
        "pooled space": recalls(rivals[1].logits(own.pooled, pooled, before.logits), labels),
    }


def recalls_before(logits: Array, labels: Array) -> float:
    """Return the mean recall of the known classes without the new class."""
    answer, new = logits.argmax(1), int(labels.max())
    return mean(share(answer[labels == y] == y) for y in range(new))


def levels(model: PhotoModel, taught: PhotoModel, task: Task, far: Photos) -> Figures:
    """Return which shares are called novel at 5 % before and after, and class sets that miss the class."""
    figures: Figures = {}
    sets = {"old": task.old[2], "new": task.new[2], "far": far}
    for when, each in (("before", model), ("after", taught)):
        held_out = HeldOut.of(each)
        assert held_out is not None
        ranks = CombinedRanks(held_out.statistics["novelty"])
        for name, photos in sets.items():
            outputs = each.outputs_of(photos.statistics)
            assert outputs.novelty is not None
            p = ranks.p_values(outputs.novelty)
            figures[f"novel_{name}_{when}"] = share(p <= LEVEL)
            if name == "far" or (name == "new" and when == "before"):
                continue
            labels = photos.labels if name == "old" else np.full(len(photos), task.classes)
            posterior = softmax(outputs.logits.astype(np.float64))
            ratios = held_out.statistics["true_posterior"] / held_out.statistics["max_posterior"]
            figures[f"missed_{name}_{when}"] = missed(posterior, labels, ratios, LEVEL)
    return figures


def measured(sets: dict[str, PhotoSet], far: Photos, eye: PackagedEye) -> dict[str, Any]:
    """Return the figures of every draw, by task, number of photos and method."""
    found: dict[str, Any] = {}
    for set_name, new in TASKS:
        by_number: dict[str, dict[str, list[Figures]]] = {str(n): {} for n in NUMBERS}
        for seed in SPLITS:
            task = Task.of(sets[set_name], new, seed)
            model = photo_model(*task.old[:2], task.classes, eye)
            rivals = Retrained(task, eye), PooledSpace(task)
            for n in NUMBERS:
                for draw in range(DRAWS):
                    each = one_draw(task, model, rivals, n, DRAWS * seed + draw, far)
                    for method, figures in each.items():
                        by_number[str(n)].setdefault(method, []).append(figures)
        found[new] = by_number
        print(_accuracy({new: by_number}), flush=True)
    return found


def tables(found: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    return f"{_accuracy(found)}\n\n{_levels(found)}"


def _records(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"class": new, "photos": n, **methods}
        for new, by_number in found.items()
        for n, methods in by_number.items()
    ]


def _mean(method: str, key: str, digits: int = 1, factor: float = 100) -> Cell:
    return lambda record: decimal(mean(each[key] for each in record[method]), digits, factor)


def _difference(record: Any) -> str:
    pairs = zip(record["candid"], record["logistic"], strict=True)
    differences = [a["balanced"] - b["balanced"] for a, b in pairs]
    return f"{100 * mean(differences):+.1f} ± {100 * stdev(differences):.1f}"


NAMED: tuple[tuple[str, Cell], ...] = (("new class", text("class")), ("photos", text("photos")))


def _accuracy(found: dict[str, Any]) -> str:
    return table(
        _records(found),
        (
            *NAMED,
            ("Candid", _mean("candid", "balanced")),
            ("logistic", _mean("logistic", "balanced")),
            ("difference", _difference),
            ("recall of the new class", _mean("candid", "new")),
            ("logistic", _mean("logistic", "new")),
            ("recall of the known, before", _mean("candid", "old_before")),
            ("after", _mean("candid", "old")),
            ("rho = 1", _mean("plain", "balanced")),
            ("pooled space", _mean("pooled space", "balanced")),
            ("CPU seconds", _mean("candid", "seconds", 2, 1)),
        ),
    )


def _levels(found: dict[str, Any]) -> str:
    return table(
        _records(found),
        (
            *NAMED,
            ("new photos called novel, before", _mean("candid", "novel_new_before")),
            ("after", _mean("candid", "novel_new_after")),
            ("known photos, before", _mean("candid", "novel_old_before")),
            ("after", _mean("candid", "novel_old_after")),
            ("far photos, before", _mean("candid", "novel_far_before")),
            ("after", _mean("candid", "novel_far_after")),
            ("class sets without the class: known, before", _mean("candid", "missed_old_before")),
            ("after", _mean("candid", "missed_old_after")),
            ("new", _mean("candid", "missed_new_after")),
        ),
    )

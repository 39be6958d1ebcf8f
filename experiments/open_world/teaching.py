"""Teach a photo model a class from a few photos, next to a logistic regression that is retrained."""

import math
import time
from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from candid.inference.predictions import Predictions
from candid.models.eyes.eye import PackagedEye
from candid.models.heads.closed_form import fit_head
from candid.models.heads.gaussian import class_scores
from candid.models.heads.photo import PhotoModel
from candid.models.heads.taught import Seen
from candid.training.remembered import Remembered
from candid.training.teach import _assembled
from candid.trust.calibrate import held_out_scores
from candid.trust.combined import CombinedRanks
from candid.trust.judge import HeldOut
from candid.trust.verdict import class_sets
from experiments.cells import Table, markdown
from experiments.photo_sets import Photos, PhotoSet

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
        random = torch.Generator().manual_seed(seed)
        classes = int(old.labels.max()) + 1
        return cls(_parts(old, random), _parts(new, random), classes)

    def tested(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return statistics, pooled features and labels of all test photos."""
        old, new = self.old[2], self.new[2]
        labels = torch.cat((old.labels, torch.full((len(new),), self.classes)))
        return (
            torch.cat((old.statistics, new.statistics)),
            torch.cat((old.pooled, new.pooled)),
            labels,
        )


def _parts(photos: Photos, random: torch.Generator) -> tuple[Photos, Photos, Photos]:
    n = len(photos)
    order = torch.randperm(n, generator=random)
    first, second = int(0.6 * n), int(0.8 * n)
    return photos[order[:first]], photos[order[first:second]], photos[order[second:]]


def recalls(logits: Tensor, labels: Tensor) -> Figures:
    """Return balanced accuracy, the recall of the new class and the mean recall of the known ones."""
    answer, new = logits.argmax(1), int(labels.max())
    each = [float((answer[labels == y] == y).double().mean()) for y in range(new + 1)]
    return {"balanced": mean(each), "new": each[new], "old": mean(each[:new])}


class Retrained:
    """A balanced logistic regression on all photos, with the penalty that is best on validation photos."""

    def __init__(self, task: Task, eye: PackagedEye) -> None:
        self.task = task
        train = task.old[0].statistics.double()
        self._centre = train.mean(0)
        variances = train.var(0).split(list(eye.groups))
        self._scale = torch.cat([part.mean().sqrt().expand(len(part)) for part in variances])
        self._penalties: dict[int, float] = {}

    def logits(self, own: Photos, statistics: Tensor) -> Tensor:
        """Return the logits of photos after a training with ``own`` photos of the new class."""
        number = len(own)
        if number not in self._penalties:
            held_out = torch.cat((self.task.old[1].statistics, self.task.new[1].statistics))
            new = torch.full((len(self.task.new[1]),), self.task.classes)
            labels = torch.cat((self.task.old[1].labels, new))
            found = {c: recalls(self._fitted(own, c, held_out), labels)["balanced"] for c in PENALTIES}
            self._penalties[number] = max(found, key=lambda c: found[c])
        return self._fitted(own, self._penalties[number], statistics)

    def _fitted(self, own: Photos, penalty: float, statistics: Tensor) -> Tensor:
        from sklearn.linear_model import LogisticRegression

        train = self.task.old[0]
        x = self._scaled(torch.cat((train.statistics, own.statistics)))
        y = torch.cat((train.labels, torch.full((len(own),), self.task.classes)))
        model = LogisticRegression(C=penalty, class_weight="balanced", tol=1e-3, max_iter=500)
        return torch.from_numpy(model.fit(x, y.numpy()).decision_function(self._scaled(statistics)))

    def _scaled(self, statistics: Tensor) -> Any:
        return ((statistics.double() - self._centre) / self._scale).numpy()


class PooledSpace:
    """Another space: roots of pooled features of unit length, their covariance shrunk by 0.6."""

    def __init__(self, task: Task) -> None:
        train, held_out = task.old[:2]
        x = self._roots(train.pooled)
        means = torch.stack([x[train.labels == y].mean(0) for y in range(task.classes)])
        away = x - means[train.labels]
        covariance = (1 - B6_SHRINKAGE) * away.T @ away / (len(x) - task.classes)
        covariance.diagonal().add_(B6_SHRINKAGE * away.square().sum() / (len(x) - task.classes) / x.shape[1])
        self._factor = torch.linalg.cholesky(covariance)
        self._centre = means.mean(0)
        self._means = self._whitened(means)
        scores = class_scores(self(held_out.pooled), self._means)
        factors = torch.logspace(-3, 0.5, 36, dtype=torch.float64)
        losses = [torch.nn.functional.cross_entropy(f * scores, held_out.labels) for f in factors]
        self._temperature = factors[int(torch.stack(losses).argmin())]

    def __call__(self, pooled: Tensor) -> Tensor:
        return self._whitened(self._roots(pooled))

    def _roots(self, pooled: Tensor) -> Tensor:
        return torch.nn.functional.normalize(pooled.double().clamp(min=0).sqrt())

    def _whitened(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self._factor, (x - self._centre).T, upper=False).T

    def logits(self, own: Tensor, pooled: Tensor, old: Tensor) -> Tensor:
        """Return ``old`` logits and that of a class with ``own`` pooled features: odds as in this space."""
        z, test, n = self(own), self(pooled), len(own)
        m = z.mean(0)
        spread = (z - m).square().sum() / (n - 1)
        score = test @ m - m @ m / 2 + spread / (2 * n)
        known = self._temperature * class_scores(test, self._means)
        odds = self._temperature * score - known.logsumexp(1)
        return torch.cat((old, (old.logsumexp(1) + odds)[:, None]), 1)


def fitted(task: Task, eye: PackagedEye) -> PhotoModel:
    """Return the model of the known classes, as ``candid train`` leaves it."""
    train, held_out, _ = task.old
    head = fit_head(train.statistics, train.labels, task.classes, eye.groups)
    model = PhotoModel.of(head, eye, [str(y) for y in range(task.classes)])
    with torch.no_grad():
        seen = model.fitted_part(held_out.statistics)
    assert seen.terms is not None
    keys = torch.arange(len(held_out))
    columns = {"novelty": seen.novelty, "log_density_terms": seen.terms, "keys": keys}
    names = ("",) * len(held_out)
    found = Predictions(names, held_out.labels, seen.logits, model.log_priors, columns)
    held_out_scores(found).attach(model)
    model.held_out |= Remembered(Seen(*seen), held_out.labels, keys).tensors()
    return model


def _plain(model: PhotoModel, own: Tensor, statistics: Tensor) -> Tensor:
    """Return logits with a new class whose logit is not damped: rho = 1."""
    z, test = model.fitted_part(own.double()).z, model.fitted_part(statistics.double())
    m, n, t = z.mean(0), len(z), model.temperatures[0].double()
    score = test.z @ m - m @ m / 2 + (z - m).square().sum() / (n - 1) / (2 * n)
    first = t * (test.scores + model.priors.double())
    odds = t * (score - math.log(model.config.fitted)) - first.logsumexp(1)
    return torch.cat((test.logits, (test.logits.logsumexp(1) + odds)[:, None]), 1)


@torch.no_grad()
def one_draw(
    task: Task, model: PhotoModel, rivals: tuple[Retrained, PooledSpace], n: int, seed: int, far: Photos
) -> dict[str, Figures]:
    """Return the figures of each method with ``n`` photos of the new class."""
    train = task.new[0]
    rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 * n + seed))[:n]
    own = train[rows]
    statistics, pooled, labels = task.tested()
    start = time.process_time()
    taught, (recall,) = _assembled(model, [{"name": "new"}], [own.statistics], [torch.arange(n)])
    seconds = time.process_time() - start
    found = taught.outputs_of(statistics)
    before = model.outputs_of(statistics)
    assert torch.equal(found.logits[:, : task.classes], before.logits)
    candid = {
        **recalls(found.logits, labels),
        "seconds": seconds,
        "left_out": recall,
        "old_before": recalls_before(before.logits, labels),
        **levels(model, taught, task, far),
    }
    return {
        "candid": candid,
        "plain": recalls(_plain(model, own.statistics, statistics), labels),
        "logistic": recalls(rivals[0].logits(own, statistics), labels),
        "pooled space": recalls(rivals[1].logits(own.pooled, pooled, before.logits.double()), labels),
    }


def recalls_before(logits: Tensor, labels: Tensor) -> float:
    """Return the mean recall of the known classes without the new class."""
    answer, new = logits.argmax(1), int(labels.max())
    return mean(float((answer[labels == y] == y).double().mean()) for y in range(new))


def levels(model: PhotoModel, taught: PhotoModel, task: Task, far: Photos) -> Figures:
    """Return which shares are called novel at 5 % before and after, and class sets that miss the class."""
    figures: Figures = {}
    sets = {"old": task.old[2], "new": task.new[2], "far": far}
    for when, each in (("before", model), ("after", taught)):
        held_out = HeldOut.of(each)
        assert held_out is not None
        ranks = CombinedRanks.fit(held_out.statistics["novelty"])
        for name, photos in sets.items():
            outputs = each.outputs_of(photos.statistics)
            assert outputs.novelty is not None
            p = ranks.p_values(outputs.novelty)
            figures[f"novel_{name}_{when}"] = float((p <= LEVEL).double().mean())
            if name == "far" or (name == "new" and when == "before"):
                continue
            labels = photos.labels if name == "old" else torch.full((len(photos),), task.classes)
            posterior = outputs.logits.double().softmax(1)
            assert held_out.true_ratios is not None
            fits = class_sets(posterior, held_out.true_ratios, LEVEL)
            missed = ~fits.gather(1, labels[:, None])
            figures[f"missed_{name}_{when}"] = float(missed.double().mean())
    return figures


def measured(sets: dict[str, PhotoSet], far: Photos, eye: PackagedEye) -> dict[str, Any]:
    """Return the figures of every draw, by task, number of photos and method."""
    found: dict[str, Any] = {}
    for set_name, new in TASKS:
        by_number: dict[str, dict[str, list[Figures]]] = {str(n): {} for n in NUMBERS}
        for seed in SPLITS:
            task = Task.of(sets[set_name], new, seed)
            model = fitted(task, eye)
            rivals = Retrained(task, eye), PooledSpace(task)
            for n in NUMBERS:
                for draw in range(DRAWS):
                    each = one_draw(task, model, rivals, n, DRAWS * seed + draw, far)
                    for method, figures in each.items():
                        by_number[str(n)].setdefault(method, []).append(figures)
        found[new] = by_number
        print(markdown(*_table({new: by_number})), flush=True)
    return found


def tables(found: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    return "\n\n".join(markdown(*table) for table in (_table(found), _levels(found)))


def _table(found: dict[str, Any]) -> Table:
    head = ["new class", "photos", "Candid", "logistic", "difference", "recall of the new class", "logistic"]
    head += ["recall of the known, before", "after", "rho = 1", "pooled space", "CPU seconds"]
    return head, _rows(found)


def _rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for new, by_number in found.items():
        for n, methods in by_number.items():
            own, logistic, pooled = (methods[name] for name in ("candid", "logistic", "pooled space"))
            differences = [a["balanced"] - b["balanced"] for a, b in zip(own, logistic, strict=True)]
            yield [
                new,
                n,
                _percent(own, "balanced"),
                _percent(logistic, "balanced"),
                f"{100 * mean(differences):+.1f} ± {100 * stdev(differences):.1f}",
                _percent(own, "new"),
                _percent(logistic, "new"),
                _percent(own, "old_before"),
                _percent(own, "old"),
                _percent(methods["plain"], "balanced"),
                _percent(pooled, "balanced"),
                f"{mean(each['seconds'] for each in own):.2f}",
            ]


def _levels(found: dict[str, Any]) -> Table:
    head = [
        "new class",
        "photos",
        "new photos called novel, before",
        "after",
        "known photos, before",
        "after",
    ]
    head += ["far photos, before", "after", "class sets without the class: known, before", "after", "new"]
    keys = [f"novel_{name}_{when}" for name in ("new", "old", "far") for when in ("before", "after")]
    keys += ["missed_old_before", "missed_old_after", "missed_new_after"]
    rows = (
        [new, n, *(_percent(methods["candid"], key) for key in keys)]
        for new, by_number in found.items()
        for n, methods in by_number.items()
    )
    return head, rows


def _percent(figures: list[Figures], key: str) -> str:
    return f"{100 * mean(each[key] for each in figures):.1f}"

"""Measure photo models next to logistic regression, on folders of photos.

``python -m experiments.photos DATA_FOLDER``

``DATA_FOLDER`` has the folders ``bloodcells8``, ``trashnet6``, ``clothing-other`` and ``caltech99``, each
with one folder of photos per class, and ``clothing10`` with ``train``, ``validation`` and ``test``. The
features of the photos are computed once and stored in ``runs/photos``. All figures go to
``docs/results/photos.json``, the tables to ``docs/results/photos.md``, between marks of their names.
``--section NAME`` measures one section again. A new section is an entry in ``SECTIONS``, one in
``photo_tables.TABLES`` and a pair of marks on the page.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.files import write_texts
from candid._support.numbers import Array, logsumexp, softmax
from candid._support.randomness import Draws
from candid.evaluation.calibration_error import expected_calibration_error, top_bins
from candid.evaluation.selective import risk_coverage
from candid.inference.metrics import accuracy, area_under_curve, cross_entropy
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.eyes import EYES
from candid.models.photo.head import ClosedForm, fit_head
from candid.models.photo.model import PhotoModel
from candid.trust.ranking import CombinedRanks
from experiments.measures import missed, share, true_ratios
from experiments.photo_sets import FAR, SPLITS, Parts, Photos, PhotoSet, Reader, joined
from experiments.photo_tables import tables
from experiments.tables import filled

LEFT_OUT_SPLITS = 3
SUBSETS = 3
FEW = (20, 50)
"""Training photos of each class, where there are few."""
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0)
LEVELS = (0.01, 0.05, 0.1)
RISK = 0.01
Figures = dict[str, float]


class Logistic:
    """Logistic regression on centred and scaled features, its penalty chosen by five-fold log-loss.

    Args:
        features: (N, D).
        labels: (N,).
        groups: the sizes of groups of features that are divided by one number each, the root of their mean
            variance.
    """

    def __init__(self, features: Array, labels: Array, groups: Sequence[int]) -> None:
        from sklearn.linear_model import LogisticRegressionCV
        from sklearn.model_selection import StratifiedKFold

        self._centre, scale = scaling(features, groups)
        self._scale = np.where(scale > 0, scale, 1.0)
        self._fitted = LogisticRegressionCV(
            Cs=PENALTIES,
            cv=StratifiedKFold(5, shuffle=True, random_state=0),
            scoring="neg_log_loss",
            max_iter=5000,
            l1_ratios=(0.0,),
            use_legacy_attributes=False,
        ).fit(self._scaled(features), labels)
        self.penalty = float(self._fitted.C_)

    def logits(self, features: Array) -> Array:
        """Return the logits of photos, (N, K)."""
        return np.asarray(self._fitted.decision_function(self._scaled(features)))

    def _scaled(self, features: Array) -> Array:
        return (features.astype(np.float64) - self._centre) / self._scale


def scaling(features: Array, groups: Sequence[int]) -> tuple[Array, Array]:
    """Return the means of features, and for each the root of the mean variance of its group, (D,)."""
    wide = features.astype(np.float64)
    variances = np.split(wide.var(0, ddof=1), np.cumsum(groups)[:-1])
    return wide.mean(0), np.repeat([np.sqrt(part.mean()) for part in variances], groups)


class Fitted:
    """A photo model, fitted to statistics."""

    def __init__(self, photos: Photos, classes: int, eye: PackagedEye, logistic: bool = True) -> None:
        self.head: ClosedForm = fit_head(
            photos.statistics, photos.labels, classes, eye.groups, logistic=logistic
        )
        self.model = PhotoModel.of(self.head, eye, [str(number) for number in range(classes)])

    def __call__(self, photos: Photos) -> tuple[Array, Array]:
        """Return logits (N, K) and the scores that are combined (N, 3)."""
        outputs = self.model.outputs_of(photos.statistics)
        assert outputs.novelty is not None
        return outputs.logits.astype(np.float64), outputs.novelty.astype(np.float64)


def answers(logits: Array, labels: Array) -> Figures:
    """Return how good the posteriors of test photos are."""
    posterior = softmax(logits)
    curve = risk_coverage(posterior.max(1), posterior.argmax(1) == labels)
    return {
        "accuracy": accuracy(logits, labels),
        "nll": cross_entropy(logits, labels),
        "ece": expected_calibration_error(top_bins(posterior, labels)),
        "coverage": float(max(curve.coverage[curve.risk <= RISK], default=0.0)),
    }


def alarms(novelty: Array, ranks: CombinedRanks) -> Figures:
    """Return the share of test photos with a p-value at each level."""
    p = ranks.p_values(novelty)
    return {f"false_alarms_{level:g}": share(p <= level) for level in LEVELS}


def sets_that_miss(logits: Array, labels: Array, held_out: Array, held_out_labels: Array) -> Figures:
    """Return the share of class sets at 5 % without the true class."""
    known = true_ratios(softmax(held_out), held_out_labels)
    return {"missed": missed(softmax(logits), labels, known, 0.05)}


def by_candid(parts: Parts, others: Mapping[str, Photos], classes: int, eye: PackagedEye) -> Figures:
    """Return the figures of a photo model."""
    model = Fitted(parts.train, classes, eye)
    logits, novelty = model(parts.test)
    held_out, ranked = model(parts.held_out)
    ranks = CombinedRanks(ranked)
    ordinary = ranks.statistic(novelty)
    areas = {
        name: area_under_curve(ordinary, ranks.statistic(model(photos)[1])) for name, photos in others.items()
    }
    return {
        **answers(logits, parts.test.labels),
        **areas,
        **alarms(novelty, ranks),
        **sets_that_miss(logits, parts.test.labels, held_out, parts.held_out.labels),
        "logistic_posterior": float(model.head.posterior == "logistic"),
    }


def by_logistic(parts: Parts, others: Mapping[str, Photos], groups: Sequence[int]) -> Figures:
    """Return the figures of a logistic regression on pooled features, with two scores for unknown photos."""
    model = Logistic(parts.train.pooled, parts.train.labels, groups)
    logits = model.logits(parts.test.pooled)
    scores = {"msp": lambda each: -softmax(each).max(1), "energy": lambda each: -logsumexp(each)}
    areas = {
        f"{name}_{kind}": area_under_curve(score(logits), score(model.logits(photos.pooled)))
        for kind, score in scores.items()
        for name, photos in others.items()
    }
    return {**answers(logits, parts.test.labels), **areas, "penalty": model.penalty}


def on_splits(photos: PhotoSet, far: Photos, eye: PackagedEye) -> dict[str, list[Figures]]:
    """Return the figures of both methods on each split."""
    others, classes = {"unknown": photos.unknown, "far": far}, len(photos.class_names)
    splits = [photos.parts(split) for split in ([None] if photos.own else range(SPLITS))]
    return {
        "candid": [by_candid(parts, others, classes, eye) for parts in splits],
        **{
            f"logistic{scaling}": [by_logistic(parts, others, groups) for parts in splits]
            for scaling, groups in _scalings([photos.photos.pooled.shape[1]])
        },
    }


def _scalings(groups: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield two ways to scale features: one number for each group, and one for each feature."""
    yield "", groups
    yield ", standardised", [1] * sum(groups)


def left_out(photos: PhotoSet, far: Photos, eye: PackagedEye) -> Iterator[tuple[str, list[Figures]]]:
    """Yield each known class, and how well its photos are found by models without it, on several splits."""
    for number, name in enumerate(photos.class_names):
        unknown = photos.photos[photos.photos.labels == number]
        yield (
            name,
            [
                without(photos.parts(split, number), len(photos.class_names) - 1, unknown, far, eye)
                for split in range(LEFT_OUT_SPLITS)
            ],
        )


def without(parts: Parts, classes: int, unknown: Photos, far: Photos, eye: PackagedEye) -> Figures:
    """Return how well the photos of a class that a model does not know, and far ones, are found."""
    model = Fitted(parts.train, classes, eye, logistic=False)
    ranks = CombinedRanks(model(parts.held_out)[1])
    novelty = model(parts.test)[1]
    ordinary = ranks.statistic(novelty)
    areas = {
        kind: area_under_curve(ordinary, ranks.statistic(model(each)[1]))
        for kind, each in (("unknown", unknown), ("far", far))
    }
    return {**areas, **alarms(novelty, ranks)}


def with_few(photos: PhotoSet, each: int, eye: PackagedEye) -> dict[str, Any]:
    """Return the figures of models of ``each`` photos of a class, all of them ranked out of fold.

    The test photos are the same for all subsets. The interval of the difference is over test photos, whose
    differences are averaged over the subsets.
    """
    train, *rest = photos.parts(0)
    test = joined(*rest)
    right: dict[str, list[Array]] = {}
    figures = []
    for seed in range(SUBSETS):
        few = train[_subset(train.labels, each, seed)]
        model = Fitted(few, len(photos.class_names), eye)
        logits, novelty = model(test)
        own = model.head.out_of_fold
        figures.append(
            {
                **alarms(novelty, CombinedRanks(own.novelty)),
                **sets_that_miss(logits, test.labels, own.logits, few.labels),
            }
        )
        for name, found in {"candid": logits, **_rivals(few, test, eye)}.items():
            right.setdefault(name, []).append(found.argmax(1) == test.labels)
    mean = {name: np.mean(values, axis=0) for name, values in right.items()}
    accuracy = {name: float(values.mean()) for name, values in mean.items()}
    differences = {name: _interval(mean["candid"] - mean[name]) for name in mean if name != "candid"}
    return {"accuracy": accuracy, "differences": differences, "levels": figures, "test_photos": len(test)}


def _rivals(few: Photos, test: Photos, eye: PackagedEye) -> dict[str, Array]:
    """Return the logits of logistic regressions on pooled and on the same features."""
    found = {}
    for kind, groups in (("pooled", (few.pooled.shape[1],)), ("statistics", eye.groups)):
        found[kind] = Logistic(getattr(few, kind), few.labels, groups).logits(getattr(test, kind))
    return found


def _subset(labels: Array, each: int, seed: int) -> Array:
    order = Draws(seed).permutation(len(labels))
    return np.concatenate([order[labels[order] == number][:each] for number in np.unique(labels)])


def _interval(values: Array) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval."""
    mean, error = float(values.mean()), 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5
    return mean, mean - error, mean + error


class Study:
    """The photo sets, read when they are needed."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.eye = PackagedEye(EYES["lite0"])
        reader = Reader(self.eye, work)
        self.sets, (self.far, _) = reader.sets(folder), reader.read(folder / FAR)

    def splits(self) -> dict[str, Any]:
        """Compare posteriors and novelty with logistic regression's."""
        return {name: on_splits(each, self.far, self.eye) for name, each in self.sets.items()}

    def left_out(self) -> dict[str, Any]:
        """Leave each known class out."""
        return {name: dict(left_out(each, self.far, self.eye)) for name, each in self.sets.items()}

    def few(self) -> dict[str, Any]:
        """Fit few photos of each class."""
        return {
            name: {str(number): with_few(each, number, self.eye) for number in FEW}
            for name, each in self.sets.items()
        }


SECTIONS: dict[str, Callable[[Study], dict[str, Any]]] = {
    "splits": Study.splits,
    "left_out": Study.left_out,
    "few": Study.few,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the figures and the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.photos", description=__doc__)
    parser.add_argument("data", metavar="DATA_FOLDER", type=Path, help="the folder of the photo sets")
    parser.add_argument(
        "--section", action="append", choices=list(SECTIONS), help="measure only this one again; repeats"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="the folder of the page")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/photos"), help="the folder where features are stored"
    )
    asked = parser.parse_args(arguments)
    page, figures = asked.out / "photos.md", asked.out / "photos.json"
    results = json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else {}
    study = Study(asked.data, asked.work)
    for name in asked.section or SECTIONS:
        results[name] = SECTIONS[name](study)
        write_texts({figures.name: json.dumps(results, indent=1) + "\n"}, asked.out)
    write_texts({page.name: filled(page.read_text(encoding="utf-8"), tables(results))}, asked.out)


if __name__ == "__main__":
    main()

"""The judge: held-out scores of a model, detectors fitted to them once, p-values and verdicts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.predictions import Measure, Predictions
from candid.models.checkpoint import FINGERPRINT, scores_belong
from candid.models.protocol import Model
from candid.trust.combined import Combined
from candid.trust.detectors import FARTHEST, Detector, checked_level, p_values, shuffled_halves
from candid.trust.feature_scores import COLUMN_SCORES, ColumnScore
from candid.trust.per_class import PerClass
from candid.trust.promises import (
    ERROR,
    NOTHING,
    NOVELTY,
    NoveltyPromise,
    Promises,
    Risk,
    level,
    no_promise,
    rounded_up,
    walk,
)
from candid.trust.ranking import among_others
from candid.trust.scores import (
    Score,
    Statistics,
    available_scores,
    chosen_score,
    measures_for,
    statistics_of,
)
from candid.trust.verdict import Examination, Verdict, check_enough, verdicts

LEVEL = 0.05
"""The level at which an image of another set counts as detected."""
STATISTIC, COLUMN_SCORE, FIT, PAIRS = "statistic.", "column_score.", "fit.", "pair_uncertainty"
FITTED_KEYS = "fitted_keys"
OUT_OF_FOLD = "out_of_fold"
KEPT = ("training_keys", "remembered.", "taught.", "before.")
"""What a model carries next to the scores, and keeps when it is calibrated again: how the names start. The
last three are for teaching: see :mod:`candid.training.teach`."""
OLD_NAMES = {"terms": "log_density_terms", "distance": "mahalanobis"}
"""Statistics that were called otherwise in models of earlier versions."""
NO_LABELS = (
    "The held-out images of this model have no labels, so that nothing can be promised about classes: leave "
    "error and risk out, or calibrate the model with labelled images."
)
OLD_MAHALANOBIS = "gaussian."
"""What the parts of the score ``mahalanobis`` start with in models of earlier versions."""


@dataclass(frozen=True)
class HeldOut:
    """What a model knows of images that it was not trained on: p-values and verdicts come from it."""

    statistics: dict[str, Tensor]
    """Statistics of each image; see :func:`candid.trust.scores.statistics_of`."""
    temperature: float
    """What the logits must be divided by for the lowest cross-entropy."""
    column_scores: dict[str, ColumnScore] = field(default_factory=dict)
    """Scores that were fitted to the features of other images, by name."""
    fitted_keys: Tensor | None = None
    """Keys of the images that they were fitted to, unless these are training images."""
    fits: dict[str, Tensor] = field(default_factory=dict)
    """Detectors that were fitted already, by score and class."""
    pair_uncertainty: Tensor | None = None
    """Uncertainty between each two of M classes, (M, M), see
    :func:`candid.inference.metrics.measured_uncertainty`; None with many classes, or if measured earlier."""
    out_of_fold: bool = False
    """Whether some of these are photos that the model learned from, each scored by a head that was fitted to
    others. New photos are scored by one head that was fitted to all, so levels hold as measured, but no bound
    is proven."""

    def __len__(self) -> int:
        return len(self.statistics["predicted"])

    @classmethod
    def of(cls, model: Model) -> "HeldOut | None":
        """Return what ``model`` carries; None if it was never calibrated, or if it was changed since then."""
        tensors = model.held_out
        if not tensors or not scores_belong(model):
            return None
        try:
            statistics = _under(STATISTIC, tensors)
            pairs = tensors.get(PAIRS)
            _check(statistics, tensors["temperature"], pairs, len(model.class_names))
            return cls(
                {OLD_NAMES.get(name, name): values for name, values in statistics.items()},
                float(tensors["temperature"]),
                _column_scores(tensors),
                tensors.get(FITTED_KEYS),
                _under(FIT, tensors),
                pairs,
                OUT_OF_FOLD in tensors,
            )
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CandidError(
                f"The model's held-out scores can't be read ({error}): calibrate it again."
            ) from error

    @property
    def true_ratios(self) -> Tensor | None:
        """The posteriors of the true classes divided by the largest ones, (n,); None without labels."""
        known = self.statistics
        return known["true_posterior"] / known["max_posterior"] if "true_posterior" in known else None

    def halves(self) -> tuple["HeldOut", "HeldOut"]:
        """Return two halves by a fixed shuffle: one to fix a rule, one to test it."""
        first, second = (self.rows(half) for half in shuffled_halves(len(self)))
        return first, second

    def rows(self, rows: Tensor) -> "HeldOut":
        """Return only some of the images."""
        known = {name: values[rows] for name, values in self.statistics.items()}
        return replace(self, statistics=known, fits={})

    def attach(self, model: Model) -> None:
        """Store it, and detectors of the default score, in ``model``; :func:`candid.save` writes it."""
        score = chosen_score(self.statistics)
        states = {name: each.state() for name, each in self.column_scores.items()}
        fit = _fitted(self, score).to_tensors()
        model.held_out = {
            **{name: each for name, each in model.held_out.items() if name.startswith(KEPT)},
            "temperature": torch.tensor(self.temperature, dtype=torch.float64),
            FINGERPRINT: torch.tensor(list(bytes.fromhex(model.fingerprint())), dtype=torch.uint8),
            **({} if self.pair_uncertainty is None else {PAIRS: self.pair_uncertainty}),
            **({} if self.fitted_keys is None else {FITTED_KEYS: self.fitted_keys}),
            **({OUT_OF_FOLD: torch.ones((), dtype=torch.bool)} if self.out_of_fold else {}),
            **{STATISTIC + name: values for name, values in self.statistics.items()},
            **{
                f"{COLUMN_SCORE}{name}.{part}": values
                for name, state in states.items()
                for part, values in state.items()
            },
            **{f"{FIT}{score.name}.{name}": values for name, values in fit.items()},
        }


def _check(statistics: Mapping[str, Tensor], temperature: Tensor, pairs: Tensor | None, classes: int) -> None:
    """Raise a ValueError if held-out scores have a shape, a type or a value that no measurement gives."""
    if not 0 < float(temperature) < math.inf:
        raise ValueError(f"the temperature is {float(temperature)}")
    predicted = statistics["predicted"]
    if predicted.dtype != torch.int64 or predicted.ndim != 1:
        raise ValueError(f"'predicted' is {predicted.dtype} of {predicted.ndim} dimensions")
    if not ((predicted >= 0) & (predicted < classes)).all():
        raise ValueError(f"'predicted' names classes that are none of the {classes}")
    if pairs is not None and pairs.shape != (classes, classes):
        raise ValueError(f"'{PAIRS}' has the shape {tuple(pairs.shape)} for {classes} classes")
    for name, values in statistics.items():
        if values.ndim < 1 or len(values) != len(predicted):
            raise ValueError(f"'{name}' has the shape {tuple(values.shape)} for {len(predicted)} images")
        if values.dtype == torch.bool or values.isnan().any():
            raise ValueError(f"'{name}' is not made of numbers")
        if name != "keys" and values.is_floating_point() and (values.abs() > FARTHEST).any():
            raise ValueError(f"'{name}' has values beyond {FARTHEST:g}")


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _column_scores(tensors: Mapping[str, Tensor]) -> dict[str, ColumnScore]:
    """Return the scores that a model carries; those of later versions are left out."""
    old = {f"mahalanobis.{part}": values for part, values in _under(OLD_MAHALANOBIS, tensors).items()}
    parts = old | _under(COLUMN_SCORE, tensors)
    names = dict.fromkeys(key.rpartition(".")[0] for key in parts)
    return {
        name: COLUMN_SCORES[name].from_state(_under(f"{name}.", parts))
        for name in names
        if name in COLUMN_SCORES
    }


def needed(model: Model, path: object = "this model") -> HeldOut:
    """Return what ``model`` carries, or raise an error that says how to add it."""
    found = HeldOut.of(model)
    if found is None:
        raise CandidError(
            f"'{path}' has no held-out scores, which p-values come from: add them with "
            f"'candid calibrate {path} DATA', DATA being what it was trained on."
        )
    return found


def _fitted(held_out: HeldOut, score: Score) -> PerClass:
    """Return the detectors of ``score``: those that were saved, else fitted now."""
    new = PerClass(score.new_detector, math.ceil(2 / LEVEL))  # enough for a p-value of LEVEL, also of a half
    saved = _under(f"{score.name}.", held_out.fits)
    if saved:
        return new.from_tensors(saved)
    return new.fit(score.of(held_out.statistics), held_out.statistics["predicted"])


def measures_of(model: Model) -> dict[str, Measure]:
    """Return what must be measured of images for all scores; nothing for a model without held-out scores."""
    held_out = HeldOut.of(model)
    if held_out is None:
        return {}
    return measures_for(available_scores(held_out.statistics), held_out.column_scores)


@dataclass(frozen=True)
class Judge:
    """Turns predictions into p-values and verdicts, with detectors that are fitted once.

    Example:
        >>> import candid
        >>> judge = Judge.of(candid.load("cifar10-beta1"), novelty=0.05)
        >>> judge.score.name, judge.promises.novelty.in_force
        ('joint', 0.05)
    """

    held_out: HeldOut
    """Scores of held-out images."""
    class_names: tuple[str, ...]
    score: Score
    promises: Promises
    """The levels of the verdicts."""
    by_class: PerClass
    """The fitted detectors."""

    @classmethod
    def of(
        cls,
        model: Model,
        score: str | None = None,
        novelty: float | None = None,
        error: float | None = None,
        held_out: HeldOut | None = None,
        risk: float | None = None,
        delta: float = 0.05,
        novelty_promise: NoveltyPromise = "average",
    ) -> "Judge":
        """Return the judge of a model that carries held-out scores.

        Args:
            model: the model.
            score: what decides whether an image is novel; see :data:`candid.trust.scores.SCORES`.
            novelty: the share of ordinary images that may be called novel; by default 0.01, or the smallest
                level that the number of held-out images allows.
            error: the share of ordinary images whose class set may miss the true class; by default 0.05.
            held_out: use these held-out scores instead of those that the model carries.
            risk: the share of accepted images that may be wrong. One half of the held-out images then fixes
                the rest of the rule, the other half tests the whole rule.
            delta: the probability that the promise of ``risk`` is wrong.
            novelty_promise: ``"average"`` over held-out sets, or ``"confident"``: with 95 % confidence for
                this model.
        """
        held_out = needed(model) if held_out is None else held_out
        labelled = held_out.true_ratios is not None
        if not labelled and (error is not None or risk is not None):
            raise CandidError(NO_LABELS)
        if risk is not None:
            rule, tests = held_out.halves()
            judge = cls.of(model, score, novelty, error, rule, novelty_promise=novelty_promise)
            promised = judge._tested(tests, checked_level("risk", risk), checked_level("delta", delta))
            return replace(judge, promises=replace(judge.promises, risk=promised))
        chosen = chosen_score(held_out.statistics, score)
        by_class = _fitted(held_out, chosen)
        n, ranked = len(held_out), by_class.shared.n_reference
        least_rank = round(by_class.shared.smallest_p_value * (ranked + 1))
        levels = level(novelty, NOVELTY, ranked, novelty_promise, least_rank=least_rank)
        errors = level(error, ERROR, n) if labelled else NOTHING
        if held_out.out_of_fold:
            levels, errors = levels._replace(proven=1.0), errors._replace(proven=1.0)
        if novelty is not None and checked_level("novelty", novelty) < levels.in_force:
            raise CandidError(
                f"With {n} held-out images no image can be called novel at the level {novelty} by the score "
                f"'{chosen.name}': calibrate with more images, or raise --novelty to "
                f"{rounded_up(levels.smallest):g}."
            )
        if labelled:
            check_enough("error", errors.in_force if error is None else error, n, "no class can be ruled out")
        promises = Promises(chosen.name, ranked, levels, errors)
        return cls(held_out, model.class_names, chosen, promises, by_class)

    def _tested(self, tests: HeldOut, risk: float, delta: float) -> Risk:
        """Return the promise of ``risk`` from held-out images that had no part in this judge."""
        known = tests.statistics
        confidence = known["max_posterior"]
        second = known.get("second_posterior", 1 - confidence)  # not measured before: no more than this
        true_ratios = self.held_out.true_ratios
        assert true_ratios is not None  # checked in `of`
        only_one = p_values(-second / confidence, -true_ratios) <= self.error
        passed = only_one & (self.p_values(known)[0] > self.promises.novelty.cut)
        wrong = known["true_posterior"] < confidence
        sample = confidence[passed].numpy(), wrong[passed].numpy(), risk, delta, len(tests)
        found = walk(*sample)
        if found is None:
            raise CandidError(no_promise(*sample, len(tests) + len(self.held_out)))
        return found

    @property
    def novelty(self) -> float:
        """The share of ordinary images that is called novel."""
        return self.promises.novelty.in_force

    @property
    def error(self) -> float:
        """The share of ordinary images whose class set misses the true class."""
        return self.promises.error.in_force

    @property
    def detector(self) -> Detector:
        """The detector that is fitted to all held-out images."""
        return self.by_class.shared

    @property
    def measures(self) -> dict[str, Measure]:
        """What must be measured of images for the score."""
        return measures_for((self.score,), self.held_out.column_scores)

    def p_values(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Return the p-values among all held-out images, and among those of the same predicted class."""
        values = self.score.of(statistics)
        return self.detector.p_value(values), self.by_class.p_value(values, statistics["predicted"])

    def verdicts(self, predictions: Predictions, p_value: Tensor) -> list[Verdict]:
        """Return accept, ambiguous or novel, and the classes that fit, of each image."""
        known, posterior = self.held_out.true_ratios, predictions.posterior
        risk = self.promises.risk
        confident = None if risk is None else posterior.amax(1) >= risk.threshold
        return verdicts(posterior, p_value, known, self.promises.novelty.cut, self.error, confident)

    def false_alarms(self) -> dict[str, tuple[int, int]]:
        """Return by predicted class how many of its held-out images are called novel, and of how many.

        Only held-out images count that images are ranked among; each is ranked among the others.
        """
        known, n = self.held_out.statistics, self.promises.n_reference
        if n < len(self.held_out):  # the others shaped a density
            half = shuffled_halves(len(self.held_out))[1]
            known = {name: values[half] for name, values in known.items()}
        values = self.score.of(known)
        if isinstance(self.detector, Combined):
            share = among_others(values)
        else:
            share = (self.detector.p_value(values) * (n + 1) - 1) / n
        novel = share <= self.promises.novelty.cut + 1e-9
        return {
            name: (int(novel[known["predicted"] == y].sum()), int((known["predicted"] == y).sum()))
            for y, name in enumerate(self.class_names)
        }

    def examine(self, predictions: Predictions) -> list[Examination]:
        """Return the examinations of images that have the columns of :attr:`measures`."""
        return examinations(predictions, self.class_names, self)


def examinations(
    predictions: Predictions, class_names: tuple[str, ...], judge: Judge | None = None
) -> list[Examination]:
    """Return what a model says of each image; without p-values and verdicts if there is no ``judge``."""
    nothing: list[Any] = [None] * len(predictions)
    p_value = class_p_value = judged = densities = nothing
    if judge is not None:
        own, in_class = judge.p_values(statistics_of(predictions))
        judged = judge.verdicts(predictions, own)
        p_value, class_p_value = own.tolist(), in_class.tolist()
    if predictions.log_density is not None:
        densities = predictions.log_density.tolist()
    ranked = predictions.posterior.sort(dim=1, descending=True, stable=True)
    columns = zip(
        predictions.paths,
        ranked.indices.tolist(),
        ranked.values.tolist(),
        p_value,
        class_p_value,
        judged,
        densities,
        strict=True,
    )
    return [
        Examination(
            path,
            {class_names[y]: share for y, share in zip(order, shares, strict=True)},
            p,
            class_p,
            None if verdict is None else verdict.kind,
            None if verdict is None else tuple(class_names[y] for y in verdict.classes),
            density,
            None if judge is None else judge.promises,
        )
        for path, order, shares, p, class_p, verdict, density in columns
    ]

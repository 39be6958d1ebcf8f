"""The head of a photo model, fitted in closed form; all that is chosen is chosen by out-of-fold scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, log_softmax, logsumexp, softmax
from candid.models.photo.gaussian import (
    SecondStage,
    Standardised,
    Totals,
    Whitened,
    class_scores,
    rest_norm,
    shrunk,
    stratified_folds,
    total,
)

SHRINKAGES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
FOLDS = 5
LOG_TEMPERATURES = (-7.0, 3.0)
LEAST_LOG_TEMPERATURE = -50.0
"""Of classes that are perfectly separated."""
PENALTIES = (0.01, 0.1, 1.0)
"""Inverse strengths of the logistic regression's regularisation."""
Posterior = Literal["mixture", "second-stage", "logistic"]


@dataclass(frozen=True)
class OutOfFold:
    """What heads say of photos that they were not fitted to: each fold by a head fitted to the others."""

    logits: Array
    """Of the posterior that was chosen, (N, K)."""
    novelty: Array
    """Scores that rise with outlyingness, (N, 3); see ``PhotoModel.outputs``."""
    scores: Array
    """Of the first stage, (N, K)."""
    folds: Array
    """The fold of each photo, (N,)."""


class FoldHead(NamedTuple):
    """A head that has not seen the photos of one fold, and says what the whole head would of new photos."""

    known: Standardised
    whitened: Whitened
    stage: SecondStage
    regression: tuple[Array, Array] | None
    """Weights and biases on features as the whole head standardises them; None if it was not chosen."""
    whole: "ClosedForm"
    """What was chosen."""

    def __call__(self, features: Array) -> tuple[Array, Array]:
        """Return logits (N, K) and novelty scores (N, 3) of photos, as :class:`OutOfFold` has them."""
        whole = self.whole
        z = self.known(features) @ self.whitened.factor.T
        scores = class_scores(z, self.whitened.means)
        mixture = whole.temperature * (scores + whole.log_priors)
        relative = self.stage.relative_distance(scores)
        novelty = np.stack((relative, -logsumexp(mixture), rest_norm(z, self.whitened.means)), 1)
        if self.regression is not None:
            weight, bias = self.regression
            return whole.standardised(features) @ weight.T + bias, novelty
        if whole.posterior == "mixture":
            return mixture, novelty
        second = class_scores(self.stage.whitened(scores), self.stage.means) + whole.log_priors
        return whole.second_temperature * second, novelty


class Division(NamedTuple):
    """Photos in folds: which of them the heads without each fold are fitted to."""

    folds: Array
    """The fold of each photo whose features are at hand, (N,)."""
    totals: tuple[Totals, ...]
    """Those of each fold; they may count more photos than those at hand."""

    @classmethod
    def of(
        cls, features: Array, labels: Array, classes: int, seed: int = 0, series: Array | None = None
    ) -> "Division":
        """Divide photos that are all at hand; each series is in one fold."""
        folds = stratified_folds(labels, FOLDS, seed, series)
        parts = (Totals.of(features[folds == f], labels[folds == f], classes) for f in range(FOLDS))
        return cls(folds, tuple(parts))

    def check(self) -> None:
        """Raise an error unless each class has two photos, and some class has two without any two folds.

        There can't be more classes than statistics, either.
        """
        classes, dimensions = self.totals[0].sums.shape
        if classes > dimensions:
            raise CandidError(
                f"{classes} classes need an eye with at least {classes} statistics, and this one has "
                f"{dimensions}: choose another eye or fewer classes."
            )
        counts = np.stack([each.counts for each in self.totals])
        together = counts.sum(0)
        left = [together - counts[one] - counts[other] for one, other in combinations(range(FOLDS), 2)]
        if together.min() < 2 or not all((rest >= 2).any() for rest in left):
            raise CandidError("There are too few photos to hold some out: give at least three of each class.")


@dataclass(frozen=True)
class ClosedForm:
    """A fitted head, in float64."""

    standardised: Standardised
    whitened: Whitened
    second: SecondStage
    log_priors: Array
    shrinkage: float
    temperature: float
    """What scores of the first stage are multiplied by."""
    second_temperature: float
    posterior: Posterior
    """Which posterior had the lowest out-of-fold log-loss."""
    logistic: tuple[Array, Array] | None
    """Weights (K, D) and biases (K,) of a logistic regression on standardised features, if it was chosen."""
    rest_scale: float
    """What z outside of the span of the class means is divided by, so that new photos have unit variance."""
    out_of_fold: OutOfFold
    groups: tuple[int, ...]
    """How many statistics each group has."""
    totals: tuple[Totals, ...]
    """Those of the photos of each fold."""
    stages: tuple[SecondStage, ...]
    """The second stage without each fold."""
    regressions: tuple[tuple[Array, Array], ...]
    """The logistic regression without each fold, if it was chosen."""
    log_losses: dict[str, float] = field(default_factory=dict)
    """Out-of-fold log-loss of each posterior in nats per photo."""

    def described(self) -> dict[str, Any]:
        """Return what was chosen, and why, for the model's record."""
        return {
            "posterior": self.posterior,
            "shrinkage": self.shrinkage,
            "temperature": self.temperature,
            "second_temperature": self.second_temperature,
            "out_of_fold_log_loss": self.log_losses,
        }

    def choices(self) -> "ClosedForm":
        """Return what was chosen, without all that has D² or N numbers: small enough to be sent around."""
        none = np.empty(0)
        return replace(
            self,
            standardised=replace(self.standardised, covariance=none),
            whitened=Whitened(none, none),
            out_of_fold=OutOfFold(none, none, none, none),
            totals=(),
        )

    def without(self, fold: int, totals: Sequence[Totals]) -> FoldHead:
        """Return the head that has not seen the photos of a fold; ``totals`` are those of all folds."""
        known = Standardised.of(total(totals) - totals[fold], self.groups)
        whitened = Whitened.of(known, self.shrinkage)
        regression = self.regressions[fold] if self.regressions else None
        known = replace(known, covariance=np.empty(0))
        return FoldHead(known, whitened, self.stages[fold], regression, self.choices())


@dataclass(frozen=True)
class _Folds:
    """Out-of-fold scores (N, K) and squared norms of the rest (N,), by shrinkage."""

    scores: dict[float, Array]
    rest: dict[float, Array]


def fit_head(
    features: Array,
    labels: Array,
    classes: int,
    groups: Sequence[int],
    uniform_priors: bool = False,
    logistic: bool = True,
    seed: int = 0,
    series: Array | None = None,
) -> ClosedForm:
    """Fit the head of a photo model.

    Args:
        features: statistics of N photos, (N, D).
        labels: their classes, (N,).
        classes: K.
        groups: how many statistics each group has.
        uniform_priors: whether all classes are equally probable; else by their frequency.
        logistic: whether a logistic regression may replace the posterior if it is clearly better.
        seed: divides the photos into folds.
        series: the series of each photo, (N,): a series is in one fold.

    Raises:
        CandidError: if there are too few photos, if all look the same, or if K > D.
    """
    division = Division.of(features, labels, classes, seed, series)
    return fit_divided(features, labels, division, groups, uniform_priors, logistic)


def fit_divided(
    features: Array,
    labels: Array,
    division: Division,
    groups: Sequence[int],
    uniform_priors: bool = False,
    logistic: bool = True,
) -> ClosedForm:
    """Fit the head of a photo model to photos in folds.

    Means and covariances are those of the totals, which may count more photos than there are features:
    shrinkage, temperatures, second stage and posterior are then chosen with these photos alone, and the
    logistic regression is fitted to them. For the other arguments see :func:`fit_head`.
    """
    division.check()
    folds, parts = division
    everything = total(parts)
    frequency = everything.counts / everything.counts.sum()
    classes = len(frequency)
    log_priors = np.log(np.full_like(frequency, 1 / classes) if uniform_priors else frequency)
    held_out = _out_of_fold(features, folds, parts, everything, groups, classes)
    tempered = {g: _tempered(s + log_priors, labels) for g, s in held_out.scores.items()}
    shrinkage = min(tempered, key=lambda g: tempered[g][1])
    scores, temperature = held_out.scores[shrinkage], tempered[shrinkage][0]
    rest = held_out.rest[shrinkage]
    second, relative = np.empty_like(scores), np.empty_like(rest)
    stages = _crossed(features, labels, folds, parts, groups, shrinkage)
    for f, stage in enumerate(stages):
        rows = folds == f
        second[rows] = class_scores(stage.whitened(scores[rows]), stage.means) + log_priors
        relative[rows] = stage.relative_distance(scores[rows])
    second_temperature, _ = _tempered(second, labels)
    mixture = temperature * (scores + log_priors)
    novelty = np.stack((relative, -logsumexp(mixture), rest), 1)
    standardised = Standardised.of(everything, groups)
    regression = _logistic(features, labels, folds, standardised) if logistic else None
    chosen = _chosen(mixture, second_temperature * second, regression, labels)
    regression = regression if chosen.posterior == "logistic" else None
    return ClosedForm(
        standardised,
        Whitened.of(standardised, shrinkage),
        SecondStage.of(scores, labels),
        log_priors,
        shrinkage,
        temperature,
        second_temperature,
        chosen.posterior,
        regression.weights(labels) if regression else None,
        math.sqrt(max(1e-12, float(rest.mean()) / (features.shape[1] - classes + 1))),
        OutOfFold(chosen.logits, novelty, scores, folds),
        tuple(groups),
        tuple(parts),
        tuple(stages),
        regression.of_folds if regression else (),
        chosen.log_losses,
    )


class _Chosen(NamedTuple):
    posterior: Posterior
    logits: Array
    log_losses: dict[str, float]


def _chosen(mixture: Array, second: Array, logistic: "_Logistic | None", labels: Array) -> _Chosen:
    """Return the posterior whose out-of-fold logits have the lowest log-loss.

    The logistic regression has to be better by more than one standard error.
    """
    losses = {"mixture": _log_losses(mixture, labels), "second-stage": _log_losses(second, labels)}
    posterior: Posterior = "mixture"
    logits = mixture
    if losses["second-stage"].mean() < losses["mixture"].mean():
        posterior, logits = "second-stage", second
    if logistic is not None:
        losses["logistic"] = _log_losses(logistic.logits, labels)
        gain = losses[posterior] - losses["logistic"]
        if gain.mean() > gain.std(ddof=1) / math.sqrt(len(gain)):
            posterior, logits = "logistic", logistic.logits
    return _Chosen(posterior, logits, {name: float(each.mean()) for name, each in losses.items()})


def _out_of_fold(
    features: Array,
    folds: Array,
    parts: Sequence[Totals],
    everything: Totals,
    groups: Sequence[int],
    classes: int,
) -> _Folds:
    scores = {g: np.empty((len(features), classes)) for g in SHRINKAGES}
    rest = {g: np.empty(len(features)) for g in SHRINKAGES}
    few = _are_few(features, everything)
    for f, part in enumerate(parts):
        rows = folds == f
        if not rows.any():
            continue
        known, x = _rotated(Standardised.of(everything - part, groups), features, rows, few)
        for g in SHRINKAGES:
            z, means = _whitened(known, x, g)
            scores[g][rows] = class_scores(z, means)
            rest[g][rows] = rest_norm(z, means)
    return _Folds(scores, rest)


def out_of_fold_z(head: ClosedForm, features: Array) -> Array:
    """Return z of the training photos by heads that have not seen them, (N, D) in float64.

    With C and C_k the covariances of the head and of the head without fold k, it is L' C_k^-1 x, so that its
    product with the whitened mean of any further class is what the head without fold k would say.

    Args:
        head: the fitted head.
        features: the statistics that it was fitted to, (N, D).
    """
    from scipy.linalg import cho_factor, cho_solve, solve_triangular

    final, folds, everything = head.standardised, head.out_of_fold.folds, total(head.totals)
    z = np.empty(features.shape)
    for f in np.unique(folds).tolist():
        rows = folds == f
        known = Standardised.of(everything - head.totals[f], head.groups)
        factor = cho_factor(shrunk(known, head.shrinkage), lower=True)
        x = cho_solve(factor, known(features[rows]).T) * (final.scale / known.scale)[:, None]
        z[rows] = solve_triangular(head.whitened.factor, x, lower=True, trans="T").T
    return z


def _are_few(features: Array, everything: Totals) -> bool:
    """Return whether the photos span fewer dimensions than they have statistics, and all are at hand."""
    return 2 * len(features) <= features.shape[1] and everything.counts.sum() == len(features)


def _rotated(known: Standardised, features: Array, rows: Array, few: bool) -> tuple[Standardised, Array]:
    """Return moments and the standardised features of some rows; of few photos, in coordinates of their span.

    Scores and norms stay the same, and matrices have as many rows as there are photos.
    """
    if not few:
        return known, known(features[rows])
    x = known(features)
    basis = np.linalg.qr(x.T).Q  # (D, N)
    covariance = basis.T @ known.covariance @ basis
    return replace(known, means=known.means @ basis, covariance=covariance), (x @ basis)[rows]


def _whitened(known: Standardised, x: Array, shrinkage: float) -> tuple[Array, Array]:
    """Return standardised features and the class means, whitened."""
    from scipy.linalg import cholesky, solve_triangular

    factor = cholesky(shrunk(known, shrinkage), lower=True)
    both = solve_triangular(factor, np.concatenate((x, known.means)).T, lower=True).T
    return both[: len(x)], both[len(x) :]


def _crossed(
    features: Array,
    labels: Array,
    folds: Array,
    parts: Sequence[Totals],
    groups: Sequence[int],
    shrinkage: float,
) -> list[SecondStage]:
    """Return a second stage for each fold, which the photos of this fold have no part in.

    It is fitted to the scores of the other folds, each by a head that has seen neither: the scores by a head
    that has seen the photos of the fold carry the labels of these photos.
    """
    everything, classes = total(parts), len(parts[0].counts)
    few = _are_few(features, everything)
    scores = np.empty((FOLDS, len(features), classes))
    for one, other in combinations(range(FOLDS), 2):
        both = np.flatnonzero((folds == one) | (folds == other))
        without = Standardised.of(everything - parts[one] - parts[other], groups)
        z, means = _whitened(*_rotated(without, features, both, few), shrinkage)
        left_out = np.where(folds[both] == one, other, one)
        scores[left_out, both] = class_scores(z, means)
    return [SecondStage.of(scores[f, folds != f], labels[folds != f]) for f in range(FOLDS)]


def _tempered(logits: Array, labels: Array) -> tuple[float, float]:
    """Return the factor of ``logits`` with the lowest log-loss, and that log-loss.

    Without a bound, the factor of classes that are perfectly separated would be infinite. N photos can't show
    an error rate below 1 / (N + 1), so the mean error probability of these photos is at least that.
    """
    from scipy.optimize import brentq, minimize_scalar

    def loss(log_factor: float) -> float:
        return float(_log_losses(math.exp(log_factor) * logits, labels).mean())

    def excess(log_factor: float) -> float:
        confidence = softmax(math.exp(log_factor) * logits).max(1)
        return float((1 - confidence).mean()) - 1 / (len(logits) + 1)

    best = float(minimize_scalar(loss, bounds=LOG_TEMPERATURES, method="bounded").x)
    if excess(best) < 0:  # it falls with the factor
        best = brentq(excess, LEAST_LOG_TEMPERATURE, best)
    return math.exp(best), loss(best)


def _log_losses(logits: Array, labels: Array) -> Array:
    return -np.take_along_axis(log_softmax(logits), labels[:, None], 1)[:, 0]


@dataclass(frozen=True)
class _Logistic:
    """Out-of-fold logits of a logistic regression, and what fits the final one."""

    logits: Array
    temperature: float
    penalty: float
    features: Array
    of_folds: tuple[tuple[Array, Array], ...]
    """Weights and biases of the regression without each fold, temperature included."""

    def weights(self, labels: Array) -> tuple[Array, Array]:
        """Return weights and biases of a regression on all photos, temperature included."""
        weight, bias = _regression(self.features, labels, self.penalty)
        return self.temperature * weight, self.temperature * bias


def _logistic(features: Array, labels: Array, folds: Array, known: Standardised) -> _Logistic:
    x = known(features)
    best: _Logistic | None = None
    best_loss = math.inf
    for penalty in PENALTIES:
        logits = np.empty((len(x), len(known.means)))
        fitted = []
        for f in range(FOLDS):
            rows = folds == f
            weight, bias = _regression(x[~rows], labels[~rows], penalty)
            logits[rows] = x[rows] @ weight.T + bias
            fitted.append((weight, bias))
        temperature, loss = _tempered(logits, labels)
        if loss < best_loss:
            of_folds = tuple((temperature * weight, temperature * bias) for weight, bias in fitted)
            best, best_loss = _Logistic(temperature * logits, temperature, penalty, x, of_folds), loss
    assert best is not None
    return best


def _regression(x: Array, labels: Array, penalty: float) -> tuple[Array, Array]:
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(1):  # its many small products would spend their time on waiting for each other
        fitted = LogisticRegression(C=penalty, tol=1e-3, max_iter=300).fit(x, labels)
    weight, bias = fitted.coef_, fitted.intercept_
    if len(weight) == 1:  # two classes: one row for the second against the first
        return np.concatenate((-weight, weight)) / 2, np.concatenate((-bias, bias)) / 2
    return weight, bias

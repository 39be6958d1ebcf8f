import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from candid._support.errors import CandidError
from candid._support.numbers import Array, log_softmax, softmax
from candid.models.photo.gaussian import (
    SecondStage,
    Standardised,
    Totals,
    Whitened,
    class_scores,
    rest_norm,
    stratified_folds,
)
from candid.models.photo.head import FOLDS, SHRINKAGES, ClosedForm, fit_head

GROUPS = (4, 8)
CLASSES = 3


def clouds(each: int = 40, spread: float = 1.0, seed: int = 0) -> tuple[Array, Array]:
    """Return points around three means, with a covariance that is not round."""
    d = sum(GROUPS)
    means = 0.5 * np.random.default_rng(9).normal(size=(CLASSES, d))
    mixing = np.random.default_rng(8).normal(size=(d, d))
    labels = np.tile(np.arange(CLASSES), each)
    points = np.random.default_rng([seed, each]).normal(size=(len(labels), d)) @ mixing
    return (means[labels] + spread * points / 2 + 3).astype(np.float32), labels


def by_hand(x: Array, labels: Array, new: Array, g: float) -> tuple[Array, Array]:
    """Return the class scores of new points and |z|^2 outside of the span of the means, by plain numpy."""
    own, other, y = x.astype(np.float64), new.astype(np.float64), labels
    scale = np.concatenate(
        [
            np.full(n, math.sqrt(part.var(0).mean()))
            for n, part in zip(GROUPS, np.split(own, [4], 1), strict=True)
        ]
    )
    centre = own.mean(0)
    own, other = (own - centre) / scale, (other - centre) / scale
    means = np.stack([own[y == k].mean(0) for k in range(CLASSES)])
    away = own - means[y]
    c = away.T @ away / (len(own) - CLASSES)
    inverse = np.linalg.inv((1 - g) * c + g * np.trace(c) / len(c) * np.eye(len(c)))
    scores = other @ inverse @ means.T - 0.5 * np.einsum("kd,de,ke->k", means, inverse, means)
    root = np.linalg.cholesky(inverse).T  # z = root x
    basis = np.linalg.qr(root @ (means[1:] - means[0]).T)[0]
    z = other @ root.T
    return scores, (z**2).sum(1) - ((z @ basis) ** 2).sum(1)


def cross_entropy(logits: Array, labels: Array) -> float:
    return float(-log_softmax(logits)[np.arange(len(labels)), labels].mean())


def fitted(features: Array, labels: Array, **options: Any) -> ClosedForm:
    return fit_head(features, labels, CLASSES, GROUPS, **options)


@pytest.mark.parametrize("g", [0.05, 0.5])
def test_scores_are_those_of_the_formula(g: float) -> None:
    x, labels = clouds()
    new, _ = clouds(5, seed=1)
    known = Standardised.of(Totals.of(x, labels, CLASSES), GROUPS)
    white = Whitened.of(known, g)
    z = known(new) @ white.factor.T
    scores, rest = by_hand(x, labels, new, g)
    np.testing.assert_allclose(class_scores(z, white.means), scores, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(rest_norm(z, white.means), rest, rtol=1e-8, atol=1e-8)


def test_all_that_is_chosen_comes_from_heads_that_have_not_seen_the_photo() -> None:
    x, labels = clouds(30, spread=1.6)
    head = fitted(x, labels, logistic=False)
    folds = stratified_folds(labels, FOLDS, 0)
    losses = {}
    for g in SHRINKAGES:
        scores, rest = np.empty((len(x), CLASSES)), np.empty(len(x))
        for f in range(FOLDS):
            out = folds == f
            scores[out], rest[out] = by_hand(x[~out], labels[~out], x[out], g)
        logits = scores + math.log(1 / 3)
        grid = [cross_entropy(t * logits, labels) for t in np.logspace(-2, 0.5, 100)]
        losses[g] = (float(min(grid)), scores, rest)
    best = min(losses, key=lambda g: losses[g][0])
    assert head.shrinkage == best
    assert head.log_losses["mixture"] == pytest.approx(losses[best][0], abs=1e-3)
    _, scores, rest = losses[best]
    np.testing.assert_allclose(head.out_of_fold.novelty[:, 2], rest, rtol=1e-7, atol=1e-7)
    for f in range(FOLDS):
        own = folds == f
        second = np.empty((len(x), CLASSES))
        for other in {*range(FOLDS)} - {f}:  # by heads that have seen neither fold
            out, kept = folds == other, ~own & (folds != other)
            second[out] = by_hand(x[kept], labels[kept], x[out], best)[0]
        stage = SecondStage.of(second[~own], labels[~own])
        expected = stage.relative_distance(scores[own])
        np.testing.assert_allclose(head.out_of_fold.novelty[own, 0], expected, rtol=1e-7, atol=1e-7)
    in_sample = class_scores(head.standardised(x) @ head.whitened.factor.T, head.whitened.means)
    assert cross_entropy(in_sample, labels) < losses[best][0]


def test_a_head_on_unlearnable_labels_knows_that_it_knows_nothing() -> None:
    x, labels = clouds(60)
    shuffled = np.random.default_rng(0).permutation(labels)
    head = fitted(x, shuffled)
    assert min(head.log_losses.values()) > math.log(3) - 0.015
    confidence = softmax(head.out_of_fold.logits).max(1)
    assert confidence.mean() < 0.5


def test_perfectly_separated_classes_have_a_finite_temperature() -> None:
    """N photos can't show an error rate below 1 / (N + 1), however far apart the classes are."""
    for spread in (1e-2, 1e-4):
        x, labels = clouds(12, spread)
        head = fitted(x, labels)
        assert np.array_equal(head.out_of_fold.logits.argmax(1), labels)
        errors = 1 - softmax(head.out_of_fold.logits).max(1)
        assert float(errors.mean()) == pytest.approx(1 / (len(x) + 1), rel=1e-6)
        assert 1 < abs(np.diff(head.out_of_fold.logits)).max() < 100


def test_logistic_regression_replaces_the_posterior_only_if_it_is_clearly_better() -> None:
    x, labels = clouds(60)
    assert fitted(x, labels).posterior != "logistic"
    # a wide class next to a narrow one: half-way between their means is the wrong place to divide them
    wide, away = x.copy(), abs(np.random.default_rng(0).normal(size=len(x)))
    wide[:, 0] = np.where(labels == 0, -20 * away, 4 + away)
    head = fit_head(wide, labels.clip(max=1), 2, GROUPS)
    gain = min(head.log_losses["mixture"], head.log_losses["second-stage"]) - head.log_losses["logistic"]
    assert gain > 0.02
    assert head.posterior == "logistic" and head.logistic is not None
    assert head.logistic[0].shape == (2, sum(GROUPS))


def test_priors() -> None:
    x, labels = clouds(40)
    kept = (labels > 0) | (np.arange(len(labels)) < 30)
    by_frequency = fitted(x[kept], labels[kept])
    counts = np.bincount(labels[kept])
    np.testing.assert_allclose(by_frequency.log_priors, np.log(counts / counts.sum()), rtol=1e-7)
    uniform = fitted(x[kept], labels[kept], uniform_priors=True)
    np.testing.assert_allclose(np.exp(uniform.log_priors), np.full(3, 1 / 3), rtol=1e-7)


def test_moments_add_up_and_can_be_taken_away() -> None:
    x, labels = clouds(20)
    whole, part = Totals.of(x, labels, CLASSES), Totals.of(x[:25], labels[:25], CLASSES)
    rest = Totals.of(x[25:], labels[25:], CLASSES)
    for name in ("counts", "sums", "products"):
        np.testing.assert_allclose(getattr(whole - part, name), getattr(rest, name), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("counts", [(20, 20, 20), (7, 2, 33)])
def test_every_class_is_spread_over_the_folds(counts: Sequence[int]) -> None:
    labels = np.repeat(np.arange(3), counts)
    folds = stratified_folds(labels, FOLDS, 1)
    for y, count in enumerate(counts):
        own = np.bincount(folds[labels == y], minlength=FOLDS)
        assert own.max() - own.min() <= 1 and own.sum() == count
    assert not np.array_equal(folds, stratified_folds(labels, FOLDS, 2))


def test_a_class_without_photos_lies_at_the_centre() -> None:
    """And not where all features are zero, which may be far away from all photos."""
    x, labels = clouds(20)
    known = Standardised.of(Totals.of(x + 100, labels, CLASSES + 1), GROUPS)
    assert np.array_equal(known.means[CLASSES], np.zeros(sum(GROUPS)))


def counted(*counts: int) -> tuple[Array, Array]:
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(len(counts)), counts)
    means = 3 * random.normal(size=(len(counts), sum(GROUPS)))
    return (means[labels] + random.normal(size=(len(labels), sum(GROUPS)))).astype(np.float32), labels


@pytest.mark.parametrize("counts", [(3, 3), (2, 3), (4, 2, 2), (2,) * 5, (30, 30, 30, 2, 2, 2)])
def test_few_photos_are_enough(counts: tuple[int, ...]) -> None:
    x, labels = counted(*counts)
    head = fit_head(x, labels, len(counts), GROUPS)
    assert np.isfinite(head.out_of_fold.logits).all() and np.isfinite(head.out_of_fold.novelty).all()


@pytest.mark.parametrize("counts", [(2, 2), (2,) * 4, (1, 20)])
def test_too_few_photos_are_refused(counts: tuple[int, ...]) -> None:
    x, labels = counted(*counts)
    with pytest.raises(CandidError, match="at least three of each class"):
        fit_head(x, labels, len(counts), GROUPS)


def test_more_classes_than_statistics_are_refused() -> None:
    """Class means that span the whole space leave nothing outside of it, which the density is of, too."""
    most = sum(GROUPS)
    x, labels = counted(*(4,) * (most + 1))
    fit_head(x[labels < most], labels[labels < most], most, GROUPS, logistic=False)
    with pytest.raises(CandidError, match="13 classes need an eye with at least 13 statistics"):
        fit_head(x, labels, most + 1, GROUPS, logistic=False)


def test_photos_that_look_alike_are_refused() -> None:
    same = np.ones((20, sum(GROUPS)))
    labels = np.arange(20) % 2
    with pytest.raises(CandidError, match="All images look the same"):
        fit_head(same, labels, 2, GROUPS)
    two = same + labels[:, None]
    with pytest.raises(CandidError, match="All images of a class look the same"):
        fit_head(two, labels, 2, GROUPS)

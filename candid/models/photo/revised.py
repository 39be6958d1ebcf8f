"""The head of a photo model after photos were added to its classes, or classes were merged or removed.

The head carries what its totals were: from the means, the number of photos of each class and the shared
covariance follow counts, sums and products, so that totals of further photos can be added as if all had been
trained on together. The shrinkage and the temperatures stay as they were chosen; a logistic regression gives
way to the better of the two other posteriors. What heads say of held-out photos that the model remembers
changes with the class means; that the shared covariance changes, too, is left out there, since a photo that
was left out of its head must not enter by way of the whole head.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, logsumexp, packed, unpacked
from candid.models.photo.gaussian import (
    SecondStage,
    Standardised,
    Totals,
    Whitened,
    class_scores,
    contrasts,
    halved,
    stratified_folds,
)
from candid.models.photo.head import Posterior
from candid.models.photo.model import PhotoModel
from candid.models.photo.taught import Seen
from candid.trust.gaussians import class_sums

FOLDS = 5
"""New photos are judged by heads to which four of five parts of them were added."""


class Photos(NamedTuple):
    """Statistics of N photos and the classes that they show."""

    values: Array
    """(N, D)."""
    labels: Array
    """(N,)."""

    def rows(self, rows: Array) -> "Photos":
        """Return some of them."""
        return Photos(self.values[rows], self.labels[rows])


class Revised(NamedTuple):
    """A model with another head, and what heads that have not seen the photos say of them."""

    model: PhotoModel
    known: Seen
    """Of the remembered photos."""
    new: Seen | None
    """Of the new photos, each by a head that it was not added to; None if there are none."""


def totals_of(model: PhotoModel) -> Totals:
    """Return counts, sums and products that the head of a model was fitted to.

    They are as exact as its whitening, whose numbers have 11 bits.

    Raises:
        CandidError: if the model does not say how many photos it was trained on.
    """
    counts = counts_of(model)
    centre, scale = (values.astype(np.float64) for values in (model.centre, model.scale))
    root = _root(model)
    means = centre + scale * (_means(model) @ root.T)
    covariance = root @ root.T
    shrinkage = float(model.metadata["head"]["shrinkage"])
    share = shrinkage * float(covariance.diagonal().mean())
    covariance[np.diag_indices_from(covariance)] -= share
    within = covariance / (1 - shrinkage) * scale[:, None] * scale * (counts.sum() - len(counts))
    sums = counts[:, None] * means
    return Totals(counts, sums, within + means.T @ sums)


def counts_of(model: PhotoModel) -> Array:
    """Return how many photos of each fitted class the head was fitted to, (K,) in float64."""
    head = model.metadata.get("head", {})
    if not {"photos", "shrinkage"} <= head.keys():
        raise CandidError("The model does not say how many photos it was trained on: train it again.")
    if "counts" in head:
        return np.array(head["counts"], np.float64)
    frequency = np.exp(model.priors.astype(np.float64))
    return (frequency * float(head["photos"])).round()


def _root(model: PhotoModel) -> Array:
    """Return L: standardised statistics have the covariance L L', (D, D)."""
    from scipy.linalg import solve_triangular

    factor = _factor(model)
    return solve_triangular(factor, np.eye(len(factor)), lower=True)


def _factor(model: PhotoModel) -> Array:
    """Return L^-1 in float64, (D, D)."""
    return unpacked(model.whitening.view(np.float16), model.config.dimensions).astype(np.float64)


def _means(model: PhotoModel) -> Array:
    return model.means.astype(np.float64)


def revised(
    model: PhotoModel,
    groups: Sequence[int],
    class_names: Sequence[str],
    remembered: Seen,
    labels: Array,
    new: Photos | None = None,
    series: Array | None = None,
) -> Revised:
    """Return a model without taught classes whose head was changed.

    Args:
        model: a model without taught classes.
        groups: for each of its classes the number of the class that it becomes, (K,); -1 removes it. Several
            with one number are merged.
        class_names: the names of the classes afterwards.
        remembered: what heads that have not seen the photos say of photos that the model remembers.
        labels: the classes of these photos afterwards.
        new: photos that are added to classes.
        series: the series of the new photos: a series is left out as a whole.
    """
    groups_of, classes = np.asarray(groups, np.int64), len(class_names)
    totals, counts = _regrouped(totals_of(model), groups_of, classes), counts_of(model)
    mixing = _mixing(counts, groups_of, classes)
    whole = totals if new is None else totals + _totals(new, classes)
    made = _first_stage(model, whole, class_names)
    heads = []
    if new is not None:
        folds = stratified_folds(new.labels, FOLDS, series=series)
        for rows in (folds == fold for fold in np.unique(folds)):
            others = totals + _totals(new.rows(~rows), classes)
            heads.append((rows, _first_stage(model, others, class_names)))
    after = _moved(model, remembered, mixing, counts, new)
    added = None
    if new is not None:
        added = np.empty((len(new.labels), classes))
        for rows, head in heads:
            added[rows] = _scores(head, new.values[rows])
    same = groups_of.tolist() == list(range(classes))
    new_labels = None if new is None else new.labels
    second = _second(model, same, (remembered.scores, after, added), labels, new_labels)
    stage = {f"second_{name}": value for name, value in second._asdict().items()}
    for head in (made, *(head for _, head in heads)):
        head.load_state({**head.state(), **stage})
    unseen = None if new is None else _unseen(heads, made, new)
    return Revised(made, _seen(model, made, remembered, after, mixing), unseen)


def _totals(photos: Photos, classes: int) -> Totals:
    return Totals.of(photos.values, photos.labels, classes)


def _regrouped(totals: Totals, groups: Array, classes: int) -> Totals:
    """Return the totals of merged classes, and none of removed ones, as if each had the shared spread."""
    kept = groups >= 0
    counts = np.bincount(groups[kept], totals.counts[kept], classes)
    sums = class_sums(totals.sums[kept], groups[kept], classes)
    products = totals.products
    if not kept.all():
        means = totals.sums / totals.counts.clip(min=1)[:, None]
        within = products - means.T @ totals.sums
        free = totals.counts.sum() - len(totals.counts)
        left = totals.counts[kept].sum() - kept.sum()
        products = within * (left / free) + means[kept].T @ totals.sums[kept]
    return Totals(counts, sums, products)


def _mixing(counts: Array, groups: Array, classes: int) -> Array:
    """Return the share of each class in what it becomes, (K, classes): columns add up to one."""
    mixing = np.zeros((len(groups), classes))
    kept = np.flatnonzero(groups >= 0)
    mixing[kept, groups[kept]] = counts[kept]
    return mixing / mixing.sum(0).clip(min=1e-300)


def _first_stage(model: PhotoModel, totals: Totals, class_names: Sequence[str]) -> PhotoModel:
    """Return a model with the Gaussians of ``totals``; its second stage is still that of ``model``."""
    config = replace(model.config, classes=len(class_names), posterior=_posterior(model))
    made = PhotoModel(config, class_names, model._eye)
    head = model.metadata["head"]
    known = Standardised.of(totals, config.groups)
    factor = halved(Whitened.of(known, float(head["shrinkage"])).factor)
    if not np.isfinite(factor).all():
        raise CandidError("All photos of a class look almost the same to the eye: give different ones.")
    uniform = model.metadata.get("training", {}).get("config", {}).get("priors") == "uniform"
    frequency = totals.counts / totals.counts.sum()
    priors = np.log(np.full(len(class_names), 1 / len(class_names)) if uniform else frequency)
    values = {
        "centre": known.centre,
        "scale": known.scale,
        "means": known.means @ factor.astype(np.float64).T,
        "priors": priors,
        "temperatures": model.temperatures,
        "rest_scale": model.rest_scale,
        "whitening": packed(factor).view(np.int16),
    }
    if len(class_names) == model.config.classes:
        old = model.state()
        values |= {name: old[name] for name in old if name.startswith("second_")}
    made.load_state({**made.state(), **values})
    photos = int(totals.counts.sum())
    made.metadata = {
        **{key: entry for key, entry in model.metadata.items() if key != "by_class"},
        "head": {
            **head,
            "posterior": config.posterior,
            "photos": photos,
            "counts": totals.counts.astype(int).tolist(),
        },
    }
    made.folder = model.folder
    return made


def _posterior(model: PhotoModel) -> Posterior:
    """Return the posterior of a changed head: a logistic regression has no closed form to add photos to."""
    if model.config.posterior != "logistic":
        return model.config.posterior
    losses = model.metadata["head"].get("out_of_fold_log_loss", {})
    return "second-stage" if losses.get("second-stage", 1) < losses.get("mixture", 0) else "mixture"


def _features(model: PhotoModel, z: Array) -> Array:
    """Return the statistics that have these whitened ones, (N, D)."""
    x = z.astype(np.float64) @ _root(model).T
    return x * model.scale.astype(np.float64) + model.centre.astype(np.float64)


def _moved(model: PhotoModel, remembered: Seen, mixing: Array, counts: Array, new: Photos | None) -> Array:
    """Return the scores of remembered photos after the class means have moved, (N, classes).

    With a the share of new photos in a class, m and w the whitened means of its old and new photos and
    m' = (1 - a) m + a w, the score z . m - |m|^2 / 2 becomes ``(1 - a) z . m + a z . w - |m'|^2 / 2``. The
    product z . m is that of the head that has not seen the photo.
    """
    means = _means(model)
    products = (remembered.scores + 0.5 * (means**2).sum(1)) @ mixing
    means = mixing.T @ means
    if new is not None:
        classes = mixing.shape[1]
        n = np.bincount(new.labels, minlength=classes)
        standardised = (new.values.astype(np.float64) - model.centre) / model.scale
        added = class_sums(standardised @ _factor(model).T, new.labels, classes) / n.clip(min=1)[:, None]
        share = n / (n + (mixing > 0).T @ counts)
        products = (1 - share) * products + share * (remembered.z.astype(np.float64) @ added.T)
        means = (1 - share)[:, None] * means + share[:, None] * added
    return products - 0.5 * (means**2).sum(1)


def _seen(old: PhotoModel, new: PhotoModel, remembered: Seen, scores: Array, mixing: Array) -> Seen:
    """Return what heads say of remembered photos whose scores have become ``scores``."""
    x = _features(old, remembered.z)
    after, known = new.fitted_part(x), new.known
    first = float(new.temperatures[0]) * (scores + new.priors)
    if new.config.posterior == "second-stage":
        second = class_scores(known.second.whitened(scores), known.second.means)
        logits = float(new.temperatures[1]) * (second + new.priors)
    else:
        logits = first
    novelty = known.second.relative_distance(scores), -logsumexp(first), remembered.novelty[:, 2]
    terms = remembered.terms
    if terms is not None:
        terms = after.terms + (terms - old.fitted_part(x).terms)
    return Seen(after.z, scores, logits, np.stack(novelty, 1), terms)


def _unseen(heads: Sequence[tuple[Array, PhotoModel]], final: PhotoModel, new: Photos) -> Seen:
    """Return what heads to which other new photos were added say of the new photos."""
    from scipy.linalg import solve_triangular

    factor, parts = _factor(final), []
    for rows, head in heads:
        seen = head.fitted_part(new.values[rows].astype(np.float64))
        x = seen.z @ _factor(head) * (final.scale.astype(np.float64) / head.scale.astype(np.float64))
        z = solve_triangular(factor, x.T, lower=True, trans="T").T  # as out_of_fold_z has it
        parts.append((np.flatnonzero(rows), seen._replace(z=z)))
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    columns = zip(*(seen for _, seen in parts), strict=True)
    return Seen(*(np.concatenate(column)[order] for column in columns))


def _scores(model: PhotoModel, x: Array) -> Array:
    """Return the scores of the first stage, (N, K)."""
    standardised = (x.astype(np.float64) - model.centre) / model.scale
    return class_scores(standardised @ _factor(model).T, _means(model))


def _second(
    model: PhotoModel,
    same: bool,
    scores: tuple[Array, Array, Array | None],
    labels: Array,
    new_labels: Array | None,
) -> SecondStage:
    """Return the second stage of changed scores.

    With the same classes its covariance stays, and the mean of each class moves with the scores of its
    remembered photos and by its new photos; else it is fitted to the remembered photos.

    Args:
        model: the model before.
        same: whether its classes are still the same.
        scores: of the remembered photos before and after, and of the new photos.
        labels: the classes of the remembered photos.
        new_labels: those of the new photos.
    """
    before, after, added = scores
    if not same:
        every = after if added is None else np.concatenate((after, added))
        return SecondStage.of(every, labels if new_labels is None else np.concatenate((labels, new_labels)))
    second = SecondStage(*(getattr(model, f"second_{n}").astype(np.float64) for n in SecondStage._fields))
    classes = len(second.means)
    rows = contrasts(classes).T @ second.factor.T
    moved, means = (after - before) @ rows, second.means.copy()
    counts = np.bincount(labels, minlength=classes)
    present = counts > 0
    means[present] += (class_sums(moved, labels, classes) / counts.clip(min=1)[:, None])[present]
    totals = counts_of(model)
    if added is not None and new_labels is not None:
        extra = np.bincount(new_labels, minlength=classes)
        sums = class_sums(added @ rows, new_labels, classes)
        means = (totals[:, None] * means + sums) / (totals + extra).clip(min=1)[:, None]
    centre = second.centre + moved.mean(0)
    return second._replace(means=means, centre=centre)


def places(old: PhotoModel, new: PhotoModel, stored: Array) -> Array:
    """Return coordinates along the span of the class means of ``new`` for some along that of ``old``.

    What a photo has outside of the span is not stored with it, and taken as nothing.
    """
    x = old.invert(stored.astype(np.float64) @ old.known.basis.astype(np.float64))
    return new.places(new.latent_of(x))

"""Verdicts with stated promises for any classifier, from its logits and, if there are any, its features."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from candid._support.errors import CandidError, did_you_mean
from candid.inference.metrics import log_odds
from candid.models.flow.config import checked_names
from candid.trust import monitor_file
from candid.trust.arrays import Arrays, checked_groups, checked_labels
from candid.trust.combined import parts_for
from candid.trust.feature_scores import COLUMN_SCORES
from candid.trust.options import MonitorOptions
from candid.trust.promises import NoveltyPromise, Promises, Risk, no_promise, walk
from candid.trust.ranking import ALL, LabelledImages, shuffled
from candid.trust.rule import Fitted, Rule
from candid.trust.verdict import Examination, ratios
from candid.trust.watched import Standard

log = logging.getLogger("candid")


class Monitor:
    """Says of each image whether to accept the classifier's answer: accept, ambiguous or novel.

    It works with any classifier. It needs the logits, and if possible features, of labelled images that the
    classifier was not trained on. Levels that the number of these images does not allow are raised to
    the smallest that it does; :meth:`sentences` says what is in force.

    Args:
        novelty: the share of ordinary images that may be called novel.
        error: the share of ordinary images whose class set may miss the true class.
        risk: the share of accepted images that may be wrong; None for no such promise. With it, one half of
            the images fixes the rest of the rule and the other half tests the whole rule.
        delta: the probability that the promise of ``risk`` is wrong.
        score: what decides whether an image is novel: ``"combined"``, or a name in
            :data:`~candid.trust.feature_scores.COLUMN_SCORES` such as ``"energy"`` or ``"mahalanobis"``.
        novelty_promise: ``"average"``: the rate of novelty holds on average over held-out sets;
            ``"confident"``: it holds with 95 % confidence for this monitor.

    Example:
        >>> import candid
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.linear_model import LogisticRegression
        >>> x, y = load_digits(return_X_y=True)
        >>> x = x / 16
        >>> classifier = LogisticRegression().fit(x[:700], y[:700])
        >>> logits = classifier.decision_function
        >>> monitor = candid.Monitor(novelty=0.05).fit(logits(x[700:1700]), y[700:1700], x[700:1700])
        >>> new = [x[1700], 1 - x[1700]]  # a digit, and its negative
        >>> [examined.verdict for examined in monitor.examine(logits(new), new)]
        ['accept', 'novel']
    """

    _fitted: Fitted | None = None

    def __init__(
        self,
        novelty: float | None = 0.01,
        error: float | None = 0.05,
        risk: float | None = None,
        delta: float = 0.05,
        score: str = "combined",
        novelty_promise: NoveltyPromise = "average",
    ) -> None:
        self.novelty, self.error, self.risk, self.delta = novelty, error, risk, delta
        self.score, self.novelty_promise = score, novelty_promise

    def __repr__(self) -> str:
        return f"Monitor({', '.join(f'{name}={value!r}' for name, value in vars(self.options).items())})"

    @property
    def options(self) -> MonitorOptions:
        """The arguments of the constructor, checked."""
        names = MonitorOptions.__dataclass_fields__
        return MonitorOptions(**{name: getattr(self, name) for name in names})

    def fit(
        self,
        logits: Any,
        labels: Any,
        features: Any = None,
        class_names: Sequence[str] | None = None,
        by: Any = None,
    ) -> Self:
        """Learn from labelled images that the classifier was not trained on.

        One half of the images fits the scores and the other half ranks them, whatever their order; with fewer
        than 400 images each fold of five is ranked by scores that the others fitted.

        Args:
            logits: what comes before the softmax, (N, M): numpy, torch or anything like them.
            labels: the true classes, (N,): columns of the logits.
            features: what the last layer gets, (N, F), or other numbers that describe an image.
            class_names: names of the classes; by default their numbers.
            by: groups within which the levels of novelty and error hold: ``"class"`` (the predicted one), or
                the name of the group of each image, (N,), such as its camera.

        Returns:
            The monitor itself.

        Raises:
            CandidError: if the arrays are wrong, or if the risk can't be promised.
        """
        options = self.options
        arrays = Arrays.of(logits, features)
        names = checked_names(
            None if class_names is None else list(map(str, class_names)), arrays.logits.shape[1]
        )
        truth = checked_labels(labels, arrays, names)
        parts = _parts(options.score, arrays)
        kind, group_names, groups = _groups(by, arrays, names)
        order = shuffled(truth, groups, *arrays.columns.values())
        arrays, truth, groups = arrays[order], truth[order], groups[order]
        n = len(arrays) if options.risk is None else len(arrays) // 2
        known = arrays[torch.arange(n)]
        rankings = LabelledImages(known.columns, truth[:n], groups[:n]).rankings(
            parts, options.novelty_promise
        )
        true_ratios = ratios(known.logits.softmax(1)).gather(1, truth[:n, None])[:, 0]
        rule, least = Rule.of(rankings, true_ratios, groups[:n], options), None
        if options.risk is not None:
            risk = _tested(rule, arrays[torch.arange(n, len(arrays))], truth[n:], groups[n:], options)
            least = risk.threshold
            confidence = torch.tensor(least, dtype=torch.float64).sigmoid()
            rule = rule.with_risk(replace(risk, threshold=float(confidence)))
        width = None if arrays.features is None else arrays.features.shape[1]
        self._fitted = Fitted(rule, names, parts, width, kind, group_names, least)
        for sentence in self._warnings():
            log.warning(sentence)
        return self

    def examine(
        self, logits: Any, features: Any = None, by: Any = None, paths: Sequence[object] | None = None
    ) -> list[Examination]:
        """Return the verdict on each image, with its p-value, class set and promises.

        Args:
            logits: (N, M).
            features: (N, F), if the monitor was fitted with features.
            by: the name of the group of each image, if the monitor was fitted with groups.
            paths: what the images are called; by default their numbers.
        """
        fitted = self._needed
        arrays = Arrays.of(logits, features)
        _check_same(arrays, fitted)
        if paths is not None and len(paths) != len(arrays):
            raise CandidError(f"There are {len(paths)} paths and logits of {len(arrays)} images.")
        groups = _known_groups(by, arrays, fitted)
        rule, posterior = fitted.rule, arrays.logits.softmax(1)
        p = rule.p_values(arrays.columns, groups)
        confident = None if fitted.log_odds is None else log_odds(arrays.logits) >= fitted.log_odds
        ranked = posterior.sort(dim=1, descending=True, stable=True)
        columns = zip(
            range(len(arrays)) if paths is None else paths,
            ranked.indices.tolist(),
            ranked.values.tolist(),
            p.tolist(),
            rule.verdicts(posterior, p, groups, confident),
            rule.ranked_in(groups).tolist(),
            strict=True,
        )
        names = fitted.class_names
        return [
            Examination(
                str(path),
                {names[y]: share for y, share in zip(order, shares, strict=True)},
                p_value,
                p_value if fitted.by == "class" and group != ALL else None,
                verdict.kind,
                tuple(names[y] for y in verdict.classes),
                promises=rule.promises[group],
            )
            for path, order, shares, p_value, verdict, group in columns
        ]

    def scores(self, logits: Any, features: Any = None) -> Tensor:
        """Return one score of each image for a :class:`candid.Watch`, (N,): it rises with outlyingness.

        It is the sum of the scores that decide what is novel, standardised by the images of :meth:`fit`. So
        the watch needs held-out images that this monitor was not fitted to.

        Args:
            logits: (N, M).
            features: (N, F), if the monitor was fitted with features.
        """
        fitted = self._needed
        arrays = Arrays.of(logits, features)
        _check_same(arrays, fitted)
        found = [
            Standard.of(ranking.held_out).sum(ranking.values(arrays.columns))
            for ranking in fitted.rule.rankings
        ]
        return torch.stack(found).mean(0)

    @property
    def promises(self) -> Promises:
        """What verdicts promise, over the images of all groups."""
        return self._needed.rule.promises[ALL]

    def sentences(self) -> list[str]:
        """Return in words what verdicts promise, and which groups are too small for these levels."""
        fitted = self._needed
        return [*self.promises.sentences(), *fitted.rule.too_small(fitted.group_names, self.options)]

    def _warnings(self) -> list[str]:
        """Return the sentences about levels that differ from what was asked."""
        fitted = self._needed
        return [*self.promises.raised(), *fitted.rule.too_small(fitted.group_names, self.options)]

    def false_alarms(self) -> dict[str, tuple[int, int]]:
        """Return by true class how many held-out images would be called novel, and of how many."""
        fitted = self._needed
        return fitted.rule.false_alarms(fitted.class_names)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the monitor into the folder ``path``: numbers and text, whole or not at all."""
        monitor_file.save(self.options, self._needed, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Monitor":
        """Return the monitor that :meth:`save` wrote into the folder ``path``; this runs no code from it."""
        options, fitted = monitor_file.load(path)
        monitor = cls(**vars(options))
        monitor._fitted = fitted
        return monitor

    @property
    def _needed(self) -> Fitted:
        if self._fitted is None:
            raise CandidError("The monitor has seen no held-out images yet: call fit first.")
        return self._fitted


def _parts(score: str, arrays: Arrays) -> tuple[str, ...]:
    """Return the names of the scores that ``score`` consists of."""
    if score == "combined":
        return parts_for(arrays.columns)
    known = [name for name, kind in COLUMN_SCORES.items() if set(kind.columns) <= arrays.columns.keys()]
    if score in COLUMN_SCORES and score not in known:
        raise CandidError(
            f"The score '{score}' needs features: give them to fit and examine, or choose one of "
            f"combined, {', '.join(known)}."
        )
    if score not in known:
        raise CandidError(f"There is no score '{score}': {did_you_mean(score, ['combined', *known])}")
    return (score,)


def _groups(
    by: Any, arrays: Arrays, class_names: tuple[str, ...]
) -> tuple[Literal["class", "name"] | None, tuple[str, ...], Tensor]:
    """Return the kind of groups, their names, and the number of the group of each image."""
    if by is None:
        return None, (), torch.full((len(arrays),), ALL)
    if isinstance(by, str):
        if by != "class":
            raise CandidError(f"'by' is \"class\" or names the group of each image, not '{by}'.")
        return "class", class_names, arrays.logits.argmax(1)
    named = checked_groups(by, len(arrays))
    numbers = {name: number for number, name in enumerate(sorted(set(named)))}
    return "name", tuple(numbers), torch.tensor([numbers[name] for name in named])


def _known_groups(by: Any, arrays: Arrays, fitted: Fitted) -> Tensor:
    """Return the number of the group of each new image; ``ALL`` for groups that were not seen before."""
    if fitted.by == "class":
        return arrays.logits.argmax(1)
    if fitted.by is None:
        if by is not None:
            raise CandidError("The monitor was fitted without groups: leave 'by' out, or fit it with 'by'.")
        return torch.full((len(arrays),), ALL)
    if by is None:
        raise CandidError("The monitor was fitted with groups: name the group of each image with 'by'.")
    numbers = {name: number for number, name in enumerate(fitted.group_names)}
    return torch.tensor(
        [numbers.get(name, ALL) for name in checked_groups(by, len(arrays))], dtype=torch.int64
    )


def _check_same(arrays: Arrays, fitted: Fitted) -> None:
    """Raise an error unless the arrays have the columns that the monitor was fitted to."""
    classes, width = arrays.logits.shape[1], None if arrays.features is None else arrays.features.shape[1]
    if classes != len(fitted.class_names):
        raise CandidError(
            f"The monitor was fitted to {len(fitted.class_names)} classes, but these logits have {classes} "
            "columns: give those of the same classifier."
        )
    if width != fitted.features:
        known, given = (
            "no features" if each is None else f"{each} features an image"
            for each in (fitted.features, width)
        )
        raise CandidError(f"The monitor was fitted to {known}, but given are {given}: give the same columns.")


def _tested(rule: Rule, arrays: Arrays, labels: Tensor, groups: Tensor, options: MonitorOptions) -> Risk:
    """Return the promise of the risk, with log odds as its threshold, from images that the rule never saw."""
    assert options.risk is not None
    p, posterior = rule.p_values(arrays.columns, groups), arrays.logits.softmax(1)
    passed = torch.tensor([each.kind == "accept" for each in rule.verdicts(posterior, p, groups)])
    confidence, wrong = log_odds(arrays.logits)[passed], (arrays.logits.argmax(1) != labels)[passed]
    sample = confidence.numpy(), wrong.numpy(), options.risk, options.delta, len(arrays)
    found = walk(*sample)
    if found is None:
        raise CandidError(no_promise(*sample, len(arrays) + len(rule.groups)))
    return found

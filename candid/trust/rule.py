"""The rule: levels, class sets, risk and verdicts within groups of images. Nothing else decides a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.trust.arrays import firsts, in_series, series_of, shuffled_rows
from candid.trust.conformal import Detector, checked_level
from candid.trust.promises import Levels, no_promise, walk
from candid.trust.ranking import (
    ALL,
    CLIP,
    OTHERS,
    Combined,
    CombinedRanks,
    Ranking,
    by_group,
    fit_rankings,
    members,
    new_detector,
    ranked_p_values,
)
from candid.trust.scores import SCORES, Columns, Score, chosen_score
from candid.trust.sets import Posterior, Truths, answers, names_one
from candid.trust.tree import LIST, Tree
from candid.trust.verdict import (
    ERROR,
    NOTHING,
    NOVELTY,
    Answer,
    Examination,
    Level,
    Promises,
    Risk,
    level,
    rounded_up,
)

MOST_NAMED = 3
"""Up to this number of small groups, each has a sentence."""
PER_CLASS = 40
"""Held-out images of a predicted class from which on images are ranked among them, too."""
NO_LABELS = (
    "The held-out images of this model have no labels, so that nothing can be promised about classes: leave "
    "error and risk out, or calibrate the model with labelled images."
)
NO_KINDS = (
    "There is no tree of classes here, so that no kind can be accepted: leave accept_kinds (--accept-kinds) "
    "out, or give a tree where the model is trained or adopted; after teaching, calibrate it again."
)


@dataclass(frozen=True)
class Rule:
    """Decides between accept, ambiguous and novel.

    Example:
        >>> logits = np.random.default_rng(0).normal(size=(500, 3))
        >>> rule = Rule.fit({"logits": logits}, logits.argmax(1), levels=Levels(novelty=0.05))
        >>> rule.promises[ALL].novelty.in_force
        0.05
    """

    rankings: Sequence[Ranking]
    """Give the p-values of novelty."""
    truths: Truths
    """How far down the answers the true classes of held-out images are: class sets come from them."""
    levels: Levels
    """What was asked."""
    promises: Mapping[int, Promises]
    """By group, and of all images: ``ALL``. Groups that are too small have those of ``OTHERS``."""
    tree: Tree | None = None
    """Kinds above the classes."""
    by_class: Ranking | None = None
    """Gives the p-values among held-out images of the same predicted class."""
    unseen: frozenset[int] = frozenset()
    """Classes without held-out images."""

    @classmethod
    def fit(
        cls,
        columns: Mapping[str, Array],
        labels: Array | None = None,
        groups: Array | None = None,
        together: Sequence[object] | Array | None = None,
        levels: Levels | None = None,
        tree: Tree | None = None,
        *,
        order: Callable[[int], Array] | None = None,
        proven: bool = True,
        occasions: bool = False,
        detectors: Mapping[int, Detector] | None = None,
    ) -> "Rule":
        """Return the rule that held-out images give.

        Args:
            columns: of n images that the model was not trained on; see :class:`Columns`.
            labels: their true classes, (n,); None if ``columns`` has ``true_posterior``, or without labels.
            groups: the groups within which the levels hold, (n,); by default there are none.
            together: names of objects, scenes or days, (n,): images with one name count once.
            levels: the score, and what verdicts should promise.
            tree: kinds above the classes.
            order: gives a random order of n images, for halves and folds; by default from digests of their
                rows.
            proven: whether the levels are proven: not if the model has learned from these images.
            occasions: whether these images were taken on the same occasions as the training images.
            detectors: those that were fitted to these images before; that of ``ALL`` is not fitted again.
        """
        levels = levels or Levels()
        if levels.accept_kinds and tree is None:
            raise CandidError(NO_KINDS)
        held_out = (
            Columns(columns, labels) if labels is not None or not isinstance(columns, Columns) else columns
        )
        groups = np.full(held_out.images, ALL) if groups is None else groups
        series = series_of(held_out, together)
        fit = partial(cls._of, levels=levels, tree=tree, together=together is not None, proven=proven)
        copies = held_out.images - int(firsts(series).sum())
        if levels.risk is None:
            rule = fit(held_out, groups, series, order, detectors)
            return rule._with(copies=copies, occasions=occasions)
        if "true_posterior" not in held_out:
            raise CandidError(NO_LABELS)
        shuffled = shuffled_rows(held_out, groups) if order is None else order(held_out.images)
        shuffled = in_series(shuffled[firsts(series)[shuffled]], series)
        shaping, testing = shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]
        rule = fit(held_out.rows(shaping), groups[shaping], series[shaping], np.arange)
        risk = rule._tested(held_out.rows(testing), groups[testing], held_out.images)
        return rule._with(risk=risk, copies=copies, occasions=occasions)

    @classmethod
    def _of(
        cls,
        columns: Columns,
        groups: Array,
        series: Array,
        order: Callable[[int], Array] | None,
        detectors: Mapping[int, Detector] | None = None,
        *,
        levels: Levels,
        tree: Tree | None,
        together: bool,
        proven: bool,
    ) -> "Rule":
        score = chosen_score(columns, levels.score, "arrays" if "logits" in columns else "model")
        promise = "confident" if levels.fdr is not None else levels.novelty_promise
        rankings = fit_rankings(score, columns, groups, order, promise, series, together)
        if detectors and ALL in detectors and len(rankings[0].groups) == columns.images:
            rankings[0].detectors[ALL] = detectors[ALL]
        truths = Truths.of(columns, groups, firsts(series), levels.confidence, tree)
        if truths.ratios is None and levels.error is not None:
            raise CandidError(NO_LABELS)
        return cls.of(rankings, truths.rows(truths.first) if together else truths, levels, tree, proven)

    @classmethod
    def of(
        cls,
        rankings: Sequence[Ranking],
        truths: Truths,
        levels: Levels,
        tree: Tree | None = None,
        proven: bool = True,
    ) -> "Rule":
        """Return the rule with the levels that the number of images in each group allows."""
        counts, first = partial(_counts, rankings, truths), rankings[0].distinct
        least_rank = 1
        if len(rankings) == 1:
            least_rank = round(first.detector(ALL).smallest_p_value * (first.count(ALL) + 1))
        allowed = partial(_levels, levels, len(rankings), least_rank, proven)
        novelty, error = allowed(*counts(ALL))

        def large(n: int, images: int) -> bool:
            within = allowed(n, images)
            return within[0].in_force <= novelty.in_force and within[1].in_force <= error.in_force

        whole = Promises(
            rankings[0].score.name,
            counts(ALL)[0],
            novelty,
            error,
            confidence=levels.confidence,
            fdr=levels.fdr,
            fdr_proven=first.new_detector().fixed_score and rankings[0].first is None,
            accept_kinds=0 if tree is None else levels.accept_kinds,
            out_of_fold=not proven,
            unmeasured=truths.unmeasured(error.cut),
        )
        promises = {ALL: whole}
        small = set()
        for group in np.unique(truths.groups[truths.groups != ALL]).tolist():
            n, images = counts(group)
            if large(n, images):
                promises[group] = _within(promises[ALL], n, *allowed(n, images))
            # of a new image's group, it is one more; so this division treats all images alike
            if not large(n - 1, images - 1):
                small.add(group)
        if small:
            rankings = [replace(ranking, small=frozenset(small), detectors={}) for ranking in rankings]
            truths = replace(truths, small=frozenset(small))
            n, images = _counts(rankings, truths, OTHERS)
            if n and images:
                promises[OTHERS] = _within(promises[ALL], n, *allowed(n, images))
        return cls(rankings, truths, levels, promises, tree)

    def _with(self, **changes: Any) -> "Rule":
        """Return the rule with other entries of all promises."""
        return replace(
            self, promises={g: replace(promise, **changes) for g, promise in self.promises.items()}
        )

    def with_class_ranks(self, detectors: Mapping[int, Detector] | None = None) -> "Rule":
        """Return the rule with p-values among held-out images of the same predicted class.

        The rule must have one ranking, of images whose true classes were not given.

        Args:
            detectors: those that were fitted before, by class.
        """
        (ranking,) = self.rankings
        predicted = ranking.classes
        classes, counts = np.unique(ranking.distinct.classes, return_counts=True)
        groups = np.where(np.isin(predicted, classes[counts >= PER_CLASS]), predicted, ALL)
        fitted = {**(detectors or {}), ALL: ranking.detector(ALL)}
        return replace(self, by_class=replace(ranking, groups=groups, detectors=fitted))

    @property
    def score(self) -> Score:
        """What decides whether an image is novel."""
        return self.rankings[0].score

    @property
    def distinct(self) -> list[Ranking]:
        """The rankings among the first of all copies of each image."""
        return [ranking.distinct for ranking in self.rankings]

    @cached_property
    def smallest_ratios(self) -> dict[int, float]:
        """By group: a class is in the class set if its posterior is at least this share of the largest."""
        return {group: self.truths.smallest_ratio(group, p.error.cut) for group, p in self.promises.items()}

    @cached_property
    def cuts(self) -> dict[int, float]:
        """By group: an image is novel if its p-value is at most this."""
        return {group: promises.novelty.cut for group, promises in self.promises.items()}

    @cached_property
    def bounds(self) -> dict[int, float]:
        """The smallest ratios of classes that have one of their own, by number: taught and unseen ones.

        An unseen class is ruled out only where its posterior is less than one of n + 1 images could show.
        """
        bounds = self.truths.bounds(self.promises[ALL].error.cut)
        if self.unseen:
            bounds = dict.fromkeys(sorted(self.unseen), 1 / (self.truths.count(ALL) + 1)) | bounds
        return bounds

    def ranked_in(self, groups: Array) -> Array:
        """Return the groups that images are ranked in: their own, or ``OTHERS`` if it is small or unknown."""
        rest = OTHERS if OTHERS in self.promises else ALL
        if len(self.promises) == 1:
            return np.full(len(groups), ALL)
        return np.where(np.isin(groups, list(self.promises)) & (groups != ALL), groups, rest)

    def p_values(self, columns: Columns, groups: Array | None = None) -> Array:
        """Return the p-values of N images of these groups, (N,): the share of images that are as unusual."""
        groups = np.full(columns.images, ALL) if groups is None else groups
        statistics = [ranking.statistic(columns) for ranking in self.rankings]
        return ranked_p_values(self.rankings, statistics, self.ranked_in(groups))

    def named(self, posterior: Array, groups: Array | None = None) -> Array:
        """Return which classes the answers about N images name, from their posteriors (N, M), (N, M).

        From the ratios ``q_i = p(y_i | x_i) / max_k p(k | x_i)`` of the true classes of n held-out images,
        class y is in the set of x if ``(1 + #{i: q_i <= p(y | x) / max_k p(k | x)}) / (n + 1)`` is above the
        level of error. The most probable class always is. If an image is exchangeable with the held-out ones,
        its true class is not in the set with a probability of at most that level, however bad the posteriors
        are. The set grows until its posteriors add up to the confidence; below the threshold of a promised
        risk it has two classes at least. With a tree, more than three classes become all classes of the
        smallest kind that covers them, and ``q_i`` is where that answer first has the true class.
        """
        groups = np.full(len(posterior), ALL) if groups is None else groups
        ratio = _by_image(self.smallest_ratios, self.ranked_in(groups))
        named = answers(posterior, ratio, self.levels.confidence, self.bounds)
        if (risk := self.promises[ALL].risk) is not None:
            below = posterior.max(1) < risk.threshold
            if below.any() and (risky := np.flatnonzero(below & (named.sum(1) == 1))).size:
                named[risky[:, None], np.argsort(-posterior[risky], axis=1, kind="stable")[:, :2]] = True
        return named

    def _novel(self, p_value: Array, ranked_in: Array) -> Array:
        """Return which images are novel at the level of their group; none, if all images of a call decide."""
        if self.levels.fdr is not None:
            return np.zeros(len(p_value), bool)
        return p_value <= _by_image(self.cuts, ranked_in)

    def _tested(self, tests: Columns, groups: Array, held_out: int) -> Risk:
        """Return the promise of the risk from held-out images that had no part in this rule."""
        assert self.levels.risk is not None
        risk, delta = checked_level("risk", self.levels.risk), checked_level("delta", self.levels.delta)
        if self.bounds:
            raise CandidError(
                "No risk can be promised after teaching, since few photos of the taught classes were left "
                "out: calibrate the model with labelled photos of all classes first, or leave risk out."
            )
        confidence, ranked_in = tests["max_posterior"], self.ranked_in(groups)
        # not measured by earlier versions: no more than this
        second = tests["second_posterior"] if "second_posterior" in tests else 1 - confidence
        ratio = _by_image(self.smallest_ratios, ranked_in)
        single = names_one(confidence, second, ratio, self.levels.confidence)
        passed = single & ~self._novel(self.p_values(tests, groups), ranked_in)
        wrong = tests["true_posterior"] < confidence
        if tests.labels is not None:
            wrong = tests["predicted"] != tests.labels
        sample = confidence[passed], wrong[passed], risk, delta, len(groups)
        promised = walk(*sample)
        if promised is None:
            raise CandidError(no_promise(*sample, held_out))
        return promised

    def examine(
        self,
        columns: Columns,
        names: Sequence[object],
        class_names: tuple[str, ...],
        groups: Array | None = None,
        groups_are_classes: bool = False,
    ) -> list[Examination]:
        """Return what is said of N images, each with its verdict.

        Args:
            columns: of the images, with ``logits`` and what the score needs.
            names: what the images are called.
            class_names: the names of all classes.
            groups: the groups of the images, (N,); those that are unknown are ranked among all images.
            groups_are_classes: whether the groups are the predicted classes.
        """
        groups = np.full(len(names), ALL) if groups is None else groups
        posterior, ranked_in = columns["posterior"], self.ranked_in(groups)
        statistics = [ranking.statistic(columns) for ranking in self.rankings]
        p_value = ranked_p_values(self.rankings, statistics, ranked_in)
        within: list[float | None] = [None] * len(names)
        if self.by_class is not None:
            is_ranked = np.isin(columns["predicted"], self.by_class.groups)
            classes = np.where(is_ranked, columns["predicted"], ALL)
            within = ranked_p_values([self.by_class], statistics, classes).tolist()
        elif groups_are_classes:
            within = [None if g < 0 else p for g, p in zip(ranked_in.tolist(), p_value.tolist(), strict=True)]
        densities = columns["log_density"].tolist() if "log_density" in columns else [None] * len(names)
        named, novel = self.named(posterior, groups), self._novel(p_value, ranked_in).tolist()
        sizes = named.sum(1).tolist()
        judged = zip(p_value.tolist(), within, novel, sizes, densities, ranked_in.tolist(), strict=True)
        examinations = []
        for i, (name, (p, class_p, is_novel, size, density, group)) in enumerate(
            zip(names, judged, strict=True)
        ):
            shares = Posterior(class_names, posterior[i])
            answer = Answer("novel") if is_novel else self._answer(shares, named[i], size)
            examinations.append(
                Examination(
                    str(name), shares, p, class_p, *answer, log_density=density, promises=self.promises[group]
                )
            )
        return examinations

    def _answer(self, posterior: Posterior, named: Array, size: int) -> Answer:
        """Return the verdict on an image that is not novel, with the classes that its answer names."""
        if size == 1:
            return Answer("accept", (posterior.label,))
        if self.tree is None or size <= LIST:
            return Answer("ambiguous", posterior.among(named))
        kind = self.tree.cover(np.flatnonzero(named))
        node, leaves = self.tree.kind(kind), int(self.tree.counts[kind])
        classes = posterior.among(self.tree.covers_class(kind))
        if node is None:
            return Answer("ambiguous", classes)
        return Answer("accept" if leaves <= self.levels.accept_kinds else "ambiguous", classes, node, leaves)

    def false_alarms(self, class_names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return by class how many held-out images would be called novel, and of how many.

        Each is ranked among the others, by scores that it did not fit. The classes are the true ones, or
        those that the model predicts where the true ones were not stored.
        """
        rankings = self.distinct
        values, groups, classes = (
            np.concatenate([getattr(ranking, name) for ranking in rankings])
            for name in ("values", "groups", "classes")
        )
        ranked_in = self.ranked_in(groups)
        novel, counted = np.zeros((2, len(classes)), bool)
        for group, promises in self.promises.items():
            rows = np.flatnonzero(members(groups, group, rankings[0].small))
            if not len(rows):
                continue
            detector = rankings[0].new_detector()
            share = detector.among_others(values[rows])
            ranking = rows[detector.ranking_rows(len(rows))]
            in_group = ranked_in[ranking] == group
            novel[ranking[in_group]] = (share <= promises.novelty.cut + 1e-9)[in_group]
            counted[ranking[in_group]] = True
        return {
            name: (int(novel[classes == y].sum()), int(counted[classes == y].sum()))
            for y, name in enumerate(class_names)
        }

    def too_small(self, names: Sequence[str]) -> list[str]:
        """Return a sentence about each group that is too small for the levels within it."""
        sentences, whole, rest = [], self.promises[ALL], self.promises.get(OTHERS, self.promises[ALL])
        small = {
            name: _counts(self.rankings, self.truths, group)
            for group, name in enumerate(names)
            if group not in self.promises
        }
        if len(small) > MOST_NAMED:
            named = ", ".join(f"'{name}' {n}" for name, (n, _) in islice(small.items(), MOST_NAMED))
            sentences.append(
                f"{len(small)} of {len(names)} groups have too few held-out images to rank among for these "
                f"levels within them ({named}, …): their images are ranked among those of small groups; give "
                "more images of them."
            )
        for name, (n, images) in small.items() if len(small) <= MOST_NAMED else ():
            hint = "give more images of it"
            if n:
                within = _levels(self.levels, len(self.rankings), 1, True, n, images)
                higher = [
                    f"{what} to at least {rounded_up(level.smallest):g}"
                    for what, level, all_ in zip(
                        ("novelty", "error"), within, (whole.novelty, whole.error), strict=True
                    )
                    if level.smallest > all_.in_force
                ]
                hint += f", or set {' and '.join(higher)}"
            sentences.append(
                f"Group '{name}' has {n} held-out image{'s' * (n != 1)} to rank among, too few for these "
                f"levels within it: its images are ranked among those of small groups; {hint}."
            )
        if small:
            sentences += [
                f"In the {len(small)} small groups together: {sentence}"
                for sentence in replace(rest, copies=0, occasions=False).raised()
            ]
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return what turns the outputs of an exported model into verdicts, as JSON.

        - ``held_out_novelty``: (n, J). The p-value of an image is the combined rank among them; terms are
          clipped at ``clip``.
        - ``first_of_copies``: (n,), which of them are no copies of earlier ones; None if there are no copies.
          The larger p-value counts: among all of them, or without copies.
        - ``novelty``: an image with this p-value or less is novel.
        - ``smallest_ratio``: a class is in the class set if its posterior is at least this share of the
          largest one. It is 1 if the held-out images have no labels. Classes in ``smallest_ratios`` have one
          of their own.
        - ``confidence``: more of the most probable classes join, until their posteriors add up to this.
        - ``tree``: kinds of classes, or None: more than three classes become the smallest kind of them all.
        """
        ranking = self.rankings[0]
        return {
            "novelty": self.promises[ALL].novelty.cut,
            "clip": CLIP,
            "smallest_ratio": self.smallest_ratios[ALL],
            "smallest_ratios": {str(y): ratio for y, ratio in self.bounds.items()},
            "confidence": self.levels.confidence,
            "promises": self.promises[ALL].sentences(),
            "tree": None if self.tree is None else self.tree.to_dict(),
            "held_out_novelty": ranking.values.tolist(),
            "first_of_copies": None if ranking.first is None else ranking.first.astype(int).tolist(),
        }

    def state(self) -> dict[str, Array]:
        """Return all numbers of the rule, to be saved."""
        arrays = self.truths.state() | {"rankings": np.array(len(self.rankings))}
        for i, ranking in enumerate(self.rankings):
            values = ranking.values if ranking.values.ndim == 2 else -ranking.values[:, None]
            parts = {"held_out": values, "groups": ranking.groups, "labels": ranking.classes}
            if ranking.first is not None:
                parts["first"] = ranking.first
            if ranking.fixed is not None:
                parts["fixed.held_out"] = ranking.fixed.held_out
            for name, learned in ranking.learned.items():
                parts |= {f"{name}.{part}": value for part, value in learned.state().items()}
            arrays |= {f"{i}.{name}": np.array(value) for name, value in parts.items()}
        return arrays

    @classmethod
    def restored(
        cls,
        score: str,
        arrays: Mapping[str, Array],
        levels: Levels,
        promised: Mapping[str, Any],
        tree: Tree | None = None,
    ) -> "Rule":
        """Return the rule whose :meth:`state` it was; ``promised`` are entries of its promises."""
        rankings = [_restored(SCORES[score], under(f"{i}.", arrays)) for i in range(int(arrays["rankings"]))]
        return cls.of(rankings, Truths.restored(arrays), levels, tree)._with(**promised)


def _restored(score: Score, arrays: Mapping[str, Array]) -> Ranking:
    names = {key.rpartition(".")[0] for key in arrays} - {"", "fixed"}
    learned = {
        name: type(SCORES[name].new_learner()).from_state(under(f"{name}.", arrays)) for name in sorted(names)
    }
    fixed = CombinedRanks(arrays["fixed.held_out"]) if "fixed.held_out" in arrays else None
    values = arrays["held_out"]
    several = isinstance(new_detector(score), Combined) and fixed is None
    first = arrays.get("first")
    ranking = Ranking(score, learned, values, arrays["groups"], arrays["labels"], fixed, first)
    return ranking if several or values.shape[1] > 1 else replace(ranking, values=-values[:, 0])


def under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _counts(rankings: Sequence[Ranking], truths: Truths, group: int) -> tuple[int, int]:
    """Return how many held-out images of a group rank new ones, and how many have a true class."""
    return sum(ranking.distinct.count(group) for ranking in rankings), truths.count(group)


def _by_image(values: Mapping[int, float], groups: Array) -> Array:
    """Return the value of the group of each image, (N,)."""
    if len(values) == 1:
        return np.full(len(groups), next(iter(values.values())))
    by_image = np.empty(len(groups))
    for group, rows in by_group(groups):
        by_image[rows] = values[group]
    return by_image


def _within(promises: Promises, n: int, novelty: Level, error: Level) -> Promises:
    return replace(promises, n_reference=n, novelty=novelty, error=error)


def _levels(
    levels: Levels, folds: int, least_rank: int, proven: bool, n: int, images: int
) -> tuple[Level, Level]:
    """Return the levels of novelty and error among ``n`` and ``images`` held-out images."""
    promise = levels.novelty_promise if levels.fdr is None else "average"
    novelty = level(levels.novelty, NOVELTY, max(n, 0), promise, folds, least_rank)
    error = NOTHING if images < 0 else level(levels.error, ERROR, images)
    return (novelty, error) if proven else (novelty._replace(proven=1.0), error._replace(proven=1.0))

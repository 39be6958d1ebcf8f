"""The rule: levels, class sets, risk and verdicts within groups of images. Nothing else decides a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.trust.conformal import Detector, checked_level, rejected_ranks
from candid.trust.promises import Levels, no_promise, walk
from candid.trust.ranking import (
    ALL,
    CLIP,
    Combined,
    CombinedRanks,
    Ranking,
    by_group,
    fit_rankings,
    new_detector,
    ranked_p_values,
    shuffled_rows,
)
from candid.trust.scores import SCORES, Columns, Score, chosen_score
from candid.trust.verdict import (
    ERROR,
    NOTHING,
    NOVELTY,
    Examination,
    Level,
    Posterior,
    Promises,
    Risk,
    Verdict,
    level,
    rounded_up,
)

PER_CLASS = 40
"""Held-out images of a predicted class from which on images are ranked among them, too."""
NO_LABELS = (
    "The held-out images of this model have no labels, so that nothing can be promised about classes: leave "
    "error and risk out, or calibrate the model with labelled images."
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
    true_ratios: Array | None
    """The posteriors of the true classes of held-out images, each divided by the largest posterior of its
    image, (n,): class sets come from them. None without labels."""
    groups: Array
    """The groups of these images, (n,)."""
    promises: Mapping[int, Promises]
    """By group, and of all images: ``ALL``. Groups that are too small have none of their own."""
    levels: Levels
    """What was asked."""
    by_class: Ranking | None = None
    """Gives the p-values among held-out images of the same predicted class."""

    @classmethod
    def fit(
        cls,
        columns: Mapping[str, Array],
        labels: Array | None = None,
        groups: Array | None = None,
        levels: Levels | None = None,
        *,
        order: Callable[[int], Array] | None = None,
        proven: bool = True,
        detectors: Mapping[int, Detector] | None = None,
    ) -> "Rule":
        """Return the rule that held-out images give.

        Args:
            columns: of n images that the model was not trained on; see :class:`Columns`.
            labels: their true classes, (n,); None if ``columns`` has ``true_posterior``, or without labels.
            groups: the groups within which the levels hold, (n,); by default there are none.
            levels: the score, and what verdicts should promise.
            order: gives a random order of n images, for halves and folds; by default from digests of their
                rows.
            proven: whether the levels are proven: not if the model has learned from these images.
            detectors: those that were fitted to these images before; that of ``ALL`` is not fitted again.
        """
        levels = levels or Levels()
        known = (
            Columns(columns, labels) if labels is not None or not isinstance(columns, Columns) else columns
        )
        groups = np.full(known.images, ALL) if groups is None else groups
        if levels.risk is None:
            return cls._of(known, groups, levels, order, proven, detectors)
        if "true_posterior" not in known:
            raise CandidError(NO_LABELS)
        shuffled = shuffled_rows(known, groups) if order is None else order(known.images)
        n = known.images // 2
        shaping, testing = (known.rows(rows) for rows in (shuffled[:n], shuffled[n:]))
        rule = cls._of(shaping, groups[shuffled[:n]], levels, np.arange, proven)
        risk = rule._tested(testing, groups[shuffled[n:]], known.images)
        promises = {group: replace(promise, risk=risk) for group, promise in rule.promises.items()}
        return replace(rule, promises=promises)

    @classmethod
    def _of(
        cls,
        columns: Columns,
        groups: Array,
        levels: Levels,
        order: Callable[[int], Array] | None,
        proven: bool,
        detectors: Mapping[int, Detector] | None = None,
    ) -> "Rule":
        score = chosen_score(columns, levels.score, "arrays" if "logits" in columns else "model")
        rankings = fit_rankings(score, columns, groups, order, levels.novelty_promise)
        if detectors and ALL in detectors and len(rankings[0].groups) == columns.images:
            rankings[0].detectors[ALL] = detectors[ALL]
        true_ratios = None
        if "true_posterior" in columns:
            true_ratios = columns["true_posterior"] / columns["max_posterior"]
        elif levels.error is not None:
            raise CandidError(NO_LABELS)
        return cls.of(rankings, true_ratios, groups, levels, proven)

    @classmethod
    def of(
        cls,
        rankings: Sequence[Ranking],
        true_ratios: Array | None,
        groups: Array,
        levels: Levels,
        proven: bool = True,
    ) -> "Rule":
        """Return the rule with the levels that the number of images in each group allows."""
        parts = rankings, true_ratios, groups
        name = rankings[0].score.name
        promises: dict[int, Promises] = {}
        for group in (ALL, *np.unique(groups[groups != ALL]).tolist()):
            novelty, error = _levels(*parts, levels, group)
            if not proven:
                novelty, error = novelty._replace(proven=1.0), error._replace(proven=1.0)
            whole = promises.get(ALL)
            if whole is None or (
                novelty.in_force <= whole.novelty.in_force and error.in_force <= whole.error.in_force
            ):
                n = sum(ranking.count(group) for ranking in rankings)
                promises[group] = Promises(name, n, novelty, error)
        return cls(*parts, promises, levels)

    def with_class_ranks(self, predicted: Array, detectors: Mapping[int, Detector] | None = None) -> "Rule":
        """Return the rule with p-values among held-out images of the same predicted class.

        Args:
            predicted: the predicted classes of the images that rank, (n,).
            detectors: those that were fitted before, by class.
        """
        (ranking,) = self.rankings
        classes, counts = np.unique(predicted, return_counts=True)
        groups = np.where(np.isin(predicted, classes[counts >= PER_CLASS]), predicted, ALL)
        known = {**(detectors or {}), ALL: ranking.detector(ALL)}
        return replace(self, by_class=replace(ranking, groups=groups, detectors=known))

    @property
    def score(self) -> Score:
        """What decides whether an image is novel."""
        return self.rankings[0].score

    @cached_property
    def smallest_ratios(self) -> dict[int, float]:
        """By group: a class is in the class set if its posterior is at least this share of the largest."""
        if self.true_ratios is None:
            return dict.fromkeys(self.promises, 1.0)
        smallest = {}
        for group, promises in self.promises.items():
            ratios = self.true_ratios if group == ALL else self.true_ratios[self.groups == group]
            rank = rejected_ranks(len(ratios), promises.error.cut) if promises.error.cut < 1 else len(ratios)
            smallest[group] = float(np.partition(ratios, rank - 1)[rank - 1]) if rank else 0.0
        return smallest

    def ranked_in(self, groups: Array) -> Array:
        """Return the groups that images are ranked in: their own, or all images if it is too small."""
        if len(self.promises) == 1:
            return np.full(len(groups), ALL)
        return np.where(np.isin(groups, list(self.promises)), groups, ALL)

    def p_values(self, columns: Columns, groups: Array | None = None) -> Array:
        """Return the p-values of N images of these groups, (N,): the share of images that are as unusual."""
        groups = np.full(columns.images, ALL) if groups is None else groups
        statistics = [ranking.statistic(columns) for ranking in self.rankings]
        return ranked_p_values(self.rankings, statistics, self.ranked_in(groups))

    def verdicts(
        self, posterior: Array, p_value: Array, groups: Array | None = None
    ) -> tuple[list[Verdict], list[int]]:
        """Return the verdicts on N images and the sizes of their class sets, from posteriors (N, M).

        An image is novel if its p-value is at most the level of novelty; else it is accepted if its class set
        has one class, and ambiguous if it has several. From the ratios ``q_i = p(y_i | x_i) / max_k p(k |
        x_i)`` of the true classes of n held-out images, class y is in the set of x if
        ``(1 + #{i: q_i <= p(y | x) / max_k p(k | x)}) / (n + 1)`` is above the level of error. The most
        probable class always is. If an image is exchangeable with the held-out ones, its true class is not
        in the set with a probability of at most that level, however bad the posteriors are. With a promised
        risk, an image whose confidence is too low for it is ambiguous, too.
        """
        confidence = posterior.max(1)
        novelty, ratio = self._cuts(np.full(len(posterior), ALL) if groups is None else groups)
        sizes = (posterior / confidence[:, None] >= ratio[:, None]).sum(1)
        if self.true_ratios is None:
            sizes = np.ones(len(posterior), np.int64)
        if (risk := self.promises[ALL].risk) is not None:
            sizes = np.where(confidence >= risk.threshold, sizes, sizes.clip(min=2))
        kinds: list[Verdict] = [
            "novel" if novel else "accept" if size == 1 else "ambiguous"
            for novel, size in zip((p_value <= novelty).tolist(), sizes.tolist(), strict=True)
        ]
        return kinds, sizes.tolist()

    def _cuts(self, groups: Array) -> tuple[Array, Array]:
        """Return the p-value up to which each image is novel, and the smallest ratio in its class set."""
        novelty, ratio = np.empty((2, len(groups)))
        for group, rows in by_group(self.ranked_in(groups)):
            novelty[rows], ratio[rows] = self.promises[group].novelty.cut, self.smallest_ratios[group]
        return novelty, ratio

    def _tested(self, tests: Columns, groups: Array, held_out: int) -> Risk:
        """Return the promise of the risk from held-out images that had no part in this rule."""
        assert self.levels.risk is not None
        risk, delta = checked_level("risk", self.levels.risk), checked_level("delta", self.levels.delta)
        confidence, (novelty, ratio) = tests["max_posterior"], self._cuts(groups)
        # not measured by earlier versions: no more than this
        second = tests["second_posterior"] if "second_posterior" in tests else 1 - confidence
        passed = (self.p_values(tests, groups) > novelty) & (second / confidence < ratio)
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
        kinds, sizes = self.verdicts(posterior, p_value, groups)
        within: list[float | None] = [None] * len(names)
        if self.by_class is not None:
            known = np.isin(columns["predicted"], self.by_class.groups)
            classes = np.where(known, columns["predicted"], ALL)
            within = self.by_class.p_values(statistics[0], classes).tolist()
        elif groups_are_classes:
            within = [
                None if g == ALL else p for g, p in zip(ranked_in.tolist(), p_value.tolist(), strict=True)
            ]
        densities = columns["log_density"].tolist() if "log_density" in columns else [None] * len(names)
        judged = zip(p_value.tolist(), within, kinds, sizes, densities, ranked_in.tolist(), strict=True)
        examinations = []
        for name, row, (p, class_p, kind, size, density, group) in zip(names, posterior, judged, strict=True):
            shares = Posterior(class_names, row)
            fitting = () if kind == "novel" else tuple(class_names[y] for y in shares.order(size))
            examinations.append(
                Examination(str(name), shares, p, class_p, kind, fitting, density, self.promises[group])
            )
        return examinations

    def false_alarms(self, class_names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return by class how many held-out images would be called novel, and of how many.

        Each is ranked among the others, by scores that it did not fit. The classes are the true ones, or
        those that the model predicts where the true ones were not stored.
        """
        values, groups, classes = (
            np.concatenate([getattr(ranking, name) for ranking in self.rankings])
            for name in ("values", "groups", "classes")
        )
        ranked_in = self.ranked_in(groups)
        novel, counted = np.zeros((2, len(classes)), bool)
        for group, promises in self.promises.items():
            rows = np.flatnonzero(ranked_in >= ALL if group == ALL else groups == group)
            detector = self.rankings[0].new_detector()
            share = detector.among_others(values[rows])
            ranking = rows[detector.ranking_rows(len(rows))]
            own = ranked_in[ranking] == group
            novel[ranking[own]] = (share <= promises.novelty.cut + 1e-9)[own]
            counted[ranking[own]] = True
        return {
            name: (int(novel[classes == y].sum()), int(counted[classes == y].sum()))
            for y, name in enumerate(class_names)
        }

    def too_small(self, names: Sequence[str]) -> list[str]:
        """Return a sentence about each group that is too small for the levels within it."""
        sentences, whole = [], self.promises[ALL]
        for group, name in enumerate(names):
            if group in self.promises:
                continue
            n = sum(ranking.count(group) for ranking in self.rankings)
            hint = "give more images of it"
            if n:
                within = _levels(self.rankings, self.true_ratios, self.groups, self.levels, group)
                higher = [
                    f"{what} to at least {rounded_up(level.smallest):g}"
                    for what, level, all_ in zip(
                        ("novelty", "error"), within, (whole.novelty, whole.error), strict=True
                    )
                    if level.smallest > all_.in_force
                ]
                hint += f", or set {' and '.join(higher)}"
            sentences.append(
                f"Group '{name}' has {n} held-out images to rank among, too few for these levels within it: "
                f"its images are ranked among those of all groups; {hint}."
            )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return what turns the outputs of an exported model into verdicts, as JSON.

        - ``held_out_novelty``: (n, J). The p-value of an image is the combined rank among them; terms are
          clipped at ``clip``.
        - ``novelty``: an image with this p-value or less is novel.
        - ``smallest_ratio``: a class is in the class set if its posterior is at least this share of the
          largest one. It is 1 if the held-out images have no labels.
        """
        return {
            "novelty": self.promises[ALL].novelty.cut,
            "clip": CLIP,
            "smallest_ratio": self.smallest_ratios[ALL],
            "promises": self.promises[ALL].sentences(),
            "held_out_novelty": self.rankings[0].values.tolist(),
        }

    def state(self) -> dict[str, Array]:
        """Return all numbers of the rule, to be saved."""
        arrays = {"groups": self.groups, "rankings": np.array(len(self.rankings))}
        if self.true_ratios is not None:
            arrays["true_ratios"] = self.true_ratios
        for i, ranking in enumerate(self.rankings):
            values = ranking.values if ranking.values.ndim == 2 else -ranking.values[:, None]
            parts = {"held_out": values, "groups": ranking.groups, "labels": ranking.classes}
            if ranking.fixed is not None:
                parts["fixed.held_out"] = ranking.fixed.held_out
            for name, learned in ranking.learned.items():
                parts |= {f"{name}.{part}": value for part, value in learned.state().items()}
            arrays |= {f"{i}.{name}": np.array(value) for name, value in parts.items()}
        return arrays

    @classmethod
    def restored(cls, score: str, arrays: Mapping[str, Array], levels: Levels, risk: Risk | None) -> "Rule":
        """Return the rule whose :meth:`state` it was; ``risk`` is what it promised."""
        rankings = [_restored(SCORES[score], under(f"{i}.", arrays)) for i in range(int(arrays["rankings"]))]
        rule = cls.of(rankings, arrays.get("true_ratios"), arrays["groups"], levels)
        if risk is None:
            return rule
        promises = {group: replace(promise, risk=risk) for group, promise in rule.promises.items()}
        return replace(rule, promises=promises)


def _restored(score: Score, arrays: Mapping[str, Array]) -> Ranking:
    names = {key.rpartition(".")[0] for key in arrays} - {"", "fixed"}
    learned = {
        name: type(SCORES[name].new_learner()).from_state(under(f"{name}.", arrays)) for name in sorted(names)
    }
    fixed = CombinedRanks(arrays["fixed.held_out"]) if "fixed.held_out" in arrays else None
    values = arrays["held_out"]
    several = isinstance(new_detector(score), Combined) and fixed is None
    ranking = Ranking(score, learned, values, arrays["groups"], arrays["labels"], fixed)
    return ranking if several or values.shape[1] > 1 else replace(ranking, values=-values[:, 0])


def under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _levels(
    rankings: Sequence[Ranking], true_ratios: Array | None, groups: Array, levels: Levels, group: int
) -> tuple[Level, Level]:
    """Return the levels of novelty and error within a group, or over all images."""
    n = sum(ranking.count(group) for ranking in rankings)
    least_rank = 1
    if n and len(rankings) == 1:
        least_rank = round(rankings[0].detector(group).smallest_p_value * (n + 1))
    novelty = level(levels.novelty, NOVELTY, n, levels.novelty_promise, len(rankings), least_rank)
    if true_ratios is None:
        return novelty, NOTHING
    images = len(groups) if group == ALL else int((groups == group).sum())
    return novelty, level(levels.error, ERROR, images)

"""The rule of a monitor: what is novel and what is ambiguous, within groups of images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from candid.trust.feature_moments import Columns
from candid.trust.options import MonitorOptions
from candid.trust.promises import ERROR, NOVELTY, Level, Promises, Risk, level, rounded_up
from candid.trust.ranking import ALL, Ranking, among_others, ranked_images, ranked_p_values
from candid.trust.verdict import Verdict, verdicts


@dataclass(frozen=True)
class Rule:
    """Decides between accept, ambiguous and novel."""

    rankings: Sequence[Ranking]
    """Give the p-values of novelty."""
    true_ratios: Tensor
    """The posteriors of the true classes of held-out images, each divided by the largest posterior of its
    image, (n,): class sets come from them."""
    groups: Tensor
    """The groups of these images, (n,)."""
    promises: Mapping[int, Promises]
    """By group, and of all images: ``ALL``. Groups that are too small have none of their own."""

    @classmethod
    def of(
        cls, rankings: Sequence[Ranking], true_ratios: Tensor, groups: Tensor, options: MonitorOptions
    ) -> "Rule":
        """Return the rule with the levels that the number of images in each group allows."""
        whole = Promises(options.score, ranked_images(rankings), *_levels(rankings, groups, options, ALL))
        promises = {ALL: whole}
        for group in groups[groups != ALL].unique().tolist():
            novelty, error = _levels(rankings, groups, options, group)
            if novelty.in_force <= whole.novelty.in_force and error.in_force <= whole.error.in_force:
                n = ranked_images(rankings, group)
                promises[group] = Promises(options.score, n, novelty, error)
        return cls(rankings, true_ratios, groups, promises)

    def with_risk(self, risk: Risk) -> "Rule":
        """Return the rule with the promise of a risk."""
        promises = {group: replace(each, risk=risk) for group, each in self.promises.items()}
        return replace(self, promises=promises)

    def ranked_in(self, groups: Tensor) -> Tensor:
        """Return the groups that images are ranked in: their own, or all images if it is too small."""
        own = torch.isin(groups, torch.tensor(list(self.promises)))
        return torch.where(own, groups, ALL)

    def p_values(self, columns: Columns, groups: Tensor) -> Tensor:
        """Return the p-values of N images of these groups, (N,)."""
        return ranked_p_values(self.rankings, columns, self.ranked_in(groups))

    def verdicts(
        self, posterior: Tensor, p_value: Tensor, groups: Tensor, confident: Tensor | None = None
    ) -> list[Verdict]:
        """Return the verdicts on N images; see :func:`candid.trust.verdict.verdicts`."""
        groups = self.ranked_in(groups)
        found: list[Verdict] = [Verdict("novel", ())] * len(groups)
        for group in groups.unique().tolist():
            rows = (groups == group).nonzero()[:, 0]
            known = self.true_ratios if group == ALL else self.true_ratios[self.groups == group]
            promises = self.promises[group]
            cuts = promises.novelty.cut, promises.error.cut
            own = None if confident is None else confident[rows]
            judged = verdicts(posterior[rows], p_value[rows], known, *cuts, own)
            for row, verdict in zip(rows.tolist(), judged, strict=True):
                found[row] = verdict
        return found

    def false_alarms(self, class_names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return by true class how many held-out images would be called novel, and of how many.

        Each is ranked among the others, by scores that it did not fit.
        """
        held_out, groups, labels = (
            torch.cat([getattr(ranking, name) for ranking in self.rankings])
            for name in ("held_out", "groups", "labels")
        )
        ranked_in = self.ranked_in(groups)
        novel = torch.zeros(len(labels), dtype=torch.bool)
        for group, promises in self.promises.items():
            rows = torch.arange(len(labels)) if group == ALL else (groups == group).nonzero()[:, 0]
            flagged = among_others(held_out[rows]) <= promises.novelty.cut + 1e-9
            novel[rows] = torch.where(ranked_in[rows] == group, flagged, novel[rows])
        return {
            name: (int(novel[labels == y].sum()), int((labels == y).sum()))
            for y, name in enumerate(class_names)
        }

    def too_small(self, names: Sequence[str], options: MonitorOptions) -> list[str]:
        """Return a sentence about each group that is too small for the levels within it."""
        found = []
        for group, name in enumerate(names):
            if group in self.promises:
                continue
            n = ranked_images(self.rankings, group)
            novelty, error = _levels(self.rankings, self.groups, options, group)
            whole, hint = self.promises[ALL], "give more images of it"
            if n:
                higher = [
                    f"{what} to at least {rounded_up(own.smallest):g}"
                    for what, own, all_ in (
                        ("novelty", novelty, whole.novelty),
                        ("error", error, whole.error),
                    )
                    if own.smallest > all_.in_force
                ]
                hint += f", or set {' and '.join(higher)}"
            found.append(
                f"Group '{name}' has {n} held-out images to rank among, too few for these levels within it: "
                f"its images are ranked among those of all groups; {hint}."
            )
        return found


@dataclass(frozen=True)
class Fitted:
    """What a monitor has learned."""

    rule: Rule
    class_names: tuple[str, ...]
    parts: tuple[str, ...]
    """The names of the scores that decide what is novel."""
    features: int | None
    """The number of features of an image."""
    by: Literal["class", "name"] | None
    """Whether images are ranked in groups: by predicted class, or by a name that users give."""
    group_names: tuple[str, ...]
    log_odds: float | None
    """The least log odds of the most probable class with which images are accepted; None without a risk."""


def _levels(
    rankings: Sequence[Ranking], groups: Tensor, options: MonitorOptions, group: int
) -> tuple[Level, Level]:
    """Return the levels of novelty and error within a group, or over all images."""
    n = ranked_images(rankings, group)
    novelty = level(options.novelty, NOVELTY, n, options.novelty_promise, len(rankings))
    images = len(groups) if group == ALL else int((groups == group).sum())
    return novelty, level(options.error, ERROR, images)

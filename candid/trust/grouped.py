"""Verdicts of a model whose levels hold within groups of images, such as classes or cameras."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from candid._support.errors import CandidError
from candid.inference.predictions import Predictions
from candid.trust.judge import HeldOut, Judge
from candid.trust.verdict import Examination


@dataclass(frozen=True)
class GroupedJudge:
    """A judge for each group of images; groups with too few held-out images share the one of all images."""

    whole: Judge
    own: Mapping[str, Judge]
    too_small: tuple[str, ...]
    """A sentence about each group without a judge of its own."""

    @classmethod
    def of(cls, whole: Judge, make: Callable[[HeldOut], Judge], groups: Sequence[str]) -> "GroupedJudge":
        """Return the judges of all groups.

        Args:
            whole: the judge of all images.
            make: makes a judge of the same score and levels from fewer held-out images.
            groups: the group of each held-out image.
        """
        own, too_small, asked = {}, [], whole.promises
        for name in sorted(set(groups)):
            rows = torch.tensor([i for i, each in enumerate(groups) if each == name])
            try:
                judge = make(whole.held_out.rows(rows))
            except CandidError:  # the judge of all images was made the same way: there are too few
                judge = None
            if (
                judge is not None
                and judge.novelty <= asked.novelty.in_force
                and judge.error <= asked.error.in_force
            ):
                own[name] = judge
                continue
            too_small.append(
                f"Group '{name}' has {len(rows)} held-out images, too few for these levels within it: its "
                "images are ranked among those of all groups; calibrate with more images of it."
            )
        return cls(whole, own, tuple(too_small))

    def examine(self, predictions: Predictions, groups: Sequence[str]) -> list[Examination]:
        """Return the examinations of images of these groups, each by the judge of its group."""
        found: dict[int, Examination] = {}
        for name in dict.fromkeys(groups):
            rows = [i for i, each in enumerate(groups) if each == name]
            judge = self.own.get(name, self.whole)
            found |= zip(rows, judge.examine(predictions[torch.tensor(rows)]), strict=True)
        return [found[i] for i in range(len(groups))]

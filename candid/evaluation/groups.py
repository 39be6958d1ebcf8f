"""Verdicts within groups of images: what holds in each, and what was measured."""

from collections.abc import Sequence
from typing import Any

from candid._support.text import hundredths
from candid.evaluation.result import JudgedSet, right_ones
from candid.evaluation.selective import KINDS
from candid.trust.detection import share
from candid.trust.promises import Promises


def group_metrics(
    by: str, groups: Sequence[str], judged: JudgedSet, promises: Sequence[Promises], whole: Promises
) -> dict[str, Any]:
    """Return, by group, its test images, its levels and its verdicts.

    ``own_levels`` says whether the levels hold within the group; in one that is too small they do not.

    Args:
        by: what the groups are.
        groups: the group of each test image.
        judged: these images with verdicts.
        promises: what each verdict promises.
        whole: what verdicts promise over the images of all groups.
    """
    right = right_ones(judged.predictions)
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(set(groups)):
        rows = [i for i, each in enumerate(groups) if each == name]
        accepted = [i for i in rows if judged.kinds[i] == "accept"]
        levels = promises[rows[0]]
        found[name] = {
            "images": len(rows),
            "own_levels": levels is not whole,
            "n_reference": levels.n_reference,
            "novelty": levels.novelty.in_force,
            "error": levels.error.in_force,
            **{kind: sum(judged.kinds[i] == kind for i in rows) / len(rows) for kind in KINDS},
            "accepted_accuracy": share(right[accepted]) if accepted else None,
        }
    return {"by": by, "groups": found}


def title(found: dict[str, Any]) -> str:
    """Return what the :func:`table` shows."""
    return (
        f"groups by '{found['by']}'; each is ranked among its own held-out images, unless there are too few"
    )


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of what :func:`group_metrics` found; shares in percent."""
    rows = [
        [
            name,
            f"{each['images']:,}",
            f"{each['n_reference']:,}" + ("" if each["own_levels"] else " of all groups"),
            *(f"{100 * each[kind]:.1f}" for kind in KINDS),
            hundredths(each["accepted_accuracy"], 1),
        ]
        for name, each in found["groups"].items()
    ]
    shares = (f"{kind} (%)" for kind in (*KINDS, "right of accepted"))
    return ["group", "images", "ranked among", *shares], rows

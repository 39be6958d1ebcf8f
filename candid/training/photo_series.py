"""Series of photos: near-duplicates, bursts of one minute, photos of one object; they stay on one side.

Two photos are in one series if they nearly equal each other to the eye. They also are if they were taken
within a minute, or have neighbouring numbers in their names, *and* are more alike than 99 of 100 pairs of
photos of their class that have no such reason to be. Names or times alone join nothing.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import Progress
from candid._support.randomness import draws
from candid._support.text import percent, plural
from candid.data.groups import GroupTable
from candid.training.features import Features
from candid.training.photo_report import first_alike, standardised
from candid.trust.arrays import FEWEST_SERIES, series_of
from candid.trust.scores import Columns

SECONDS = 60
"""Photos of one series are taken within this time of each other."""
NUMBERS = 2
"""The largest difference of the numbers in the names of photos that may be a series."""
ALIKE = 0.99
"""The share of other pairs of a class that a pair of a series must be more alike than."""
LEAST = 0.5
"""The smallest cosine of standardised statistics at which such photos are alike."""
PAIRS = 2000
"""Pairs of a class that say how alike photos without a reason are."""
TAKEN, TAKEN_IN, EXIF = 0x9003, 0x0132, 0x8769
"""Tags: when a photo was taken, when it was written, and where the first one is."""
NAMED = ("none", "folder")
"""What ``--together`` takes besides a table."""


class Series(NamedTuple):
    """Which photos belong together."""

    numbers: dict[str, Array]
    """The series of each photo, by part."""
    joined: int
    """Photos that are in a series with another one."""
    several: int
    """Series of several photos."""
    dropped: int = 0
    """Held-out photos that are left out since their series is trained on."""


def in_series(
    together: str | None, parts: dict[str, Features], class_names: Sequence[str], progress: Progress
) -> tuple[dict[str, Features], Series]:
    """Return the photos, and the series of each.

    Held-out photos of a series that is also trained on are left out: they would look better known than new
    photos.

    Args:
        together: None to find series; "none" to join near-duplicates only; "folder" to join the photos of
            each folder below that of their class; or a table ``FILE.csv`` or ``FILE.csv:COLUMN``.
        parts: the photos by part, with those to fit as ``train``.
        class_names: the names of the classes.
        progress: where to say what was found.
    """
    names = [name for part in parts.values() for name in part.names]
    everyone = standardised(np.concatenate([part.values for part in parts.values()]), parts["train"].values)
    labels = np.concatenate([part.labels for part in parts.values()])
    together_names = named_series(together, names, labels, class_names)
    if together is None:
        together_names = [str(number) for number in found_series(names, everyone, labels)]
    numbers = series_of(Columns({"keys": first_alike(everyone)}), together_names)
    count = len(np.unique(numbers))
    if count < FEWEST_SERIES and together not in (None, *NAMED):
        raise CandidError(
            f"--together leaves {count} series of photos: name at least {FEWEST_SERIES} objects, scenes or "
            "days, or leave it out."
        )
    if count < FEWEST_SERIES:  # all look the same, which is said elsewhere
        numbers = np.arange(len(numbers))
    sizes = np.bincount(numbers)
    ends = np.cumsum([len(part) for part in parts.values()])[:-1]
    series = dict(zip(parts, np.split(numbers, ends), strict=True))
    joined, several = int(sizes[sizes > 1].sum()), int((sizes > 1).sum())
    if several:
        progress.log(
            f"{plural(several, 'series', 'series')} of {joined:,} photos, of {len(numbers):,}: each series "
            "counts once and stays on one side"
        )
    dropped = 0
    if "val" in parts and (seen := np.isin(series["val"], series["train"])).any():
        dropped = int(seen.sum())
        progress.log(f"{dropped:,} held-out photos are left out: their series is trained on")
        parts = {**parts, "val": parts["val"].rows(~seen)}
        series["val"] = series["val"][~seen]
    return parts, Series(series, joined, several, dropped)


def sentence(series: Series, apart: float, accuracy: float, how: str) -> str:
    """Return what series change: the accuracy if each photo were on its own, and as it is."""
    several = plural(series.several, "series", "series")
    return (
        f"accuracy {how} {percent(accuracy)} with {several} on one side of every division, "
        f"{percent(apart)} if their photos were divided one by one"
    )


def named_table(together: str | None) -> GroupTable | None:
    """Return the table that ``--together`` names; None if it names none."""
    return None if together is None or together in NAMED else GroupTable.together(together)


def named_series(
    together: str | None, names: Sequence[str], labels: Array, class_names: Sequence[str]
) -> list[str] | None:
    """Return the name of the series of each photo; None if ``together`` gives them no names."""
    table = named_table(together)
    if table is not None:
        return table.of(names)
    if together != "folder":
        return None
    return [_folder(name, class_names[y]) for name, y in zip(names, labels.tolist(), strict=True)]


def _folder(name: str, class_name: str) -> str:
    """Return the folder of a photo; the photo itself if that is the folder of its class."""
    place = Path(name).parent
    return name if place.name == class_name else str(place)


def found_series(names: Sequence[str], x: Array, labels: Array) -> Array:
    """Return a number for each photo, (N,); photos that were found to belong together have the same one.

    Args:
        names: the files.
        x: directions of standardised statistics, (N, D).
        labels: the classes, (N,).
    """
    near = _near(names, labels)
    first = np.arange(len(names))
    if not len(near):
        return first
    alike = (x[near[:, 0]] * x[near[:, 1]]).sum(1)
    bounds = {int(y): _bound(x, np.flatnonzero(labels == y), near) for y in np.unique(labels[near[:, 0]])}
    joined = near[alike >= np.array([bounds[int(y)] for y in labels[near[:, 0]]])]
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(joined)), joined.T), (len(names), len(names)))
    return connected_components(links, directed=False)[1].astype(np.int64)


def _bound(x: Array, members: Array, near: Array) -> float:
    """Return the cosine that 99 of 100 pairs of a class stay below, of pairs that nothing else joins."""
    pairs = members[draws(0, len(members)).integers(len(members), 2 * PAIRS).reshape(PAIRS, 2)]
    known = {tuple(pair) for pair in np.sort(near, 1).tolist()}
    others = [pair for pair in np.sort(pairs, 1).tolist() if pair[0] != pair[1] and tuple(pair) not in known]
    if not others:
        return 1.0
    rows = np.array(others)
    return max(LEAST, float(np.quantile((x[rows[:, 0]] * x[rows[:, 1]]).sum(1), ALIKE)))


def _near(names: Sequence[str], labels: Array) -> Array:
    """Return pairs of photos of one class that are near in time or in the numbers of their names, (P, 2)."""
    runs: dict[tuple[int, *tuple[object, ...]], list[tuple[float, int]]] = {}
    for i, (name, y) in enumerate(zip(names, labels.tolist(), strict=True)):
        place = Path(name)
        if (taken := taken_at(place)) is not None:
            seconds = (taken - datetime.min).total_seconds()
            runs.setdefault((SECONDS, y), []).append((seconds, i))
        if number := re.fullmatch(r"(.*?)(\d{1,12})(\D*)", place.stem):
            runs.setdefault((NUMBERS, y, place.parent, number[1], number[3]), []).append((int(number[2]), i))
    pairs = {
        (min(i, j), max(i, j))
        for (most, *_), run in runs.items()
        for (before, i), (after, j) in pairwise(sorted(run))
        if after - before <= most
    }
    return np.array(sorted(pairs), np.int64).reshape(len(pairs), 2)


def taken_at(path: Path) -> datetime | None:
    """Return when a photo was taken, as its camera says; None if it does not."""
    try:
        with Image.open(path) as image:
            exif = image.getexif()
            text = exif.get_ifd(EXIF).get(TAKEN) or exif.get(TAKEN_IN)
        return datetime.strptime(str(text)[:19], "%Y:%m:%d %H:%M:%S")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None

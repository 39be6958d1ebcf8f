"""Measure the alarm of ``candid watch`` on streams of photos, next to that of the first version.

``python -m experiments.photo_drift DATA_FOLDER``

``DATA_FOLDER`` is as for ``experiments.photos``. Models of three photo sets see streams of 1000 photos. From
the first one on, a share of these is *near* (kinds that look like the known ones), *far* (``caltech99``) or
blurred (radius 2). Held-out photos and quiet ones are drawn with replacement from the same photos, which the
model was not fitted to, so that they are exchangeable. *First*: power bets on the energy and the rest, as in
the first version; *now*: power and tail bets on all three parts. Both share the level with a watch of
classes.

Then each model is taught the near kinds as one class, from 50 photos. The streams after that are quiet:
photos of the old classes alone, or 30 % of the new class.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from candid._support.numbers import Array
from candid.data.formats import image_files, part_folders, subfolders
from candid.data.images import decode_as
from candid.judging.held_out import needed
from candid.judging.watched import WatchedScore, _rows
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.eyes import EYES
from candid.models.photo.gaussian import stratified_folds
from candid.models.photo.model import PhotoModel
from candid.training.pieces import assembled
from candid.trust.bets import Bets, FrequencyBets, PowerBets, ScoreBets, bins_of
from candid.trust.ranking import Standard
from candid.trust.scores import OWN_PARTS, Columns
from experiments.drift import LEVEL, _cell, class_wealth, first, log_wealth, sequential, summary
from experiments.open_world.teaching import photo_model, said
from experiments.photo_sets import FAR, SPLITS, UNKNOWN, Photos, PhotoSet, Reader
from experiments.tables import markdown

RADIUS, BLURRED = 2, 150
"""Of the blur, in pixels of the photo as the model sees it, and how many test photos are blurred."""
TAUGHT, LENGTH = 50, 1000
CHANGES = (
    ("quiet", "quiet", 0.0),
    *((f"{share:.0%} near", "near", share) for share in (0.05, 0.1, 0.3)),
    *((f"{share:.0%} far", "far", share) for share in (0.05, 0.1, 0.3)),
    *((f"{share:.0%} blurred", "blurred", share) for share in (0.2, 1.0)),
)


class Watched(NamedTuple):
    """What a watch sees of photos, by part, and of those that it ranks among whatever the stream is."""

    scores: dict[str, Array]
    classes: dict[str, Array]
    ranked: int
    """How many held-out photos are drawn for each stream."""
    counts: Array
    """Photos of each predicted class among those that fix the bets."""
    always: tuple[Array, Array] = (np.zeros(0), np.zeros(0, np.int64))
    """Scores and classes of held-out photos of a taught class."""


def watched(model: PhotoModel, parts: dict[str, Columns], own: slice) -> Watched:
    """Return what a watch sees of photos; ``own`` are the scores that are added up."""
    held_out = needed(model)
    fixing, ranked = _rows(held_out, 0), _rows(held_out, 1)
    standard = Standard.of(fixing[OWN_PARTS][:, own])
    fitted = model.config.fitted
    if own == slice(None):
        seen = WatchedScore.fit(held_out, model).sightings(ranked)
        assert np.allclose([each[0] for each in seen], standard.sum(ranked[OWN_PARTS][:, own]))

    def scores(columns: Columns) -> Array:
        return standard.sum(columns[OWN_PARTS][:, own].astype(np.float64))

    taught = ranked.get("taught", np.full(ranked.images, -1)) >= 0
    old = ranked.rows(~taught)
    quiet = {"quiet": (old, parts["quiet"])}
    columns = {name: quiet.get(name, (each,)) for name, each in parts.items()}
    return Watched(
        {name: np.concatenate([scores(each) for each in some]) for name, some in columns.items()},
        {name: np.concatenate([each["predicted"] for each in some]) for name, some in columns.items()},
        old.images,
        np.bincount(fixing["predicted"][fixing["predicted"] < fitted], minlength=fitted),
        (scores(ranked.rows(taught)), ranked["predicted"][taught]),
    )


def delays(seen: Watched, part: str, share: float, bets: Bets, streams: int) -> Array:
    """Return after how many photos each stream rings, (S,); infinite if it never does."""
    random = np.random.default_rng(0)
    n = seen.ranked
    quiet, other = len(seen.scores["quiet"]), len(seen.scores[part])
    rows = random.integers(quiet, size=(streams, n + LENGTH))
    new = (random.random((streams, LENGTH)) < share) & (part != "quiet")
    from_part = random.integers(other, size=(streams, LENGTH))

    def drawn(values: dict[str, Array], always: Array) -> Array:
        stream = np.where(new, values[part][from_part], values["quiet"][rows[:, n:]])
        fixed = np.broadcast_to(always, (streams, len(always)))
        return np.concatenate((fixed, values["quiet"][rows[:, :n]], stream), 1)

    scores = np.unique(bins_of(drawn(seen.scores, seen.always[0])), return_inverse=True)[1]
    scores = scores.reshape(streams, -1)
    u = random.random((2, streams, LENGTH))
    wealth = log_wealth(bets, sequential(scores, scores.shape[1] - LENGTH, u[0]))
    classes = drawn(seen.classes, seen.always[1])
    by_class = class_wealth(classes, classes.shape[1] - LENGTH, FrequencyBets(seen.counts + 1), u[1])
    return first(np.maximum(wealth, by_class), -math.log(LEVEL / 2))


class Study:
    """The photo sets, and the far one."""

    def __init__(self, data: Path, work: Path) -> None:
        self.data, self.eye = data, PackagedEye(EYES["lite0"])
        reader = Reader(self.eye, work)
        self.sets, (self.far, _) = reader.sets(data), reader.read(data / FAR)

    def parts(self, name: str) -> tuple[PhotoModel, dict[str, Photos]]:
        """Return a model of a set, and photos that it was not fitted to; of the new class those to test."""
        photos = self.sets[name]
        train, held_out, test = photos.parts(0)
        model = photo_model(train, held_out, len(photos.class_names), self.eye)
        blurred = self._blurred(name, photos)
        return model, {"quiet": test, "near": photos.unknown, "far": self.far, "blurred": blurred}

    def _blurred(self, name: str, photos: PhotoSet) -> Photos:
        """Return some of the test photos, blurred."""
        folder = self.data / name
        parts = part_folders(folder) or {"all": folder}
        files = [image_files(each, [entry.name for entry in subfolders(each)]) for each in parts.values()]
        unknown = UNKNOWN.get(name)
        paths = [path for split in files for path in split.paths if path.parent.name != unknown]
        assert len(paths) == len(photos.photos)
        test = np.flatnonzero(stratified_folds(photos.photos.labels, SPLITS) == 0)
        test = test[np.linspace(0, len(test) - 1, BLURRED).round().astype(int)]
        images = np.stack([blur(decode_as(paths[row], self.eye.preprocessing, None)) for row in test])
        batches = [self.eye.statistics(images[i : i + 50] / np.float32(255)) for i in range(0, BLURRED, 50)]
        statistics = np.concatenate(batches)
        return Photos(statistics, photos.photos.pooled[test], photos.photos.labels[test])


def blur(image: Array) -> Array:
    """Return an image (C, H, W) of 8 bits, blurred."""
    photo = Image.fromarray(image.transpose(1, 2, 0))
    return np.asarray(photo.filter(ImageFilter.GaussianBlur(RADIUS))).transpose(2, 0, 1)


def power(study: Study, streams: int) -> str:
    """Return when the alarm rings, by set and change: with the first version's score and bets, and now."""
    rows: dict[str, list[str]] = {name: [] for name, _, _ in CHANGES}
    heads = []
    for name in study.sets:
        model, photos = study.parts(name)
        parts = {part: said(model, each) for part, each in photos.items()}
        first_one, now = watched(model, parts, slice(-2, None)), watched(model, parts, slice(None))
        heads.append(f"{name} ({now.ranked} ranked): first → now")
        for title, part, share in CHANGES:
            when = (
                delays(first_one, part, share, PowerBets(), streams),
                delays(now, part, share, ScoreBets(), streams),
            )
            rows[title].append(" → ".join(_cell(summary(each)) for each in when))
            print(name, title, rows[title][-1], flush=True)
    return markdown(["change", *heads], [[title, *cells] for title, cells in rows.items()])


def quiet(study: Study, streams: int) -> str:
    """Return the share of quiet streams that ring, before and after a class was taught."""
    rows = []
    for name in study.sets:
        model, photos = study.parts(name)
        new = photos["near"].statistics
        chosen, others = new[:TAUGHT], new[TAUGHT:]
        taught, _ = assembled(model, [{"name": "new"}], [chosen], [-1 - np.arange(TAUGHT)])
        cells = []
        for each, bets in ((model, ScoreBets(2)), (taught, ScoreBets(1))):
            parts = {"quiet": said(each, photos["quiet"])}
            if each is taught:
                unlabelled = np.full(len(others), -1)
                parts["near"] = said(each, Photos(others, others[:, :1], unlabelled))
            seen = watched(each, parts, slice(None))
            for part, share in {"quiet": 0.0, "near": 0.3}.items():
                if part in parts:
                    rang = np.isfinite(delays(seen, part, share, bets, streams))
                    cells.append(f"{100 * rang.mean():.2f}")
        rows.append([name, *cells])
        print(rows[-1], flush=True)
    head = ["", "before", f"after teaching {TAUGHT} photos, old classes alone", "30 % of the new class"]
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m experiments.photo_drift", description=__doc__)
    parser.add_argument("data", metavar="DATA_FOLDER", type=Path, help="the folder of the photo sets")
    parser.add_argument("--streams", type=int, default=100, help="streams with each change")
    parser.add_argument("--quiet", type=int, default=2000, help="quiet streams")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/photo-drift"), help="where features are stored"
    )
    asked = parser.parse_args(arguments)
    study = Study(asked.data.resolve(), asked.work.resolve())
    print(power(study, asked.streams), quiet(study, asked.quiet), sep="\n\n")


if __name__ == "__main__":
    main()

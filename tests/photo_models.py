"""A tiny real photo model: the default eye on generated photos of three classes."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import candid

CLASSES = ("dots", "rings", "stripes")
SIDE = 112
MIXED = 0.65
"""The largest share of the second pattern."""


class PhotoRun(NamedTuple):
    """A photo model on disk and the photos that it comes from."""

    model: str
    """The folder of the run."""
    data: str
    """The photos: ``train`` and ``test`` with a folder for each class."""
    photos: tuple[Path, ...]
    """The first test photo of each class, in the order of :data:`CLASSES`."""
    strange: Path
    """A folder with photos of noise, which fit no class."""


def photo(kind: str, seed: int, height: int = SIDE, width: int = SIDE + 24) -> Image.Image:
    """Return a pattern in random colours: ``dots``, ``rings``, ``stripes``, ``checks`` or ``noise``.

    A second pattern is mixed in, so that classes are hard enough to separate for posteriors below one.
    """
    random = np.random.default_rng([sorted((*CLASSES, "checks", "noise")).index(kind), seed])
    rows, columns = np.mgrid[:height, :width] + random.uniform(0, 20, (2, 1, 1))
    step = random.uniform(10, 26)
    waves = {
        "dots": np.sin(rows * 6.28 / step) * np.sin(columns * 6.28 / step) > 0.4,
        "rings": np.sin(np.hypot(rows - height / 2, columns - width / 2) * 6.28 / step) > 0,
        "stripes": np.sin((rows + columns) * 6.28 / step) > 0,
        "checks": (rows // step + columns // step) % 2 > 0,
        "noise": random.random(rows.shape) > 0.5,
    }
    share = 0.0 if kind == "noise" else random.uniform(0, MIXED)
    mixed = (1 - share) * waves[kind] + share * waves[CLASSES[seed % 3]]
    back, front = random.uniform(0, 110, 3), random.uniform(140, 255, 3)
    colours = back + mixed[..., None] * (front - back) + random.normal(0, 25, (height, width, 3))
    return Image.fromarray(colours.clip(0, 255).astype(np.uint8))


def write_photos(folder: Path, kinds: tuple[str, ...], count: int, start: int = 0) -> Path:
    """Write ``count`` photos of each kind into a folder of its name."""
    for kind in kinds:
        (folder / kind).mkdir(parents=True)
        for i in range(count):
            photo(kind, start + i).save(folder / kind / f"{i:03}.png")
    return folder


def train_photo_model(folder: Path, photos: int = 12, **options: Any) -> PhotoRun:
    """Train on ``photos`` photos a class, all of them scored out of fold; there are four a class to test."""
    data = folder / "photos"
    write_photos(data / "train", CLASSES, photos)
    write_photos(data / "test", CLASSES, 4, start=photos)
    strange = write_photos(folder / "strange", ("noise",), 4)
    candid.train(str(data), out=folder / "run", **options)
    shown = tuple(data / "test" / kind / "000.png" for kind in CLASSES)
    return PhotoRun(str(folder / "run"), str(data), shown, strange)

"""The paper on photos: an invertible network on the features of CIFAR-10 at 224 pixels, for all eight betas.

``python -m experiments.features extract cifar10/images --others DATA --mnist mnist`` writes what the eye
``lite0`` sees of the images, enlarged to 224 pixels, of corrupted ones and of 500 images of each other set to
``runs/features``. ``DATA`` has the folders ``tiny20``, ``bloodcells8`` and ``clothing10``; their images are
shrunk to 32 pixels first, so that they can't be found by their sharpness. Corruptions are of 32 pixels, too.

``python -m experiments.features train`` trains the models that are missing, the most wanted first;
``--share 0/2`` every second one. ``measure`` measures those that are trained, ``compare`` compares with the
closed form, ``attack cifar10/images`` attacks three models through the eye, and ``page`` writes the JSON and
the tables of ``docs/results/features.md``.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from candid._support.files import replacing, write_text
from candid._support.numbers import Array
from candid._support.processes import OneProcess
from candid._support.progress import Progress, TerminalProgress
from candid._support.randomness import draws
from candid.data.batches import named_batches
from candid.data.datasets import open_dataset
from candid.data.formats import Query, format_of
from candid.data.images import Preprocessing, preprocess_image, to_float
from candid.data.splits import FileSplit, Split
from candid.models.photo.eye import Eye
from candid.models.photo.opening import open_eye
from candid.robustness.attacks.benchmark import attack
from candid.robustness.corruptions.benchmark import CORRUPTIONS, SEVERITIES, corrupted
from candid.training.features import Extraction, FeatureCache
from candid.training.options import VectorOptions
from candid.training.vectors import VectorData
from experiments.features_measures import (
    LABELS,
    PER_CLASS,
    Asked,
    Material,
    closed_form,
    compared,
    corrupted_rows,
    measured,
    photo_model,
    trained,
)
from experiments.features_tables import page

RUNS = Path("runs") / "features"
EYE, HELD_OUT, SIDE = "lite0", 0.1, 32
COUNT, CORRUPTED, ATTACKED = 500, 200, 50
"""Images of each other set, of each corruption, and that are attacked."""
BETAS = (1.0, math.inf, 16.0, 4.0, None, 0.0, 32.0, 8.0, 2.0)
"""In the order in which they are trained; None is the softmax network."""
REPEATED = (1.0, 16.0, math.inf)
"""Betas whose further seeds come first; those that are compared with the closed form, and attacked."""
FEWER = (500, 1000, PER_CLASS)
"""Training images of a class in the comparison with the closed form."""
RADII, STEPS = (0.1, 0.25, 0.5), 20
"""Of the attacks: L2 distance of images with values from 0 to 1, and steps of projected gradients."""
CIFAR, OTHERS, CORRUPTIONS_FILE, CLOSED = "cifar10.npz", "others.npz", "corruptions.npz", "closed-form"


def asked(seeds: int) -> Iterator[Asked]:
    """Yield the models, the most wanted first."""
    wanted = [(0, beta) for beta in BETAS]
    wanted += [(seed, beta) for seed in range(1, seeds) for beta in REPEATED]
    wanted += [(seed, beta) for seed in range(1, seeds) for beta in BETAS if beta not in REPEATED]
    yield from (Asked(labels, beta, seed) for seed, beta in wanted for labels in LABELS)


def extract(images: str, others: Path, mnist: str, per_class: int, progress: Progress) -> None:
    """Write the features of CIFAR-10, of corrupted images and of the other sets."""
    eye = open_eye(EYE)
    RUNS.mkdir(parents=True, exist_ok=True)
    data = open_dataset(images, holdout=HELD_OUT)
    assert data.test is not None and isinstance(data.train, FileSplit)
    if not (RUNS / CIFAR).exists():
        labels = data.train.labels
        rows = [np.flatnonzero(labels == y)[:per_class] for y in range(len(data.class_names))]
        train = data.train.subset(np.sort(np.concatenate(rows)))
        see = Extraction(eye, FeatureCache(eye, progress), OneProcess(), progress)
        arrays: dict[str, Any] = {"class_names": np.array(data.class_names), "groups": np.array(eye.groups)}
        for prefix, split in (("", train), ("val_", data.val), ("test_", data.test)):
            seen = see(split)
            arrays |= {f"{prefix}features": seen.values, f"{prefix}labels": seen.labels}
        _write(CIFAR, arrays)
    if not (RUNS / OTHERS).exists():
        named: dict[str, str] = {name: str(others / name) for name in ("tiny20", "bloodcells8", "clothing10")}
        named["mnist"] = mnist
        _write(OTHERS, {name: _seen(eye, _shrunk(source, progress)) for name, source in named.items()})
    if not (RUNS / CORRUPTIONS_FILE).exists():
        split = data.test.subset(corrupted_rows(len(data.test), CORRUPTED))
        clean = _pixels(split, progress)
        _write(CORRUPTIONS_FILE, {name: _seen(eye, _corrupted(clean, name)) for name in CORRUPTIONS})


def _write(name: str, arrays: dict[str, Array]) -> None:
    with replacing(RUNS / name) as path, path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _shrunk(source: str, progress: Progress) -> Array:
    """Return images of a set, shrunk to 32 pixels, (N, 3, 32, 32) uint8."""
    read = format_of(source).read
    assert read is not None
    parts = read(Query(source)).parts
    split: Split = parts["test" if "test" in parts else "val" if "val" in parts else "all"]()
    return _pixels(split.subsample(min(COUNT, len(split))), progress)


def _pixels(split: Split, progress: Progress) -> Array:
    small, _ = split.load(Preprocessing(3, SIDE, SIDE), False, progress)
    return np.concatenate([images for images, _, _ in named_batches(small, Preprocessing(3, SIDE, SIDE), 50)])


def _corrupted(images: Array, name: str) -> Array:
    """Return images with a corruption; the severity of each image is another one than that of the last."""
    changed = np.empty_like(images)
    for s in SEVERITIES:
        rows = np.arange(len(images)) % len(SEVERITIES) == s - 1
        random = draws(0, CORRUPTIONS[name].number, s).numpy
        changed[rows] = corrupted(images[rows], name, s, random)
    return changed


def _seen(eye: Eye, images: Array) -> Array:
    """Return what the eye sees of images that are enlarged as files are, (N, D)."""

    def enlarged(some: Array) -> Array:
        pictures = map(Image.fromarray, some.transpose(0, 2, 3, 1))
        return to_float(np.stack([preprocess_image(picture, eye.preprocessing) for picture in pictures]))

    starts = range(0, len(images), 50)
    return np.concatenate([eye.statistics(enlarged(images[start : start + 50])) for start in starts])


def material(measuring: bool = True) -> Material:
    """Return what was extracted: all of it for measuring, CIFAR-10 alone for training."""
    eye = open_eye(EYE)
    options = VectorOptions(data=str(RUNS / CIFAR))
    data = VectorData.stored(options, eye.groups)
    others, changed = {}, None
    if measuring:
        with np.load(RUNS / OTHERS) as stored:
            others = {name: stored[name] for name in stored.files}
        with np.load(RUNS / CORRUPTIONS_FILE) as stored:
            changed = np.stack([stored[name] for name in CORRUPTIONS])
    return Material(data, others, changed, RUNS / "models", options, eye)


def train(models: Sequence[Asked], progress: Progress) -> None:
    """Train the models that are missing."""
    given = material(measuring=False)
    for one in models:
        if not (given.folder / one.name).exists():
            progress.log(one.name)
            trained(one, given, progress)


def measure(models: Sequence[Asked], progress: Progress) -> None:
    """Measure the models that were trained and have no record."""
    given = material()
    for one in models:
        if (given.folder / one.name).exists() and not (RUNS / f"{one.name}.json").exists():
            progress.log(one.name)
            _record(one.name, measured(one, given, progress))


def compare(progress: Progress) -> None:
    """Measure the closed form, and compare networks with it."""
    given = material()
    for per_class in FEWER:
        models = [Asked("hard", beta, 0, per_class) for beta in REPEATED]
        names = [f"compared-{one.name}" for one in models] + [CLOSED] * (per_class == PER_CLASS)
        if all((RUNS / f"{name}.json").exists() for name in names):
            continue
        progress.log(f"closed form, {per_class} images of a class")
        head = photo_model(given, per_class)
        if per_class == PER_CLASS:
            _record(CLOSED, closed_form(head, given))
        for one, name in zip(models, names, strict=False):
            if not (RUNS / f"{name}.json").exists():
                progress.log(one.name)
                _record(name, compared(one, head, given, progress))


def attacks(images: str, progress: Progress) -> None:
    """Attack models through the eye; the size of the smallest radius that works is not searched for."""
    models = {f"{beta:g}": str(RUNS / "models" / Asked("hard", beta, 0).name) for beta in REPEATED}
    for radius in RADII:
        if (RUNS / f"attack-{radius:g}.json").exists():
            continue
        options: dict[str, Any] = {"method": "projected-gradient", "radius": radius, "steps": STEPS}
        options |= {"images": ATTACKED, "untargeted": True, "eight_bit": False, "workers": 0}
        found = attack(models, images, progress, out=RUNS / "attacks" / f"{radius:g}", **options)
        assert found is not None
        _record(f"attack-{radius:g}", {"radius": radius, "metrics": found.to_dict()["metrics"]})


def _record(name: str, record: dict[str, Any]) -> None:
    write_text(json.dumps(record, indent=1) + "\n", RUNS / f"{name}.json")


def _records(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RUNS.glob(pattern))]


def main() -> None:
    """Extract features, train and measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("step", choices=("extract", "train", "measure", "compare", "attack", "page"))
    parser.add_argument("images", nargs="?", help="CIFAR-10, as a folder of images")
    parser.add_argument("--others", type=Path, help="folder with the other sets")
    parser.add_argument("--mnist", help="MNIST")
    parser.add_argument("--per-class", type=int, default=PER_CLASS, help="training images of a class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", default="0/1", help="which part of the models, such as 0/2")
    given, progress = parser.parse_args(), TerminalProgress()
    first, _, of = given.share.partition("/")
    models = list(asked(given.seeds))[int(first) :: int(of)]
    if given.step == "extract":
        extract(given.images, given.others, given.mnist, given.per_class, progress)
    elif given.step == "train":
        train(models, progress)
    elif given.step == "measure":
        measure(models, progress)
    elif given.step == "compare":
        compare(progress)
    elif given.step == "attack":
        attacks(given.images, progress)
    else:
        models_found = [*_records("*-seed?.json"), *_records(f"{CLOSED}.json")]
        page(
            [one for one in models_found if "labels" in one],
            _records("compared-*.json"),
            _records("attack-*.json"),
        )


if __name__ == "__main__":
    main()

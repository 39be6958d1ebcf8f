"""Make the decision planes of docs/explanations.md and the trajectories of docs/attacks.md.

``python -m experiments.planes cifar-10-batches-bin tiny20 clothing10``

Ten classes of ``tiny20`` are picked on the model's held-out images, never on test images; their plane is
trained for twelve epochs, that of CIFAR-10's ten classes for three. Runs are kept in ``runs/planes``: what
was stopped goes on where it was, what is finished is only drawn. The record of all planes is
``docs/results/planes.json``; without data, the table of the page is written again from it.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.files import replacing
from candid._support.numbers import Array, logsumexp
from candid._support.progress import SILENT
from candid.data.batches import named_batches
from candid.data.images import to_float
from candid.explanations.overview import open_images, project
from candid.models import checkpoint
from candid.models.protocol import Model, batch_size
from experiments.models import with_test
from experiments.tables import Results, filled, percent, shown, table, text

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
RECORD = ROOT / "docs" / "results" / "planes.json"
PAGE = ROOT / "docs" / "explanations.md"
PICKED = 10
TARGET = "frog"
"""The class that attacks lead to."""
FIGURES = {
    "tiny20": "decision_plane.png",
    "cifar10": "decision_plane_ten.png",
    "clothing": "decision_plane_photos.png",
}


def picked(logits: Array, labels: Array, count: int) -> list[int]:
    """Return the ``count`` classes that are separated best, by the logits (N, M) and labels of N images.

    Of all classes, the one whose absence lowers the log-loss among the others most is left out, again and
    again; then single classes are exchanged while that lowers it.
    """
    classes = list(range(logits.shape[1]))
    while len(classes) > count:
        smaller = [[y for y in classes if y != left_out] for left_out in classes]
        classes = min(smaller, key=lambda chosen: _log_loss(logits, labels, chosen))
    while True:
        others = [y for y in range(logits.shape[1]) if y not in classes]
        exchanged = [sorted({*classes, new} - {old}) for old in classes for new in others]
        best = min([classes, *exchanged], key=lambda chosen: _log_loss(logits, labels, chosen))
        if best == classes:
            return classes
        classes = best


def held_out(model: Model, data: str) -> tuple[Array, Array]:
    """Return the logits and labels of the images that were held out in training."""
    split, _ = open_images(model, data, "val", None, False, SILENT)
    frozen, logits, labels = model.frozen(), [], []
    for images, y, _ in named_batches(split, model.preprocessing, batch_size(model)):
        logits.append(frozen.outputs(to_float(images)).logits.astype(np.float64))
        labels.append(y)
    return np.concatenate(logits), np.concatenate(labels)


def _log_loss(logits: Array, labels: Array, classes: Sequence[int]) -> float:
    """Return the mean of -log p(y | x, y among ``classes``) over the images of these classes."""
    rows = np.flatnonzero(np.isin(labels, classes))
    among = logits[rows][:, classes]
    return float((logsumexp(among) - logits[rows, labels[rows]]).mean())


def candid(*arguments: object) -> str:
    """Run a command of the command line, and return what it prints."""
    print("candid", *arguments, flush=True)
    command = [sys.executable, "-m", "candid", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def plane(name: str, model: str, data: str, classes: str | None, work: Path, *options: object) -> Any:
    """Return the record of a plane, which is trained unless it is there, and put its figure on the page."""
    out = work / name
    kept = out / "plane.json"
    if not kept.is_file():
        if (out / "config.toml").is_file():
            candid("train", "--resume", "--out", out)
            record = json.loads(candid("plane", out / "model" / "best", data, "--out", out, "--json"))
            record["full_accuracy"] = accuracy_among(model, data, record["classes"])
        else:
            chosen = () if classes is None else ("--classes", classes)
            record = json.loads(candid("plane", model, data, *chosen, "--out", out, "--json", *options))
        with replacing(kept) as file:
            file.write_text(json.dumps(record), encoding="utf-8")
    shutil.copy(out / "decision_plane.png", IMAGES / FIGURES[name])
    record = json.loads(kept.read_text(encoding="utf-8"))
    kept_keys = ("classes", "images", "accuracy", "full_accuracy", "inside")
    return {"model": model, **{key: record[key] for key in kept_keys}}


def accuracy_among(name: str, data: str, classes: Sequence[str]) -> float:
    """Return the accuracy of a model on the test images of ``classes``, choosing among them."""
    model = checkpoint.load(name)
    split, _ = open_images(model, data, None, None, False, SILENT)
    numbers = [model.class_names.index(name) for name in classes]
    places = project(model, split, None, among=numbers)
    rows = np.isin(places.labels, numbers)
    return float((np.array(numbers)[places.predicted[rows]] == places.labels[rows]).mean())


def planes_table(planes: Results) -> str:
    """Return the table of the page."""
    return table(
        planes.values(),
        [
            ("model", text("model")),
            ("classes", lambda plane: str(len(plane["classes"]))),
            ("test images", lambda plane: f"{plane['images']:,}"),
            ("the model, among these classes (%)", shown(1, 100, "full_accuracy")),
            ("in the plane (%)", shown(1, 100, "accuracy")),
            ("loss (points)", lambda plane: f"{100 * (plane['full_accuracy'] - plane['accuracy']):.1f}"),
            ("images in the drawn region", lambda plane: percent(plane["inside"])),
        ],
    )


def trajectories(figure: str, model: str | Path, data: str, work: Path) -> None:
    """Draw attacks on a model on the page."""
    out = work / figure
    options = ("--d", 0, "--images", 8, "--no-eight-bit", "--trajectories", 4, "--towards", TARGET)
    candid("attack", model, data, *options, "--out", out)
    (drawn,) = out.glob("trajectories-*.png")
    shutil.copy(drawn, IMAGES / f"{figure}.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, draw and record all planes."""
    parser = argparse.ArgumentParser(prog="python -m experiments.planes", description=__doc__)
    parser.add_argument("cifar10", nargs="?", help="CIFAR-10 as published: the folder cifar-10-batches-bin")
    parser.add_argument("tiny", nargs="?", help="20 classes of Tiny ImageNet: train/ and test/ (or val/)")
    parser.add_argument("clothing", nargs="?", help="photos of clothes: train/, validation/ and test/")
    parser.add_argument("--work", type=Path, default=Path("runs/planes"), help="the folder for what is kept")
    asked = parser.parse_args(arguments)
    if asked.cifar10 is not None:
        if asked.clothing is None:
            parser.error("name all three data sets, or none")
        measure(asked)
    planes = json.loads(RECORD.read_text(encoding="utf-8"))
    page = filled(PAGE.read_text(encoding="utf-8"), {"planes": planes_table(planes)})
    with replacing(PAGE) as file:
        file.write_text(page, encoding="utf-8")


def measure(asked: argparse.Namespace) -> None:
    """Train, draw and record all planes, one after the other, and draw the trajectories."""
    tiny = str(with_test(asked.tiny, asked.work))
    model = checkpoint.load("tiny20")
    classes = ",".join(model.class_names[y] for y in picked(*held_out(model, tiny), PICKED))
    record("tiny20", plane("tiny20", "tiny20", tiny, classes, asked.work, "--beta", 16, "--epochs", 12))
    record("cifar10", plane("cifar10", "cifar10-beta16", asked.cifar10, "*", asked.work, "--epochs", 3))
    record("clothing", plane("clothing", "clothing", asked.clothing, None, asked.work))
    trajectories("trajectories", asked.work / "cifar10" / "model" / "best", asked.cifar10, asked.work)
    trajectories("trajectories-full", "cifar10-beta1", asked.cifar10, asked.work)


def record(name: str, found: Any) -> None:
    """Put what was ``found`` of a plane into the record; the other planes in it stay."""
    planes = json.loads(RECORD.read_text(encoding="utf-8")) | {name: found}
    with replacing(RECORD) as file:
        ordered = {each: planes[each] for each in FIGURES if each in planes}
        file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

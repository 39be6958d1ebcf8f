"""Make the bundled photo models: ``everyday``, ``bloodcells``, ``clothing`` and ``waste``, with their cards.

``python -m experiments.photo_models data``

``data`` has the folders ``bloodcells8``, ``clothing10``, ``trashnet6``, ``caltech99``, ``imagenet-val`` and
``imagenet-sample-100``. What each card says is what ``candid evaluate NAME DATA`` measures; all of it is in
``docs/results/photo_models.json``.
"""

import argparse
import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from candid._support.files import replacing
from candid._support.progress import TerminalProgress
from candid._support.text import percent
from candid.evaluation.compare import METRICS
from candid.evaluation.evaluate import evaluate
from candid.judging.examine import examine
from candid.judging.held_out import HeldOut
from candid.models import checkpoint, saving, zoo
from candid.training.adopt import adopt
from candid.training.train import train
from experiments.cards import write

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "photo_models.json"
EVERYDAY = "everyday"
LIMITS = (
    "It knows its classes only. Photos of other things are called novel most of the time if they look "
    "different, and often not if they look alike: see the AUCs.",
    "The p-values hold for photos like those it was fitted to. With another camera, light or background, all "
    "photos may be novel, or none.",
    "Anyone who can change pixels can choose the class: changes too small to be seen are enough.",
)
NOT_FOR = (
    "Decisions about people, or any decision in which a wrong class does harm: it is for research and "
    "teaching.",
    "Security: it does not withstand an adversary.",
)


@dataclass(frozen=True)
class PhotoSet:
    """The photos of a bundled model."""

    folder: str
    summary: str
    data: tuple[str, ...]
    """Where they come from, and the licence."""
    limits: tuple[str, ...] = ()


SETS = {
    "bloodcells": PhotoSet(
        "bloodcells8",
        "Photos of blood cells under a microscope, in eight kinds.",
        (
            "2000 photos of the PBC data set (Acevedo, Merino, Alférez, Molina, Boldú, Rodellar 2020, Data "
            "in Brief 30), 250 of each kind, CC BY 4.0. `ig` are immature granulocytes.",
        ),
        ("It is no medical device: never use it for a diagnosis.",),
    ),
    "clothing": PhotoSet(
        "clothing10",
        "Photos of clothes that lie or hang, in ten kinds.",
        ("2529 photos of the small clothing data set (Grigorev 2020), CC0, with its own test photos.",),
    ),
    "waste": PhotoSet(
        "trashnet6",
        "Photos of waste on a white background, in six kinds.",
        (
            "1637 photos of TrashNet (Thung, Yang 2016), MIT licence. One object is often shown several "
            "times, also in training and test photos, so accuracies are optimistic.",
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the models that are named, or all."""
    parser = argparse.ArgumentParser(description="Make the bundled photo models.")
    parser.add_argument("data", type=Path, help="folder of the photo sets")
    parser.add_argument("names", nargs="*", default=[EVERYDAY, *SETS], help="models to make")
    parser.add_argument("--work", type=Path, default=Path("runs/photo_models"), help="folder of the runs")
    given = parser.parse_args(arguments)
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in given.names:
        print(name, flush=True)
        make = _everyday if name == EVERYDAY else _photo_model
        found[name] = make(name, given.data, given.work)
        with replacing(RESULTS) as file:
            file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _photo_model(name: str, data: Path, work: Path) -> dict[str, Any]:
    """Train one on its photos; a fifth of them, or its own test photos, are not trained on."""
    chosen, run = SETS[name], (work / name).resolve()
    shutil.rmtree(run, ignore_errors=True)
    photos = data / chosen.folder
    with contextlib.chdir(data):  # the record names the folder, not where it is here
        trained = train(chosen.folder, out=run, progress=TerminalProgress())
    _bundle(trained.best, name)
    metrics = _measured(name, photos, {"caltech99": data / "caltech99"}, work)
    head = checkpoint.load(name).metadata["head"]
    made = (
        f"`candid train {chosen.folder}`",
        f"EfficientNet-Lite0 as a fixed eye; a Gaussian head in closed form on {head['photos']:,} photos, "
        f"shrinkage {head['shrinkage']:g}, posterior of the {head['posterior']}.",
    )
    _card(
        name,
        chosen.summary,
        chosen.data,
        made,
        chosen.limits,
        metrics,
        f"`candid evaluate {name} {chosen.folder}`",
    )
    return metrics


def _everyday(name: str, data: Path, work: Path) -> dict[str, Any]:
    """Adopt EfficientNet-Lite0: the first photo of each class is fitted, the second one held out."""
    first, second, test = (work / "imagenet" / part for part in ("first", "second", "test"))
    shutil.rmtree(work / "imagenet", ignore_errors=True)
    for folder in sorted(each for each in (data / "imagenet-val").iterdir() if each.is_dir()):
        for target, photo in zip((first, second), sorted(folder.iterdir()), strict=True):
            _link(photo, target / folder.name)
    for photo in sorted((data / "imagenet-sample-100").iterdir()):
        _link(photo, test / photo.name.partition("_")[0])
    adopt("lite0", first, held_out=str(second), tree="imagenet", out=work / name, progress=TerminalProgress())
    _bundle(work / name, name)
    metrics = _measured(name, test, {"bloodcells8": data / "bloodcells8"}, work)
    metrics["novel_at_5_percent"] = _foreign(name, data / "bloodcells8")
    _card(
        name,
        "Photos of 1000 everyday kinds of things: EfficientNet-Lite0, adopted, with its own posteriors.",
        (
            "The network was trained on ImageNet (Russakovsky et al. 2015); its weights are under Apache 2.0 "
            "and come from a package.",
            "One validation photo of each class was fitted, another one is held out.",
        ),
        ("`candid adopt lite0 first --held-out second --tree imagenet`",),
        (
            "It has no class for people, and its classes are those of ImageNet: 120 kinds of dogs, few "
            "plants.",
        ),
        metrics,
        "`candid evaluate everyday test`, 100 photos of 100 classes",
    )
    return metrics


def _foreign(name: str, cells: Path) -> dict[str, float]:
    """Return the shares of 100 blood cells and of 50 plain, noise and text images that are novel at 5 %."""
    random = np.random.default_rng(0)
    photos = sorted(cells.rglob("*.jpg"))
    chosen: dict[str, list[Any]] = {
        "blood cells": [photos[i] for i in random.permutation(len(photos))[:100]],
        "plain": [
            Image.new("RGB", (256, 256), tuple(random.integers(0, 256, 3).tolist())) for _ in range(20)
        ],
        "noise": [Image.fromarray(random.integers(0, 256, (256, 256, 3), dtype=np.uint8)) for _ in range(15)],
        "text": [_text(random) for _ in range(15)],
    }
    found = {}
    for what, images in chosen.items():
        verdicts = [each.verdict for each in examine(name, images, novelty=0.05)]
        found[what] = verdicts.count("novel") / len(verdicts)
    return found


def _text(random: np.random.Generator) -> Image.Image:
    """Return black letters on white."""
    image = Image.new("RGB", (256, 256), "white")
    draw = ImageDraw.Draw(image)
    for line in range(18):
        letters = "".join(" abcdefghijklmnopqrstuvwxyz"[i] for i in random.integers(0, 27, 40))
        draw.text((8, 8 + 13 * line), letters, fill="black")
    return image


def _link(photo: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / photo.name).symlink_to(photo.resolve())


def _bundle(folder: Path, name: str) -> None:
    """Put a model into the zoo; its card is written later."""
    shutil.rmtree(zoo.FOLDER / name, ignore_errors=True)
    saving.save(checkpoint.load(folder), zoo.FOLDER / name)
    with replacing(zoo.FOLDER / name / zoo.CARD) as file:
        file.write_text("{}\n", encoding="utf-8")


def _measured(name: str, photos: Path, others: dict[str, Path], work: Path) -> dict[str, Any]:
    """Return what ``candid evaluate`` says of the model."""
    found = evaluate(
        name,
        str(photos),
        ood={key: str(path) for key, path in others.items()},
        out=work / "evaluation" / name,
    )
    assert found is not None
    metrics = found.metrics
    return {
        "images": metrics["images"],
        "held_out_images": metrics["held_out_images"],
        **{key: metrics[key] for key in METRICS if key in metrics},
        "intervals": {key: ends for key, ends in metrics["intervals"].items() if key in METRICS},
        "false_positives": metrics["false_positives"]["combined"],
        "auc": {key: scores["combined"]["auc"] for key, scores in metrics["ood"].items()},
        "verdicts": metrics["verdicts"],
        "selective": {key: value for key, value in metrics["selective"].items() if key != "curve"},
    }


def figures(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return accuracy and calibration of a card, with their intervals."""
    return {key: metrics[key] for key in (*METRICS, "intervals") if key in metrics}


def more_figures(metrics: dict[str, Any]) -> dict[str, str]:
    """Return the lines of a card that are not accuracy, likelihood or calibration."""
    more = {"false alarms at 5 %, score 'combined'": percent(metrics["false_positives"]["0.05"])}
    for other, auc in metrics["auc"].items():
        more[f"AUC on {other}, score 'combined'"] = percent(auc)
    for what, share in metrics.get("novel_at_5_percent", {}).items():
        more[f"{what} called novel at 5 %"] = percent(share)
    return more


def _card(
    name: str,
    summary: str,
    data: Sequence[str],
    training: Sequence[str],
    limits: Sequence[str],
    metrics: dict[str, Any],
    measured: str,
) -> None:
    model = checkpoint.load(name)
    stored = sum(file.stat().st_size for file in (zoo.FOLDER / name).glob("*.safetensors"))
    write(
        name,
        {
            "name": name,
            "summary": summary,
            "kind": model.kind,
            "beta": None,
            "images": " x ".join(map(str, model.image_shape)),
            "classes": list(model.class_names),
            "parameters": model.size,
            "bytes": stored,
            "data": list(data),
            "training": list(training),
            "storage": [
                "The eye is not part of the model: it comes from its package, and the model is bound to its "
                "SHA-256.",
                "Loading it runs no code from the files. It carries the scores of "
                f"{len(HeldOut.of(model) or ()):,} held-out photos.",
            ],
            "measured": f"On {metrics['images']:,} test photos: {measured}.",
            "figures": figures(metrics),
            "more_figures": more_figures(metrics),
            "limits": [*limits, *LIMITS],
            "not_for": list(NOT_FOR),
        },
    )


if __name__ == "__main__":
    main()

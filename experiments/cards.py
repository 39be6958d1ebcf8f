"""The cards of the bundled models."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from candid._support.files import replacing
from candid.models import checkpoint, zoo
from candid.models.resnet import ResNet
from candid.models.zoo.cards import as_markdown

DATA = (
    "CIFAR-10 (Krizhevsky, 2009): 60 000 colour photos of 32 x 32 pixels in ten classes, from the web.",
    "49 000 of the 50 000 training images were trained on, shifted by up to 4 pixels and mirrored at random.",
    "The other 1000 chose the best epoch and are the held-out images that p-values come from.",
    "The results below are for the 10 000 test images. The recipe's learning rates were chosen with shorter "
    "runs of a smaller network, which were compared on these images, too.",
)
LIMITS = (
    "It knows ten classes of small photos. It can only call anything else novel, and it misses most photos "
    "of other objects: see the AUCs of other sets.",
    "The p-values hold for images like CIFAR-10's. With another camera, size or compression, all images "
    "may be novel, or none.",
    "Anyone who can change pixels can choose the class: changes too small to be seen are enough.",
    "Images of other sizes are scaled to 32 x 32, so small things in them are lost.",
    "The labels of CIFAR-10 contain errors, and its photos do not represent what a camera sees in practice.",
)
NOT_FOR = (
    "Decisions about people, or any decision in which a wrong class does harm: it is for research "
    "and teaching.",
    "Security: it does not withstand an adversary.",
    "Judging whether a photo is authentic, edited or generated.",
)


PRECISIONS = {"32": "in float32", "bf16": "convolutions in bfloat16"}


def write_card(name: str, options: Sequence[str], run: Path) -> None:
    """From the model in the zoo and its run; figures are added by :func:`add_figures`."""
    folder = zoo.FOLDER / name
    model = checkpoint.load_any(folder)
    config = model.record.config
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        epochs = list(csv.DictReader(file))
    hours = [float(row["seconds"]) / 3600 for row in epochs]
    parameters = sum(p.numel() for p in model.parameters())
    flow = model.config if isinstance(model, ResNet) else model.config.flow
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    kind = "ResNet with bottleneck blocks" if isinstance(model, ResNet) else "Generative classifier"
    beta = model.record.beta
    again = " Trained with a second seed, to show the effect of chance." if config["seed"] else ""
    best = model.metadata["training"]["epoch"]
    _write(
        name,
        {
            "name": name,
            "summary": f"{kind} of 32 x 32 photos into ten classes. {_character(beta, config)}{again}",
            "kind": "resnet" if isinstance(model, ResNet) else "generative",
            "beta": None if beta is None else str(beta),
            "images": " x ".join(map(str, model.image_shape)),
            "classes": list(model.class_names),
            "parameters": parameters,
            "bytes": weights,
            "data": list(DATA),
            "training": [
                f"`candid train cifar-10-batches-bin --recipe cifar10 {' '.join(options)}`",
                f"{config['epochs']} epochs in batches of {config['batch']}, label smoothing "
                f"{config['label_smoothing']:g}, {PRECISIONS[config['precision']]}; the best epoch by "
                f"validation loss was {best}.",
                f"{parameters / 1e6:.2f} million parameters (blocks {list(flow.blocks)}, widths "
                f"{list(flow.widths)}).",
                f"{sum(hours):.1f} hours, two runs at a time on two cores; "
                f"{len(hours) * min(hours):.1f} at the pace of the fastest epoch.",
            ],
            "storage": [
                "Kernels and matrices are rounded to half precision; all results are those of the "
                "rounded model.",
                "Loading it runs no code from the files. It carries the scores of its 1000 held-out images.",
            ],
            "measured": "",
            "figures": {},
            "more_figures": {},
            "limits": [*_own_limits(beta, isinstance(model, ResNet)), *LIMITS],
            "not_for": list(NOT_FOR),
        },
    )


def add_figures(name: str, measured: str, figures: Mapping[str, Any], more: Mapping[str, str]) -> None:
    """Put what was ``measured`` on the card of the bundled model ``name``."""
    _write(name, zoo.card(name) | {"measured": measured, "figures": figures, "more_figures": more})


def _write(name: str, card: dict[str, Any]) -> None:
    for file, text in ((zoo.CARD, json.dumps(card, indent=1) + "\n"), ("README.md", as_markdown(card))):
        with replacing(zoo.FOLDER / name / file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _character(beta: float | None, config: Mapping[str, Any]) -> str:
    if beta is None:
        smoothed = "with" if config["label_smoothing"] else "without"
        return f"The discriminative baseline of the same layout, trained {smoothed} label smoothing."
    if beta == 0:
        return "Beta 0: it models only images; classes were not part of its loss."
    if beta == float("inf"):
        return "Beta infinity: it was trained only to separate classes."
    return f"Beta {beta:g}: a compromise between a good model of images and a good classifier."


def _own_limits(beta: float | None, resnet: bool) -> list[str]:
    if resnet:
        return ["It has no likelihood: p-values come from the Mahalanobis distance of its features."]
    if beta == 0:
        return ["Its classes are meaningless: it guesses. Use its likelihood and its samples."]
    if beta == float("inf"):
        return [
            "Its likelihood is not a useful density of images: use its p-values with care, "
            "and do not use its samples."
        ]
    return []

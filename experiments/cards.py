"""The cards of the bundled models."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from candid._support.files import replacing
from candid.judging.held_out import HeldOut
from candid.models import checkpoint, zoo
from candid.models.resnet import ResNet
from candid.models.zoo import as_readme

CIFAR10 = (
    "CIFAR-10 (Krizhevsky, 2009): 60 000 colour photos of 32 x 32 pixels in ten classes, from the web.",
    "49 000 of the 50 000 training images were trained on, shifted by up to 4 pixels and mirrored at random.",
    "The other 1000 chose the best epoch and are the held-out images that p-values come from.",
    "The results below are for the 10 000 test images. The recipe's learning rates were chosen with shorter "
    "runs of a smaller network, which were compared on these images, too.",
)
TINY20 = (
    "20 classes of Tiny ImageNet (Stanford CS231n, after Russakovsky et al., 2015): 500 training and 50 test "
    "photos of 64 x 64 pixels each, among them three cats, three dogs and two cars.",
    "95 % of the training photos were trained on, shifted by up to 8 pixels and mirrored at random.",
    "The others chose the best epoch and are the held-out images that p-values come from.",
    "The results below are for the 1000 test photos.",
)
LIMITS = (
    "It knows a few classes of small photos. It can only call anything else novel, and it misses most photos "
    "of other objects.",
    "The p-values hold for images like those it was trained on. With another camera, size or compression, "
    "all images may be novel, or none.",
    "Anyone who can change pixels can choose the class: changes too small to be seen are enough.",
    "Images of other sizes are scaled to its own, so small things in them are lost.",
    "The labels of its data contain errors, and the photos do not represent what a camera sees in practice.",
)
NOT_FOR = (
    "Decisions about people, or any decision in which a wrong class does harm: it is for research "
    "and teaching.",
    "Security: it does not withstand an adversary.",
    "Judging whether a photo is authentic, edited or generated.",
)


TESTED_ON = {
    "cifar10": "CIFAR-10",
    "tiny20": "Tiny ImageNet, 20 classes",
    "everyday": "ImageNet, 100 validation photos of 100 classes",
    "waste": "TrashNet",
    "clothing": "clothing data set, ten kinds",
    "bloodcells": "PBC data set of blood cells",
}
"""The data that bundled models were tested on, by how their names begin."""
LICENCES = {"bloodcells": "cc-by-4.0"}
"""Of models that are not under the licence of the package: the thumbnails in them are under this one."""
PRECISIONS = {"32": "in float32", "bf16": "convolutions in bfloat16"}


def write_card(name: str, command: Sequence[str], run: Path) -> None:
    """Write the card of the model in the zoo that ``command`` trained into ``run``.

    Figures are added by :func:`add_figures`.
    """
    folder = zoo.FOLDER / name
    model = checkpoint.load(folder)
    config = model.record.config
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        epochs = list(csv.DictReader(file))
    hours = [float(row["seconds"]) / 3600 for row in epochs]
    flow = model.config if isinstance(model, ResNet) else model.config.flow
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    kind = "ResNet with bottleneck blocks" if isinstance(model, ResNet) else "Generative classifier"
    beta = model.record.beta
    again = " Trained with a second seed, to show the effect of chance." if config["seed"] else ""
    best = model.metadata["training"]["epoch"]
    write(
        name,
        {
            "name": name,
            "summary": f"{kind} of {model.image_shape[1]} x {model.image_shape[2]} photos into "
            f"{len(model.class_names)} classes. {_character(beta, config)}{again}",
            "kind": "resnet" if isinstance(model, ResNet) else "generative",
            "beta": None if beta is None else str(beta),
            "images": " x ".join(map(str, model.image_shape)),
            "classes": list(model.class_names),
            "parameters": model.size,
            "bytes": weights,
            "data": list(TINY20 if name == "tiny20" else CIFAR10),
            "training": [
                f"`{' '.join(command)}`",
                f"{config['epochs']} epochs in batches of {config['batch']}, label smoothing "
                f"{config['label_smoothing']:g}, {PRECISIONS[config['precision']]}; the best epoch by "
                f"validation loss was {best}.",
                f"{model.size / 1e6:.2f} million parameters (blocks {list(flow.blocks)}, widths "
                f"{list(flow.widths)}).",
                f"{sum(hours):.1f} hours, with other runs on two cores; "
                f"{len(hours) * min(hours):.1f} at the pace of the fastest epoch.",
                *refit_lines(model),
            ],
            "storage": storage(model),
            "measured": "",
            "figures": {},
            "more_figures": {},
            "limits": [*_own_limits(beta, isinstance(model, ResNet)), *LIMITS],
            "not_for": list(NOT_FOR),
        },
    )


def refit_lines(model: Any) -> list[str]:
    """Say how the class means of ``model`` were moved after training."""
    found = model.metadata.get("refit")
    if found is None:
        return []
    return [
        f"After training, the likelihood of {found['images']:,} held-out images moved the class means from "
        f"{found['distance_before']:.2f} to {found['distance']:.2f} standard deviations apart on average "
        "(`candid refit`). Posteriors are the same."
    ]


def storage(model: Any) -> list[str]:
    """Say how ``model`` is stored."""
    means = "" if isinstance(model, ResNet) else " Class means are exact."
    return [
        "Kernels and matrices of the network are rounded to half precision; all results are those of the "
        f"rounded model.{means}",
        "Loading it runs no code from the files. It carries the scores of its "
        f"{len(HeldOut.of(model) or ()):,} held-out images.",
    ]


def add_figures(name: str, measured: str, figures: Mapping[str, Any], more: Mapping[str, str]) -> None:
    """Put what was ``measured``, and the size of its files, on the card of the bundled model ``name``."""
    size = sum(file.stat().st_size for file in (zoo.FOLDER / name).glob("*.safetensors"))
    found = {"bytes": size, "measured": measured, "figures": figures, "more_figures": more}
    write(name, zoo.card(name) | found)


def write(name: str, card: dict[str, Any]) -> None:
    """Write the card of the bundled model ``name``, for programs and for people."""
    tested = next((data for start, data in TESTED_ON.items() if name.startswith(start)), name)
    card = {**card, "licence": LICENCES.get(name, "mit"), "tested_on": tested}
    for file, text in ((zoo.CARD, json.dumps(card, indent=1) + "\n"), ("README.md", as_readme(card))):
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
        return ["It has no likelihood: p-values come from its features and logits, by the score 'combined'."]
    if beta == 0:
        return ["Its classes are meaningless: it guesses. Use its likelihood and its samples."]
    if beta == float("inf"):
        return [
            "Its likelihood is not a useful density of images: use its p-values with care, "
            "and do not use its samples."
        ]
    return []

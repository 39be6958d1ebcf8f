"""Measure the heatmaps of photo models next to captum's Grad-CAM: pointing and deletion.

``python -m experiments.pointing DATA_FOLDER --out runs/pointing``

``DATA_FOLDER`` has the folders ``bloodcells8``, ``trashnet6`` and ``clothing10``. A photo model is trained on
each, without the classes that are kept unknown.

Pointing: a collage has the middle half of a test photo of one class on the left, and of one of another class
on the right. A map points right if it adds up to more over the half that shows its class.

Deletion: the 30 % of the cells that speak most for the answer get the photo's mean colour. The log posterior
of the answer should fall by much.

Grad-CAM is that of the last stage (captum's LayerGradCam), of the same scores: a logit minus another one, or
minus the mean of all.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from captum.attr import LayerGradCam
from torch import Tensor, nn

import candid
from candid._support.files import write_texts
from candid._support.progress import SILENT
from candid.data.datasets import open_part
from candid.data.formats import subfolders
from candid.data.loader import named_batches
from candid.data.options import Part
from candid.explanations.photo_maps import class_maps, smooth
from candid.models.eyes.efficientnet import statistics
from candid.models.heads.photo import PhotoModel
from experiments.cells import markdown

UNKNOWN = {"bloodcells8": "ig", "trashnet6": "trash", "clothing10": None}
"""The class that is kept from the model, by set."""
COLLAGES, PHOTOS = 200, 200
DELETED = 0.3
"""Share of the cells."""
BATCH = 8
Scorer = Callable[[Tensor], Tensor]
"""From logits (B, K) to a score of each image, (B,)."""


class Maps:
    """Ours and Grad-CAM's maps of a model."""

    def __init__(self, model: PhotoModel) -> None:
        self.model = model
        self.camera = _Camera(model)
        self.grad_cam = LayerGradCam(self.camera, self.camera.last)

    def ours(self, images: Tensor, score: Scorer) -> Tensor:
        """Return the map that adds up to the score, less that of the average photo, (B, h, w)."""
        maps = class_maps(self.model, images)[0]
        flat = maps.flatten(2).transpose(1, 2)  # (B, h w, K)
        rows = [score(flat[:, cell]) for cell in range(flat.shape[1])]
        return smooth(torch.stack(rows, 1).reshape(len(maps), *maps.shape[2:]))

    def theirs(self, images: Tensor, score: Scorer, relu: bool) -> Tensor:
        """Return Grad-CAM of the score at the same positions, (B, h, w)."""
        self.camera.score = score
        found = self.grad_cam.attribute(images, relu_attributions=relu).detach()
        return F.interpolate(found, scale_factor=2, mode="bilinear")[:, 0].double()

    def all(self, images: Tensor, score: Scorer) -> dict[str, Tensor]:
        """Return all maps by name."""
        return {
            "ours": self.ours(images, score),
            "Grad-CAM": self.theirs(images, score, relu=False),
            "Grad-CAM, ReLU": self.theirs(images, score, relu=True),
        }


class _Camera(nn.Module):
    """The model in torch, with its last stage as a layer."""

    def __init__(self, model: PhotoModel) -> None:
        super().__init__()
        self.last = nn.Identity()
        self.model = [model]
        self.score: Scorer = lambda logits: logits[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        model = self.model[0]
        *maps, last = model.eye.network.maps(images)  # type: ignore[attr-defined]
        return self.score(model.logits_of(statistics([*maps, self.last(last)])))


def against(y: Tensor, other: Tensor | None) -> Scorer:
    """Return the score of y (B,): its logit minus that of the other class, or minus the mean of all."""

    def score(logits: Tensor) -> Tensor:
        own = logits.gather(1, y[:, None])[:, 0]
        return own - (logits.mean(1) if other is None else logits.gather(1, other[:, None])[:, 0])

    return score


@dataclass(frozen=True)
class Photos:
    """Test photos as the model sees them, (N, 3, H, W) in [0, 1], and labels, (N,)."""

    images: Tensor
    labels: Tensor


def photo_model(data: Path, unknown: str | None, out: Path) -> PhotoModel:
    """Train a photo model, or load the one that an earlier run trained."""
    if not (out / "model").exists():
        only = (
            () if unknown is None else tuple(each.name for each in subfolders(data) if each.name != unknown)
        )
        candid.train(str(data), out=out, only=only)
    model: PhotoModel = candid.load(out)
    return model


def part_photos(model: PhotoModel, data: Path, part: Part) -> Photos:
    """Return the photos of a part of the data: of "test", those that the model was not trained on."""
    split = open_part(str(data), model.class_names, part, model.record.config).split
    prepared = split.preprocess(model.preprocessing, False, SILENT, f"{part} photos")
    batches = list(named_batches(prepared, model.preprocessing, 64, workers=0))
    return Photos(torch.cat([each[0] for each in batches]).float() / 255, torch.cat([b[1] for b in batches]))


def pointing(maps: Maps, photos: Photos) -> dict[str, float]:
    """Return the share of maps that point to the right half, by method and score."""
    right: dict[str, list[bool]] = {}
    for images, left, other in collages(photos):
        for y, z, side in ((left, other, 0), (other, left, 1)):
            for name, second in (("y - other", z), ("y - mean", None)):
                for method, found in maps.all(images, against(y, second)).items():
                    half = found.shape[2] // 2
                    sums = torch.stack((found[..., :half].sum((1, 2)), found[..., -half:].sum((1, 2))), 1)
                    right.setdefault(f"{method}, {name}", []).extend((sums.argmax(1) == side).tolist())
    return {name: float(np.mean(values)) for name, values in right.items()}


def collages(photos: Photos) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches of collages, and the classes on their left and on their right."""
    random = np.random.default_rng(0)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < COLLAGES:
        one, two = random.integers(len(photos.labels), size=2).tolist()
        if photos.labels[one] != photos.labels[two]:
            pairs.append((one, two))
    quarter = photos.images.shape[3] // 4
    for chunk in torch.tensor(pairs).split(BATCH):
        halves = [photos.images[chunk[:, i], :, :, quarter:-quarter] for i in range(2)]
        yield torch.cat(halves, 3), photos.labels[chunk[:, 0]], photos.labels[chunk[:, 1]]


def deletion(maps: Maps, photos: Photos) -> dict[str, float]:
    """Return the mean drop of the answer's log posterior in nats, by method."""
    chosen = torch.linspace(0, len(photos.labels) - 1, min(PHOTOS, len(photos.labels))).round().long()
    random = np.random.default_rng(0)
    drops: dict[str, list[float]] = {}
    for rows in chosen.split(BATCH):
        images = photos.images[rows]
        with torch.no_grad():
            before, y = maps.model.logits(images).log_softmax(1).max(1)
        found = maps.all(images, against(y, None))
        found["random"] = torch.from_numpy(random.random(found["ours"].shape))
        for method, values in found.items():
            cells = int(DELETED * values[0].numel())
            gone = torch.zeros_like(values.flatten(1)).scatter(1, values.flatten(1).topk(cells).indices, 1.0)
            mask = F.interpolate(gone.reshape(values.shape)[:, None].float(), images.shape[2:])
            changed = images * (1 - mask) + images.mean((2, 3), keepdim=True) * mask
            with torch.no_grad():
                after = maps.model.logits(changed).log_softmax(1).gather(1, y[:, None])[:, 0]
            drops.setdefault(method, []).extend((before - after).tolist())
    return {method: float(np.mean(values)) for method, values in drops.items()}


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    names = list(found)
    pointed = {key: [found[name]["pointing"][key] for name in names] for key in found[names[0]]["pointing"]}
    deleted = {key: [found[name]["deletion"][key] for name in names] for key in found[names[0]]["deletion"]}
    one = [[key, *(f"{v:.3f}" for v in row), f"{np.mean(row):.3f}"] for key, row in pointed.items()]
    two = [[key, *(f"{v:.2f}" for v in row)] for key, row in deleted.items()]
    return "\n".join(
        (
            f"Pointing: share of {2 * COLLAGES} maps of {COLLAGES} collages a set",
            markdown(["", *names, "mean"], one),
            f"Deletion: drop of the answer's log posterior in nats, {PHOTOS} photos a set",
            markdown(["", *names], two),
        )
    )


def main() -> None:
    """Measure all sets and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/pointing"))
    options = parser.parse_args()
    found = {}
    for name, unknown in UNKNOWN.items():
        model = photo_model(options.data / name, unknown, options.out / name)
        maps, photos = Maps(model), part_photos(model, options.data / name, "test")
        found[name] = {"pointing": pointing(maps, photos), "deletion": deletion(maps, photos)}
        write_texts({"pointing.json": json.dumps(found, indent=1) + "\n"}, options.out)
    print(tables(found))


if __name__ == "__main__":
    main()

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
from collections.abc import Iterator
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
from candid._support.numbers import Array, log_softmax
from candid._support.progress import SILENT
from candid.data import Part
from candid.data.batches import named_batches
from candid.data.datasets import open_part
from candid.data.formats import subfolders
from candid.data.images import to_float
from candid.explanations.class_maps import maps_of_all_classes, smooth
from candid.models.photo.model import PhotoModel
from candid.models.photo.torch_eyes import EfficientNetLite, statistics
from candid.models.photo.torch_models import TorchArray, photo_module
from experiments.photo_tables import deletion_table, pointing_table

UNKNOWN = {"bloodcells8": "ig", "trashnet6": "trash", "clothing10": None}
"""The class that is kept from the model, by set."""
COLLAGES, PHOTOS = 200, 200
DELETED = 0.3
"""Share of the cells."""
BATCH = 8


class Maps:
    """Ours and Grad-CAM's maps of a model."""

    def __init__(self, model: PhotoModel) -> None:
        self.model = model
        self.camera = _Camera(model)
        self.grad_cam = LayerGradCam(self.camera, self.camera.last)

    def ours(self, images: Array, contrasts: Array) -> Array:
        """Return the map that adds up to the score, less that of the average photo, (B, h, w)."""
        maps, _, _ = maps_of_all_classes(self.model, images)
        return smooth(np.einsum("bkhw,bk->bhw", maps, contrasts))

    def theirs(self, images: Array, contrasts: Array, relu: bool) -> Array:
        """Return Grad-CAM of the score at the same positions, (B, h, w)."""
        self.camera.contrasts = torch.from_numpy(contrasts.astype(np.float32))
        x = torch.from_numpy(images).requires_grad_()
        found = self.grad_cam.attribute(x, relu_attributions=relu).detach()
        return F.interpolate(found, scale_factor=2, mode="bilinear")[:, 0].double().numpy()

    def all(self, images: Array, contrasts: Array) -> dict[str, Array]:
        """Return all maps of a score by name.

        Args:
            images: (B, 3, H, W) in [0, 1].
            contrasts: what the logits of each image are multiplied by, and added up to the score, (B, K).
        """
        return {
            "ours": self.ours(images, contrasts),
            "Grad-CAM": self.theirs(images, contrasts, relu=False),
            "Grad-CAM, ReLU": self.theirs(images, contrasts, relu=True),
        }


class _Camera(nn.Module):
    """The score of a model in torch, with its last stage as a layer."""

    def __init__(self, model: PhotoModel) -> None:
        super().__init__()
        self.last, self.model = nn.Identity(), model
        network = photo_module(model).network
        assert isinstance(network, EfficientNetLite)
        self.network, self.contrasts = network, torch.empty(0)

    def forward(self, images: Tensor) -> Tensor:
        *maps, last = self.network.maps(images)
        logits: Any = self.model.logits_of(TorchArray(statistics([*maps, self.last(last)])))  # type: ignore[arg-type]
        return (logits.tensor * self.contrasts).sum(1)


def against(classes: int, y: Array, other: Array | None) -> Array:
    """Return the contrasts of y, (B, K): its logit minus that of the other class, or minus the mean of all.

    >>> against(2, np.array([0]), np.array([1]))
    array([[ 1., -1.]])
    """
    each = np.eye(classes)
    return each[y] - (1 / classes if other is None else each[other])


@dataclass(frozen=True)
class Photos:
    """Test photos as the model sees them, (N, 3, H, W) in [0, 1], and labels, (N,)."""

    images: Array
    labels: Array


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
    images, labels = (np.concatenate(parts) for parts in list(zip(*batches, strict=True))[:2])
    return Photos(to_float(images), labels)


def pointing(maps: Maps, photos: Photos) -> dict[str, float]:
    """Return the share of maps that point to the right half, by method and score."""
    right: dict[str, list[bool]] = {}
    for images, left, other in collages(photos):
        for y, z, side in ((left, other, 0), (other, left, 1)):
            for name, second in (("y - other", z), ("y - mean", None)):
                contrasts = against(len(maps.model.class_names), y, second)
                for method, values in maps.all(images, contrasts).items():
                    half = values.shape[2] // 2
                    sums = np.stack((values[..., :half].sum((1, 2)), values[..., -half:].sum((1, 2))), 1)
                    right.setdefault(f"{method}, {name}", []).extend((sums.argmax(1) == side).tolist())
    return {name: float(np.mean(values)) for name, values in right.items()}


def collages(photos: Photos) -> Iterator[tuple[Array, Array, Array]]:
    """Yield batches of collages, and the classes on their left and on their right."""
    random = np.random.default_rng(0)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < COLLAGES:
        one, two = random.integers(len(photos.labels), size=2).tolist()
        if photos.labels[one] != photos.labels[two]:
            pairs.append((one, two))
    quarter = photos.images.shape[3] // 4
    for start in range(0, COLLAGES, BATCH):
        chunk = np.array(pairs[start : start + BATCH])
        halves = [photos.images[chunk[:, i], :, :, quarter:-quarter] for i in range(2)]
        yield np.concatenate(halves, 3), photos.labels[chunk[:, 0]], photos.labels[chunk[:, 1]]


def deletion(maps: Maps, photos: Photos) -> dict[str, float]:
    """Return the mean drop of the answer's log posterior in nats, by method."""
    count = min(PHOTOS, len(photos.labels))
    chosen = np.linspace(0, len(photos.labels) - 1, count).round().astype(int)
    random = np.random.default_rng(0)
    drops: dict[str, list[float]] = {}
    for start in range(0, count, BATCH):
        images = photos.images[chosen[start : start + BATCH]]
        before = log_softmax(maps.model.logits(images))
        y = before.argmax(1)
        by_method = maps.all(images, against(before.shape[1], y, None))
        by_method["random"] = random.random(by_method["ours"].shape)
        for method, values in by_method.items():
            after = log_softmax(maps.model.logits(without(images, values)))
            drop = np.take_along_axis(before - after, y[:, None], 1)[:, 0]
            drops.setdefault(method, []).extend(drop.tolist())
    return {method: float(np.mean(values)) for method, values in drops.items()}


def without(images: Array, values: Array) -> Array:
    """Return images with their mean colour in the cells of the largest values, (B, h, w)."""
    flat = values.reshape(len(values), -1)
    gone = np.zeros_like(flat, np.float32)
    cells = int(DELETED * flat.shape[1])
    np.put_along_axis(gone, np.argsort(-flat, axis=1)[:, :cells], 1, axis=1)
    mask = gone.reshape(len(values), 1, *values.shape[1:])
    for side in (2, 3):
        mask = mask.repeat(images.shape[side] // mask.shape[side], axis=side)
    return images * (1 - mask) + images.mean((2, 3), keepdims=True) * mask


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    return "\n".join(
        (
            f"Pointing: share of {2 * COLLAGES} maps of {COLLAGES} collages a set",
            pointing_table(found),
            f"Deletion: drop of the answer's log posterior in nats, {PHOTOS} photos a set",
            deletion_table(found),
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

"""Teach a pixel model a class by a mean in latent space: the mean of one class of CIFAR-10 is taken away.

The network has seen all ten classes in its training, so the figures are optimistic.
"""

import math
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import candid
from candid.data.datasets import open_part
from candid.data.loader import named_batches
from candid.inference.predictions import to_float
from experiments.cells import markdown

MODEL, IMAGES, NUMBERS, DRAWS = "cifar10-beta1", 6000, (5, 20, 50, 200), 3
Figures = tuple[float, float, float]


@torch.no_grad()
def latents(folder: Path) -> tuple[Tensor, Tensor]:
    """Return z of test images, (N, D), and their classes."""
    model = candid.load(MODEL).frozen()
    split = open_part(str(folder), model.class_names, "test").split.subsample(IMAGES)
    found = [
        (model.outputs(to_float(images, "cpu")).latent.double(), labels)
        for images, labels, _ in named_batches(split, model.preprocessing, 250)
    ]
    z, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return z, labels


def recalls(answers: Tensor, labels: Tensor, new: int) -> Figures:
    """Return balanced accuracy, the recall of the new class and the mean recall of the others."""
    each = [float((answers[labels == y] == y).double().mean()) for y in labels.unique().tolist()]
    return mean(each), each[new], mean(each[:new] + each[new + 1 :])


def taught(own: Tensor, test: Tensor, classes: int) -> Tensor:
    """Return the logit of a class with the latents ``own``, (n, D), of the latents ``test``."""
    n, m = len(own), own.mean(0)
    spread = (own - m).square().sum() / (n - 1)
    rho = (1 - spread / (n * m @ m)).clamp(min=0).sqrt()
    return rho * (test @ m - m @ m / 2 + spread / (2 * n)) - math.log(classes)


@torch.no_grad()
def measured(folder: Path) -> dict[str, Any]:
    """Return figures by method and number of images: mean over ten left-out classes and the draws."""
    z, labels = latents(folder)
    means = candid.load(MODEL).mixture.means(torch.arange(10)).double()
    pool = torch.arange(len(z)) < len(z) // 2
    found: dict[str, list[Figures]] = {}
    for new in range(10):
        old = [y for y in range(10) if y != new]
        centre = means[old].mean(0)
        known = (z[~pool] - centre) @ (means[old] - centre).T - 0.5 * (means[old] - centre).square().sum(1)
        logits = torch.full((len(known), 10), -math.inf, dtype=torch.float64)
        logits[:, old] = known - math.log(len(old))
        found.setdefault("nine means", []).append(recalls(logits.argmax(1), labels[~pool], new))
        own_mean = logits.clone()
        own_mean[:, new] = taught_by(means[new] - centre, z[~pool] - centre, len(old))
        found.setdefault("its own mean", []).append(recalls(own_mean.argmax(1), labels[~pool], new))
        rows = ((labels == new) & pool).nonzero().flatten()
        for name, origin in (("latent", centre), ("latent, centred", z[pool & (labels != new)].mean(0))):
            for n in NUMBERS:
                for seed in range(DRAWS):
                    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
                    logits[:, new] = taught(z[rows[order[:n]]] - origin, z[~pool] - origin, len(old))
                    own = recalls(logits.argmax(1), labels[~pool], new)
                    found.setdefault(f"{name}, {n} images", []).append(own)
    return {name: [mean(part) for part in zip(*each, strict=True)] for name, each in found.items()}


def taught_by(m: Tensor, test: Tensor, classes: int) -> Tensor:
    """Return the logit of a class with the mean ``m``."""
    return test @ m - m @ m / 2 - math.log(classes)


def tables(found: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    head = ["new class by", "balanced accuracy (%)", "recall of the new class", "of the others"]
    rows = ([name, *(f"{100 * value:.1f}" for value in values)] for name, values in found.items())
    return markdown(head, rows)

"""Adopt EfficientNet-Lite0 and measure it: posteriors, accuracy, false alarms, what it finds.

``python -m experiments.adopt DATA_FOLDER --out runs/adopt``

``DATA_FOLDER`` has the folder ``imagenet-val`` with two photos in each class folder, and the folders
``bloodcells8``, ``caltech99``, ``clothing10`` and ``trashnet6``. The density is fitted to the first photo of
each class; of the second ones, a random half is held out and the others are for testing. The model is saved
in ``OUT/everyday``. Tables are printed in Markdown.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import candid
from candid._support.numbers import Array, log_softmax, softmax
from candid._support.progress import TerminalProgress
from candid._support.randomness import draws
from candid.data.datasets import open_images
from candid.data.formats import subfolders
from candid.data.images import to_float
from candid.inference.metrics import accuracy, area_under_curve
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.efficientnet import Network
from candid.models.photo.eyes import EYES
from candid.models.photo.opening import EARLY, PackagedSoftmax
from candid.models.photo.torch_eyes import EfficientNetLite
from candid.models.photo.torch_models import photo_module
from candid.models.protocol import Outputs
from candid.trust.gaussians import Moments
from candid.trust.ranking import CombinedRanks
from experiments.measures import missed, share, true_ratios
from experiments.tables import markdown

OTHERS = ("bloodcells8", "trashnet6", "clothing10", "caltech99")
DRAWS = 20
HELD_OUT = 500
COMPARED = 32
"""Photos on which posteriors are compared."""
PARTS = ("fit", "held-out", "test")


class Seen(NamedTuple):
    """What the network says of photos."""

    pooled: Array
    """(N, 1280)."""
    stages: Array
    """Stage statistics, (N, 1408)."""
    logits: Array
    """(N, 1000)."""

    @property
    def early(self) -> Array:
        """Statistics of the two earliest stages, (N, 384)."""
        return self.stages[:, : sum(EYES["lite0"].widths[:EARLY]) * 2]


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/adopt"))
    given = parser.parse_args()
    folders = divide(given.data / "imagenet-val", given.out / "photos")
    model = candid.adopt(
        "lite0",
        folders["fit"],
        held_out=str(folders["held-out"]),
        out=given.out / "everyday",
        progress=TerminalProgress(),
    )
    print(f"\n{exactness(model, folders['test'])}\n")
    known = {part: see(model, folder) for part, folder in folders.items()}
    others = {name: see(model, given.data / name) for name in OTHERS}
    print(f"{densities(known, others)}\n")
    print(f"{random_halves(model, known, others)}\n")


def halves(seed: int) -> Array:
    """Return all classes: first those whose second photo is held out, in order, then the others."""
    return np.sort(draws(seed).permutation(2 * HELD_OUT).reshape(2, HELD_OUT), axis=1).flatten()


def divide(source: Path, target: Path) -> dict[str, Path]:
    """Make folders of links to the photos that are fitted, held out and tested."""
    order = halves(0).tolist()
    for number, folder in enumerate(subfolders(source)):
        first, second = sorted(folder.glob("*.jpg"))
        where = PARTS[1] if number in order[:HELD_OUT] else PARTS[2]
        for part, photo in (("fit", first), (where, second)):
            link = target / part / folder.name / photo.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(photo.resolve())
    return {part: target / part for part in PARTS}


def photos(model: AdoptedModel, folder: Path, batch: int = 32) -> list[Array]:
    """Return batches of the photos in a folder, in order, in [0, 1]."""
    split = open_images(str(folder), model.preprocessing)
    batches = split.named_batches(model.preprocessing, batch, 0, 1, 0)
    return [to_float(images) for images, _, _ in batches]


def see(model: AdoptedModel, folder: Path) -> Seen:
    """Return what the network says of all photos in a folder, in order."""
    eye = model.eye
    assert isinstance(eye, PackagedSoftmax)
    pairs = [eye.eye.statistics_and_pooled(images) for images in photos(model, folder)]
    stages, pooled = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    weight, bias = eye.last_layer()
    return Seen(pooled, stages, pooled @ weight.T + bias)


def exactness(model: AdoptedModel, folder: Path) -> str:
    """Compare posteriors with those of the published network, and onnxruntime with torch."""
    eye = model.eye
    assert isinstance(eye, PackagedSoftmax)
    network, module = EfficientNetLite(Network.read(EYES["lite0"])), photo_module(model)
    layer = [torch.from_numpy(part) for part in eye.last_layer()]
    images = photos(model, folder, COMPARED)[0]

    def compared(images: Array, dtype: torch.dtype, in_torch: bool) -> tuple[float, float, float]:
        """Return the largest differences of posteriors, posteriors of the joint density and features."""
        x = torch.from_numpy(images).to(dtype)
        with torch.no_grad():
            pooled = network.to(dtype).pooled(network.maps(x))
            posterior = F.linear(pooled, *(part.to(dtype) for part in layer)).softmax(1)
            outputs = module.to(dtype).tensor_outputs(x).arrays() if in_torch else model.outputs(images)
        return differences(outputs, pooled.numpy(), posterior.numpy())

    rows = []
    for what, dtype, in_torch in (
        ("torch, float32", torch.float32, True),
        ("torch, float64", torch.float64, True),
        ("onnxruntime, float32", torch.float32, False),
    ):
        parts = [compared(part, dtype, in_torch) for part in np.split(images, COMPARED // 4)]
        rows.append((what, *(f"{max(values):.1e}" for values in zip(*parts, strict=True))))
    head = ("largest difference to the network in torch", "posteriors", "of the joint density", "features")
    return markdown(head, rows)


def differences(outputs: Outputs, pooled: Array, posterior: Array) -> tuple[float, float, float]:
    """Return the largest differences of outputs to the pooled features and the posteriors of a network."""
    assert outputs.log_density_terms is not None
    joint = log_softmax(outputs.logits.astype(np.float64)) + outputs.log_density_terms
    return (
        float(abs(softmax(outputs.logits) - posterior).max()),
        float(abs(softmax(joint) - posterior).max()),
        float(abs(outputs.features[:, : pooled.shape[1]] - pooled).max()),
    )


def densities(known: dict[str, Seen], others: dict[str, Seen]) -> str:
    """Compare Gaussians of pooled features and of stage statistics, by AUROC."""
    rows = []
    for name in ("pooled", "stages", "early"):
        fit = getattr(known["fit"], name)
        moments = Moments.of(fit, np.zeros(len(fit)))

        def distance(seen: Seen, name: str = name, moments: Moments = moments) -> Array:
            return np.sum(((getattr(seen, name) - moments.mean) @ moments.whitening.T) ** 2, axis=1)

        own = np.concatenate([distance(known[part]) for part in PARTS[1:]])
        areas = [100 * area_under_curve(own, distance(each)) for each in others.values()]
        what = {"pooled": "pooled features", "stages": "stage statistics", "early": "the two earliest stages"}
        rows.append((f"{what[name]} ({fit.shape[1]})", *(f"{value:.1f}" for value in areas)))
    return markdown(("AUROC of the distance alone, %", *others), rows)


def random_halves(model: AdoptedModel, known: dict[str, Seen], others: dict[str, Seen]) -> str:
    """Measure accuracy, false alarms, class sets and AUROC: of the saved model, and over random halves."""
    order = halves(0).argsort()  # from held-out and test photos to the order of classes
    both = zip(*(known[part] for part in PARTS[1:]), strict=True)
    second = Seen(*(np.concatenate(parts)[order] for parts in both))
    table: dict[str, list[float]] = {}
    for seed in range(DRAWS + 1):
        for name, value in measured(model, second, halves(seed), others).items():
            table.setdefault(name, []).append(100 * value)
    lines = []
    for name, values in table.items():
        lines.append((name, f"{values[0]:.1f}", f"{mean(values[1:]):.1f} ± {stdev(values[1:]):.1f}"))
    return markdown(("%", "the saved model", f"{DRAWS} random halves"), lines)


def measured(model: AdoptedModel, seen: Seen, order: Array, others: dict[str, Seen]) -> dict[str, float]:
    """Return the figures of one division into held-out and test photos; photo y is of class y."""

    def parts(each: Seen) -> Array:
        novelty = model.outputs_of(each.logits, np.concatenate((each.pooled, each.early), 1)).novelty
        assert novelty is not None
        return novelty

    own, (held_out, test) = parts(seen), np.split(order, [HELD_OUT])
    labels = np.arange(len(own))
    ranks = CombinedRanks(own[held_out])
    posterior = softmax(seen.logits.astype(np.float64))
    true = true_ratios(posterior, labels)
    p_values = ranks.p_values(own[test])
    figures = {
        "accuracy": accuracy(posterior[test], labels[test]),
        "false alarms at 1 %": share(p_values <= 0.01),
        "false alarms at 5 %": share(p_values <= 0.05),
        "class sets that miss the class, at 5 %": missed(posterior[test], labels[test], true[held_out], 0.05),
    }
    for name, other in others.items():
        theirs = parts(other)
        auroc = area_under_curve(ranks.statistic(own[test]), ranks.statistic(theirs))
        figures |= {f"AUROC of {name}": auroc}
        figures |= {f"{name} found at 5 %": share(ranks.p_values(theirs) <= 0.05)}
    return figures


if __name__ == "__main__":
    main()

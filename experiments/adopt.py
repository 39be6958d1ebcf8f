"""Adopt EfficientNet-Lite0 and measure it: posteriors, accuracy, false alarms, what it finds.

``python -m experiments.adopt DATA_FOLDER --out runs/adopt``

``DATA_FOLDER`` has the folder ``imagenet-val`` with two photos in each class folder, and the folders
``bloodcells8``, ``caltech99``, ``clothing10`` and ``trashnet6``. The density is fitted to the first photo of
each class; of the second ones, a random half is held out and the others are for testing. The model is saved
in ``OUT/everyday``. Tables are printed in Markdown.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import candid
from candid._support.progress import TerminalProgress
from candid._support.randomness import generator
from candid.data.datasets import open_images
from candid.data.formats import subfolders
from candid.inference.predictions import to_float
from candid.inference.roc import area_under_curve
from candid.models.eyes.efficientnet import EfficientNetLite, read_weights
from candid.models.eyes.registry import EYES
from candid.models.heads.adopted import AdoptedModel
from candid.models.heads.softmax import EARLY, PackagedSoftmax
from candid.trust.combined import CombinedRanks
from candid.trust.feature_moments import Moments
from candid.trust.verdict import class_sets, ratios
from experiments.cells import markdown

OTHERS = ("bloodcells8", "trashnet6", "clothing10", "caltech99")
DRAWS = 20
HELD_OUT = 500
COMPARED = 32
"""Photos on which posteriors are compared."""
PARTS = ("fit", "held-out", "test")


class Seen(NamedTuple):
    """What the network says of photos."""

    pooled: Tensor
    """(N, 1280)."""
    stages: Tensor
    """Stage statistics, (N, 1408)."""
    logits: Tensor
    """(N, 1000)."""

    @property
    def early(self) -> Tensor:
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
    print(f"{draws(model, known, others)}\n")


def halves(seed: int) -> Tensor:
    """Return all classes: first those whose second photo is held out, in order, then the others."""
    order = torch.randperm(2 * HELD_OUT, generator=generator(seed))
    return torch.cat([half.sort().values for half in order.split(HELD_OUT)])


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


def photos(model: AdoptedModel, folder: Path, batch: int = 32) -> list[Tensor]:
    """Return batches of the photos in a folder, in order, in [0, 1]."""
    split = open_images(str(folder), model.preprocessing)
    batches = split.named_batches(model.preprocessing, batch, 0, 1, 0)
    return [to_float(images, "cpu") for images, _, _ in batches]


@torch.inference_mode()
def see(model: AdoptedModel, folder: Path) -> Seen:
    """Return what the network says of all photos in a folder, in order."""
    eye = model.eye
    assert isinstance(eye, PackagedSoftmax)
    pairs = [eye.eye.statistics_and_pooled(images) for images in photos(model, folder)]
    stages, pooled = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return Seen(pooled, stages, F.linear(pooled, *eye.last_layer()))


def exactness(model: AdoptedModel, folder: Path) -> str:
    """Compare posteriors with those of the published network, and onnxruntime with torch."""
    info = EYES["lite0"]
    weights = read_weights(info.weights_file())
    network = EfficientNetLite(weights, info)
    images = photos(model, folder, COMPARED)[0]

    def compared(x: Tensor, torch_only: bool = True) -> tuple[float, float, float]:
        """Return the largest differences of posteriors, posteriors of the joint density and features."""
        found = model.outputs(x.requires_grad_(torch_only))
        with torch.no_grad():
            pooled = network.to(x.dtype).pooled(network.maps(x))
            layer = (weights[f"_fc.{part}"].to(x) for part in ("weight", "bias"))
            expected = F.linear(pooled, *layer).softmax(1)
            assert found.log_density_terms is not None
            joint = found.logits.double().log_softmax(1) + found.log_density_terms
            features = found.features[:, : pooled.shape[1]]
            parts = found.logits.softmax(1) - expected, joint.softmax(1) - expected, features - pooled
            return tuple(float(each.abs().max()) for each in parts)  # type: ignore[return-value]

    rows = []
    for what, dtype, torch_only in (
        ("torch, float32", torch.float32, True),
        ("torch, float64", torch.float64, True),
        ("onnxruntime, float32", torch.float32, False),
    ):
        each = [compared(part.to(dtype), torch_only) for part in images.split(4)]
        rows.append((what, *(f"{max(values):.1e}" for values in zip(*each, strict=True))))
    head = ("largest difference to the network in torch", "posteriors", "of the joint density", "features")
    return markdown(head, rows)


def densities(known: dict[str, Seen], others: dict[str, Seen]) -> str:
    """Compare Gaussians of pooled features and of stage statistics, by AUROC."""
    rows = []
    for name in ("pooled", "stages", "early"):
        fit = getattr(known["fit"], name)
        moments = Moments.of(fit, torch.zeros(len(fit)))

        def distance(seen: Seen, name: str = name, moments: Moments = moments) -> Tensor:
            return ((getattr(seen, name) - moments.mean) @ moments.whitening.T).square().sum(1)

        own = torch.cat([distance(known[part]) for part in PARTS[1:]])
        found = [100 * area_under_curve(own, distance(each)) for each in others.values()]
        what = {"pooled": "pooled features", "stages": "stage statistics", "early": "the two earliest stages"}
        rows.append((f"{what[name]} ({fit.shape[1]})", *(f"{value:.1f}" for value in found)))
    return markdown(("AUROC of the distance alone, %", *others), rows)


def draws(model: AdoptedModel, known: dict[str, Seen], others: dict[str, Seen]) -> str:
    """Measure accuracy, false alarms, class sets and AUROC: of the saved model, and over random halves."""
    order = halves(0).argsort()  # from held-out and test photos to the order of classes
    both = zip(*(known[part] for part in PARTS[1:]), strict=True)
    second = Seen(*(torch.cat(parts)[order] for parts in both))
    table: dict[str, list[Tensor]] = {}
    for seed in range(DRAWS + 1):
        for name, value in measured(model, second, halves(seed), others).items():
            table.setdefault(name, []).append(torch.tensor(100 * value))
    lines = []
    for name, values in table.items():
        more = torch.stack(values[1:])
        lines.append((name, f"{values[0]:.1f}", f"{more.mean():.1f} ± {more.std():.1f}"))
    return markdown(("%", "the saved model", f"{DRAWS} random halves"), lines)


def measured(model: AdoptedModel, seen: Seen, order: Tensor, others: dict[str, Seen]) -> dict[str, float]:
    """Return the figures of one division into held-out and test photos; photo y is of class y."""

    def parts(each: Seen) -> Tensor:
        novelty = model.outputs_of(each.logits, torch.cat((each.pooled, each.early), 1)).novelty
        assert novelty is not None
        return novelty

    own, (held_out, test) = parts(seen), order.split(HELD_OUT)
    labels = torch.arange(len(own))
    ranks = CombinedRanks.fit(own[held_out])
    posterior = seen.logits.double().softmax(1)
    true = ratios(posterior).gather(1, labels[:, None])[:, 0]
    sets = class_sets(posterior[test], true[held_out])
    p_values = ranks.p_values(own[test])
    found = {
        "accuracy": float((posterior[test].argmax(1) == labels[test]).double().mean()),
        "false alarms at 1 %": float((p_values <= 0.01).double().mean()),
        "false alarms at 5 %": float((p_values <= 0.05).double().mean()),
        "class sets that miss the class, at 5 %": 1
        - float(sets[torch.arange(len(test)), labels[test]].double().mean()),
    }
    for name, other in others.items():
        theirs = parts(other)
        auroc = area_under_curve(ranks.statistic(own[test]), ranks.statistic(theirs))
        found |= {f"AUROC of {name}": auroc}
        found |= {f"{name} found at 5 %": float((ranks.p_values(theirs) <= 0.05).double().mean())}
    return found


if __name__ == "__main__":
    main()

"""Check whether the mixture of the bundled generative models describes the latents of test images.

``python -m experiments.geometry cifar-10-batches-bin --tiny tiny20 --photos photos --json geometry.json``

``photos`` has the folders ``bloodcells8``, ``clothing10`` and ``trashnet6``. Each model makes one pass over
its test images and one over its held-out images; what the JSON file has of a model is kept. A refitted model
is described as it was trained (before) and as it is now (after). Distances of classes are judged by
confusions of test images (``experiments.similarity``); of a photo model, these are its means alone.
"""

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scipy.spatial.distance import cdist

from candid._support.files import replacing
from candid._support.numbers import Array, softmax
from candid._support.processes import launch
from candid._support.progress import SILENT
from candid.data import Part
from candid.data.batches import named_batches
from candid.data.images import to_float
from candid.explanations.decision_space import CONFIDENT, MASS, decision_spaces
from candid.explanations.overview import open_images
from candid.explanations.similarity import expected_uncertainty
from candid.inference.metrics import measured_uncertainty
from candid.inference.runner import Runner
from candid.models import checkpoint, zoo
from candid.models.flow.backbone import SpanScaling
from candid.models.flow.classifier import FlowOutputs, GenerativeClassifier
from candid.models.flow.means import restore, span_of
from candid.models.flow.network import array_of
from candid.models.protocol import Outputs, batch_size
from experiments import similarity
from experiments.models import with_test
from experiments.photo_models import SETS
from experiments.similarity import Seen
from experiments.tables import Cell, shown, table, text

DRAWS = 2000
"""Latents that are drawn from the mixture, for comparison."""
PAIR = ("cat", "dog")
"""The pair of classes that is listed by itself."""
COLUMNS = {
    "mean_distance": "distance of class means (σ)",
    "class_average_distance": "of class averages of latents",
    "inside": f"in the {100 * MASS:.0f} % region (%)",
    "inside_confident": "confident images",
    "inside_draws": "draws of the mixture",
    "inside_draws_confident": "confident draws",
    "expected": "expected uncertainty (%)",
    "measured": "measured",
    "expected_pair": f"expected, {'–'.join(PAIR)}",
    "measured_pair": "measured",
    "log_density": "log density (nats)",
    "largest_change": "largest change of a posterior",
}
"""Metrics and the heads of their columns."""
SHARES = ("inside", "expected", "measured")
"""Metrics that start with one of these are shares, printed in percent."""


@torch.no_grad()
def seen(model: GenerativeClassifier, data: str, part: Part | None = None, images: int | None = None) -> Seen:
    """Return what the network makes of the test images, or of those of a part, and their labels."""
    split, _ = open_images(model, data, part, images, False, SILENT)
    frozen, passes, labels = model.frozen(), [], []
    for x, y, _ in named_batches(split, model.preprocessing, batch_size(model)):
        passes.append(frozen(torch.from_numpy(to_float(x)).to(model.device)))
        labels.append(y)
    z, log_det, logits = (torch.cat(parts) for parts in zip(*passes, strict=True))
    return Seen(FlowOutputs(z, log_det, logits), np.concatenate(labels))


@torch.no_grad()
def as_trained(model: GenerativeClassifier, outputs: FlowOutputs) -> tuple[GenerativeClassifier, FlowOutputs]:
    """Return a refitted model before it was refitted, and its outputs, without another pass."""
    layer = cast(SpanScaling, model.flow._modules["span"])
    z, log_det = layer.inverse(outputs.z)
    before = copy.deepcopy(model)
    restore(before)
    return before, FlowOutputs(z, outputs.log_det + log_det, before.mixture.logits(z))


@torch.no_grad()
def geometry(model: GenerativeClassifier, outputs: FlowOutputs, labels: Array) -> dict[str, float | None]:
    """Return how well the mixture of ``model`` describes the latents; shares are from 0 to 1."""
    mixture, classes = model.mixture, len(model.class_names)
    pairs = np.triu_indices(classes, 1)
    distances = model.geometry.distances()
    layer = span_of(mixture).layer
    places = np.concatenate([layer.coordinates(part.double()).numpy() for part in outputs.z.split(1000)])
    averages = np.stack([places[labels == y].mean(0) for y in range(classes)])
    expected = expected_uncertainty(distances)
    measured = measured_uncertainty(softmax(array_of(outputs.logits).astype(np.float64)), labels)
    generator = torch.Generator().manual_seed(0)
    y = mixture.log_priors.exp().multinomial(DRAWS, replacement=True, generator=generator)
    drawn = mixture.sample(y, generator=generator)
    inside, inside_confident = _inside(model, array_of(outputs.z), array_of(outputs.logits))
    inside_draws, inside_draws_confident = _inside(model, array_of(drawn), array_of(mixture.logits(drawn)))
    names = model.class_names
    pair = tuple(map(names.index, PAIR)) if set(PAIR) <= set(names) else None
    return {
        "mean_distance": float(distances[pairs].mean()),
        "class_average_distance": float(cdist(averages, averages)[pairs].mean()),
        "inside": inside,
        "inside_confident": inside_confident,
        "inside_draws": inside_draws,
        "inside_draws_confident": inside_draws_confident,
        "expected": float(expected[pairs].mean()),
        "measured": float(measured[pairs].mean()),
        "expected_pair": None if pair is None else float(expected[pair]),
        "measured_pair": None if pair is None else float(measured[pair]),
        "log_density": float(model.log_density_of(outputs).mean()),
        "largest_change": None,
    }


def _inside(model: GenerativeClassifier, z: Array, logits: Array) -> tuple[float, float | None]:
    """Return the shares of all and of confident latents in the drawn region of their most probable class."""
    spaces = decision_spaces(model, Outputs(logits, z[:, :0], None, z))
    inside = np.array([bool(space.inside[0]) for space in spaces], np.float64)
    confident = inside[[bool(space.posterior[0] > CONFIDENT) for space in spaces]]
    return float(inside.mean()), float(confident.mean()) if len(confident) else None


def of_pixel_model(model: GenerativeClassifier, data: str, images: int | None) -> dict[str, Any]:
    """Return the metrics of a pixel model, before and after it was refitted."""
    test, held_out = seen(model, data, images=images), seen(model, data, "val")
    outputs, labels = test
    found = {"images": len(labels), "similarity": similarity.of_pixel_model(model, test, held_out)}
    if model.config.flow.span is None:
        return found | {"before": geometry(model, outputs, labels)}
    before, earlier = as_trained(model, outputs)
    after = geometry(model, outputs, labels)
    change = outputs.logits.double().softmax(1) - earlier.logits.double().softmax(1)
    after["largest_change"] = float(change.abs().max())
    return found | {"before": geometry(before, earlier, labels), "after": after}


def of_photo_model(model: Any, data: str, images: int | None) -> dict[str, Any]:
    """Return how the means of a photo model agree with confusions."""
    split, part = open_images(model, data, None, images, False, SILENT)
    predictions = Runner(model, launch(1, network=False)).predictions(split, model.preprocessing, part)
    assert predictions is not None
    found = similarity.of_means(model, predictions.labels, predictions.logits.argmax(1))
    return {"images": len(predictions.labels), "similarity": found}


def measured_geometry(
    data: Mapping[str, str], file: Path | None = None, images: int | None = None
) -> dict[str, Any]:
    """Return the metrics of bundled models, by name.

    Args:
        data: the data of each model.
        file: JSON with what was measured; what it has of models that are still the same is kept.
        images: number of test images; all by default.
    """
    models = {} if file is None or not file.is_file() else json.loads(file.read_text(encoding="utf-8"))
    for name, source in data.items():
        model: Any = checkpoint.load(name)
        same = {"fingerprint": model.fingerprint(), "asked": images}
        if same.items() <= models.get(name, {}).items():
            continue
        print(name, flush=True)
        measure = of_pixel_model if isinstance(model, GenerativeClassifier) else of_photo_model
        models[name] = same | measure(model, source, images)
        if file is not None:
            with replacing(file) as temporary:
                temporary.write_text(json.dumps(models, indent=1) + "\n", encoding="utf-8")
    return {name: models[name] for name in data}


def sources(cifar10: str, tiny: str | None = None, photos: Path | None = None) -> dict[str, str]:
    """Return the data of each bundled generative model, by name; CIFAR-10's by beta."""
    betas = {name: zoo.card(name)["beta"] for name in zoo.names() if name.startswith("cifar10")}
    names = sorted(
        (name for name, beta in betas.items() if beta is not None), key=lambda name: float(betas[name])
    )
    data = dict.fromkeys(names, cifar10) | ({} if tiny is None else {"tiny20": tiny})
    return data if photos is None else data | {name: str(photos / each.folder) for name, each in SETS.items()}


def markdown(models: dict[str, Any]) -> str:
    """Return the table: one row for each model and state."""
    records = [
        {"name": f"{name}, {state}", **found[state]}
        for name, found in models.items()
        for state in ("before", "after")
        if state in found
    ]
    return table(records, (("model", text("name")), *((head, _cell(key)) for key, head in COLUMNS.items())))


def _cell(key: str) -> Cell:
    if key.startswith(SHARES):
        return shown(1, 100, key)
    digits = ".1e" if key == "largest_change" else ",.2f"
    return lambda record: "–" if record[key] is None else f"{record[key]:{digits}}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all bundled generative models and print the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.geometry", description=__doc__)
    parser.add_argument("data", metavar="DATA", help="CIFAR-10, as a folder of images or as published")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the file for all numbers")
    parser.add_argument("--images", type=int, metavar="N", help="number of test images; all by default")
    parser.add_argument(
        "--tiny", metavar="FOLDER", help="20 classes of Tiny ImageNet: train/ and test/ (or val/)"
    )
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="the folder of the photo sets")
    parser.add_argument("--work", type=Path, default=Path("runs/geometry"), help="the folder for links")
    asked = parser.parse_args(arguments)
    tiny = None if asked.tiny is None else str(with_test(asked.tiny, asked.work))
    data = sources(asked.data, tiny, asked.photos)
    print(markdown(measured_geometry(data, asked.json, asked.images)))


if __name__ == "__main__":
    main()

"""Check whether the mixture of the bundled generative models describes the latents of test images.

``python -m experiments.geometry images --json geometry.json``

``images`` is CIFAR-10, as a folder with ``test/<class>/*.png`` or as published. Each model makes one pass
over the test images. A refitted model is described as it was trained (before) and as it is now (after), any
other one only as it was trained. The table is printed as Markdown, the JSON file has all numbers.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

from candid._support.files import replacing
from candid._support.numbers import Array, softmax
from candid._support.progress import SILENT
from candid.data.batches import named_batches
from candid.data.images import to_float
from candid.explanations.decision_space import CONFIDENT, MASS, decision_spaces
from candid.explanations.overview import open_images
from candid.explanations.similarity import expected_uncertainty
from candid.inference.metrics import measured_uncertainty
from candid.models import checkpoint, zoo
from candid.models.flow.backbone import SpanScaling
from candid.models.flow.classifier import FlowOutputs, GenerativeClassifier
from candid.models.flow.means import restore, span_of
from candid.models.flow.network import array_of
from candid.models.protocol import Outputs, batch_size
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
    "rank_correlation": "rank correlation",
    "log_density": "log density (nats)",
    "largest_change": "largest change of a posterior",
}
"""Metrics and the heads of their columns."""
SHARES = ("inside", "expected", "measured")
"""Metrics that start with one of these are shares, printed in percent."""


@torch.no_grad()
def outputs_of(model: GenerativeClassifier, data: str, images: int | None) -> tuple[FlowOutputs, Array]:
    """Return what the network makes of the test images, and their labels."""
    split, _ = open_images(model, data, None, images, False, SILENT)
    frozen, passes, labels = model.frozen(), [], []
    for x, y, _ in named_batches(split, model.preprocessing, batch_size(model)):
        passes.append(frozen(torch.from_numpy(to_float(x)).to(model.device)))
        labels.append(y)
    z, log_det, logits = (torch.cat(parts) for parts in zip(*passes, strict=True))
    return FlowOutputs(z, log_det, logits), np.concatenate(labels)


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
        "rank_correlation": float(spearmanr(expected[pairs], measured[pairs]).statistic),
        "log_density": float(model.log_density_of(outputs).mean()),
        "largest_change": None,
    }


def _inside(model: GenerativeClassifier, z: Array, logits: Array) -> tuple[float, float | None]:
    """Return the shares of all and of confident latents in the drawn region of their most probable class."""
    spaces = decision_spaces(model, Outputs(logits, z[:, :0], None, z))
    inside = np.array([bool(space.inside[0]) for space in spaces], np.float64)
    confident = inside[[bool(space.posterior[0] > CONFIDENT) for space in spaces]]
    return float(inside.mean()), float(confident.mean()) if len(confident) else None


def measured_geometry(model: GenerativeClassifier, data: str, images: int | None) -> dict[str, Any]:
    """Return the metrics of one model, before and after it was refitted."""
    outputs, labels = outputs_of(model, data, images)
    if model.config.flow.span is None:
        return {"images": len(labels), "before": geometry(model, outputs, labels)}
    before, earlier = as_trained(model, outputs)
    after = geometry(model, outputs, labels)
    change = outputs.logits.double().softmax(1) - earlier.logits.double().softmax(1)
    after["largest_change"] = float(change.abs().max())
    return {"images": len(labels), "before": geometry(before, earlier, labels), "after": after}


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
    asked = parser.parse_args(arguments)
    models = {}
    for name in (name for name in zoo.names() if name.startswith("cifar10")):
        model = checkpoint.load(name)
        if isinstance(model, GenerativeClassifier):
            print(name, flush=True)
            models[name] = measured_geometry(model, asked.data, asked.images)
    if asked.json is not None:
        with replacing(asked.json) as file:
            file.write_text(json.dumps(models, indent=1) + "\n", encoding="utf-8")
    print(markdown(models))


if __name__ == "__main__":
    main()

"""The paper on photos: an invertible network on the features of CIFAR-10 at 224 pixels, for all eight betas.

``python -m experiments.features extract cifar10/images --others DATA --mnist mnist`` writes what the eye
``lite0`` sees of the images, enlarged to 224 pixels, and of 500 images of each other set to
``runs/features``. ``DATA`` has the folders ``tiny20``, ``bloodcells8`` and ``clothing10``; their images are
shrunk to 32 pixels first, so that they can't be found by their sharpness.

``python -m experiments.features run`` trains and measures the models that are missing, the most wanted first;
``--share 0/2`` every second one. ``python -m experiments.features page`` writes the JSON
and the tables of ``docs/results/features.md``.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch import Tensor, nn

from candid._support.files import write_text
from candid._support.numbers import Array, softmax
from candid._support.processes import OneProcess
from candid._support.progress import Progress, TerminalProgress
from candid._support.randomness import generator
from candid.data.batches import named_batches
from candid.data.datasets import open_dataset
from candid.data.formats import Query, format_of
from candid.data.images import Preprocessing, preprocess_image, to_float
from candid.data.splits import FileSplit, Split
from candid.evaluation.calibration_error import CRITICAL, calibration_metrics
from candid.explanations.similarity import expected_uncertainty
from candid.inference.metrics import (
    accuracy,
    area_under_curve,
    auc_interval,
    binomial_interval,
    cross_entropy,
    fit_temperature,
)
from candid.judging.calibrate import held_out_scores
from candid.models.decision_plane import fitted_plane
from candid.models.flow.mixture import Losses
from candid.models.flow.subnets import perceptron
from candid.models.flow.vector import VectorClassifier
from candid.models.photo.eye import Eye
from candid.models.photo.opening import open_eye
from candid.training.features import Extraction, FeatureCache
from candid.training.options import VectorOptions
from candid.training.vectors import VectorData, finish, fit, new_model, predicted, train_flow
from candid.trust.ranking import new_detector
from candid.trust.scores import SCORES, Columns
from experiments.features_tables import page

RUNS = Path("runs") / "features"
EYE, HELD_OUT, COUNT, SIDE = "lite0", 0.1, 500, 32
PER_CLASS = 2000
"""Training images of a class: with 4500, all there are, a model takes 2 minutes of a core instead of one."""
BETAS = (1.0, math.inf, 16.0, 4.0, None, 0.0, 32.0, 8.0, 2.0)
"""In the order in which they are trained; None is the softmax network."""
LABELS = {"hard": 0.0, "smoothed": 0.05}
"""Label smoothing."""
DETECTORS = ("two-tailed", "combined", "max-posterior")
"""Scores whose areas under ROC curves are measured."""
CIFAR, OTHERS = "cifar10.npz", "others.npz"


class Asked(NamedTuple):
    """A model of the study."""

    labels: str
    beta: float | None
    """None for the softmax network."""
    seed: int

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.labels}-{'softmax' if self.beta is None else f'beta{self.beta:g}'}-seed{self.seed}"


def asked(seeds: int) -> Iterator[Asked]:
    """Yield the models, the most wanted first."""
    for seed in range(seeds):
        for beta in BETAS:
            yield from (Asked(labels, beta, seed) for labels in LABELS)


def extract(images: str, others: Path, mnist: str, per_class: int, progress: Progress) -> None:
    """Write the features of CIFAR-10 and of the other sets."""
    eye = open_eye(EYE)
    RUNS.mkdir(parents=True, exist_ok=True)
    if not (RUNS / CIFAR).exists():
        data = open_dataset(images, holdout=HELD_OUT)
        assert data.test is not None and isinstance(data.train, FileSplit)
        labels = data.train.labels
        rows = [np.flatnonzero(labels == y)[:per_class] for y in range(len(data.class_names))]
        train = data.train.subset(np.sort(np.concatenate(rows)))
        see = Extraction(eye, FeatureCache(eye, progress), OneProcess(), progress)
        arrays: dict[str, Any] = {"class_names": np.array(data.class_names), "groups": np.array(eye.groups)}
        for prefix, split in (("", train), ("val_", data.val), ("test_", data.test)):
            seen = see(split)
            arrays |= {f"{prefix}features": seen.values, f"{prefix}labels": seen.labels}
        np.savez(RUNS / CIFAR, **arrays)
    if (RUNS / OTHERS).exists():
        return
    sets: dict[str, str] = {name: str(others / name) for name in ("tiny20", "bloodcells8", "clothing10")}
    seen_of = {name: _shrunk(eye, source, progress) for name, source in {**sets, "mnist": mnist}.items()}
    np.savez(RUNS / OTHERS, **seen_of)  # type: ignore[arg-type]


def _shrunk(eye: Eye, source: str, progress: Progress) -> Array:
    """Return what the eye sees of images that were shrunk to 32 pixels, (N, D)."""
    read = format_of(source).read
    assert read is not None
    parts = read(Query(source)).parts
    split: Split = parts["test" if "test" in parts else "val" if "val" in parts else "all"]()
    split = split.subsample(min(COUNT, len(split)))
    small, _ = split.load(Preprocessing(3, SIDE, SIDE), False, progress)
    batches = named_batches(small, Preprocessing(3, SIDE, SIDE), 50)

    def enlarged(images: Array) -> Array:
        """As files are."""
        pictures = map(Image.fromarray, images.transpose(0, 2, 3, 1))
        return to_float(np.stack([preprocess_image(each, eye.preprocessing) for each in pictures]))

    return np.concatenate([eye.statistics(enlarged(images)) for images, _, _ in batches])


class Softmax(nn.Module):
    """A residual network with the subnets of the couplings, on scaled features, and a linear layer."""

    def __init__(self, start: VectorClassifier, options: VectorOptions) -> None:
        super().__init__()
        d, classes = start.feature_size, start.config.classes
        start.whitening.copy_(torch.eye(d))
        self.start = [start.requires_grad_(False)]  # in a list: it scales and adds noise, and is not trained
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(options.seed)
            self.blocks = nn.ModuleList(perceptron(d, d, options.width) for _ in range(options.couplings))
            self.last = nn.Linear(d, classes)

    def forward(self, features: Tensor, noise: torch.Generator | None = None) -> Tensor:
        """Return the logits of features, (B, M)."""
        x = self.start[0].train(self.training).whitened(features, noise)[:, :, None, None]
        for block in self.blocks:
            x = x + 0.1 * block(x)
        logits: Tensor = self.last(x.flatten(1))
        return logits


def train_softmax(data: VectorData, options: VectorOptions, progress: Progress) -> Softmax:
    """Train it as the generative models are trained, with the cross-entropy alone."""
    network = Softmax(new_model(data, options), options)

    def loss(features: Tensor, labels: Tensor, step: int) -> Losses:
        logits = network(features, generator(options.seed, step, 1))
        entropy = nn.functional.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
        return Losses(entropy, entropy.detach() * 0, entropy)

    def validated() -> dict[str, float]:
        val = data.parts["val"]
        return {"accuracy": accuracy(logits_of(network, val.values), val.labels)}

    fit(network, loss, data.parts["train"], options, validated, progress)
    return network


@torch.inference_mode()
def logits_of(network: Softmax, features: Array) -> Array:
    """Return the logits of features, (N, M)."""
    parts = torch.from_numpy(features).split(4096)
    return np.concatenate([network.eval()(part).numpy() for part in parts])


def measured(one: Asked, data: VectorData, others: dict[str, Array], progress: Progress) -> dict[str, Any]:
    """Train a model and return its metrics."""
    options = VectorOptions(
        data=str(RUNS / CIFAR),
        beta=math.inf if one.beta is None else one.beta,
        label_smoothing=LABELS[one.labels],
        seed=one.seed,
    )
    test = data.parts["test"]
    record: dict[str, Any] = {"labels": one.labels, "seed": one.seed}
    if one.beta is None:
        network = train_softmax(data, options, progress)
        columns = {name: {"logits": logits_of(network, part)} for name, part in _values(data, others).items()}
        record |= {"beta": "softmax"}
    else:
        model = new_model(data, options)
        train_flow(model, data, options, progress)
        finish(model, data, options, progress)
        outputs = {name: model.outputs_of(part) for name, part in _values(data, others).items()}
        columns = {name: part.columns() for name, part in outputs.items()}
        terms = columns["test"]["log_density_terms"]
        record |= {
            "beta": "inf" if math.isinf(one.beta) else one.beta,
            "L_X": float(-terms[:, :2].sum(1).mean() / model.feature_size),
            "nats_per_feature": float(-terms.sum(1).mean() / model.feature_size),
            **_geometry(model, data, outputs),
        }
    logits = {name: part["logits"] for name, part in columns.items()}
    record |= classification(logits["test"], test.labels)
    temperature = fit_temperature(logits["val"], data.parts["val"].labels)
    record["scaled"] = {
        "temperature": temperature,
        **classification(logits["test"] / temperature, test.labels),
    }
    labels = {"val": data.parts["val"].labels, "test": test.labels}
    known = {name: Columns(part, labels.get(name)) for name, part in columns.items()}
    record["detection"] = {name: detection(known, name) for name in others}
    return record


def _values(data: VectorData, others: dict[str, Array]) -> dict[str, Array]:
    return {"val": data.parts["val"].values, "test": data.parts["test"].values, **others}


def classification(logits: Array, labels: Array) -> dict[str, Any]:
    """Return accuracy, cross-entropy and calibration errors with their intervals."""
    posterior = softmax(logits.astype(np.float64))
    right = int((logits.argmax(1) == labels).sum())
    errors = {
        "accuracy": binomial_interval(right, len(labels), 0.95),
        **calibration_metrics(posterior, labels),
    }
    confident = posterior.max(1) >= CRITICAL
    return {
        "cross_entropy": cross_entropy(logits, labels),
        "confident": int(confident.sum()),
        "wrong": int((confident & (logits.argmax(1) != labels)).sum()),
        **{name: None if each is None else each.value for name, each in errors.items()},
        "intervals": {name: [each.low, each.high] for name, each in errors.items() if each is not None},
    }


def detection(columns: dict[str, Columns], name: str) -> dict[str, Any]:
    """Return the area under the ROC curve of each score for one set, with its interval."""
    areas = {}
    for score in map(SCORES.__getitem__, DETECTORS):
        if not score.is_available(columns["val"]):
            continue
        detector = new_detector(score).fit(score.of(columns["val"]))
        inside, outside = (detector.score(score.of(columns[part])) for part in ("test", name))
        ends = list(auc_interval(inside, outside))
        areas[score.name] = {"auc": area_under_curve(inside, outside), "intervals": {"auc": ends}}
    return areas


def _geometry(model: VectorClassifier, data: VectorData, outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the rank correlation of similarity with confusions of test images, and the plane of classes."""
    test, classes = data.parts["test"], model.config.classes
    pairs = np.triu_indices(classes, 1)
    confusions = np.zeros((classes, classes))
    np.add.at(confusions, (test.labels, outputs["test"].logits.argmax(1)), 1)
    confused = (confusions + confusions.T)[pairs]
    held_out = held_out_scores(predicted(model, data.parts["val"]), distances=model.geometry.distances())
    distances = {"means": model.geometry.distances(), "held_out": held_out.pair_distances}
    plane = fitted_plane(model, range(classes), outputs["val"].latent, data.parts["val"].labels)
    points = plane.project(outputs["test"].latent)
    return {
        "mean_distance": float(model.geometry.distances()[pairs].mean()),
        "rank_correlation": {
            name: float(spearmanr(expected_uncertainty(each)[pairs], confused).statistic)
            for name, each in distances.items()
            if each is not None
        },
        "plane": {
            "accuracy": accuracy(plane.logits(points), test.labels),
            "inside": float(plane.inside(points).mean()),
        },
    }


def run(seeds: int, share: tuple[int, int], progress: Progress) -> None:
    """Train and measure the models that have no record yet."""
    options = VectorOptions(data=str(RUNS / CIFAR))
    data = VectorData.stored(options, open_eye(EYE).groups)
    with np.load(RUNS / OTHERS) as stored:
        others = {name: stored[name] for name in stored.files}
    for one in list(asked(seeds))[share[0] :: share[1]]:
        file = RUNS / f"{one.name}.json"
        if not file.exists():
            progress.log(one.name)
            write_text(json.dumps(measured(one, data, others, progress), indent=1) + "\n", file)


def main() -> None:
    """Extract features, train and measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("step", choices=("extract", "run", "page"))
    parser.add_argument("images", nargs="?", help="CIFAR-10, as a folder of images")
    parser.add_argument("--others", type=Path, help="folder with the other sets")
    parser.add_argument("--mnist", help="MNIST")
    parser.add_argument("--per-class", type=int, default=PER_CLASS, help="training images of a class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", default="0/1", help="which part of the models, such as 0/2")
    given, progress = parser.parse_args(), TerminalProgress()
    if given.step == "extract":
        extract(given.images, given.others, given.mnist, given.per_class, progress)
    elif given.step == "run":
        first, _, of = given.share.partition("/")
        run(given.seeds, (int(first), int(of)), progress)
    else:
        page([json.loads(file.read_text(encoding="utf-8")) for file in sorted(RUNS.glob("*-seed*.json"))])


if __name__ == "__main__":
    main()

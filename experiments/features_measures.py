"""The models of :mod:`experiments.features`, and what is measured of them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor, nn

from candid._support.numbers import Array, softmax
from candid._support.progress import Progress
from candid._support.randomness import generator
from candid.evaluation.calibration_error import CRITICAL, calibration_metrics
from candid.explanations.similarity import expected_uncertainty
from candid.inference.metrics import (
    accuracy,
    area_under_curve,
    auc_interval,
    binomial_interval,
    cross_entropy,
    fit_temperature,
    label_losses,
    mean_interval,
    paired_placements,
    placement_interval,
    share_interval,
)
from candid.judging.held_out import HeldOut
from candid.models import checkpoint, saving
from candid.models.decision_plane import fitted_plane
from candid.models.flow.mixture import Losses
from candid.models.flow.subnets import perceptron
from candid.models.flow.vector import VectorClassifier
from candid.models.photo.eye import Eye
from candid.models.photo.head import fit_head
from candid.models.photo.model import PhotoModel
from candid.robustness.corruptions import CORRUPTIONS
from candid.training.features import Features
from candid.training.options import VectorOptions
from candid.training.vectors import VectorData, finish, fit, new_model, train_flow
from candid.trust.ranking import new_detector
from candid.trust.scores import SCORES, Columns

PER_CLASS = 2000
"""Training images of a class: with 4500, all there are, a model takes twice as long."""
LABELS = {"hard": 0.0, "smoothed": 0.05}
"""Label smoothing."""
DETECTORS = ("two-tailed", "combined", "max-posterior")
"""Scores whose areas under ROC curves are measured."""
CONFIDENT_SHARE = 0.5
"""The most confident half of the test images: errors there hardly depend on the temperature."""


class Asked(NamedTuple):
    """A model of the study."""

    labels: str
    beta: float | None
    """None for the softmax network."""
    seed: int
    per_class: int = PER_CLASS
    """Training images of a class."""

    @property
    def name(self) -> str:
        """What its files are called."""
        few = "" if self.per_class == PER_CLASS else f"-{self.per_class}"
        beta = "softmax" if self.beta is None else f"beta{self.beta:g}"
        return f"{self.labels}-{beta}-seed{self.seed}{few}"

    def options(self, base: VectorOptions) -> VectorOptions:
        """Return how it is trained: as ``base``, with its own beta, labels and seed."""
        beta = math.inf if self.beta is None else self.beta
        return replace(base, beta=beta, label_smoothing=LABELS[self.labels], seed=self.seed)


@dataclass(frozen=True)
class Material:
    """What models are trained and measured on."""

    data: VectorData
    others: dict[str, Array]
    """Features of other sets."""
    corrupted: Array | None
    """Of corrupted test images, (corruptions, images, D)."""
    folder: Path
    """Where trained models are kept."""
    options: VectorOptions
    """What the trainings have in common."""
    eye: Eye | None = None
    """What the features come from."""

    @cached_property
    def sets(self) -> dict[str, Array]:
        """The features that every model judges."""
        parts = {name: self.data.parts[name].values for name in ("val", "test")}
        changed = {} if self.corrupted is None else {"corrupted": np.concatenate(self.corrupted)}
        return {**parts, **self.others, **changed}

    def first(self, per_class: int) -> VectorData:
        """Return the data with the first training images of each class."""
        train = self.data.parts["train"]
        chosen = np.zeros(len(train), bool)
        for y in range(len(self.data.class_names)):
            chosen[np.flatnonzero(train.labels == y)[:per_class]] = True
        parts = {**self.data.parts, "train": train.rows(chosen)}
        return VectorData(parts, self.data.class_names, self.data.groups)


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


def train_softmax(network: Softmax, data: VectorData, options: VectorOptions, progress: Progress) -> None:
    """Train it as the generative models are trained, with the cross-entropy alone."""

    def loss(features: Tensor, labels: Tensor, step: int) -> Losses:
        logits = network(features, generator(options.seed, step, 1))
        entropy = nn.functional.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
        return Losses(entropy, entropy.detach() * 0, entropy)

    def validated() -> dict[str, float]:
        val = data.parts["val"]
        return {"accuracy": accuracy(logits_of(network, val.values), val.labels)}

    fit(network, loss, data.parts["train"], options, validated, progress)


@torch.inference_mode()
def logits_of(network: Softmax, features: Array) -> Array:
    """Return the logits of features, (N, M)."""
    parts = torch.from_numpy(features).split(4096)
    return np.concatenate([network.eval()(part).numpy() for part in parts])


def trained(one: Asked, material: Material, progress: Progress) -> VectorClassifier | Softmax:
    """Return a model of the study; it is trained once and kept."""
    folder, options = material.folder / one.name, one.options(material.options)
    if one.beta is None:
        network = Softmax(new_model(material.data, options), options)
        if not (file := folder / "softmax.safetensors").exists():
            train_softmax(network, material.data, options, progress)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(network.state_dict(), file)
        network.load_state_dict(load_file(file))
        return network.eval()
    if not folder.exists():
        data = material.first(one.per_class)
        model = new_model(data, options, material.eye)
        train_flow(model, data, options, progress)
        finish(model, data, options, progress)
        saving.save(model, folder)
    loaded = checkpoint.load(folder)
    assert isinstance(loaded, VectorClassifier)
    return loaded


def measured(one: Asked, material: Material, progress: Progress) -> dict[str, Any]:
    """Return the metrics of a model."""
    model = trained(one, material, progress)
    record: dict[str, Any] = {"labels": one.labels, "seed": one.seed}
    if isinstance(model, Softmax):
        columns = {name: {"logits": logits_of(model, part)} for name, part in material.sets.items()}
        record |= {"beta": "softmax"}
    else:
        outputs = {name: model.outputs_of(part) for name, part in material.sets.items()}
        columns = {name: part.columns() for name, part in outputs.items()}
        terms = columns["test"]["log_density_terms"]
        assert one.beta is not None
        record |= {
            "beta": "inf" if math.isinf(one.beta) else one.beta,
            "L_X": float(-terms[:, :2].sum(1).mean() / model.feature_size),
            "nats_per_feature": float(-terms.sum(1).mean() / model.feature_size),
            **geometry(model, material.data, outputs),
        }
    return record | judged(columns, material)


def closed_form(model: PhotoModel, material: Material) -> dict[str, Any]:
    """Return the metrics of the photo model with the head in closed form."""
    columns = {name: model.outputs_of(part).columns() for name, part in material.sets.items()}
    return {"labels": "hard", "seed": 0, "beta": "closed form", **judged(columns, material)}


def photo_model(material: Material, per_class: int) -> PhotoModel:
    """Return the photo model of the first training images of each class."""
    assert material.eye is not None
    data = material.first(per_class)
    train = data.parts["train"]
    head = fit_head(train.values, train.labels, len(data.class_names), data.groups)
    return PhotoModel.of(head, material.eye, data.class_names)


def judged(columns: dict[str, dict[str, Array]], material: Material) -> dict[str, Any]:
    """Return what posteriors and scores of the sets are worth."""
    val, test = material.data.parts["val"], material.data.parts["test"]
    logits = {name: part["logits"].astype(np.float64) for name, part in columns.items()}
    temperature = fit_temperature(logits["val"], val.labels)
    record = {
        **classification(logits["test"], test.labels),
        "scaled": {
            "temperature": temperature,
            **classification(logits["test"] / temperature, test.labels),
        },
    }
    labels = {"val": val.labels, "test": test.labels}
    known = {name: Columns(part, labels.get(name)) for name, part in columns.items()}
    record["detection"] = {name: detection(known, name) for name in material.others}
    if material.corrupted is not None:
        record["corruptions"] = corruptions(known, logits["corrupted"], test, material.corrupted.shape[1])
    return record


def classification(logits: Array, labels: Array) -> dict[str, Any]:
    """Return accuracy, cross-entropy and calibration errors with their intervals."""
    posterior = softmax(logits.astype(np.float64))
    wrong, largest = logits.argmax(1) != labels, posterior.max(1)
    half = np.argsort(-largest, kind="stable")[: round(CONFIDENT_SHARE * len(labels))]
    errors = {
        "accuracy": share_interval(~wrong),
        "error_of_half": share_interval(wrong[half]),
        **calibration_metrics(posterior, labels),
    }
    confident = largest >= CRITICAL
    return {
        "cross_entropy": cross_entropy(logits, labels),
        "confident": int(confident.sum()),
        "wrong": int((confident & wrong).sum()),
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


def corrupted_rows(test_images: int, images: int) -> Array:
    """Return which test images are corrupted: evenly spread ones, since they are in the order of classes."""
    return np.arange(images) * test_images // images


def corruptions(columns: dict[str, Columns], logits: Array, test: Features, images: int) -> dict[str, Any]:
    """Return the error on corrupted images, and how well scores tell them from the same images before."""
    rows = corrupted_rows(len(test), images)
    wrong = (logits.argmax(1) != np.tile(test.labels[rows], len(CORRUPTIONS))).reshape(-1, images)
    error = mean_interval(wrong.mean(0))
    record: dict[str, Any] = {"error": error.value, "intervals": {"error": [error.low, error.high]}}
    for score in map(SCORES.__getitem__, DETECTORS):
        if not score.is_available(columns["val"]):
            continue
        detector = new_detector(score).fit(score.of(columns["val"]))
        inside = detector.score(score.of(columns["test"]))[rows]
        outside = detector.score(score.of(columns["corrupted"])).reshape(-1, images)
        each = [paired_placements(inside, scores[None], np.arange(images)) for scores in outside]
        influences = np.mean(each, axis=0)
        record[score.name] = {
            "auc": float(influences.mean()),
            "intervals": {"auc": list(placement_interval([influences]))},
            "by_corruption": {
                name: float(values.mean()) for name, values in zip(CORRUPTIONS, each, strict=True)
            },
        }
    return record


def geometry(model: VectorClassifier, data: VectorData, outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the rank correlation of similarity with confusions of test images, and the plane of classes."""
    test, classes = data.parts["test"], model.config.classes
    pairs = np.triu_indices(classes, 1)
    confusions = np.zeros((classes, classes))
    np.add.at(confusions, (test.labels, outputs["test"].logits.argmax(1)), 1)
    confused = (confusions + confusions.T)[pairs]
    held_out = HeldOut.of(model)
    assert held_out is not None
    distances = {"means": model.geometry.distances(), "held_out": held_out.pair_distances}
    plane = fitted_plane(model, range(classes), outputs["val"].latent, data.parts["val"].labels)
    points = plane.project(outputs["test"].latent)
    right = binomial_interval(int((plane.logits(points).argmax(1) == test.labels).sum()), len(test), 0.95)
    return {
        "mean_distance": float(model.geometry.distances()[pairs].mean()),
        "rank_correlation": {
            name: float(spearmanr(expected_uncertainty(each)[pairs], confused).statistic)
            for name, each in distances.items()
            if each is not None
        },
        "plane": {
            "accuracy": right.value,
            "intervals": {"accuracy": [right.low, right.high]},
            "inside": float(plane.inside(points).mean()),
        },
    }


def compared(one: Asked, head: PhotoModel, material: Material, progress: Progress) -> dict[str, Any]:
    """Return how a generative network and the closed form differ on the same training images."""
    model = trained(one, material, progress)
    assert isinstance(model, VectorClassifier) and one.beta is not None
    val, test = material.data.parts["val"], material.data.parts["test"]
    temperature = fit_temperature(model.outputs_of(val.values).logits, val.labels)
    network = model.outputs_of(test.values).logits / temperature
    closed = head.outputs_of(test.values).logits
    right = [(logits.argmax(1) == test.labels).astype(float) for logits in (network, closed)]
    losses = [label_losses(logits.astype(np.float64), test.labels) for logits in (network, closed)]
    record: dict[str, Any] = {"per_class": one.per_class, "beta": "inf" if math.isinf(one.beta) else one.beta}
    for name, (ours, theirs) in (("accuracy", right), ("cross_entropy", losses)):
        difference = mean_interval(ours - theirs)
        record[name] = {
            "network": float(ours.mean()),
            "closed_form": float(theirs.mean()),
            "difference": difference.value,
            "intervals": {"difference": [difference.low, difference.high]},
        }
    return record

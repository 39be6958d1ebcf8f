"""The decision plane: a few classes with means in a plane, whose whole decision space can be drawn."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from candid._support.config import from_dict, to_dict
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress, is_first_process
from candid.data.images import Preprocessing
from candid.data.loader import named_batches
from candid.data.splits import Split
from candid.inference.predictions import to_float
from candid.inference.runner import batch_size
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.protocol import LatentModel, Model, require_latent
from candid.training.display import TrainingDisplay
from candid.training.loop import AfterEpoch, Outcome, train
from candid.training.options import TrainConfig, load_config
from candid.training.run_folder import RunFolder

FEWEST, MOST = 2, 10
OF_CLASSES = ("classes", "rank", "priors", "planar")
"""Keys of a model's configuration that its plane has values of its own for."""


def planar_model(model: Model, classes: Sequence[int]) -> GenerativeClassifier:
    """A classifier of ``classes`` alone, in this order, with the same network and means in a plane.

    The plane is the one nearest to the means of these classes, and each mean its point nearest to the
    old one; priors keep their ratios. It classifies worse until it is fine-tuned: :func:`fit_plane`.

    >>> model = GenerativeClassifier.from_preset("digits")
    >>> planar_model(model, [7, 1, 3]).class_names
    ('7', '1', '3')
    """
    model = cast(GenerativeClassifier, require_latent(model, "A decision plane"))
    if model.is_frozen:
        raise CandidError("A frozen model has no weights to fine-tune: give the one it was made from.")
    _check_classes(classes, model.config.classes)
    names = [model.class_names[y] for y in classes]
    known = model.config.priors
    priors = None if known is None else [known[y] for y in classes]
    shares = None if priors is None else tuple(p / math.fsum(priors) for p in priors)
    config = replace(model.config, classes=len(classes), rank=None, priors=shares, planar=True)
    with torch.device("meta"):
        planar = GenerativeClassifier(config, names, model.memory)
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mixture.")}
    state = {name: tensor.detach().clone() for name, tensor in (kept | _in_a_plane(model, classes)).items()}
    checkpoint.load_weights(planar, state, "the model")
    planar.metadata = copy.deepcopy(model.metadata)
    planar.metadata["training"] = _record(planar.metadata.get("training"), only=names)
    return planar.to(model.device).train(model.training)


def _check_classes(classes: Sequence[int], count: int) -> None:
    if not FEWEST <= len(classes) <= MOST:
        raise CandidError(f"A plane takes {FEWEST} to {MOST} classes, not {len(classes)}: choose so many.")
    for y in classes:
        if not 0 <= y < count:
            raise CandidError(f"Classes go from 0 to {count - 1}: there is no class {y}.")
        if list(classes).count(y) > 1:
            raise CandidError(f"Class {y} is chosen twice: name each class once.")


@torch.no_grad()
def _in_a_plane(model: GenerativeClassifier, classes: Sequence[int]) -> dict[str, Tensor]:
    """The mixture of ``classes`` with its means moved to the plane that is nearest to them."""
    mixture = model.mixture
    y = torch.tensor(classes, device=mixture.prototypes.device)
    means = mixture.means(y).double()  # (M, D)
    centre = means.mean(0)
    axes = torch.linalg.svd(means - centre, full_matrices=False).Vh[:2]  # (2, D)
    places = (means - centre) @ axes.T
    # Both factors have numbers of the same size: a step of the optimiser moves the means and turns the plane.
    scale = (places.square().mean() * means.shape[1]).pow(0.25).clamp(min=1e-3)
    parts = {
        "mean": means[:, :0],
        "alpha": places / scale,
        "prototypes": torch.cat((centre[None], scale * axes)),
        "log_priors": mixture.log_priors[y].double().log_softmax(0),
    }
    return {f"mixture.{name}": part.to(mixture.prototypes.dtype).contiguous() for name, part in parts.items()}


def _record(training: Any, **changes: Any) -> dict[str, Any]:
    """The record of a training with other values in its configuration."""
    record = training if isinstance(training, dict) else {}
    config = record.get("config")
    return record | {"config": (config if isinstance(config, dict) else {}) | changes}


@dataclass(frozen=True)
class DecisionPlane:
    """The plane of the means with lengths as in latent space; all tensors in float64, on the CPU.

    The first axis is the one along which the means lie furthest apart. What a latent has beyond the plane is
    the same for every class, so two numbers decide, and the cell of a class is a polygon::

        |z - mu_y|^2 = |p(z) - m_y|^2 + (distance of z to the plane)^2
    """

    class_names: tuple[str, ...]
    origin: Tensor
    """The average of the means, (D,): the point (0, 0)."""
    axes: Tensor
    """Orthonormal, (2, D)."""
    means: Tensor
    """m_y, (M, 2), in standard deviations of a class."""
    log_priors: Tensor
    """log p(y), (M,)."""

    def project(self, z: Tensor) -> Tensor:
        """p(z), the point of the plane nearest to each latent (N, D), in standard deviations, (N, 2)."""
        return (z.detach().cpu().double() - self.origin) @ self.axes.T

    def logits(self, points: Tensor) -> Tensor:
        """``p . m_y - |m_y|^2 / 2 + log p(y)`` of the points (N, 2), (N, M): log p(y | z) but a constant."""
        return points.double() @ self.means.T - 0.5 * self.means.square().sum(1) + self.log_priors

    def posterior(self, points: Tensor) -> Tensor:
        """p(y | z) of every latent above the points (N, 2), (N, M); the model's own, exactly."""
        return self.logits(points).softmax(1)

    def log_density(self, points: Tensor) -> Tensor:
        """Log of the mixture's density in the plane, sum_y p(y) N(p; m_y, 1), in nats, (N,)."""
        squares = points.double().square().sum(1)
        return self.logits(points).logsumexp(1) - 0.5 * squares - math.log(2 * math.pi)


@torch.no_grad()
def decision_plane(model: LatentModel) -> DecisionPlane:
    """The plane that the means of a planar model lie in.

    >>> plane = decision_plane(planar_model(GenerativeClassifier.from_preset("digits"), [7, 1, 3]))
    >>> plane.project(torch.randn(5, 64)).shape, plane.means.shape
    (torch.Size([5, 2]), torch.Size([3, 2]))
    """
    if not require_latent(model, "A decision plane").mixture.planar:
        raise CandidError("The means of this model lie in no plane: choose classes and fit one first.")
    mixture = model.mixture
    assert mixture.weights is not None
    prototypes = mixture.prototypes.cpu().double()
    means = mixture.weights.cpu().double() @ prototypes  # (M, D)
    origin = means.mean(0)
    axes = torch.linalg.qr(prototypes[1:].T).Q.T
    turn = torch.linalg.svd((means - origin) @ axes.T).Vh  # (2, 2): to the principal axes of the means
    places = (means - origin) @ (turn @ axes).T
    return oriented(model.class_names, origin, turn @ axes, places, mixture.log_priors)


def oriented(
    class_names: tuple[str, ...], origin: Tensor, axes: Tensor, means: Tensor, log_priors: Tensor
) -> DecisionPlane:
    """The plane with its axes (2, D) turned round where the mean that is furthest out is negative."""
    furthest = means.gather(0, means.abs().argmax(0)[None])  # (1, 2)
    signs = torch.where(furthest < 0, -1.0, 1.0)
    return DecisionPlane(class_names, origin, signs.T * axes, signs * means, log_priors.cpu().double())


def fit_plane(
    model: Model,
    data: str,
    classes: Sequence[int],
    out: str | Path,
    *,
    means_only: bool = False,
    epochs: int = 3,
    learning_rate: float = 2e-3,
    beta: float | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    devices: int | None = None,
    progress: TrainingDisplay | None = None,
    after_epoch: AfterEpoch | None = None,
) -> Outcome:
    """Fine-tune :func:`planar_model` on the images of its classes in ``data``, into the run folder ``out``.

    It is trained as ``model`` was, on the same division of the images, for a few more ``epochs``; with
    ``means_only`` the network stays as it is. ``out/model/best`` is then a model like any other, and
    ``out/start`` what it was before.
    """
    start = Path(out) / "start"
    planar = planar_model(model, classes)
    changes = {
        "start": str(start),
        "only": planar.class_names,
        "means_only": means_only,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "beta": beta,
        "skip_bad": skip_bad or None,
        "workers": workers,
    }
    config = plane_config(planar, data, changes)
    if not RunFolder(Path(out)).exists and is_first_process():  # else train says what is wrong
        checkpoint.save(planar, start)
    return train(config, out, devices=devices, progress=progress, after_epoch=after_epoch)


def plane_config(model: GenerativeClassifier, data: str, changes: dict[str, Any]) -> TrainConfig:
    """How to fine-tune: as ``model`` was trained, with one cycle of AdamW and ``changes`` that are not None.

    A model without a record of its training is taken for one of photos, as ImageNet's are.
    """
    recorded = model.record.config
    if "preset" in recorded:
        base = recorded | {"beta": float(recorded["beta"]), "val_data": None, "epoch_images": None}
    else:
        layout = {**to_dict(model.config.flow), "mean": model.config.mean, "std": model.config.std}
        base = to_dict(load_config("imagenet", data=data, model=layout))
        base |= {"batch": 128, "beta": float(model.metadata.get("beta", base["beta"]))}
    base["model"] = {key: value for key, value in base["model"].items() if key not in OF_CLASSES}
    cycle = {"optimiser": "adamw", "schedule": "one-cycle", "burn_in": 0.15, "means_rate": 1.0}
    given = {key: value for key, value in changes.items() if value is not None}
    config = from_dict(TrainConfig, base | cycle | {"data": data} | given)
    if config.beta == 0:
        raise CandidError("At beta 0 no class is told from another: give a --beta above 0.")
    return config


@torch.inference_mode()
def located(
    model: LatentModel,
    split: Split,
    preprocessing: Preprocessing,
    workers: int = 0,
    progress: Progress = SILENT,
) -> tuple[Tensor, Tensor]:
    """Where the images of ``split`` lie in the plane of ``model``, (N, 2), and their labels, (N,)."""
    plane, fast = decision_plane(model), model.frozen()
    points, labels = [], []
    batch = batch_size(model)
    batches = named_batches(split, preprocessing, batch, workers=workers)
    for images, y, _ in progress.track(batches, "images in the plane", math.ceil(len(split) / batch), batch):
        points.append(plane.project(fast.latent(to_float(images, model.device))))
        labels.append(y)
    return torch.cat(points), torch.cat(labels)

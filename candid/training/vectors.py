"""Train a classifier of features: of photos through an eye, or stored in a file."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array, use_threads
from candid._support.options import checked_names, to_dict
from candid._support.processes import Processes, launch
from candid._support.progress import SILENT, Progress, Row
from candid._support.randomness import draws, generator
from candid.data.images import image_keys
from candid.inference.predictions import Predictions
from candid.judging.calibrate import FEWEST_IMAGES, held_out_scores
from candid.models import saving
from candid.models.flow.config import vector_flow
from candid.models.flow.coupling import ActNorm
from candid.models.flow.mixture import Losses, information_bottleneck_loss
from candid.models.flow.vector import VectorClassifier, VectorConfig, nats_per_feature
from candid.models.photo.eye import Eye
from candid.models.photo.gaussian import Standardised, Totals
from candid.models.photo.opening import open_eye, tree_of
from candid.training.features import Extraction, FeatureCache, Features
from candid.training.options import PhotoOptions, TrainOptions, VectorOptions
from candid.training.photo_data import PhotoData, earlier_results, has_val
from candid.training.photo_series import in_series
from candid.training.refit import can_refit, refit_to
from candid.training.run_folder import RunFolder, state_digest
from candid.training.setup import build_optimiser, clip_gradients, learning_rate, set_learning_rate

MEANS_RATE = 0.1
"""Learning rate of the class means, relative to that of the couplings."""
START_ROWS = 4096
"""Vectors that set the first scales of the network."""
PARTS = ("val", "test")
FEWEST_PER_NUMBER = 3
"""Training features for each of their numbers: with fewer, the closed form is better (docs/photos.md)."""


@dataclass(frozen=True)
class VectorData:
    """Features of each part: train, val, maybe test."""

    parts: dict[str, Features]
    class_names: tuple[str, ...]
    groups: tuple[int, ...]
    """How many features each group has."""
    series: Array | None = None
    """The series of each held-out photo."""
    own_val: bool = True
    """Whether the held-out features are a part of the data, and not taken from the training part."""

    @classmethod
    def stored(cls, options: VectorOptions, groups: tuple[int, ...] | None = None) -> "VectorData":
        """Read features from a file.

        Args:
            options: name the file. It has ``features`` (N, D), ``labels`` (N,) from 0 on and ``class_names``;
                perhaps ``groups``, ``paths``, and the same of the parts ``val`` and ``test``, such as
                ``val_features``.
            groups: of the eye that the features come from.

        Raises:
            CandidError: if the file has something else.
        """
        path = Path(options.data)
        arrays = _arrays(path)
        parts = {"train": _part(path, arrays, "")}
        parts |= {name: _part(path, arrays, name) for name in PARTS if f"{name}_features" in arrays}
        named = [str(name) for name in arrays["class_names"].ravel()]
        names = checked_names(named, len(named))
        dimensions = {part.values.shape[1] for part in parts.values()}
        if len(dimensions) > 1:
            raise CandidError(f"The parts of '{path}' have features of different lengths: {dimensions}.")
        chosen = tuple(
            arrays.get("groups", np.array(groups or tuple(dimensions))).ravel().astype(int).tolist()
        )
        if min(chosen) < 1 or {sum(chosen)} != dimensions:
            raise CandidError(f"The groups of '{path}' have {sum(chosen)} features, and it has {dimensions}.")
        for part in parts.values():
            if part.labels.min() < 0 or part.labels.max() >= len(names):
                raise CandidError(f"Labels in '{path}' must be numbers from 0 to {len(names) - 1}.")
        own_val = "val" in parts
        if not own_val:
            held_out = _held_out_rows(parts["train"].labels, options.holdout, options.split_seed)
            parts |= {"train": parts["train"].rows(~held_out), "val": parts["train"].rows(held_out)}
        return cls(parts, names, chosen, None, own_val)

    @classmethod
    def of_photos(
        cls, options: VectorOptions, eye: Eye, processes: Processes, progress: Progress
    ) -> "VectorData":
        """Return what the eye sees of a folder of photos; what is cached is not computed again."""
        shared = ("data", "split_seed", "holdout", "tree")
        of_photos = PhotoOptions(**{name: getattr(options, name) for name in shared})
        data = PhotoData.of(of_photos)
        progress.log(data.described())
        extraction = Extraction(eye, FeatureCache(eye, progress), processes, progress, skip_bad=True)
        parts = {name: extraction(part, f"{name} photos") for name, part in data.parts.items()}
        parts, series = in_series(of_photos.together, parts, data.class_names, progress)
        own_val = has_val(options.data, options.tree == "folders")
        return cls(parts, data.class_names, eye.groups, series.numbers["val"], own_val)

    @property
    def digest(self) -> str:
        """The SHA-256 of all that the training sees."""
        parts = [(name, part.values, part.labels) for name, part in sorted(self.parts.items())]
        return state_digest([self.class_names, self.groups, parts])

    def check(self) -> None:
        """Raise an error unless there are two classes, with two training photos each."""
        if len(self.class_names) < 2:
            raise CandidError("There is one class only: give features of two or more.")
        counts = np.bincount(self.parts["train"].labels, minlength=len(self.class_names))
        if counts.min() < 2:
            name = self.class_names[int(counts.argmin())]
            raise CandidError(
                f"The class '{name}' has {counts.min()} for training: add more, or leave it out."
            )

    def warning(self) -> str | None:
        """Return what to say of too few features for their length; None of enough."""
        (n, d), wanted = self.parts["train"].values.shape, FEWEST_PER_NUMBER
        if n >= wanted * d:
            return None
        return (
            f"only {n:,} training features of {d:,} numbers each, of {wanted * d:,} wanted: the network "
            "learns them by heart, and its posteriors are overconfident; a closed form is better (of photos: "
            "without --preset vector)"
        )


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, BadZipFile) as error:
        raise CandidError(f"'{path}' can't be read as an .npz file of numbers and text: {error}.") from error
    for name in ("features", "labels", "class_names"):
        if name not in arrays:
            raise CandidError(
                f"'{path}' has no '{name}', but {', '.join(arrays) or 'nothing'}: write it with "
                "np.savez(path, features=..., labels=..., class_names=...)."
            )
    return arrays


def _part(path: Path, arrays: dict[str, Array], part: str) -> Features:
    """Return a part of the file, checked; the first one has no name."""
    prefix = f"{part}_" if part else ""
    values, labels = arrays[f"{prefix}features"], arrays.get(f"{prefix}labels")
    if values.ndim != 2 or values.dtype.kind not in "fiu" or not values.size:
        raise CandidError(
            f"'{prefix}features' of '{path}' must be numbers of the shape (N, D), not {values.dtype} of "
            f"{values.shape}."
        )
    if labels is None or labels.dtype.kind not in "iu" or labels.shape != values.shape[:1]:
        raise CandidError(f"'{prefix}labels' of '{path}' must be {len(values)} whole numbers.")
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
        raise CandidError(f"Row {row} of '{prefix}features' in '{path}' has NaN or infinite numbers.")
    names = arrays.get(f"{prefix}paths", np.arange(len(values)))
    if len(names) != len(values):
        raise CandidError(f"'{prefix}paths' of '{path}' has {len(names)} entries for {len(values)} rows.")
    keys = image_keys(values.view(np.int32))
    return Features(tuple(map(str, names.tolist())), labels.astype(np.int64), values, keys)


def _held_out_rows(labels: Array, share: float, seed: int) -> Array:
    """Return which rows are held out, (N,): the share of each class, at random."""
    held_out = np.zeros(len(labels), bool)
    for y in np.unique(labels).tolist():
        members = np.flatnonzero(labels == y)
        held_out[members[draws(seed, y).permutation(len(members))[: round(share * len(members))]]] = True
    return held_out


def train_vectors(
    options: VectorOptions, folder: RunFolder, resume: bool, devices: int | None, progress: Progress
) -> tuple[list[Row], dict[str, Any]]:
    """Train a classifier of features into ``folder``; return the metrics of its epochs, and its results.

    A run that was killed starts again, with what the eye saw of photos taken from the cache.
    """
    folder.check_new(resume)
    eye = None if options.eye_name is None else open_eye(options.eye_name)
    processes = launch(devices, network=False)
    show = progress if processes.is_global_zero else SILENT
    with folder.held(processes, resume):
        if options.stored:
            data = VectorData.stored(options, None if eye is None else eye.groups)
        else:
            assert eye is not None
            data = VectorData.of_photos(options, eye, processes, show)
        if not processes.is_global_zero:
            return [], {}
        if eye is not None and eye.groups != data.groups:
            raise CandidError(f"The features of '{options.data}' are not those of the eye '{eye.name}'.")
        data.check()
        if warning := data.warning():
            show.log(warning)
        settings = {key: value for key, value in to_dict(options).items() if key != "data"}
        digests = {"data": data.digest, "options": state_digest(settings)}
        earlier = earlier_results(folder, digests)
        if earlier is not None:
            show.log(f"this run is finished: {folder.path}")
            return [], earlier
        folder.create(options)
        model = new_model(data, options, eye)
        rows = train_flow(model, data, options, show)
        beta = "inf" if math.isinf(options.beta) else options.beta  # JSON has no infinity
        config = {**to_dict(options), "beta": beta, "split": "hash", "crop": "none"}
        model.metadata["training"] = {
            "config": {key: value for key, value in config.items() if value is not None},
            "digests": digests,
        }
        results = finish(model, data, options, show)
        saving.save(model, folder.best)
        folder.write_rows(rows)
        skipped = [line for part in data.parts.values() for line in part.skipped]
        folder.write_skipped(skipped, "photo", show)
        folder.write_results(results)
        return rows, results


def new_model(data: VectorData, options: VectorOptions, eye: Eye | None = None) -> VectorClassifier:
    """Return a model that whitens the training features, with its means at the class averages after that."""
    train, classes = data.parts["train"], len(data.class_names)
    known = Standardised.of(Totals.of(train.values, train.labels, classes), data.groups)
    counts = np.bincount(train.labels, minlength=classes)
    config = VectorConfig(
        vector_flow(train.values.shape[1], options.couplings, options.width),
        classes,
        rank=0,
        priors=None if options.priors == "uniform" else tuple((counts / counts.sum()).tolist()),
        groups=data.groups,
        deviation=options.noise,
    )
    if eye is not None:
        config = replace(config, eye=eye.name, eye_sha256=eye.sha256, size=eye.size)
    model = VectorClassifier(config, data.class_names, options.seed, eye)
    model.start(known.centre, known.scale, known.whitening(options.noise**2))
    _start(model, train, options.seed)
    return model


@torch.no_grad()
def _start(model: VectorClassifier, train: Features, seed: int) -> None:
    """Give each channel of the network unit variance, and put the means at the class averages."""
    model.train()
    few = draws(seed, 2).permutation(len(train))[:START_ROWS]
    v = model.whitened(torch.from_numpy(train.values[few]), generator(seed, 0, 2))[:, :, None, None]
    for _, layer in model.flow.leaves():
        if isinstance(layer, ActNorm):
            layer.start_from(v)
        v, _ = layer(v)
    sums = np.zeros((model.config.classes, model.feature_size))
    for number, start in enumerate(range(0, len(train), START_ROWS)):
        rows = slice(start, start + START_ROWS)
        z = model(torch.from_numpy(train.values[rows]), generator(seed, number, 3)).z
        np.add.at(sums, train.labels[rows], z.double().numpy())
    counts = np.bincount(train.labels, minlength=model.config.classes)
    model.mixture.mean.copy_(torch.from_numpy(sums / counts[:, None]))


def train_flow(
    model: VectorClassifier, data: VectorData, options: VectorOptions, progress: Progress = SILENT
) -> list[Row]:
    """Train the couplings and the means; return the metrics of each epoch."""

    def loss(features: Tensor, labels: Tensor, step: int) -> Losses:
        noise = generator(options.seed, step, 1)
        return information_bottleneck_loss(
            model, features, labels, options.beta, options.label_smoothing, noise
        )

    def validated() -> dict[str, float]:
        return metrics_of(predicted(model, data.parts["val"]), model.feature_size)

    use_threads(model)
    return fit(model, loss, data.parts["train"], options, validated, progress)


def fit(
    network: nn.Module,
    loss: Callable[[Tensor, Tensor, int], Losses],
    train: Features,
    options: VectorOptions,
    validated: Callable[[], dict[str, float]],
    progress: Progress = SILENT,
) -> list[Row]:
    """Minimise ``loss(features, labels, step)``: AdamW, one cycle. Return the metrics of each epoch."""
    settings = TrainOptions(
        data=options.data,
        epochs=options.epochs,
        batch=options.batch,
        learning_rate=options.learning_rate,
        means_rate=MEANS_RATE,
    )
    x, y, n = torch.from_numpy(train.values), torch.from_numpy(train.labels), len(train)
    optimiser, per_epoch = build_optimiser(network, settings), math.ceil(n / options.batch)
    rows: list[Row] = []
    sums, steps = np.zeros(3), options.epochs * per_epoch
    for step in progress.track(range(steps), "training", steps, options.batch):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = torch.randperm(n, generator=generator(options.seed, epoch, 4))
        network.train()
        set_learning_rate(optimiser, learning_rate(settings, step, per_epoch, ()))
        batch = order[place * options.batch : (place + 1) * options.batch]
        optimiser.zero_grad()
        losses = loss(x[batch], y[batch], step)
        losses.total.backward()
        if not math.isfinite(float(clip_gradients(network, settings))):
            raise NonFiniteError("The training diverged: choose a smaller --learning-rate.")
        optimiser.step()
        sums += [float(part.detach()) for part in losses]
        if place == per_epoch - 1:
            network.eval()
            means = dict(zip(("train_loss", "train_L_X", "train_L_Y"), sums / per_epoch, strict=True))
            seen = validated()
            rows.append({"epoch": epoch + 1, **means, **{f"val_{key}": v for key, v in seen.items()}})
            shown = ", ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in seen.items())
            progress.log(
                f"epoch {epoch + 1}/{options.epochs}: loss {sums[0] / per_epoch:.4f}; held out: {shown}"
            )
            sums[:] = 0
    return rows


def finish(
    model: VectorClassifier, data: VectorData, options: VectorOptions, progress: Progress = SILENT
) -> dict[str, Any]:
    """Refit the means, store the held-out scores with the model, and return its results."""
    model.eval()
    val = data.parts["val"]
    if can_refit(model):
        latent = model.outputs_of(val.values).latent
        assert latent is not None
        progress.log(str(refit := refit_to(model, latent)))
        model.metadata["refit"] = asdict(refit)
    model.tree = tree_of(options.tree, data.class_names, options.data)
    predictions = {name: predicted(model, data.parts[name]) for name in PARTS if name in data.parts}
    held_out = predictions["val"]
    if data.series is not None and len(np.unique(data.series)) < len(data.series):
        held_out = replace(held_out, columns={**held_out.columns, "series": data.series})
    model.held_out = {"training_keys": np.unique(data.parts["train"].keys)}
    if len(held_out) < FEWEST_IMAGES:
        progress.log(f"no p-values and verdicts: {len(held_out)} are held out, of {FEWEST_IMAGES} needed")
    else:
        scores = held_out_scores(held_out, None, model.tree, model.geometry.distances())
        replace(scores, occasions=not data.own_val).attach(model)
    return {name: metrics_of(part, model.feature_size) for name, part in predictions.items()}


def predicted(model: VectorClassifier, features: Features) -> Predictions:
    """Return what a model, in evaluation mode, says of features."""
    outputs = model.outputs_of(features.values)
    columns = {**outputs.columns(), "keys": features.keys}
    return Predictions(features.names, features.labels, columns.pop("logits"), model.log_priors, columns)


def metrics_of(predictions: Predictions, dimensions: int) -> dict[str, float]:
    """Return accuracy, cross-entropy in nats, and nats per feature."""
    losses = -np.take_along_axis(predictions.log_posterior, predictions.labels[:, None], 1)
    log_density = predictions.log_density
    assert log_density is not None
    return {
        "accuracy": float((predictions.logits.argmax(1) == predictions.labels).mean()),
        "cross_entropy": float(losses.mean()),
        "nats_per_feature": nats_per_feature(log_density, dimensions),
    }

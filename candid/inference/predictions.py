"""One pass of a model over images: every result is a function of it."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from candid._support.files import ANY_NAME, read_sealed, write_sealed
from candid._support.numbers import Array, log_softmax, one_blas_thread, softmax
from candid._support.old_formats import COLUMN_NAMES, NO_DIGEST
from candid.data.batches import NamedBatch
from candid.data.images import to_float
from candid.models.protocol import Model, Outputs
from candid.trust.scores import Columns

Measure = Callable[[Array, Outputs], Array]
"""Measures B images: from 8-bit pixels (B, C, H, W) and the model's outputs to (B,) or (B, d)."""
NO_MEASURES: Mapping[str, Measure] = {}
LARGEST_HALF = float(np.finfo(np.float16).max)
log = logging.getLogger("candid")


def half_features(images: Array, outputs: Outputs) -> Array:
    """Return the features in half precision, (B, F): a measure; the largest numbers are clipped."""
    return outputs.features.clip(-LARGEST_HALF, LARGEST_HALF).astype(np.float16)


FEATURES: Mapping[str, Measure] = {"features": half_features}
"""The measure that keeps features as a column."""


@dataclass(frozen=True)
class Predictions:
    """What a model says of N images.

    Example:
    >>> predictions = Predictions(("a.png",), np.array([1]), np.zeros((1, 2)), np.log([0.5, 0.5]))
    >>> predictions.posterior
    array([[0.5, 0.5]])
    """

    paths: tuple[str, ...]
    """Where the images come from: a file, a sample of a shard, or a number in a data set."""
    labels: Array
    """True classes, (N,); -1 where unknown."""
    logits: Array
    """(N, M)."""
    log_priors: Array
    """Log p(y), (M,); uniform for a ResNet."""
    columns: Mapping[str, Array] = field(default_factory=dict)
    """What else is known of each image, (N,) or (N, d): ``log_density_terms`` of a model with a density (in
    float64, in nats), ``keys`` from a runner, and one column for each measure."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def log_posterior(self) -> Array:
        """Log p(y | x), (N, M) in float64."""
        return log_softmax(self.logits.astype(np.float64))

    @cached_property
    def posterior(self) -> Array:
        """p(y | x), (N, M) in float64."""
        return softmax(self.logits.astype(np.float64))

    @cached_property
    def log_density(self) -> Array | None:
        """Log p(x) of the 8-bit image in nats, (N,) in float64; None of a model without a density."""
        terms = self.columns.get("log_density_terms")
        return None if terms is None else terms.sum(1)

    @cached_property
    def statistics(self) -> Columns:
        """All columns, and what follows from the logits: what scores and verdicts need."""
        labelled = len(self) > 0 and bool((self.labels >= 0).all())
        columns = {**self.columns, "logits": self.logits, "posterior": self.posterior}
        return Columns(columns, self.labels if labelled else None)

    @classmethod
    def of(
        cls,
        outputs: Outputs,
        model: Model,
        batch: NamedBatch,
        measures: Mapping[str, Measure] = NO_MEASURES,
    ) -> "Predictions":
        """Return what ``model`` says of a batch of 8-bit images, labels and names, from its ``outputs``."""
        images, labels, paths = batch
        columns = {name: measure(images, outputs) for name, measure in measures.items()} | outputs.columns()
        return cls(paths, labels, columns.pop("logits"), model.log_priors, columns)

    def save(self, path: Path, state: str = "") -> None:
        """Write one safetensors file with a digest of its content, and the ``state`` of the images."""
        text = "".join(f"{path}\0" for path in self.paths).encode(errors=ANY_NAME)
        arrays = {
            **self.columns,
            "labels": self.labels,
            "logits": self.logits,
            "log_priors": self.log_priors,
            "paths": np.frombuffer(text, np.uint8),
        }
        write_sealed(arrays, path, state=state)

    @classmethod
    def load(cls, path: Path, state: str | None = None) -> "Predictions | None":
        """Read what :meth:`save` wrote; None if the file is cut, changed, foreign or of another ``state``."""
        try:
            stored, notes = read_sealed(path)
            arrays = {COLUMN_NAMES.get(name, name): column for name, column in stored.items()}
            paths = arrays.pop("paths").tobytes().decode(errors=ANY_NAME).split("\0")[:-1]
            own = {name: arrays.pop(name) for name in ("labels", "logits", "log_priors")}
            whole = all(
                len(column) == len(paths) for column in (own["labels"], own["logits"], *arrays.values())
            )
        except (ValueError, KeyError, TypeError):
            return None
        if notes is None:
            log.warning(NO_DIGEST, path)
        elif state not in (None, notes.get("state")):
            return None
        return cls(tuple(paths), **own, columns=arrays) if whole else None

    @classmethod
    def joined(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Return all images of ``parts``."""
        return cls(
            tuple(path for part in parts for path in part.paths),
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.logits for part in parts]),
            parts[0].log_priors,
            {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        )

    def __getitem__(self, indices: Array) -> "Predictions":
        """Return those of the images ``indices``, whole numbers."""
        return Predictions(
            tuple(self.paths[i] for i in indices.tolist()),
            self.labels[indices],
            self.logits[indices],
            self.log_priors,
            {name: column[indices] for name, column in self.columns.items()},
        )


def predict_batches(
    model: Model, batches: Iterable[NamedBatch], measures: Mapping[str, Measure] = NO_MEASURES
) -> Predictions:
    """Return what ``model``, in evaluation mode, says of batches of 8-bit images, labels and names."""
    model = model.frozen()
    parts = [predict(model, *batch, measures) for batch in batches]
    if parts:
        return Predictions.joined(parts)
    image = np.zeros((1, *model.image_shape), np.uint8)
    return predict(model, image, np.zeros(1, np.int64), ("",), measures)[np.arange(0)]


def predict(
    model: Model,
    images: Array,
    labels: Array,
    paths: tuple[str, ...],
    measures: Mapping[str, Measure] = NO_MEASURES,
) -> Predictions:
    """Return what ``model`` says of one batch, and what ``measures`` find."""
    with one_blas_thread():
        outputs = model.outputs(to_float(images))
        return Predictions.of(outputs, model, (images, labels, paths), measures)


def without_noise(model: Model) -> Model:
    """Return the model without its dequantisation noise; itself if it has none. Only for classification.

    The copy shares the weights. Its log densities are not those of 8-bit images: these need the noise.
    """
    network: Any = model
    if "mixture" not in network.can:
        return model
    quiet = copy.copy(network)
    quiet._buffers = {**network._buffers, "noise": 0 * network.noise}
    return cast(Model, quiet)

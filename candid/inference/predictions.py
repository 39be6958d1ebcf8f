"""One pass of a model over images: every result is a function of it."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from candid._support.files import ANY_NAME, read_sealed, write_sealed
from candid.data.loader import NamedBatch
from candid.models.protocol import Model, Outputs

OLD_NAMES = {"terms": "log_density_terms"}
"""Columns that were called otherwise in files of earlier versions."""
NUMBERS_A_BATCH = 250 * 3 * 32 * 32
Measure = Callable[[Tensor, Outputs], Tensor]
"""Measures B images: from 8-bit pixels (B, C, H, W) and the model's outputs to (B,) or (B, d)."""
NO_MEASURES: Mapping[str, Measure] = {}
LARGEST_HALF = torch.finfo(torch.half).max
log = logging.getLogger("candid")


def half_features(images: Tensor, outputs: Outputs) -> Tensor:
    """Return the features in half precision, (B, F): a measure; the largest numbers are clipped."""
    return outputs.features.clamp(-LARGEST_HALF, LARGEST_HALF).half()


FEATURES: Mapping[str, Measure] = {"features": half_features}
"""The measure that keeps features as a column."""


@dataclass(frozen=True)
class Predictions:
    """What a model says of N images, on the CPU."""

    paths: tuple[str, ...]
    """Where the images come from: a file, a sample of a shard, or a number in a data set."""
    labels: Tensor
    """True classes, (N,); -1 where unknown."""
    logits: Tensor
    """(N, M)."""
    log_priors: Tensor
    """Log p(y), (M,); uniform for a ResNet."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """What else is known of each image, (N,) or (N, d): ``log_density_terms`` of a model with a density (in
    float64, in nats), ``keys`` from a runner, and one column for each measure."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def log_posterior(self) -> Tensor:
        """Log p(y | x), (N, M) in float64."""
        return self.logits.double().log_softmax(1)

    @cached_property
    def posterior(self) -> Tensor:
        """p(y | x), (N, M) in float64."""
        return self.logits.double().softmax(1)

    @cached_property
    def log_density(self) -> Tensor | None:
        """Log p(x) of the 8-bit image in nats, (N,) in float64; None of a model without a density."""
        terms = self.columns.get("log_density_terms")
        return None if terms is None else terms.sum(1)

    @property
    def log_likelihoods(self) -> Tensor | None:
        """Log p(x | y) of the 8-bit image in nats, (N, M) in float64; None of a model without a density.

        By Bayes: log p(y | x) + log p(x) - log p(y).
        """
        if self.log_density is None:
            return None
        return self.log_posterior + self.log_density[:, None] - self.log_priors.double()

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
        columns = {name: measure(images, outputs).cpu() for name, measure in measures.items()}
        if outputs.log_density_terms is not None:
            columns["log_density_terms"] = outputs.log_density_terms.cpu()
        if outputs.novelty is not None:
            columns["novelty"] = outputs.novelty.cpu()
        return cls(paths, labels, outputs.logits.cpu(), model.log_priors, columns)

    def save(self, path: Path, state: str = "") -> None:
        """Write one safetensors file with a digest of its content, and the ``state`` of the images."""
        text = "".join(f"{path}\0" for path in self.paths).encode(errors=ANY_NAME)
        tensors = {
            **self.columns,
            "labels": self.labels,
            "logits": self.logits,
            "log_priors": self.log_priors,
            "paths": torch.tensor(bytearray(text), dtype=torch.uint8),
        }
        write_sealed(tensors, path, state=state)

    @classmethod
    def load(cls, path: Path, state: str | None = None) -> "Predictions | None":
        """Read what :meth:`save` wrote; None if the file is cut, changed, foreign or of another ``state``."""
        try:
            stored, notes = read_sealed(path)
            tensors = {OLD_NAMES.get(name, name): tensor for name, tensor in stored.items()}
            paths = bytes(tensors.pop("paths").numpy()).decode(errors=ANY_NAME).split("\0")[:-1]
            own = {name: tensors.pop(name) for name in ("labels", "logits", "log_priors")}
            whole = all(
                len(column) == len(paths) for column in (own["labels"], own["logits"], *tensors.values())
            )
        except (ValueError, KeyError, TypeError):
            return None
        if notes is None:
            log.warning("'%s' is of an older version without a digest: damage to it can't be seen.", path)
        elif state not in (None, notes.get("state")):
            return None
        return cls(tuple(paths), **own, columns=tensors) if whole else None

    @classmethod
    def joined(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Return all images of ``parts``."""
        return cls(
            tuple(path for part in parts for path in part.paths),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.logits for part in parts]),
            parts[0].log_priors,
            {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns},
        )

    def __getitem__(self, indices: Tensor) -> "Predictions":
        """Return those of the images ``indices``."""
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
    image = torch.zeros(1, *model.image_shape, dtype=torch.uint8)
    return predict(model, image, torch.zeros(1, dtype=torch.long), ("",), measures)[torch.arange(0)]


@torch.inference_mode()
def predict(
    model: Model,
    images: Tensor,
    labels: Tensor,
    paths: tuple[str, ...],
    measures: Mapping[str, Measure] = NO_MEASURES,
) -> Predictions:
    """Return what ``model`` says of one batch, and what ``measures`` find."""
    outputs = model.outputs(to_float(images, model.device))
    return Predictions.of(outputs, model, (images, labels, paths), measures)


def without_noise(model: Model) -> Model:
    """Return the model without its dequantisation noise; itself if it has none. Only for classification.

    The copy shares the weights. Its log densities are not those of 8-bit images: these need the noise.
    """
    given: Any = model
    if not isinstance(getattr(given, "noise", None), Tensor):
        return model
    copied = copy.copy(given)
    copied._buffers = {**given._buffers, "noise": torch.zeros_like(given.noise)}
    return cast(Model, copied)


def to_float(images: Tensor, device: torch.device | str) -> Tensor:
    """Turn 8-bit images to floats in [0, 1] on ``device``."""
    return images.to(device, non_blocking=True).float() / 255


def batch_size(model: Model) -> int:
    """Return the number of images that should pass a network at a time."""
    return min(250, max(1, NUMBERS_A_BATCH // math.prod(model.image_shape)))

"""One pass of a model over images; every figure is a function of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from candid._support.files import ANY_NAME, replacing, write_tensors
from candid.data.images import image_keys
from candid.data.loader import NamedBatch
from candid.inference.complexity import code_lengths_by_scale
from candid.inference.features import FeatureGaussian
from candid.models.protocol import Model, Outputs

COLUMNS = ("labels", "keys", "logits", "complexity", "terms", "distance")
"""What there is of each image, as tensors."""


@dataclass(frozen=True)
class Predictions:
    """What a model says of N images, on the CPU."""

    paths: tuple[str, ...]
    """Where the images come from: a file, a sample of a shard, or a number in a data set."""
    labels: Tensor
    """(N,); -1 where unknown."""
    keys: Tensor
    """A hash of each image's pixels, (N,) in int64: the same image has the same key in any data set."""
    logits: Tensor
    """(N, M)."""
    log_priors: Tensor
    """Of the classes, (M,); uniform for a baseline."""
    complexity: Tensor
    """Bits of the image in a lossless code, and of smaller versions of it, (N, scales) in float64."""
    terms: Tensor | None
    """log p(z), then the log-determinants before and in each stage: (N, 2 + stages) in float64, in nats.
    They add up to the log density. None for a baseline."""
    distance: Tensor | None
    """Mahalanobis distance of the features to the nearest class, (N,); None before calibration."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def log_posterior(self) -> Tensor:
        """Log p(y | x), (N, M) in float64."""
        return self.logits.double().log_softmax(1)

    @property
    def posterior(self) -> Tensor:
        """p(y | x), (N, M) in float64."""
        return self.logits.double().softmax(1)

    @property
    def log_density(self) -> Tensor | None:
        """Log p(x) of the 8-bit image in nats, (N,) in float64; None for a baseline."""
        return None if self.terms is None else self.terms.sum(1)

    @property
    def log_likelihoods(self) -> Tensor | None:
        """Log p(x | y) of the 8-bit image in nats, (N, M) in float64; None for a baseline.

        By Bayes: log p(y | x) + log p(x) - log p(y).
        """
        if self.log_density is None:
            return None
        return self.log_posterior + self.log_density[:, None] - self.log_priors.double()

    def save(self, path: Path) -> None:
        """As one safetensors file."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        text = "".join(f"{path}\0" for path in self.paths)
        tensors["paths"] = torch.tensor(bytearray(text.encode(errors=ANY_NAME)), dtype=torch.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write_tensors(tensors, temporary)

    @classmethod
    def load(cls, path: Path) -> "Predictions | None":
        """What :meth:`save` wrote; None if the file is cut or foreign."""
        try:
            tensors: dict[str, Any] = load_file(path)
            text = bytes(tensors.pop("paths").numpy()).decode(errors=ANY_NAME)
            found = cls(tuple(text.split("\0")[:-1]), **{"terms": None, "distance": None, **tensors})
            columns = [getattr(found, name) for name in COLUMNS]
            whole = all(len(column) == len(found.paths) for column in columns if column is not None)
        except (OSError, SafetensorError, KeyError, TypeError):
            return None
        return found if whole else None

    @classmethod
    def joined(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """All images of ``parts``."""
        columns = {name: [getattr(part, name) for part in parts] for name in COLUMNS}
        joined: dict[str, Any] = {
            name: None if column[0] is None else torch.cat(column) for name, column in columns.items()
        }
        return replace(parts[0], paths=tuple(path for part in parts for path in part.paths), **joined)

    def __getitem__(self, indices: Tensor) -> "Predictions":
        """Those of the images ``indices``."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        chosen: dict[str, Any] = {
            name: None if column is None else column[indices] for name, column in columns.items()
        }
        return replace(self, paths=tuple(self.paths[i] for i in indices.tolist()), **chosen)


def predict_batches(
    model: Model, batches: Iterable[NamedBatch], gaussian: FeatureGaussian | None = None
) -> Predictions:
    """``model``, in evaluation mode, on batches of 8-bit images (B, C, H, W), labels (B,) and names."""
    model = model.frozen()
    parts = [predict(model, *batch, gaussian) for batch in batches]
    return Predictions.joined(parts) if parts else _nothing(model, gaussian)


@torch.inference_mode()
def predict(
    model: Model,
    images: Tensor,
    labels: Tensor,
    paths: tuple[str, ...],
    gaussian: FeatureGaussian | None = None,
) -> Predictions:
    """``model`` on one batch."""
    passed = model.outputs(to_float(images, model.device))
    return predictions_of(passed, model, images, labels, paths, gaussian)


def predictions_of(
    passed: Outputs,
    model: Model,
    images: Tensor,
    labels: Tensor,
    paths: tuple[str, ...],
    gaussian: FeatureGaussian | None = None,
) -> Predictions:
    """What ``model`` says of 8-bit ``images`` that have ``passed`` it."""
    return Predictions(
        paths,
        labels,
        image_keys(images),
        passed.logits.cpu(),
        model.log_priors,
        code_lengths_by_scale(images).cpu(),
        None if passed.log_density_terms is None else passed.log_density_terms.cpu(),
        None if gaussian is None else gaussian.distance(passed.features).cpu(),
    )


def _nothing(model: Model, gaussian: FeatureGaussian | None) -> Predictions:
    """Of no images, with the same columns."""
    channels, height, width = model.image_shape
    none = torch.zeros(1, channels, height, width, dtype=torch.uint8)
    return predict(model, none, torch.zeros(1, dtype=torch.long), ("",), gaussian)[torch.arange(0)]


def to_float(images: Tensor, device: torch.device | str) -> Tensor:
    """8-bit images to floats in [0, 1] on ``device``."""
    return images.to(device, non_blocking=True).float() / 255

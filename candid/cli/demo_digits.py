"""The paper's system on 8 x 8 digits: a classifier that knows its limits, and digits that become others."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from candid._support.progress import SILENT
from candid._support.randomness import generator
from candid.data.loader import named_batches
from candid.data.splits import ArraySplit, unknown
from candid.evaluation.calibration_error import expected_calibration_error, top_bins
from candid.explanations.counterfactual import Counterfactual, counterfactual
from candid.inference.metrics import accuracy, bits_per_dimension
from candid.inference.predictions import Predictions, predict_batches
from candid.models.checkpoint import load
from candid.models.flow.classifier import GenerativeClassifier
from candid.training.display import TrainingDisplay
from candid.training.loop import AfterEpoch
from candid.training.recipes import load_options
from candid.training.run_folder import RunFolder
from candid.training.setup import open_data
from candid.training.train import run
from candid.trust.judge import Judge
from candid.trust.scores import statistics_of

CHANGES = ((4, 9), (0, 6), (8, 3), (7, 2))
"""Digits, and the digits that they become."""


def sample_photo(size: int = 224) -> Tensor:
    """Return the centre of a photo that scikit-learn ships, (3, size, size) in [0, 1]."""
    photo = Image.fromarray(load_sample_image("china.jpg"))
    scale = size * 8 / 7 / min(photo.size)
    width, height = (round(side * scale) for side in photo.size)
    left, top = (width - size) // 2, (height - size) // 2
    photo = photo.resize((width, height), Image.Resampling.BICUBIC)
    photo = photo.crop((left, top, left + size, top + size))
    pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8)
    return pixels.view(size, size, 3).permute(2, 0, 1) / 255


class Opinion(NamedTuple):
    """What the model says of a group of images."""

    images: Tensor
    """(N, 1, 8, 8) uint8."""
    posterior: Tensor
    """(N, 10)."""
    p_value: Tensor
    """(N,): how often an image from the training distribution is as untypical."""


@dataclass(frozen=True)
class DigitsDemo:
    """A model of the digits, and what it says of digits and of other images."""

    accuracy: float
    bits_per_dim: float
    calibration_error: float
    posterior: Tensor
    """Posteriors of the test images, (N, 10)."""
    labels: Tensor
    opinions: dict[str, Opinion]
    changes: list[Counterfactual]
    """Digits that become others."""


def digits_demo(
    out: Path, progress: TrainingDisplay, epochs: int | None = None, after_epoch: AfterEpoch | None = None
) -> DigitsDemo | None:
    """Train the digits preset at beta 1 into ``out``, and ask it about digits and other images.

    None if the training was stopped.
    """
    options = load_options("digits", data="digits", beta=1.0, epochs=epochs)
    if not run(options, RunFolder(out), display=progress, after_epoch=after_epoch).finished:
        return None
    model = load(out / "model" / "best")
    judge = Judge.of(model)
    data, preprocessing = open_data(options, SILENT)
    assert isinstance(data.test, ArraySplit)

    def ask(images: Tensor) -> Opinion:
        found = predict_batches(
            model, named_batches(ArraySplit(images, unknown(len(images))), preprocessing, 500), judge.measures
        )
        return Opinion(images, found.posterior, judge.p_values(statistics_of(found))[0])

    digits = data.test.images
    test = predict_batches(model, named_batches(data.test, preprocessing, 500))
    assert test.log_density is not None
    return DigitsDemo(
        accuracy(test.logits, test.labels),
        bits_per_dimension(test.log_density, model.dimensions),
        expected_calibration_error(top_bins(test.posterior, test.labels)),
        test.posterior,
        test.labels,
        {name: ask(images) for name, images in {"test digits": digits, **not_digits(digits)}.items()},
        [_changed(model, digits, test, *pair) for pair in CHANGES],
    )


def _changed(
    model: GenerativeClassifier, digits: Tensor, test: Predictions, label: int, y: int
) -> Counterfactual:
    """Return the most confident ``label``, on its path to become a ``y``."""
    best = int(test.posterior[:, label].argmax())
    return counterfactual(model, digits[best], y, target=0.9, steps=8)


def not_digits(digits: Tensor) -> dict[str, Tensor]:
    """Return groups of 8 x 8 images that are not digits, each as many as ``digits``, uint8."""
    n, random = len(digits), generator(0)
    photo = (255 * sample_photo(224).mean(0, keepdim=True)).to(torch.uint8)
    left, top = torch.randint(0, 224 - 32, (2, n), generator=random)
    patches = torch.stack([photo[:, t : t + 32, s : s + 32] for t, s in zip(top, left, strict=True)])
    greys = torch.randint(0, 256, (n,), generator=random, dtype=torch.uint8)
    return {
        "inverted digits": 255 - digits,
        "shuffled pixels": digits.flatten(1)[:, torch.randperm(64, generator=random)].view_as(digits),
        "photo patches": F.avg_pool2d(patches.float(), 4).to(torch.uint8),
        "random pixels": torch.randint(0, 256, digits.shape, generator=random, dtype=torch.uint8),
        "plain grey": greys[:, None, None, None].expand(-1, 1, 8, 8),
    }

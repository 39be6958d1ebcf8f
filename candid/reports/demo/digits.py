"""The paper's system on 8 x 8 digits: a classifier that knows its limits, and digits that become others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from candid._support.numbers import Array
from candid._support.progress import SILENT
from candid._support.randomness import draws
from candid.data.batches import named_batches
from candid.evaluation.calibration_error import expected_calibration_error, top_bins
from candid.inference.metrics import accuracy, bits_per_dimension
from candid.inference.predictions import predict_batches
from candid.judging.examine import Examiner
from candid.models.checkpoint import load
from candid.reports.demo.chapters import Chapter
from candid.reports.plots import latent, style
from candid.reports.plots.style import GREEN, SMALL, STYLE, VERMILION
from candid.trust.verdict import Examination

if TYPE_CHECKING:
    from candid._support.progress import TrainingDisplay
    from candid.explanations.counterfactual import Counterfactual

CHANGES = ((4, 9), (0, 6), (8, 3), (7, 2))
"""Digits, and the digits that they become."""
SIGNIFICANT = 0.05
DIGITS = tuple(str(digit) for digit in range(10))


class Said(NamedTuple):
    """What the model says of a group of images."""

    images: Array
    """(N, 1, 8, 8) uint8."""
    posterior: Array
    """(N, 10)."""
    p_value: Array
    """(N,): how often an image from the training distribution is as untypical."""


@dataclass(frozen=True)
class DigitsDemo:
    """What a model of the digits says of digits and of other images."""

    accuracy: float
    bits_per_dim: float
    calibration_error: float
    opinions: dict[str, Said]
    changes: list[Counterfactual]
    """Digits that become others."""


def digits_demo(out: Path, progress: TrainingDisplay, epochs: int | None = None) -> DigitsDemo | None:
    """Train the digits preset at beta 1 into ``out``, and ask it about digits and other images.

    None if the training was stopped.
    """
    from candid.training.recipes import load_options
    from candid.training.run_folder import RunFolder
    from candid.training.setup import open_data
    from candid.training.train import train_network

    options = load_options("digits", data="digits", beta=1.0, epochs=epochs)
    if not train_network(options, RunFolder(out), display=progress).finished:
        return None
    model = load(out / "model" / "best")
    data, preprocessing = open_data(options, SILENT)
    assert data.test is not None
    test = predict_batches(model, named_batches(data.test, preprocessing, 500))
    assert test.log_density is not None
    digits = np.concatenate([images for images, _, _ in named_batches(data.test, preprocessing, 500)])
    examiner = Examiner(model)
    return DigitsDemo(
        accuracy(test.logits, test.labels),
        bits_per_dimension(test.log_density, model.dimensions),
        expected_calibration_error(top_bins(test.posterior, test.labels)),
        {
            name: _opinion(examiner, images)
            for name, images in {"test digits": digits, **not_digits(digits)}.items()
        },
        [_changed(model, digits, test.posterior, *pair) for pair in CHANGES],
    )


def _opinion(examiner: Examiner, images: Array) -> Said:
    """Return what the model says of 8-bit images."""
    judged = [
        examined
        for examined in examiner.judged([("", image) for image in images])
        if isinstance(examined, Examination)
    ]
    posterior = np.array([[examined.posterior[digit] for digit in DIGITS] for examined in judged])
    return Said(images, posterior, np.array([examined.p_value for examined in judged], np.float64))


def _changed(model: Any, digits: Array, posterior: Array, label: int, y: int) -> Counterfactual:
    """Return the most confident ``label``, on its path to become a ``y``."""
    from candid.explanations.counterfactual import counterfactual

    best = int(posterior[:, label].argmax())
    return counterfactual(model, digits[best], y, target=0.9, steps=8)


def sample_photo(size: int = 224) -> Array:
    """Return the centre of a photo that scikit-learn ships, (3, size, size) uint8."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    photo = Image.fromarray(load_sample_image("china.jpg"))
    scale = size * 8 / 7 / min(photo.size)
    width, height = (round(side * scale) for side in photo.size)
    left, top = (width - size) // 2, (height - size) // 2
    photo = photo.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(photo.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def not_digits(digits: Array) -> dict[str, Array]:
    """Return groups of 8 x 8 images that are not digits, each as many as ``digits``, uint8."""
    n, random = len(digits), draws(0)
    photo = sample_photo(224).mean(0).astype(np.uint8)
    left, top = random.integers(224 - 32, 2 * n).reshape(2, n)
    patches = np.stack([photo[t : t + 32, s : s + 32] for t, s in zip(top, left, strict=True)])
    greys = random.integers(256, n).astype(np.uint8)
    shuffled = digits.reshape(n, -1)[:, random.permutation(64)].reshape(digits.shape)
    return {
        "inverted digits": 255 - digits,
        "shuffled pixels": shuffled,
        "photo patches": patches.reshape(n, 1, 8, 4, 8, 4).mean((3, 5)).astype(np.uint8),
        "random pixels": random.integers(256, digits.size).astype(np.uint8).reshape(digits.shape),
        "plain grey": np.broadcast_to(greys[:, None, None, None], digits.shape),
    }


def chapter(shown: DigitsDemo, out: Path, program: str) -> Chapter:
    """Draw what the model says into the folder ``out``, and return the chapter of the page."""
    return Chapter(
        "The paper's system: an invertible network on pixels",
        (
            f"A generative classifier of 8 x 8 digits: {100 * shown.accuracy:.1f} % of the test digits are "
            f"right, at {shown.bits_per_dim:.2f} bits/dim. It knows the exact likelihood of every image, and "
            "runs backwards.",
        ),
        figures=[
            (
                style.save(opinions(shown.opinions), out / "digits.png"),
                "Digits and images that are not digits. The posterior is often confident about nonsense.",
            ),
            (
                style.save(latent.counterfactuals(shown.changes, DIGITS), out / "counterfactuals.png"),
                "What would have to change? Digits on their way through latent space to another class.",
            ),
        ],
        commands=[f"{program} train digits --out {out / 'more-digits'}"],
    )


@rc_context(STYLE)
def opinions(groups: Mapping[str, tuple[Array, Array, Array]], shown: int = 8) -> Figure:
    """Draw examples of each group of images with the most probable class, its posterior and the p-value.

    A group has 8-bit images (N, 1, H, W), posteriors (N, M) and p-values (N,).
    """
    figure = Figure(figsize=(0.9 * shown + 1, 1.25 * len(groups) + 0.5), layout="constrained")
    rows = figure.subplots(len(groups), shown, squeeze=False)
    for axes_row, (name, (images, posterior, p_values)) in zip(rows, groups.items(), strict=True):
        for i, axes in enumerate(axes_row):
            axes.imshow(images[i, 0], cmap="gray", vmin=0, vmax=255)
            p = float(p_values[i])
            title = f"{int(posterior[i].argmax())}: {100 * float(posterior[i].max()):.0f} %"
            axes.set_title(title, fontsize=SMALL)
            axes.set_xlabel(f"p = {p:.2f}", fontsize=SMALL, color=GREEN if p > SIGNIFICANT else VERMILION)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(True)
        axes_row[0].set_ylabel(name, fontsize=SMALL)
    figure.suptitle(
        "above each image: the class and its posterior; below: the p-value, "
        f"red where the model says 'not a digit' (p ≤ {SIGNIFICANT})",
        fontsize=SMALL,
    )
    return figure

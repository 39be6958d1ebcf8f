"""Which pixels a column of features depends on, and how strongly: the effective receptive field."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array
from candid._support.progress import SILENT, Progress
from candid._support.randomness import generator
from candid.models.flow.network import ImageClassifier, array_of
from candid.models.protocol import can

NUMBERS_A_BATCH = 64 * 3 * 32 * 32
"""Pixels of the images that are differentiated at once: about 100 MB of activations are stored for them."""
FEWEST_PROJECTIONS = 3
"""The smallest number of projections: with two, the variance of the estimate is infinite."""


class Cell(NamedTuple):
    """The pixels that downsampling alone brings into a column of features."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class ReceptiveField:
    """How strongly the centre column u of the last feature maps depends on each pixel.

    ``Sensitivity(i, j) = mean over images of sum_k sum_l |d u_l / d x_ijk|``, for x in [0, 1], k over its
    colours and l over the channels of u (the appendix of the paper).
    """

    sensitivity: Array
    """(H, W) in float64."""
    standard_error: Array | None
    """Standard error of an estimate, for these images, (H, W); None if the sensitivity is exact.

    An upper bound: the errors of the colours are taken to have a correlation of one.
    """
    cell: Cell
    """Where u lies in the image, in pixels."""
    images: int
    """Number of images in the mean."""
    projections: int | None
    """Random projections per image; None if the sensitivity is exact."""

    @property
    def cross_section(self) -> Array:
        """Cross-section along the width: mean over the rows of the cell, (W,)."""
        return _rows(self.sensitivity, self.cell)

    @property
    def cross_section_error(self) -> Array | None:
        """Upper bound of its standard error, (W,), as if the errors of pixels had a correlation of one."""
        return None if self.standard_error is None else _rows(self.standard_error, self.cell)

    @property
    def width_at_half_maximum(self) -> float | None:
        """Full width of the cross-section at half its maximum, in pixels.

        None if it is still above half at an edge of the image, or nowhere above zero.
        """
        return full_width(self.cross_section)


@torch.enable_grad()
def receptive_field(
    model: ImageClassifier,
    images: Array,
    projections: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> ReceptiveField:
    """Return the effective receptive field of ``model`` on ``images``, in evaluation mode.

    Exact: one backward pass for each of the C channels of u. Or estimated from ``projections`` m passes: with
    v standard Cauchy, v . g is Cauchy with the scale ``|g|_1``, and

        ``cos(pi / 2m)^m  (product of m |v . g|)^(1/m)``

    is an unbiased estimate of it (Li, Hastie and Church, 2007). For networks with thousands of channels.

    Args:
        images: (N, C, H, W), 8-bit or floats in [0, 1].
        projections: m, at least 3; None for all channels.
        batch: images at once; None for as many as take about 100 MB. It doesn't change the result.
        seed: of the projections.
        progress: shows the progress, by backward passes.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits", blocks=(1, 1), widths=(4, 4))
    >>> field = receptive_field(model, np.full((2, 1, 8, 8), 99, np.uint8))
    >>> field.sensitivity.shape, field.cell
    ((8, 8), Cell(top=4, left=4, height=4, width=4))
    """
    _check(model, images, projections, batch)
    folded = can(model, "invert")
    model = model.frozen() if folded else copy.deepcopy(model).eval().requires_grad_(False)
    pixels = torch.from_numpy(images)
    _, column, cell = _centre_column(model, pixels[:1])
    passes = column.shape[1] if projections is None else projections
    del column  # and the activations that its graph keeps
    batch = min(len(images), batch or max(1, NUMBERS_A_BATCH // images[0].size))
    steps = _sensitivities(model, pixels, projections, batch, seed)
    total = math.ceil(len(images) / batch) * passes
    first = second = np.zeros(images.shape[2:])
    for part in progress.track(steps, "receptive field", total, batch):
        if part is not None:
            first = first + part.sum(0)
            second = second + np.square(part).sum(0)
    if not np.isfinite(first).all():
        raise NonFiniteError(
            "The gradients of the feature maps are not finite: look at the images and the weights."
        )
    n = len(images)
    error = None if projections is None else np.sqrt(_error_share(projections) * second) / n
    return ReceptiveField(first / n, error, cell, n, projections)


@torch.no_grad()
def channels(model: ImageClassifier, images: Array) -> int:
    """Return how many features each position of the last feature maps has, seen from 8-bit images."""
    return model.feature_maps(torch.from_numpy(images).to(model.device) / 255).shape[1]


def full_width(curve: Array) -> float | None:
    """Return the distance of the outermost points where ``curve`` (n,) is half its maximum, interpolated.

    None if it is above half at an end, or nowhere above zero.

    >>> full_width(np.array([0.0, 4.0, 1.0, 3.0, 0.0]))
    2.833...
    """
    half = float(curve.max()) / 2
    above = np.flatnonzero(curve > half).tolist()
    if half <= 0 or above[0] == 0 or above[-1] == len(curve) - 1:
        return None

    def past(inside: int, outside: int) -> float:
        """Return how far beyond ``inside`` the crossing lies."""
        high, low = float(curve[inside]), float(curve[outside])
        return (high - half) / (high - low)

    first, last = above[0], above[-1]
    return past(first, first - 1) + last - first + past(last, last + 1)


def _sensitivities(
    model: ImageClassifier, images: Tensor, projections: int | None, batch: int, seed: int
) -> Iterator[Array | None]:
    """Yield, after each backward pass, None or the sensitivities that are complete, (B, H, W)."""
    for start in range(0, len(images), batch):
        x, column, _ = _centre_column(model, images[start : start + batch])
        draws = [generator(seed, number) for number in range(start, start + len(x))]
        sums = torch.zeros_like(x, dtype=torch.float64)
        passes = column.shape[1] if projections is None else projections
        for number in range(passes):
            weights = torch.zeros_like(column)
            if projections is None:
                weights[:, number] = 1
            else:
                cauchy = [
                    torch.empty(column.shape[1], dtype=torch.float64).cauchy_(generator=g) for g in draws
                ]
                weights += torch.stack(cauchy).to(column)
            (gradient,) = torch.autograd.grad(column, x, weights, retain_graph=True)
            sums += gradient.abs() if projections is None else gradient.double().abs().log()
            if number < passes - 1:
                yield None
        if projections is not None:
            sums = math.cos(math.pi / (2 * projections)) ** projections * (sums / projections).exp()
        yield array_of(sums.sum(1))


def _centre_column(model: ImageClassifier, images: Tensor) -> tuple[Tensor, Tensor, Cell]:
    """Return the images as the model takes them, their centre features (B, C), and where the centre is."""
    x = images.to(model.device, model.dtype)
    x = (x / 255 if images.dtype == torch.uint8 else x).detach().requires_grad_()
    maps = model.feature_maps(x)
    (top, height), (left, width) = (
        _centre(pixels, cells) for pixels, cells in zip(x.shape[2:], maps.shape[2:], strict=True)
    )
    return x, maps[:, :, maps.shape[2] // 2, maps.shape[3] // 2], Cell(top, left, height, width)


def _centre(pixels: int, cells: int) -> tuple[int, int]:
    """Return where the pixels of the centre cell begin and how many there are."""
    start, end = pixels * (cells // 2) // cells, math.ceil(pixels * (cells // 2 + 1) / cells)
    return start, end - start


def _error_share(projections: int) -> float:
    """Return the variance of an estimate divided by the mean of its square.

    E |v . g|^t = |g|_1^t / cos(pi t / 2) gives the estimate the relative variance
    ``r = cos(pi / 2m)^2m / cos(pi / m)^m - 1``: of its square, r / (1 + r) is variance.
    """
    m = projections
    return 1 - math.cos(math.pi / m) ** m / math.cos(math.pi / (2 * m)) ** (2 * m)


def _rows(values: Array, cell: Cell) -> Array:
    averaged: Array = values[cell.top : cell.top + cell.height].mean(0)
    return averaged


def _check(model: ImageClassifier, images: Array, projections: int | None, batch: int | None) -> None:
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise CandidError(
            f"Images must be 8-bit or floats in [0, 1], not {images.dtype}: convert them first."
        )
    if tuple(images.shape[1:]) != model.image_shape or not len(images):
        expected, shape = (" x ".join(map(str, s)) for s in (model.image_shape, images.shape))
        raise CandidError(
            f"The receptive field needs a batch of {expected} images (channels x height x width), "
            f"not an array of {shape or 'no dimensions'}: resize or crop them first."
        )
    if projections is not None and projections < FEWEST_PROJECTIONS:
        raise CandidError(
            f"An estimate needs at least {FEWEST_PROJECTIONS} projections, not {projections}: "
            "use more, or None for the exact value."
        )
    if batch is not None and batch < 1:
        raise CandidError(f"'batch' must be at least 1, not {batch}.")

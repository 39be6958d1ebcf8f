"""The laws of benchmarks.scaling: what a training step costs in time and memory, and what follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from scipy.optimize import least_squares, nnls
from torch.utils.flop_counter import FlopCounterMode

from candid import ClassifierConfig, GenerativeClassifier
from candid.models.flow.config import FlowConfig, preset

FLOAT = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Case:
    preset: str
    blocks: tuple[int, ...]
    classes: int
    size: int
    batch: int
    mixing: str = "permutation"

    def __str__(self) -> str:
        return f"{sum(self.blocks)} blocks, {self.classes} classes, {self.size} px, batch {self.batch}"

    @property
    def config(self) -> ClassifierConfig:
        return preset(
            self.preset,
            blocks=self.blocks,
            classes=self.classes,
            height=self.size,
            width=self.size,
            mixing=self.mixing,
        )


@dataclass(frozen=True)
class Counts:
    """What is known of a network without running it."""

    trained: float
    """Multiply-accumulates an image with trained weights: convolutions, mixture."""
    fixed: float
    """With fixed ones: mixing, DCT."""
    gram: float
    """Multiply-accumulates a batch: the norms of the means."""
    parameters: dict[str, int]
    """By layer, the mixture last."""
    stored: dict[str, float]
    """Numbers an image that a layer keeps for the backward pass."""
    state: int
    """Bytes of parameters and buffers."""
    means: int
    prototypes: int
    classes: int
    rank: int
    pixels: int

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def training_macs(self, batch: int) -> float:
        """Forward, gradient of the input and, where trained, of the weights."""
        return batch * (3 * self.trained + 2 * self.fixed) + 2 * self.gram

    def forward_macs(self, batch: int) -> float:
        return batch * (self.trained + self.fixed)


@cache
def count(config: ClassifierConfig) -> Counts:
    with torch.device("meta"):
        model = GenerativeClassifier(config).eval()
    flow, classes, rank = config.flow, config.classes, config.rank or config.classes
    constant, rest = flow.constant_coefficients, flow.dimensions - flow.constant_coefficients
    with FlopCounterMode(display=False) as counter:
        model.flow(torch.empty(1, *model.image_shape, device="meta"))
    total = counter.get_total_flops() / 2
    convolutions = counter.get_flop_counts()["Global"][torch.ops.aten.convolution] / 2
    layers = {**dict(model.flow.named_children()), "mixture": model.mixture}
    return Counts(
        trained=convolutions + classes * constant + rank * rest + classes * rank,
        fixed=total - convolutions,
        gram=rank**2 * (rest + classes),
        parameters={name: sum(p.numel() for p in layer.parameters()) for name, layer in layers.items()},
        stored=stored(flow),
        state=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        means=classes * constant,
        prototypes=rank * rest,
        classes=classes,
        rank=rank,
        pixels=flow.height * flow.width,
    )


def stored(flow: FlowConfig) -> dict[str, float]:
    """Numbers an image that each layer keeps with plain autograd (D: numbers of the image itself)."""
    d, pixels = flow.dimensions, flow.height * flow.width
    layers: dict[str, float] = {}
    if flow.entry != "none":
        inner = {"3x3": 1.5, "7x7": 0.5}[flow.entry] * flow.entry_width * pixels
        x2 = flow.channels // 2 / flow.channels * d
        layers["entry"] = 4 * d + x2 + inner
        pixels //= 4
    pixels //= 4
    layers["haar"] = 0
    layers["pointwise"] = 2.5 * d + flow.pointwise_width * pixels
    for stage, (blocks, width) in enumerate(zip(flow.blocks, flow.widths, strict=True), start=1):
        for block in range(1, blocks + 1):
            if stage > 1 and block == 1:
                pixels //= 4
                layers[f"stage{stage}_block{block}"] = 4.5 * d + 15 * width * pixels
            else:
                layers[f"stage{stage}_block{block}"] = 2.5 * d + 6 * width * pixels
    layers["dct"] = d
    return layers


def plain_peak(counts: Counts, batch: int) -> float:
    """Bytes that a step with plain autograd allocates: nothing in it is fitted.

    Going back, activations are freed layer by layer while gradients come: the peak is where their
    sum is largest, or at the start, where the mixture's gradients are put together.
    """
    kept = batch * sum(counts.stored.values())
    peak = kept + _mixture_work(counts, batch)
    gradients = counts.parameters["mixture"]
    for name in reversed(counts.stored):
        gradients += counts.parameters[name]
        peak = max(peak, kept + gradients)
        kept -= batch * counts.stored[name]
    return FLOAT * peak


def inverse_peak(counts: Counts, batch: int, numbers: Sequence[float]) -> float:
    """The same for memory="inverse": all gradients and a multiple of the pixels, whatever the depth.

    A pixel needs i numbers for each image, or j for each and o for one image alone, where the entry
    recomputes its own resolution image by image.
    """
    i, j, o = numbers
    last = counts.total + counts.pixels * max(i * batch, j * batch + o)
    return FLOAT * max(last, _mixture_work(counts, batch))


def _mixture_work(counts: Counts, batch: int) -> float:
    gradients = max(3 * counts.means, counts.means + 2 * counts.prototypes)
    return gradients + counts.classes * (counts.rank + 3 * batch)


@dataclass(frozen=True)
class Point:
    """What was measured of a case: seconds (medians) and bytes."""

    plain: float
    inverse: float
    frozen: float
    plain_peak: int
    inverse_peak: int
    state: int


Points = Mapping[Case, Point]


@dataclass(frozen=True)
class Laws:
    """Seconds are ``a + b T + c P``: multiply-accumulates T, parameters P; bytes as in the two peaks."""

    time: dict[str, tuple[float, float, float]]
    inverse: tuple[float, float, float]
    """Numbers a pixel: i, j and o."""

    def seconds(self, mode: str, case: Case) -> float:
        return float(np.dot(self.time[mode], _terms(mode, case)))

    def peak(self, mode: str, case: Case) -> float:
        """Bytes with parameters, buffers and gradients, without the optimiser's."""
        counts = count(case.config)
        if mode == "plain":
            return counts.state + plain_peak(counts, case.batch)
        return counts.state + inverse_peak(counts, case.batch, self.inverse)

    def errors(self, points: Points) -> dict[str, float]:
        """The largest relative error of each law."""
        found = {}
        for mode in ("plain", "inverse", "frozen"):
            found[f"time, {mode}"] = max(
                abs(self.seconds(mode, c) / getattr(p, mode) - 1) for c, p in points.items()
            )
        for mode in ("plain", "inverse"):
            found[f"memory, {mode}"] = max(
                abs(self.peak(mode, c) / total(p, mode) - 1) for c, p in points.items()
            )
        return found


def total(point: Point, mode: str) -> int:
    return point.state + int(getattr(point, f"{mode}_peak"))


def _terms(mode: str, case: Case) -> tuple[float, float, float]:
    counts = count(case.config)
    macs = counts.forward_macs(case.batch) if mode == "frozen" else counts.training_macs(case.batch)
    return 1.0, macs, counts.total


def fit(points: Points) -> Laws:
    """Least squares of the relative errors, coefficients not below zero."""
    times = {}
    for mode in ("plain", "inverse", "frozen"):
        rows = [_terms(mode, case) for case in points]
        times[mode] = _relative_fit(rows, [getattr(p, mode) for p in points.values()])

    def errors(numbers: Sequence[float]) -> list[float]:
        return [
            inverse_peak(count(case.config), case.batch, numbers) / point.inverse_peak - 1
            for case, point in points.items()
        ]

    found = least_squares(errors, (100.0, 50.0, 200.0), bounds=(0, np.inf), x_scale=100.0)
    i, j, o = (float(v) for v in found.x)
    return Laws(times, (i, j, o))


def _relative_fit(
    rows: Sequence[tuple[float, float, float]], values: Sequence[float]
) -> tuple[float, float, float]:
    matrix = np.array(rows) / np.array(values)[:, None]
    columns = matrix.max(0)
    found, _ = nnls(matrix / columns, np.ones(len(values)))
    a, b, c = (float(v) for v in found / columns)
    return a, b, c


TRAINING_IMAGES, EPOCHS = 1_281_167, 120
"""Of ImageNet, and of the recipe."""


@dataclass(frozen=True)
class Gpu:
    """Published peak rates of an A100 (40 GB) and assumed shares of them: nothing here is measured."""

    tf32: float = 156e12
    """Floating-point operations a second in convolutions, two a multiply-accumulate."""
    float32: float = 19.5e12
    """In the mixing's matrix products, which are kept out of TF32."""
    bandwidth: float = 1.555e12
    """Bytes a second of its memory."""
    reached: float = 0.35
    """Share of the operations that a training step sustains."""
    bandwidth_reached: float = 0.7
    passes: int = 23
    """How often a stored number is read or written in a step (docs/scaling.md)."""
    nvlink: float = 300e9
    """Bytes a second in each direction between the GPUs of one machine, up to eight."""
    network: float = 25e9
    """The same for each GPU between machines: 200 Gb/s InfiniBand."""

    def image_seconds(self, counts: Counts) -> float:
        convolutions = 2 * 3 * counts.trained / (self.reached * self.tf32)
        mixing = 2 * 2 * counts.fixed / (self.reached * self.float32)
        return convolutions + mixing + self.traffic(counts) / (self.bandwidth_reached * self.bandwidth)

    def traffic(self, counts: Counts) -> float:
        """Bytes an image that a step moves to and from memory."""
        return self.passes * FLOAT * sum(counts.stored.values())

    def reduce_seconds(self, counts: Counts, gpus: int) -> float:
        """Ring all-reduce of the gradients."""
        rate = self.nvlink if gpus <= 8 else self.network
        return 2 * (gpus - 1) / gpus * FLOAT * counts.total / rate

    def step_seconds(self, counts: Counts, batch: int, gpus: int) -> float:
        """With ``batch`` images on each GPU; gradients are sent after the backward pass, not during it."""
        norms = 2 * 2 * counts.gram / (self.reached * self.float32)
        return batch * self.image_seconds(counts) + norms + self.reduce_seconds(counts, gpus)

    def run_hours(self, counts: Counts, batch: int, gpus: int) -> float:
        steps = TRAINING_IMAGES * EPOCHS / (batch * gpus)
        return steps * self.step_seconds(counts, batch, gpus) / 3600


def gpu_bytes(laws: Laws, mode: str, case: Case) -> float:
    """The law's peak and the momentum of SGD."""
    return laws.peak(mode, case) + FLOAT * count(case.config).total


def largest_batch(laws: Laws, mode: str, case: Case, card: float) -> int:
    """Images that fit into nine tenths of ``card`` bytes; the rest is for the driver and cuDNN."""
    batch = 0
    while gpu_bytes(laws, mode, replace(case, batch=batch + 1)) <= 0.9 * card:
        batch += 1
    return batch

"""Attacked images, what an attack did to a model, and whether the detection notices."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, TypeVar

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.inference.metrics import (
    area_under_curve,
    mean_entropy,
    paired_placements,
    placement_interval,
    share_interval,
)
from candid.inference.predictions import Predictions
from candid.inference.study import Note
from candid.judging.held_out import HeldOut
from candid.models.protocol import Model, density_dimensions
from candid.robustness.options import AttackOptions
from candid.trust.conformal import OneTailed, ScalarDetector, TwoTailed

Ends = tuple[float, float]
"""The ends of an interval."""
M = TypeVar("M", bound="Measured")
EIGHT_BIT = "eight_bit."
"""What the names of the columns of 8-bit images begin with."""
VISIBLE = 4 / 255
"""The root mean square of a perturbation from which it can be seen, roughly: 36 dB below white."""


@dataclass(frozen=True)
class Trace:
    """The path of one image, from the original to where the attack stopped: n - 1 steps."""

    margins: Array
    """Margin of the logits, (n,): positive where the model is fooled."""
    distances: Array
    """L2 norm from the original, (n,)."""
    latents: Array | None = None
    """Latents, (n, D), if they were asked for."""


@dataclass(frozen=True)
class AttackedImages:
    """The attacked versions of N images."""

    images: Array
    """(N, C, H, W), floats in [0, 1]."""
    success: Array
    """Whether the margin reached kappa, (N,); for an infinite one and within a radius, if it is > 0."""
    rounded_success: Array
    """Whether the image is still misclassified as wanted when it is rounded to 8 bits, (N,)."""
    already_misclassified: Array
    """Whether the image was misclassified as wanted before the attack, (N,)."""
    distance: Array
    """L2 norm of the perturbation, (N,) in float64; black to white is 1 for each number of a pixel."""
    margin: Array
    """``l_t - max l_y`` over all y but the target t, (N,); untargeted, ``max l_y - l_t`` from the label t."""
    posterior: Array
    """Posterior of ``images``, (N, M) in float64."""
    log_density: Array | None
    """Log density of ``images``, (N,) in nats, in float64; None without a likelihood."""
    steps: Array
    """Gradient steps until the attack stopped, (N,)."""
    traces: tuple[Trace, ...] | None
    """The path of each image, if it was asked for."""
    eight_bit: "AttackedImages | None" = None
    """The attack that works as a file, if it was asked for: ``images`` are multiples of 1 / 255, and a
    ``success`` reaches kappa with the model's own noise pattern and with others that the attack has not seen;
    all else is with the model's own."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def as_file(self) -> "AttackedImages":
        """The attack with 8-bit images, or with real-valued ones if there are no others."""
        return self if self.eight_bit is None else self.eight_bit

    @property
    def per_pixel(self) -> Array:
        """Root mean square of the perturbation, (N,): the distance by the square root of C H W."""
        return self.distance / math.sqrt(math.prod(self.images.shape[1:]))

    def columns(self) -> dict[str, Array]:
        """Return all but the traces by name, and below ``eight_bit.`` that of the 8-bit images."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        columns = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        if self.eight_bit is not None:
            columns |= {EIGHT_BIT + name: value for name, value in self.eight_bit.columns().items()}
        return columns

    @classmethod
    def of_columns(cls, columns: Mapping[str, Array]) -> "AttackedImages":
        """Return the attack whose :meth:`columns` these are.

        Raises:
            TypeError: if one is missing.
        """
        real: dict[str, Any] = {name: column for name, column in columns.items() if EIGHT_BIT not in name}
        rounded = {name.removeprefix(EIGHT_BIT): columns[name] for name in columns if EIGHT_BIT in name}
        eight_bit = cls.of_columns(rounded) if rounded else None
        return cls(**{"log_density": None, "traces": None, **real}, eight_bit=eight_bit)

    @classmethod
    def joined(cls, parts: Sequence["AttackedImages"]) -> "AttackedImages":
        """Return all images of ``parts``, without their traces."""
        columns = [part.columns() for part in parts]
        return cls.of_columns({name: np.concatenate([part[name] for part in columns]) for name in columns[0]})


@dataclass(frozen=True)
class Detected:
    """AUCs of separating attacked images from their originals, by log q(x) alone."""

    one_tailed: float
    two_tailed: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What attacked images did to a model. Means are over the images that fooled it; rates are shares."""

    success: float | None = None
    """Share of the attacked images that fooled the model; None if there were none."""
    l2_mean: float | None = None
    """Mean L2 norm of the perturbation of an image."""
    l2_median: float | None = None
    """Median over all attacked images; infinite if half of them did not fool the model."""
    per_pixel: float | None = None
    """Mean of the root mean square perturbation."""
    confidence: float | None = None
    """Posterior of the wrong class."""
    entropy_before: float | None = None
    entropy_after: float | None = None
    """Mean entropy of the posterior before and after, in nats."""
    contrast: float | None = None
    """Mean standard deviation of an image's pixels, relative to the originals'."""
    bits_before: float | None = None
    bits_after: float | None = None
    """Bits per dimension before and after."""
    detection: Detected | None = None
    adaptive_one_tailed: float | None = None
    adaptive_two_tailed: float | None = None
    """The lowest AUCs among the attacks with this kappa that also fool the detection."""
    adaptive_success: float | None = None
    """Success of the attack with the lowest two-tailed AUC."""
    intervals: dict[str, Ends] = field(default_factory=dict)
    """95 % intervals of ``success``, ``l2_median``, ``one_tailed``, ``two_tailed`` and the adaptive ones."""


@dataclass(frozen=True, kw_only=True)
class AttackMetrics(Measured):
    """One attack on one model, with real-valued images."""

    model: str
    beta: float | None
    kappa: float
    d: float
    images: int
    misclassified: int
    """Images that are misclassified before the attack, as any class."""
    already_misclassified: int
    """Images that are misclassified as the attack wants before it begins: excluded from the metrics."""
    rounded_success: float | None
    """Share of the attacked images that were fooled and still fool the model when rounded to 8 bits."""
    steps: float
    """Gradient steps, mean over all images."""
    most_steps: int
    eight_bit: Measured | None = None
    """The attack that works as a file: 8-bit images, any noise pattern."""

    @property
    def as_file(self) -> Measured:
        """The metrics of the 8-bit images, or of the real-valued ones if there are no others."""
        return self if self.eight_bit is None else self.eight_bit

    def without_bits(self) -> "AttackMetrics":
        """Return the metrics of a model whose density is not one of pixels."""
        rounded = self.eight_bit and replace(self.eight_bit, bits_before=None, bits_after=None)
        return replace(self, bits_before=None, bits_after=None, eight_bit=rounded)

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON: infinities are strings, and so is beta."""
        metrics: dict[str, Any] = _as_json(asdict(self))
        return metrics | {"beta": None if self.beta is None else str(self.beta)}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_as_json(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def attack_metrics(
    name: str,
    beta: float | None,
    setting: tuple[float, float],
    attack: AttackedImages,
    originals: Array,
    clean: Predictions,
    held_out: HeldOut | None,
    targets: Array | None,
) -> AttackMetrics:
    """Return the metrics of an ``attack`` with kappa and d of ``setting`` on the 8-bit ``originals``."""
    attacked = ~attack.already_misclassified
    real, *rounded = (
        _measured(images, originals, clean, held_out, targets)
        for images in (attack, attack.eight_bit)
        if images is not None
    )
    survived = (attack.success & attack.rounded_success)[attacked]
    if len(survived):
        real.intervals["rounded_success"] = share_interval(survived)[1:]
    return AttackMetrics(
        model=name,
        beta=beta,
        kappa=setting[0],
        d=setting[1],
        images=len(attack),
        misclassified=int((clean.logits.argmax(1) != clean.labels).sum()),
        already_misclassified=int(attack.already_misclassified.sum()),
        rounded_success=_mean(survived),
        steps=float(attack.steps.mean()),
        most_steps=int(attack.steps.max()),
        eight_bit=rounded[0] if rounded else None,
        **vars(real),
    )


def _measured(
    attack: AttackedImages,
    originals: Array,
    clean: Predictions,
    held_out: HeldOut | None,
    targets: Array | None,
) -> Measured:
    attacked = ~attack.already_misclassified
    fooled = attack.success & attacked
    success = _mean(attack.success[attacked])
    if success is None:
        return Measured()
    distances = np.where(attack.success, attack.distance, math.inf)[attacked]
    intervals: dict[str, Ends] = {"success": share_interval(attack.success[attacked])[1:]}
    if not fooled.any():
        return Measured(success=success, intervals=intervals)
    wrong = attack.posterior.argmax(1) if targets is None else targets
    measured = Measured(
        success=success,
        l2_mean=_mean(attack.distance[fooled]),
        l2_median=median(distances.tolist()),
        per_pixel=_mean(attack.per_pixel[fooled]),
        confidence=_mean(attack.posterior[np.arange(len(wrong)), wrong][fooled]),
        entropy_before=mean_entropy(clean.posterior[fooled]),
        entropy_after=mean_entropy(attack.posterior[fooled]),
        contrast=_contrast(attack.images[fooled]) / max(1e-9, _contrast(originals[fooled] / 255)),
        intervals=intervals | {"l2_median": median_interval(distances)},
    )
    if attack.log_density is None or clean.log_density is None:
        return measured
    before, after = clean.log_density[fooled], attack.log_density[fooled]
    bits = -1 / (math.log(2) * originals[0].size)
    measured = replace(
        measured, bits_before=bits * float(before.mean()), bits_after=bits * float(after.mean())
    )
    return measured if held_out is None else _with_detection(measured, before, after, held_out)


def _with_detection(measured: Measured, before: Array, after: Array, held_out: HeldOut) -> Measured:
    """Add the AUCs of images with these log densities ``before`` and ``after`` the attack."""
    reference, rows = held_out.statistics["log_density"], np.arange(len(before))
    areas, intervals = {}, dict(measured.intervals)
    tests: dict[str, ScalarDetector] = {"one_tailed": OneTailed(), "two_tailed": TwoTailed()}
    for name, test in tests.items():
        inliers, outliers = (test.fit(reference).score(densities) for densities in (before, after))
        areas[name] = area_under_curve(inliers, outliers)
        intervals[name] = placement_interval([paired_placements(inliers, outliers[None], rows)])
    return replace(measured, detection=Detected(**areas), intervals=intervals)


def median_interval(values: Array) -> Ends:
    """Return the 95 % interval of a median, from two of the ``values`` (N,); 0 to infinity if N is below 6.

    How many values lie below the median is binomial, whatever their distribution.

    >>> median_interval(np.arange(1.0, 7.0)), median_interval(np.ones(5))
    ((1.0, 6.0), (0.0, inf))
    """
    from scipy.stats import quantile_test

    low, high = quantile_test(values, p=0.5).confidence_interval(0.95)
    return (0.0, math.inf) if math.isnan(low) else (float(low), float(high))


def without_lone_detection(metrics: Sequence[AttackMetrics]) -> Iterable[AttackMetrics]:
    """Yield each with the attack that also fools the detection; no detection is shown without it."""
    for one in metrics:
        adaptive = [other for other in metrics if other.d > 0 and other.kappa == one.kappa]
        rounded = one.eight_bit and _adapted(one.eight_bit, [other.as_file for other in adaptive])
        yield replace(_adapted(one, adaptive), eight_bit=rounded)


def _adapted(measured: M, adaptive: Sequence[Measured]) -> M:
    """Return ``measured`` with the lowest AUCs among ``adaptive`` attacks; without any if there are none."""
    detected = [(attack.detection, attack) for attack in adaptive if attack.detection is not None]
    if not detected:
        tails = {name: ends for name, ends in measured.intervals.items() if not name.endswith("_tailed")}
        return replace(measured, detection=None, intervals=tails)
    one, by_one = min(detected, key=lambda pair: pair[0].one_tailed)
    two, by_two = min(detected, key=lambda pair: pair[0].two_tailed)
    adapted = {
        "adaptive_one_tailed": by_one.intervals["one_tailed"],
        "adaptive_two_tailed": by_two.intervals["two_tailed"],
        "adaptive_success": by_two.intervals["success"],
    }
    return replace(
        measured,
        adaptive_one_tailed=one.one_tailed,
        adaptive_two_tailed=two.two_tailed,
        adaptive_success=by_two.success,
        intervals=measured.intervals | adapted,
    )


def median_log_density(model: Model) -> float:
    """Return the median of log q(x) / D over the held-out images of ``model``, in nats per dimension.

    There the detection by log q(x) is least suspicious: it is the ``median`` of the attacks.
    """
    held_out = HeldOut.of(model)
    if held_out is None:
        raise CandidError("The model has no held-out scores to take the median of: calibrate it first.")
    if "log_density" not in held_out.statistics:
        raise CandidError("The model has no held-out likelihood to fool: attack the decision alone.")
    ordered = np.sort(held_out.statistics["log_density"])
    return float(ordered[(len(ordered) - 1) // 2]) / density_dimensions(model)


def _mean(values: Array) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


def _contrast(images: Array) -> float:
    return float(images.reshape(len(images), -1).std(1, np.float64, ddof=1).mean())


@dataclass(frozen=True)
class AttackInputs:
    """The images under attack."""

    images: Array
    """8-bit, (N, C, H, W)."""
    labels: Array
    targets: Array | None
    """Target classes, (N,); None for untargeted attacks."""
    names: tuple[str, ...]
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class AttackedModel:
    """One model under all attacks."""

    name: str
    model: Model
    inputs: AttackInputs
    clean: Predictions
    attacks: dict[tuple[float, float], AttackedImages]
    """Results by kappa and d."""
    metrics: tuple[AttackMetrics, ...]

    @property
    def beta(self) -> float | None:
        """The beta that the model was trained with."""
        return self.model.record.beta


@dataclass(frozen=True)
class AttackResult:
    """The result of :func:`candid.attack`: every model under every attack."""

    data: str
    """The data set that the images are from."""
    options: AttackOptions
    models: tuple[AttackedModel, ...]
    """The metrics and attacked images of each model."""
    notes: tuple[Note, ...] = ()
    """What was left out, and why."""

    def __iter__(self) -> Iterator[AttackedModel]:
        return iter(self.models)

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics as JSON."""
        metrics = [attack.to_dict() for model in self.models for attack in model.metrics]
        return {"attack": self.options.described(self.data), "metrics": metrics}

"""Metrics of attacks: success, size of the perturbation, and whether the detection notices."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

import torch
from scipy.stats import binomtest, quantile_test
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.metrics import mean_entropy
from candid.inference.predictions import Predictions
from candid.inference.roc import area_under_curve, paired_placements, placement_interval
from candid.models.protocol import Model, density_dimensions
from candid.robustness.attacks.search import AttackResult
from candid.trust.detectors import OneTailed, ScalarDetector, TwoTailed
from candid.trust.judge import HeldOut

Ends = tuple[float, float]
"""The ends of an interval."""
M = TypeVar("M", bound="Measured")
VISIBLE = 4 / 255
"""The root mean square of a perturbation from which it can be seen, roughly: 36 dB below white."""


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
        found: dict[str, Any] = _as_json(asdict(self))
        return found | {"beta": None if self.beta is None else str(self.beta)}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def attack_metrics(
    name: str,
    beta: float | None,
    setting: tuple[float, float],
    attack: AttackResult,
    originals: Tensor,
    clean: Predictions,
    held_out: HeldOut | None,
    targets: Tensor | None,
) -> AttackMetrics:
    """Return the metrics of an ``attack`` with kappa and d of ``setting`` on the 8-bit ``originals``."""
    attacked = ~attack.already_misclassified
    own, *rounded = (
        _measured(each, originals, clean, held_out, targets)
        for each in (attack, attack.eight_bit)
        if each is not None
    )
    survived = (attack.success & attack.rounded_success)[attacked]
    if len(survived):
        own.intervals["rounded_success"] = share_interval(survived)
    return AttackMetrics(
        model=name,
        beta=beta,
        kappa=setting[0],
        d=setting[1],
        images=len(attack),
        misclassified=int((clean.logits.argmax(1) != clean.labels).sum()),
        already_misclassified=int(attack.already_misclassified.sum()),
        rounded_success=_mean(survived),
        steps=float(attack.steps.double().mean()),
        most_steps=int(attack.steps.max()),
        eight_bit=rounded[0] if rounded else None,
        **vars(own),
    )


def _measured(
    attack: AttackResult,
    originals: Tensor,
    clean: Predictions,
    held_out: HeldOut | None,
    targets: Tensor | None,
) -> Measured:
    attacked = ~attack.already_misclassified
    fooled = attack.success & attacked
    success = _mean(attack.success[attacked])
    if success is None:
        return Measured()
    distances = torch.where(attack.success, attack.distance, math.inf)[attacked]
    intervals = {"success": share_interval(attack.success[attacked]), "l2_median": median_interval(distances)}
    if not fooled.any():
        return Measured(success=success, intervals={"success": intervals["success"]})
    wrong = attack.posterior.argmax(1) if targets is None else targets
    found = Measured(
        success=success,
        l2_mean=_mean(attack.distance[fooled]),
        l2_median=median(distances.tolist()),
        per_pixel=_mean(attack.per_pixel[fooled]),
        confidence=_mean(attack.posterior.gather(1, wrong[:, None])[fooled]),
        entropy_before=mean_entropy(clean.posterior[fooled]),
        entropy_after=mean_entropy(attack.posterior[fooled]),
        contrast=_contrast(attack.images[fooled]) / max(1e-9, _contrast(originals[fooled] / 255)),
        intervals=intervals,
    )
    if attack.log_density is None or clean.log_density is None:
        return found
    before, after = clean.log_density[fooled], attack.log_density[fooled]
    bits = -1 / (math.log(2) * originals[0].numel())
    found = replace(found, bits_before=bits * float(before.mean()), bits_after=bits * float(after.mean()))
    return found if held_out is None else _with_detection(found, before, after, held_out)


def _with_detection(found: Measured, before: Tensor, after: Tensor, held_out: HeldOut) -> Measured:
    """Add the AUCs of images with these log densities ``before`` and ``after`` the attack."""
    known, rows = held_out.statistics["log_density"], torch.arange(len(before))
    areas, intervals = {}, dict(found.intervals)
    tests: dict[str, ScalarDetector] = {"one_tailed": OneTailed(), "two_tailed": TwoTailed()}
    for name, test in tests.items():
        inliers, outliers = (test.fit(known).score(each) for each in (before, after))
        areas[name] = area_under_curve(inliers, outliers)
        intervals[name] = placement_interval([paired_placements(inliers, outliers[None], rows)])
    return replace(found, detection=Detected(**areas), intervals=intervals)


def share_interval(hits: Tensor) -> Ends:
    """Return the exact 95 % interval (Clopper and Pearson) of the share of ``hits``, (N,).

    >>> low, high = share_interval(torch.tensor([True] * 50))
    >>> round(low, 3), high
    (0.929, 1.0)
    """
    low, high = binomtest(int(hits.sum()), len(hits)).proportion_ci(0.95, method="exact")
    return float(low), float(high)


def median_interval(values: Tensor) -> Ends:
    """Return the 95 % interval of a median, from two of the ``values`` (N,); 0 to infinity if N is below 6.

    How many values lie below the median is binomial, whatever their distribution.

    >>> median_interval(torch.arange(1.0, 7.0)), median_interval(torch.ones(5))
    ((1.0, 6.0), (0.0, inf))
    """
    low, high = quantile_test(values.double().numpy(), p=0.5).confidence_interval(0.95)
    return (0.0, math.inf) if math.isnan(low) else (float(low), float(high))


def without_lone_detection(found: Sequence[AttackMetrics]) -> Iterable[AttackMetrics]:
    """Yield each with the attack that also fools the detection; no detection is shown without it."""
    for each in found:
        adaptive = [other for other in found if other.d > 0 and other.kappa == each.kappa]
        rounded = each.eight_bit and _adapted(each.eight_bit, [other.as_file for other in adaptive])
        yield replace(_adapted(each, adaptive), eight_bit=rounded)


def _adapted(own: M, adaptive: Sequence[Measured]) -> M:
    """Return ``own`` with the lowest AUCs among the ``adaptive`` attacks; without any if there are none."""
    known = [(each.detection, each) for each in adaptive if each.detection is not None]
    if not known:
        tails = {name: ends for name, ends in own.intervals.items() if not name.endswith("_tailed")}
        return replace(own, detection=None, intervals=tails)
    one, by_one = min(known, key=lambda pair: pair[0].one_tailed)
    two, by_two = min(known, key=lambda pair: pair[0].two_tailed)
    adapted = {
        "adaptive_one_tailed": by_one.intervals["one_tailed"],
        "adaptive_two_tailed": by_two.intervals["two_tailed"],
        "adaptive_success": by_two.intervals["success"],
    }
    return replace(
        own,
        adaptive_one_tailed=one.one_tailed,
        adaptive_two_tailed=two.two_tailed,
        adaptive_success=by_two.success,
        intervals=own.intervals | adapted,
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
    return float(held_out.statistics["log_density"].median()) / density_dimensions(model)


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _contrast(images: Tensor) -> float:
    return float(images.double().flatten(1).std(1).mean())

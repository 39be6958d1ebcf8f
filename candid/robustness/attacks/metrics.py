"""Metrics of attacks: success, size of the perturbation, and whether the detection notices."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.metrics import mean_entropy
from candid.inference.predictions import Predictions
from candid.inference.roc import area_under_curve
from candid.models.protocol import Model
from candid.robustness.attacks.search import AttackResult
from candid.trust.detectors import OneTailed, TwoTailed
from candid.trust.judge import HeldOut

VISIBLE = 4 / 255
"""The root mean square of a perturbation from which it can be seen, roughly: 36 dB below white."""


@dataclass(frozen=True)
class Detected:
    """AUCs of separating attacked images from their originals, by log q(x) alone."""

    one_tailed: float
    two_tailed: float


@dataclass(frozen=True)
class AttackMetrics:
    """One attack on one model. Means are over the images that it fooled; rates are shares."""

    model: str
    beta: float | None
    kappa: float
    d: float
    images: int
    misclassified: int
    """Images that are misclassified before the attack, as any class."""
    already_misclassified: int
    """Images that are misclassified as the attack wants before it begins: excluded from the metrics below."""
    success: float | None
    """Share of the attacked images that were fooled; None if there were none."""
    rounded_success: float | None
    """Share of the attacked images that were fooled and still fool the model when rounded to 8 bits."""
    steps: float
    """Gradient steps, mean over all images."""
    most_steps: int
    """Mean L2 norm of the perturbation of an image."""
    l2_mean: float | None = None
    l2_median: float | None = None
    """Median over all attacked images; infinite if half of them were not fooled."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON: infinities are strings, and so is beta."""
        values = asdict(self) | {"beta": None if self.beta is None else str(self.beta)}
        return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


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
    fooled = attack.success & attacked
    found = AttackMetrics(
        name,
        beta,
        *setting,
        len(attack),
        int((clean.logits.argmax(1) != clean.labels).sum()),
        int(attack.already_misclassified.sum()),
        _mean(attack.success[attacked]),
        _mean((attack.success & attack.rounded_success)[attacked]),
        float(attack.steps.double().mean()),
        int(attack.steps.max()),
    )
    if not fooled.any():
        return found
    wrong = attack.posterior.argmax(1) if targets is None else targets
    distances = torch.where(attack.success, attack.distance, math.inf)[attacked].tolist()
    found = replace(
        found,
        l2_mean=_mean(attack.distance[fooled]),
        l2_median=median(distances),
        per_pixel=_mean(attack.per_pixel[fooled]),
        confidence=_mean(attack.posterior.gather(1, wrong[:, None])[fooled]),
        entropy_before=mean_entropy(clean.posterior[fooled]),
        entropy_after=mean_entropy(attack.posterior[fooled]),
        contrast=_contrast(attack.images[fooled]) / max(1e-9, _contrast(originals[fooled] / 255)),
    )
    if attack.log_density is None or clean.log_density is None:
        return found
    bits = -1 / (math.log(2) * originals[0].numel())
    found = replace(
        found,
        bits_before=bits * float(clean.log_density[fooled].mean()),
        bits_after=bits * float(attack.log_density[fooled].mean()),
    )
    if held_out is None:
        return found
    before, after, known = clean.log_density, attack.log_density, held_out.statistics["log_density"]
    areas = [
        area_under_curve(test.score(before[fooled]), test.score(after[fooled]))
        for test in (OneTailed().fit(known), TwoTailed().fit(known))
    ]
    return replace(found, detection=Detected(*areas))


def without_lone_detection(found: Sequence[AttackMetrics]) -> Iterable[AttackMetrics]:
    """Yield each with the attack that also fools the detection; no detection is shown without it."""
    for each in found:
        adaptive = [
            (other.detection, other.success)
            for other in found
            if other.d > 0 and other.kappa == each.kappa and other.detection is not None
        ]
        if not adaptive:
            yield replace(each, detection=None)
            continue
        strongest, success = min(adaptive, key=lambda other: other[0].two_tailed)
        yield replace(
            each,
            adaptive_one_tailed=min(detection.one_tailed for detection, _ in adaptive),
            adaptive_two_tailed=strongest.two_tailed,
            adaptive_success=success,
        )


def median_log_density(model: Model) -> float:
    """Return the median of log q(x) / D over the held-out images of ``model``, in nats per dimension.

    There the detection by log q(x) is least suspicious: it is the ``median`` of the attacks.
    """
    held_out = HeldOut.of(model)
    if held_out is None:
        raise CandidError("The model has no held-out scores to take the median of: calibrate it first.")
    if "log_density" not in held_out.statistics:
        raise CandidError("A ResNet has no likelihood to fool: attack a generative model.")
    return float(held_out.statistics["log_density"].median()) / model.dimensions


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _contrast(images: Tensor) -> float:
    return float(images.double().flatten(1).std(1).mean())

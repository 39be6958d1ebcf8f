"""What the numbers of an audit mean, in plain words; every threshold is here, and on the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from candid._support.numbers import Array
from candid._support.randomness import draws
from candid._support.text import GOOD, SOME, listed, number, percent, span
from candid.evaluation.calibration_error import CRITICAL, expected_calibration_error, top_bins
from candid.judging.held_out import LEVEL
from candid.robustness.attacks.metrics import VISIBLE, AttackMetrics
from candid.robustness.corruptions.metrics import CorruptedModel

Mark = Literal["good", "fair", "poor", "unknown"]
HIGH, USEFUL = 0.95, 0.75
"""Accuracies of good and fair models."""
HARDLY = 0.1
"""Share of the way from guessing to always right; a model below it counts as guessing."""
CLOSE, NEAR = 0.02, 0.05
"""Expected calibration errors of the most probable class."""
BAND = 0.99
"""Share of honest tests whose false alarms are not beyond what chance explains."""
STEADY, SHAKEN = 0.05, 0.15
"""Shares of images that only corruptions make wrong."""
FOOLED = 0.1
"""Share of fooled images above which a model counts as defeated."""
CONTROL, MARGIN = "code-length", 0.01
"""The score without a model, and by how much another one must beat it."""
DRAWS = 40
"""Draws of labels, for the calibration error that chance alone makes."""

CRITERIA = {
    "Accuracy": f"good: at least {100 * HIGH:g} % correct; fair: at least {100 * USEFUL:g} %; poor: less, or "
    "hardly better than always naming the most frequent class; not known: too few images to say. What is "
    "enough depends on the cost of a mistake.",
    "Calibration": f"good: expected calibration error of the most probable class at most {100 * CLOSE:g} %; "
    f"fair: at most {100 * NEAR:g} %; poor: more; not known: above {100 * CLOSE:g} %, but a perfectly "
    "calibrated model would show as much by chance on this number of images (5 of 100 times).",
    "False alarms": f"good: the share of normal images with p ≤ {LEVEL:g} is not larger than in "
    f"{50 * (1 + BAND):g} of 100 honest tests with this number of images; poor: it is larger.",
    "Out of distribution": "by the score behind the verdicts; good: the area under the ROC curve is at least "
    f"{100 * GOOD:g} % for every set; fair: above {100 * SOME:g} % for every set; poor: less. A set that the "
    "length of a lossless code, which needs no model, finds as well never counts as good.",
    "Corruptions": f"good: corruptions make at most {100 * STEADY:g} of 100 more images wrong, on average "
    f"over all corruptions and severities; fair: at most {100 * SHAKEN:g}; poor: more; not known: the model "
    "hardly does better than guessing.",
    "Attacks": f"poor: some attack fooled more than {100 * FOOLED:g} % of the images; fair: none did, which "
    "does not show that better attacks would fail. Never good.",
}
"""How each aspect is graded."""


@dataclass(frozen=True)
class Grade:
    """The grade of one aspect of a model."""

    aspect: str
    grade: Mark
    value: str
    """The number behind it, short."""
    sentence: str


def accuracy(metrics: dict[str, Any], chance: float) -> Grade:
    """Grade the accuracy; ``chance`` is the accuracy of always naming the most frequent class."""
    value, (low, high) = metrics["accuracy"], metrics["intervals"]["accuracy"]
    grade: Mark = "good" if value >= HIGH else "fair" if value >= USEFUL else "poor"
    text = f"{percent(value)} of {metrics['images']:,} images are correct (95 % interval: {span(low, high)})"
    if guesses(metrics, chance):
        return Grade("Accuracy", "poor", percent(value), f"{text}: hardly better than guessing.")
    if low <= chance:
        few = f"{text}: too few images to rule out guessing."
        return Grade("Accuracy", "unknown", percent(value), few)
    wrong = "none is wrong" if value == 1 else f"about one in {_whole(1 / (1 - value))} is wrong"
    return Grade("Accuracy", grade, percent(value), f"{text}: {wrong}.")


def guesses(metrics: dict[str, Any], chance: float) -> bool:
    """Return whether the accuracy is that of a model that knows next to nothing."""
    return bool(metrics["accuracy"] <= chance + HARDLY * (1 - chance))


def chance_of(labels: Array) -> float:
    """Return the share of the most frequent class, (N,)."""
    return float(np.bincount(labels).max()) / len(labels)


def calibration(metrics: dict[str, Any], confidence: float, by_chance: float) -> Grade:
    """Grade the calibration error; ``confidence`` is its mean, ``by_chance`` see :func:`error_by_chance`."""
    error, (low, high) = metrics["top1_ece"], metrics["intervals"]["top1_ece"]
    grade: Mark = "good" if error <= CLOSE else "fair" if error <= NEAR else "poor"
    way = "over-confident" if confidence > metrics["accuracy"] else "under-confident"
    text = f"Posteriors are off by {percent(error)} on average (95 % interval: {span(low, high)})"
    if CLOSE < error <= by_chance:
        grade = "unknown"
        text += (
            f": too few images to say, because a perfectly calibrated model shows up to {percent(by_chance)} "
            "by chance."
        )
    elif grade == "good":
        text += ": as they should be."
    else:
        text += f": {way}, mean confidence {percent(confidence)}, accuracy {percent(metrics['accuracy'])}."
    return Grade("Calibration", grade, percent(error), f"{text} {_when_confident(metrics)}")


def _when_confident(metrics: dict[str, Any]) -> str:
    confident = f"very confident (posterior of at least {100 * CRITICAL:g} %)"
    times = metrics["oce"]
    if times is None:
        return f"It is never {confident}."
    low, high = metrics["intervals"]["oce"]
    if times == 0:
        return (
            f"Where it is {confident}, it is never wrong here; the true rate may be up to {_times(high)} the "
            "allowed one (95 % interval)."
        )
    return (
        f"Where it is {confident}, it is wrong {_times(times)} as often as this allows (95 % interval: "
        f"{_times(low).removesuffix(' times')} to {_times(high)})."
    )


def error_by_chance(posterior: Array) -> float:
    """Return the calibration error below which a perfectly calibrated model stays 95 of 100 times.

    The labels are drawn from its own posteriors (N, M).
    """
    confidence, predicted = posterior.max(1), posterior.argmax(1)
    random = draws(0, 17)
    errors = []
    for _ in range(DRAWS):
        uniform = (random.words(len(confidence)) & (2**53 - 1)) / 2**53
        labels = np.where(uniform < confidence, predicted, (predicted + 1) % posterior.shape[1])
        errors.append(expected_calibration_error(top_bins(posterior, labels)))
    return float(np.quantile(errors, 0.95))


def false_alarms(metrics: dict[str, Any]) -> Grade:
    """Grade whether p-values keep their promise on images that are not among the held-out ones."""
    if "false_positives" not in metrics:
        return Grade("False alarms", "unknown", "–", NOT_CALIBRATED)
    images = metrics["images"] - metrics["held_out_overlap"]
    if images <= 0:
        return Grade("False alarms", "unknown", "–", "Not checked: all images are among the held-out ones.")
    rate = metrics["false_positives"][metrics["verdicts"]["score"]][f"{LEVEL:g}"]
    ranks = metrics["verdicts"]["n_reference"]
    if LEVEL * (ranks + 1) < 1:
        few = f"Not known: {ranks:,} held-out images allow no p-value of {LEVEL:g}; calibrate with more."
        return Grade("False alarms", "unknown", "–", few)
    most = most_false_alarms(images, ranks)
    measured = f"False alarms {percent(rate)} at a level of {100 * LEVEL:g} %"
    source = f"on {images:,} images, ranked among {ranks:,} held-out ones; chance explains up to"
    if rate <= most:
        text = f"{measured}: as promised ({source} {percent(most)})."
        return Grade("False alarms", "good", percent(rate), text)
    text = (
        f"{measured}: more than promised ({source} {percent(most)}). These images differ from the held-out "
        "ones."
    )
    return Grade("False alarms", "poor", percent(rate), text)


def most_false_alarms(images: int, ranks: int) -> float:
    """Return the share with p <= ``LEVEL`` that chance explains, with ``ranks`` held-out images.

    The count is beta-binomial, over the draw of the images and of the held-out ones: of the n + 1 places
    among the latter, k are extreme at the level.
    """
    from scipy.stats import betabinom

    extreme = math.floor(LEVEL * (ranks + 1))
    return float(betabinom.ppf((1 + BAND) / 2, images, extreme, ranks + 1 - extreme)) / images


NOT_CALIBRATED = "Not known: the model has no held-out scores, which p-values come from."


def out_of_distribution(metrics: dict[str, Any]) -> Grade:
    """Grade the score behind the verdicts."""
    aspect = "Out of distribution"
    if "ood" not in metrics:
        return Grade(aspect, "unknown", "–", NOT_CALIBRATED)
    if not metrics["ood"]:
        return Grade(aspect, "unknown", "–", "Not known: no other images were given (--ood NAME=PATH).")
    score = metrics["verdicts"]["score"]
    areas = {name: scores[score]["auc"] for name, scores in metrics["ood"].items()}
    easy = [
        name
        for name, scores in metrics["ood"].items()
        if CONTROL in scores and scores[CONTROL]["auc"] + MARGIN >= areas[name] >= GOOD
    ]
    earned = [name for name in areas if areas[name] >= GOOD and name not in easy]
    partly = [name for name in areas if SOME < areas[name] < GOOD]
    missed = [name for name in areas if areas[name] <= SOME]
    grade: Mark = "poor" if missed else "fair" if partly or easy else "good"
    sentences = [
        f"{what}: {listed(f'{name} ({percent(areas[name])})' for name in names)}{note}."
        for what, names, note in (
            ("Detected", earned, ""),
            ("Detected, but no better than by the length of a lossless code", easy, ""),
            ("Partly detected", partly, ""),
            ("Not detected", missed, ", near chance or worse"),
        )
        if names
    ]
    text = f"Areas under the ROC curve of the score '{score}'. {' '.join(sentences)}"
    return Grade(aspect, grade, f"{percent(min(areas.values()))} at least", text)


def corruptions(
    corrupted: CorruptedModel | None, reason: str, guesses: bool = False, score: str | None = None
) -> Grade:
    """Grade how many more images are wrong; ``reason`` says why there is no such study.

    A model that ``guesses`` has nothing to lose. ``score`` is the one behind the verdicts.
    """
    if corrupted is None:
        return Grade("Corruptions", "unknown", "–", reason)
    means = corrupted.mean_errors
    grade: Mark = "good" if corrupted.loss <= STEADY else "fair" if corrupted.loss <= SHAKEN else "poor"
    worst = max(means, key=lambda name: means[name])
    text = (
        f"Of {corrupted.images:,} images, corruptions make {percent(corrupted.mean_error)} wrong instead of "
        f"{percent(corrupted.clean_error)}; worst: {worst.replace('_', ' ')}, {percent(means[worst])}. "
    )
    if guesses:
        grade, text = "unknown", "It guesses, so corruptions can't make it worse. "
    areas = corrupted.auc.get(score or "", {})
    if areas:
        area = sum(areas.values()) / len(areas)
        says = "well" if area >= GOOD else "in part" if area > SOME else "hardly"
        text += f"The score '{score}' detects corruptions {says} (AUC {percent(area)})."
    else:
        text += "Whether corruptions are detected is not known: there are no held-out scores."
    return Grade("Corruptions", grade, f"{100 * corrupted.loss:+.1f} points", text)


def attacks(metrics: Sequence[AttackMetrics], reason: str) -> Grade:
    """Grade the attacks; never good, because only attacks that were tried can fail."""
    tried = [measured for measured in metrics if measured.success is not None]
    if not tried:
        return Grade("Attacks", "unknown", "–", reason or "No image could be attacked.")
    most = max(measured.as_file.success or 0 for measured in tried)
    gentlest = min(
        (measured for measured in tried if measured.as_file.per_pixel is not None),
        key=lambda measured: (-(measured.as_file.success or 0), measured.as_file.per_pixel or 0),
        default=None,
    )
    images = max(measured.images - measured.already_misclassified for measured in tried)
    text = f"{percent(most)} of {images:,} images were moved to a wrong class"
    if gentlest is not None and (size := gentlest.as_file.per_pixel) is not None:
        seen = "too little to be seen" if size < VISIBLE else "enough to be seen"
        text += (
            f", {percent(gentlest.as_file.success or 0)} by changes of {255 * size:.2g} of 255 grey "
            f"levels on average (κ = {number(gentlest.kappa)}), {seen}"
        )
    text += "."
    adaptive = [
        (measured.adaptive_two_tailed, measured.adaptive_success)
        for measured in (metric.as_file for metric in tried)
        if measured.adaptive_two_tailed is not None and (measured.adaptive_success or 0) > FOOLED
    ]
    if adaptive:
        area, success = min(adaptive)
        text += (
            " An attack that knows the detector by likelihood lowers its area under the ROC curve to "
            f"{percent(area)} (50 % is chance) and fools {percent(success or 0)} of the images."
        )
    else:
        likelihood = any(measured.bits_before is not None for measured in tried)
        text += (
            " Whether its likelihood detects attacks is not known."
            if likelihood
            else " It has no likelihood to detect attacks by."
        )
    if most > FOOLED:
        return Grade(
            "Attacks", "poor", f"{percent(most)} fooled", f"{text} Don't rely on it against an adversary."
        )
    return Grade(
        "Attacks",
        "fair",
        f"{percent(most)} fooled",
        f"{text} That does not show that better attacks would fail.",
    )


def _whole(value: float) -> str:
    return f"{value:.1f}" if value < 3 else f"{value:,.0f}"


def _times(value: float) -> str:
    return f"{value:.1f} times" if value < 10 else f"{value:,.0f} times"

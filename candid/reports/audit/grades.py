"""What figures mean, in plain words: every threshold of an audit stands here, and on its page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from scipy.stats import betabinom
from torch import Tensor

from candid._support.randomness import generator
from candid._support.tables import GOOD, SOME
from candid._support.text import listed, number, percent, span
from candid.evaluation.calibration_error import CRITICAL, expected_calibration_error, top_bins
from candid.robustness.attacks.metrics import VISIBLE, AttackMetrics
from candid.robustness.corruptions.benchmark import CorruptedModel
from candid.trust.judge import LEVEL

Mark = Literal["good", "fair", "poor", "unknown"]
HIGH, USEFUL = 0.95, 0.75
"""Accuracies."""
HARDLY = 0.1
"""Of the way from guessing to always right: up to there a model counts as one that guesses."""
CLOSE, NEAR = 0.02, 0.05
"""Expected calibration errors of the most probable class."""
BAND = 0.99
"""Share of honest tests whose false alarms are not beyond what chance explains."""
STEADY, SHAKEN = 0.05, 0.15
"""Shares of images that corruptions make wrong in addition."""
FOOLED = 0.1
"""Share of fooled images from which on a model counts as defeated."""
CONTROL, MARGIN = "code-length", 0.01
"""The test without a model, and by how much another must beat it to be worth more."""
DRAWS = 40
"""Of labels, for the calibration error that chance alone makes."""

CRITERIA = {
    "Accuracy": f"good from {100 * HIGH:g} % of the images right on, fair from {100 * USEFUL:g} % on, "
    "else poor, and so is what hardly beats always naming the most frequent class; not known where too few "
    "images tell it from that. What is enough depends on what a mistake costs.",
    "Calibration": f"good up to an expected calibration error of {100 * CLOSE:g} % for the most probable "
    f"class, fair up to {100 * NEAR:g} %, else poor; above {100 * CLOSE:g} % not known where a perfectly "
    "calibrated model would show as much by chance on so few images (5 of 100 times).",
    "False alarms": f"good if the share of usual images with p ≤ {LEVEL:g} is not beyond what "
    f"{50 * (1 + BAND):g} of 100 honest tests show, given how many images there are; else poor.",
    "Out of distribution": "by the test that verdicts rest on: good if the area under the ROC curve is "
    f"at least {100 * GOOD:g} % for every set, fair if it is above {100 * SOME:g} % for every set, else "
    "poor. A set that the length of a lossless code, which needs no model, finds as well never counts as "
    "good.",
    "Corruptions": f"good if corruptions make at most {100 * STEADY:g} of 100 images wrong that were "
    f"right, fair up to {100 * SHAKEN:g}, else poor; on average over all corruptions and severities. Not "
    "known of a model that hardly does better than guessing.",
    "Attacks": f"poor if more than {100 * FOOLED:g} % of the images were fooled by any attack, else fair: "
    "that some attacks fail does not show that better ones would. Never good.",
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
    """Of an evaluation; ``chance`` is how often one is right who always names the most frequent class."""
    value, (low, high) = metrics["accuracy"], metrics["intervals"]["accuracy"]
    grade: Mark = "good" if value >= HIGH else "fair" if value >= USEFUL else "poor"
    text = f"{percent(value)} of {metrics['images']:,} images are right (95 % interval: {span(low, high)})"
    if guesses(metrics, chance):
        return Grade("Accuracy", "poor", percent(value), f"{text}: hardly better than guessing.")
    if low <= chance:
        few = f"{text}: too few images to tell it from guessing."
        return Grade("Accuracy", "unknown", percent(value), few)
    wrong = "none is wrong" if value == 1 else f"about one in {_whole(1 / (1 - value))} is wrong"
    return Grade("Accuracy", grade, percent(value), f"{text}: {wrong}.")


def guesses(metrics: dict[str, Any], chance: float) -> bool:
    """Whether the accuracy is that of a model that knows next to nothing."""
    return bool(metrics["accuracy"] <= chance + HARDLY * (1 - chance))


def chance_of(labels: Tensor) -> float:
    """Share of the most frequent class, (N,)."""
    return float(labels.bincount().max()) / len(labels)


def calibration(metrics: dict[str, Any], confidence: float, by_chance: float) -> Grade:
    """``confidence`` is the mean of the most probable class, ``by_chance`` as of :func:`error_by_chance`."""
    error, (low, high) = metrics["top1_ece"], metrics["intervals"]["top1_ece"]
    grade: Mark = "good" if error <= CLOSE else "fair" if error <= NEAR else "poor"
    way = "over-confident" if confidence > metrics["accuracy"] else "under-confident"
    text = f"Posteriors are off by {percent(error)} on average (95 % interval: {span(low, high)})"
    if CLOSE < error <= by_chance:
        grade = "unknown"
        text += (
            f": too few images to tell, as chance alone makes up to {percent(by_chance)} of a perfectly "
            "calibrated model."
        )
    elif grade == "good":
        text += ": as they should be."
    else:
        text += f": {way}, {percent(confidence)} sure on average and {percent(metrics['accuracy'])} right."
    return Grade("Calibration", grade, percent(error), f"{text} {_when_sure(metrics)}")


def _when_sure(metrics: dict[str, Any]) -> str:
    sure = f"sure (posterior of at least {100 * CRITICAL:g} %)"
    times = metrics["oce"]
    if times is None:
        return f"It is never {sure}."
    low, high = metrics["intervals"]["oce"]
    if times == 0:
        return (
            f"Where it is {sure}, it is never wrong here; it may be wrong up to {_times(high)} as often as "
            "it should (95 % interval)."
        )
    return (
        f"Where it is {sure}, it is wrong {_times(times)} as often as it may be (95 % interval: "
        f"{_times(low).removesuffix(' times')} to {_times(high)})."
    )


def error_by_chance(posterior: Tensor) -> float:
    """The calibration error that a perfectly calibrated model stays below 95 of 100 times, on so many images.

    The labels are drawn from its own posteriors (N, M).
    """
    confidence, predicted = posterior.max(1)
    random = generator(0, 17)
    errors = []
    for _ in range(DRAWS):
        right = torch.rand(len(confidence), generator=random, dtype=torch.float64) < confidence
        labels = torch.where(right, predicted, (predicted + 1) % posterior.shape[1])
        errors.append(expected_calibration_error(top_bins(posterior, labels)))
    return float(torch.tensor(errors, dtype=torch.float64).quantile(0.95))


def false_alarms(metrics: dict[str, Any]) -> Grade:
    """Whether p-values keep what they promise, on the images that the model was not calibrated on."""
    if "false_positives" not in metrics:
        return Grade("False alarms", "unknown", "–", NOT_CALIBRATED)
    images = metrics["images"] - metrics["held_out_overlap"]
    if images <= 0:
        return Grade(
            "False alarms", "unknown", "–", "Not checked: all images are those that it was calibrated on."
        )
    rate = metrics["false_positives"][metrics["verdicts"]["test"]][f"{LEVEL:g}"]
    ranks = metrics["verdicts"]["ranked_among"]
    if LEVEL * (ranks + 1) < 1:
        few = f"Not known: {ranks:,} held-out images allow no p-value of {LEVEL:g}; calibrate with more."
        return Grade("False alarms", "unknown", "–", few)
    most = most_false_alarms(images, ranks)
    found = f"False alarms {percent(rate)} at a level of {100 * LEVEL:g} %"
    source = f"on {images:,} images, ranked among {ranks:,} held-out ones; chance explains up to"
    if rate <= most:
        text = f"{found}: as promised ({source} {percent(most)})."
        return Grade("False alarms", "good", percent(rate), text)
    text = (
        f"{found}: more than promised ({source} {percent(most)}). These images are unlike the held-out ones."
    )
    return Grade("False alarms", "poor", percent(rate), text)


def most_false_alarms(images: int, ranks: int) -> float:
    """The share with p <= ``LEVEL`` that chance explains, if they are ranked among so many held-out ones.

    The count is beta-binomial, over the draw of the images and of the held-out ones: of the n + 1 places
    among the latter, k are extreme at the level.
    """
    extreme = math.floor(LEVEL * (ranks + 1))
    return float(betabinom.ppf((1 + BAND) / 2, images, extreme, ranks + 1 - extreme)) / images


NOT_CALIBRATED = "Not known: the model has no held-out scores, which p-values come from."


def out_of_distribution(metrics: dict[str, Any]) -> Grade:
    """By the test that verdicts rest on."""
    aspect = "Out of distribution"
    if "ood" not in metrics:
        return Grade(aspect, "unknown", "–", NOT_CALIBRATED)
    if not metrics["ood"]:
        return Grade(aspect, "unknown", "–", "Not known: no other images were given (--ood NAME=PATH).")
    test = metrics["verdicts"]["test"]
    areas = {name: tests[test]["auc"] for name, tests in metrics["ood"].items()}
    easy = [
        name
        for name, tests in metrics["ood"].items()
        if tests[CONTROL]["auc"] + MARGIN >= areas[name] >= GOOD
    ]
    earned = [name for name in areas if areas[name] >= GOOD and name not in easy]
    partly = [name for name in areas if SOME < areas[name] < GOOD]
    missed = [name for name in areas if areas[name] <= SOME]
    grade: Mark = "poor" if missed else "fair" if partly or easy else "good"
    sentences = [
        f"{what}: {listed(f'{name} ({percent(areas[name])})' for name in names)}{note}."
        for what, names, note in (
            ("Told apart", earned, ""),
            ("Told apart, but no better than by the length of a lossless code", easy, ""),
            ("Told apart in part", partly, ""),
            ("Not told apart", missed, ", near chance or worse"),
        )
        if names
    ]
    text = f"Areas under the ROC curve of the test '{test}'. {' '.join(sentences)}"
    return Grade(aspect, grade, f"{percent(min(areas.values()))} at least", text)


def corruptions(found: CorruptedModel | None, reason: str, guesses: bool = False) -> Grade:
    """By how many more images are wrong; ``reason`` is why there is no sweep.

    A model that ``guesses`` has nothing to lose.
    """
    if found is None:
        return Grade("Corruptions", "unknown", "–", reason)
    means = found.mean_errors
    grade: Mark = "good" if found.loss <= STEADY else "fair" if found.loss <= SHAKEN else "poor"
    worst = max(means, key=lambda name: means[name])
    text = (
        f"Of {found.images:,} images, corruptions make {percent(found.mean_error)} wrong instead of "
        f"{percent(found.clean_error)}; worst: {worst.replace('_', ' ')}, {percent(means[worst])}. "
    )
    if guesses:
        grade, text = "unknown", "It guesses, so corruptions can't make it worse. "
    areas = found.auc.get(found.score or "", {})
    if areas:
        area = sum(areas.values()) / len(areas)
        says = "well" if area >= GOOD else "in part" if area > SOME else "hardly"
        text += (
            f"The test '{found.score}' notices corruptions {says} (area under the ROC curve {percent(area)})."
        )
    else:
        text += "Whether it notices corruptions is not known: it has no held-out scores."
    return Grade("Corruptions", grade, f"{100 * found.loss:+.1f} points wrong", text)


def attacks(figures: Sequence[AttackMetrics], reason: str) -> Grade:
    """Never good: only attacks that were tried can fail."""
    tried = [each for each in figures if each.success is not None]
    if not tried:
        return Grade("Attacks", "unknown", "–", reason or "No image could be attacked.")
    most = max(each.success or 0 for each in tried)
    gentlest = min(
        (each for each in tried if each.per_pixel is not None),
        key=lambda each: (-(each.success or 0), each.per_pixel or 0),
        default=None,
    )
    images = max(each.images - each.already_misclassified for each in tried)
    text = f"{percent(most)} of {images:,} images were led to a wrong class"
    if gentlest is not None and gentlest.per_pixel is not None:
        seen = "too little to be seen" if gentlest.per_pixel < VISIBLE else "enough to be seen"
        text += (
            f", {percent(gentlest.success or 0)} by changes of {255 * gentlest.per_pixel:.2g} of 255 grey "
            f"levels on average (κ = {number(gentlest.kappa)}), {seen}"
        )
    text += "."
    adaptive = [
        (each.adaptive_two_tailed, each.adaptive_success)
        for each in tried
        if each.adaptive_two_tailed is not None and (each.adaptive_success or 0) > FOOLED
    ]
    if adaptive:
        area, success = min(adaptive)
        text += (
            " An attack that knows of the detection by likelihood brings it down to an area under the ROC "
            f"curve of {percent(area)} (50 % is chance), and fools {percent(success or 0)} of the images."
        )
    else:
        likelihood = any(each.bits_before is not None for each in tried)
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

"""What models are fit for and what not, in sentences from the figures; and how they compare."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from candid._support.numbers import Array
from candid._support.text import Cell, listed, percent, plural, span
from candid.data.datasets import trained_on
from candid.evaluation.result import EvaluationResult, right_ones
from candid.inference.metrics import Interval, binomial_interval
from candid.judging.by_class import ByClass, ClassResult
from candid.models.protocol import can
from candid.reports.audit import grades
from candid.reports.audit.record import AuditedModel, AuditResult, results_by_class
from candid.robustness.attacks.metrics import AttackMetrics
from candid.robustness.corruptions.metrics import CorruptedModel

SLIPS = 0.05
"""Share of accepted foreign images up to which a model keeps them out."""
RELIABLE = 0.9
"""Recall that a class has beyond doubt if it is called reliable."""
DOUBTFUL = 3
"""The most classes that are named as not to be relied on."""
FEW = 100
"""Images below which figures of a set say little."""
THOUSAND = 1000


@dataclass(frozen=True)
class Fitness:
    """What a model is fit for: each entry is a sentence from the figures."""

    summary: list[str]
    """What happens if one acts on what it accepts."""
    fit: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)


def noun(result: AuditResult) -> str:
    """Return what the images are called."""
    return "photos" if any(can(model.loaded, "eye") for model in result.models) else "images"


def fitness(result: AuditResult, i: int) -> Fitness:
    """Return what the model number ``i`` is fit for."""
    evaluation = result.evaluations[i]
    metrics, by_class = evaluation.metrics, results_by_class(evaluation)
    return Fitness(
        list(_summary(metrics, noun(result))),
        list(_fit(metrics, by_class, noun(result))),
        list(_unfit(result, i, by_class)),
        list(untested(result, i, by_class)),
    )


def _rule(metrics: dict[str, Any]) -> tuple[float, float | None, Sequence[float]]:
    """Return the share that is answered, how many answers are right, and the interval of this."""
    rule = metrics["selective"].get("verdicts")
    if rule is None:
        return 1.0, metrics["accuracy"], metrics["intervals"]["accuracy"]
    return rule["coverage"], rule["accepted"], rule["intervals"]["accepted"] or (0.0, 1.0)


def _summary(metrics: dict[str, Any], images: str) -> Iterator[str]:
    coverage, right, ends = _rule(metrics)
    if right is None:
        yield f"If you act on accept, it answers none of these {metrics['images']:,} {images}."
        return
    answered, wrong = round(THOUSAND * coverage), round(THOUSAND * coverage * (1 - right))
    numbers = f"Of 1,000 {images}, {answered:,} are answered, {wrong:,} of these wrongly"
    if "verdicts" not in metrics["selective"]:
        yield (
            f"It has no verdicts, so it answers all {images}; {percent(right)} of the answers are right "
            f"({span(*ends)}). {numbers}."
        )
        return
    shares = metrics["verdicts"]["sets"][metrics["part"]]
    yield (
        f"If you act on accept, it answers {percent(coverage)} of {images} like these; {percent(right)} of "
        f"those answers are right (95 % interval: {span(*ends)}). {numbers}, and {THOUSAND - answered:,} go "
        f"to a person: {percent(shares['ambiguous'])} are ambiguous and {percent(shares['novel'])} are "
        "called novel."
    )
    foreign = metrics["selective"]["verdicts"]["foreign"]
    if foreign:
        shown = listed(f"{percent(share)} of '{name}'" for name, share in foreign.items())
        yield f"Of foreign {images}, {shown} slip through: they are accepted as one of the classes."


def _foreign(metrics: dict[str, Any]) -> dict[str, Interval]:
    """Return the accepted share of each foreign set."""
    rule = metrics["selective"].get("verdicts", {"foreign": {}, "intervals": {"foreign": {}}})
    ends = rule["intervals"]["foreign"]
    return {name: Interval(share, *ends[name]) for name, share in rule["foreign"].items() if ends[name]}


def _fit(metrics: dict[str, Any], by_class: ByClass, images: str) -> Iterator[str]:
    coverage, right, (low, _) = _rule(metrics)
    if metrics["accuracy"] >= grades.HIGH:
        yield (
            f"Answering all {images} without a person where {percent(1 - metrics['accuracy'])} wrong answers "
            "are tolerable."
        )
    if right is not None and right >= grades.USEFUL and coverage < 1:
        yield (
            f"Answering what it accepts where up to {percent(1 - low)} of the answers may be wrong (the "
            f"upper end of the 95 % interval), while a person looks at the other {percent(1 - coverage)}."
        )
    kept = {name: share for name, share in _foreign(metrics).items() if share.high <= SLIPS}
    if kept:
        worst = percent(max(share.high for share in kept.values()))
        names = listed(f"'{name}'" for name in kept)
        yield f"Keeping out images such as {names}: at most {worst} are accepted."
    reliable = [
        row.name + ("" if row.coverage is None else f" ({percent(row.coverage)} accepted)")
        for row in by_class.tested
        if binomial_interval(row.right, row.images, 0.95).low >= RELIABLE
    ]
    if reliable and len(by_class.tested) > 2:
        few = reliable[:5] + ([f"{len(reliable) - 5} more"] if len(reliable) > 5 else [])
        of = "class" if len(reliable) == 1 else "classes"
        yield f"Naming the {of} {listed(few)}: beyond doubt at least {percent(RELIABLE, 0)} are recognised."


def _unfit(result: AuditResult, i: int, by_class: ByClass) -> Iterator[str]:
    model, metrics = result.models[i], result.evaluations[i].metrics
    images = noun(result)
    if metrics["accuracy"] < grades.HIGH:
        yield f"Answering all {images} without a person: {percent(1 - metrics['accuracy'])} would be wrong."
    for name, share in _foreign(metrics).items():
        if share.low > SLIPS:
            yield (
                f"Streams with images such as '{name}': {percent(share.value)} of them "
                f"({span(share.low, share.high)}) are accepted as one of the classes."
            )
        elif share.high > SLIPS:
            yield (
                f"Relying on it to keep out images such as '{name}': {percent(share.value)} are accepted, "
                f"and up to {percent(share.high)} can't be ruled out."
            )
    yield from _unfit_classes(metrics, by_class)
    alarms = grades.false_alarms(metrics)
    if alarms.grade == "poor":
        yield f"Relying on the promised share of novel images. {alarms.sentence}"
    if metrics["top1_ece"] > grades.NEAR and metrics["intervals"]["top1_ece"][0] > grades.NEAR:
        off = percent(metrics["top1_ece"])
        yield f"Decisions by the probabilities themselves: they are off by {off} on average."
    if (corrupted := _corruptions(result, model)) is not None and corrupted.loss > grades.STEADY:
        means = corrupted.mean_errors
        worst = max(means, key=lambda name: means[name])
        yield (
            f"{images.capitalize()} of much worse quality: with {worst.replace('_', ' ')}, "
            f"{percent(means[worst])} are wrong instead of {percent(corrupted.clean_error)} of the same "
            f"{plural(corrupted.images, images[:-1])}."
        )
    fooled = [attacked for attacked in _attacks(result, model) if attacked.as_file.success is not None]
    if fooled and max(attacked.as_file.success or 0.0 for attacked in fooled) > grades.FOOLED:
        most = max(fooled, key=lambda attacked: attacked.as_file.success or 0.0)
        tried = most.images - most.already_misclassified
        yield (
            f"Use against anyone who tries to fool it: {round((most.as_file.success or 0.0) * tried):,} of "
            f"{tried:,} attacked {images} were moved to a wrong class."
        )


def _unfit_classes(metrics: dict[str, Any], by_class: ByClass) -> Iterator[str]:
    for row in _doubtful(by_class):
        other, count = row.taken_for[0]
        yield (
            f"The class '{row.name}' without a second look, above all at answers '{other}': {row.right:,} of "
            f"{row.images:,} are right, {count:,} taken for '{other}'; wrong but accepted: "
            f"{row.accepted_wrong or 0:,}."
        )
    promised = metrics.get("verdicts", {}).get("novelty", 1.0)
    for row in by_class.tested:
        if row.novel is not None and binomial_interval(row.novel, row.images, 0.95).low > promised:
            yield (
                f"Expecting as few false alarms of every class: {percent(row.novel_share)} of '{row.name}' "
                f"are called novel, where {percent(promised)} are meant over all classes."
            )


def _doubtful(by_class: ByClass) -> list[ClassResult]:
    """Return classes that are certainly weak, and those with wrong answers that nobody would look at."""
    weak = [row for row in by_class.weakest() if row.highest_recall < by_class.accuracy]
    passed = [
        row
        for row in by_class.tested
        if (row.accepted_wrong or 0) > 1 and (row.right_of_accepted or 0.0) < grades.HIGH and row not in weak
    ]
    passed.sort(key=lambda row: (row.right_of_accepted or 0.0, row.name))
    return [*weak, *passed][:DOUBTFUL]


def _corruptions(result: AuditResult, model: AuditedModel) -> CorruptedModel | None:
    """Return how a model stands corruptions, if that was measured."""
    return next((measured for measured in result.corruptions or () if measured.name == model.name), None)


def _attacks(result: AuditResult, model: AuditedModel) -> list[AttackMetrics]:
    return [
        metrics
        for measured in result.attacks or ()
        if measured.name == model.name
        for metrics in measured.metrics
    ]


def untested(result: AuditResult, i: int, by_class: ByClass) -> Iterator[str]:
    """Yield what was not tested of the model number ``i``."""
    model, metrics = result.models[i], result.evaluations[i].metrics
    images = noun(result)
    if not _foreign(metrics):
        yield f"Foreign {images}: how many are accepted is unknown (--ood NAME=PATH)."
    for name, judged in result.evaluations[i].judged.items():
        if len(judged.predictions) < FEW:
            yield f"'{name}' has only {plural(len(judged.predictions), 'image')}: its shares are rough."
    few = [row.name for row in by_class.rows if row.images < 5]
    if few:
        yield f"Classes with fewer than 5 test images: {listed(few[:8])}{' and others' * (len(few) > 8)}."
    for study in ("corruptions", "attacks"):
        if model.loaded is None:
            yield f"{study.capitalize()}: stored arrays have no network."
        elif study in result.absent:
            yield f"{study.capitalize()}: {result.absent[study]}"
    corrupted = _corruptions(result, model)
    if corrupted is not None and corrupted.images < FEW:
        yield f"Corruptions in number: only {plural(corrupted.images, 'image was', 'images were')} corrupted."
    if result.attacks is not None and _attacks(result, model):
        count = len(result.attacks.models[0].inputs.labels)
        if count < FEW:
            yield f"Attacks in number: only {plural(count, 'image was', 'images were')} attacked."
    if "groups" not in metrics:
        yield "Groups of people, sites or cameras: no groups were named (--by), so no difference is known."
    if model.loaded is not None and trained_on(result.data, model.model.record.config):
        yield f"Another source, camera, place or season: test and training {images} are of one data set."
    yield "Change over time ('candid watch' raises an alarm), and what a wrong answer costs."


def figures(result: AuditResult) -> tuple[list[str], list[list[Cell | str]]]:
    """Return head and rows of the table to decide by: out of 1,000 images, with 95 % intervals."""
    sets = list(
        dict.fromkeys(name for evaluation in result.evaluations for name in _foreign(evaluation.metrics))
    )
    words = ["answered by itself (accepted)", "of these, wrong", "left to a person"]
    words += [f"accepted of 1,000 foreign images, '{name}'" for name in sets]
    rows: list[list[Cell | str]] = [[word] for word in words]
    for evaluation in result.evaluations:
        metrics = evaluation.metrics
        rule, (coverage, right, _) = metrics["selective"].get("verdicts"), _rule(metrics)
        n, accepted = metrics["selective"]["images"], coverage * metrics["selective"]["images"]
        wrong = binomial_interval(round(accepted * (1 - (right or 0.0))), n, 0.95)
        covered = Interval(coverage, *(rule["intervals"]["coverage"] if rule else (1.0, 1.0)))
        rest = Interval(1 - covered.value, 1 - covered.high, 1 - covered.low)
        shares = [covered, wrong, rest, *(_foreign(metrics).get(name) for name in sets)]
        for row, share in zip(rows, shares, strict=True):
            row.append("–" if share is None else _of_thousand(share))
    return ["out of 1,000 images like these", *(model.name for model in result.models)], rows


def _of_thousand(share: Interval) -> str:
    value, low, high = (round(THOUSAND * number) for number in share)
    return f"{value:,}" if low == high else f"{value:,} ({low:,} to {high:,})"


def comparisons(result: AuditResult) -> list[str]:
    """Return how each pair of models differs on the same images; models that are equal are called so."""
    texts: list[str] = []
    for first, second in combinations(range(len(result.models)), 2):
        texts += _compared(result, first, second)
    return texts


def _compared(result: AuditResult, first: int, second: int) -> Iterator[str]:
    one, two = result.evaluations[first], result.evaluations[second]
    names = f"{result.models[first].name} and {result.models[second].name}"
    if np.allclose(one.predictions.posterior, two.predictions.posterior, rtol=0, atol=1e-6):
        same = "" if _kinds(one) == _kinds(two) else ", but not the same verdicts"
        yield f"{names} are equal: they give the same posteriors for every image{same}."
        if not same:
            return
    else:
        right = right_ones(one.predictions), right_ones(two.predictions)
        yield f"Accuracy of {names}: {_difference(*right)}."
    metrics = one.metrics, two.metrics
    if not all("verdicts" in measured["selective"] for measured in metrics):
        return
    (covered, right_one, _), (other, right_two, _) = (_rule(measured) for measured in metrics)
    yield (
        f"Answered by {names}: {percent(covered)} and {percent(other)} of the images; right of these: "
        f"{percent(right_one)} and {percent(right_two)}."
    )
    yield f"Answered wrongly, of all images, by {names}: {_difference(*map(_wrong_accepted, (one, two)))}."
    coverage = min(covered, other)
    if coverage:
        equal = [_most_confident(evaluation, coverage) for evaluation in (one, two)]
        yield (
            f"If {names} answered equally many, {percent(coverage)} of the images (the most confident ones "
            f"that are not novel), {percent(equal[0])} and {percent(equal[1])} of the answers would be right."
        )
    shares = [_foreign(measured) for measured in metrics]
    for name in [name for name in shares[0] if name in shares[1]]:
        a, b = shares[0][name], shares[1][name]
        clear = a.low > b.high or b.low > a.high
        end = "" if clear else "; the intervals overlap"
        yield f"Accepted of '{name}' by {names}: {percent(a.value)} and {percent(b.value)}{end}."


def _kinds(evaluation: EvaluationResult) -> list[str]:
    judged = evaluation.judged.get(evaluation.metrics["part"])
    return [] if judged is None else list[str](judged.kinds)


def _wrong_accepted(evaluation: EvaluationResult) -> Array:
    """Return which images are accepted with a wrong answer, (N,) bool."""
    accepted = np.array([kind == "accept" for kind in _kinds(evaluation)])
    return accepted & ~right_ones(evaluation.predictions)


def _most_confident(evaluation: EvaluationResult, coverage: float) -> float:
    """Return the accuracy of the most confident images that are not novel, a share ``coverage`` of all."""
    predictions = evaluation.predictions
    novel = np.array([kind == "novel" for kind in _kinds(evaluation)])
    confidence = np.where(novel, -1.0, predictions.posterior.max(1))
    count = max(1, round(coverage * len(confidence)))
    return float(right_ones(predictions)[np.argsort(-confidence, kind="stable")[:count]].mean())


def _difference(first: Array, second: Array) -> str:
    """Return two shares of the same images, and their difference with its exact interval.

    Given the m images that belong to only one of both, the share p of the first is binomial, and the
    difference is (2 p - 1) m / n.

    >>> _difference(np.array([True, True, False]), np.array([True, True, False]))
    '66.7 % and 66.7 %: the same images'
    """
    shown = f"{percent(float(first.mean()))} and {percent(float(second.mean()))}"
    m, n = int((first != second).sum()), len(first)
    if m == 0:
        return f"{shown}: the same images"
    share = binomial_interval(int((first & ~second).sum()), m, 0.95)
    value, low, high = (100 * (2 * end - 1) * m / n for end in share)
    verdict = "a clear difference" if low > 0 or high < 0 else "chance explains the difference"
    return f"{shown}, {value:+.1f} points ({low:+.1f} to {high:+.1f}) on the same images: {verdict}"

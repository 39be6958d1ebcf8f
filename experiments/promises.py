"""Measure whether the promised risk of accepted images is kept, on real predictions.

``python -m experiments.promises images``

``images`` is CIFAR-10 as a folder with ``test/<class>/*.png``. Held-out sets are drawn with replacement from
the test predictions, so that the true risk is known: it is the risk over all of them. The passes are cached
in ``runs/promises``, where ``promises.json`` and ``promises.md`` are written.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtr
from scipy.stats import betabinom

import candid
from candid._support.errors import CandidError
from candid._support.files import write_texts
from candid._support.numbers import Array
from candid.data.datasets import open_part
from candid.inference.predictions import FEATURES, Predictions
from candid.inference.runner import Runner
from candid.trust.promises import walk
from candid.trust.ranking import ALL
from candid.trust.scores import Columns

MODELS = ("cifar10-resnet", "cifar10-beta1")
RISKS = (0.01, 0.02, 0.05, 0.1)
DELTA = 0.05
FEW, LEVELS = 180, (0.01, 0.05, 0.1)
"""Images of a small held-out set, and the levels at which its false alarms are counted."""
Threshold = Callable[[Array, Array, float], float | None]
"""From confidences, flags whether they are wrong, and a risk to the least confidence that is accepted."""


class Kept(NamedTuple):
    """What became of a promise on many held-out sets."""

    coverage: float
    """The mean share of all images that is accepted; 0 if nothing was promised."""
    none: float
    """The share of sets with which nothing could be promised."""
    broken: float
    """The share of sets whose promise is broken."""


def predicted(name: str, data: str, images: int | None, work: Path) -> Predictions:
    """Return what a bundled model says of test images, from a pass that is cached."""
    model = candid.load(name)
    split = open_part(data, model.class_names, "test", model.record.config).split.subsample(images)
    found = Runner(model, folder=work / name).predictions(split, model.preprocessing, "test", FEATURES)
    assert found is not None
    return found


def by_walk(confidence: Array, wrong: Array, risk: float) -> float | None:
    """Return the threshold of candid."""
    found = walk(confidence, wrong, risk, DELTA)
    return None if found is None else found.threshold


def by_bisection(confidence: Array, wrong: Array, risk: float) -> float | None:
    """Return the threshold of SGR (Geifman & El-Yaniv, 2017): log2 n bisections of the ranks share delta.

    A threshold passes if the Clopper-Pearson upper bound of its risk, at its share of delta, is below the
    risk. The last one that passed is returned.
    """
    order = np.argsort(-confidence, kind="stable")
    ranked, errors = confidence[order], wrong[order].cumsum()
    n = len(ranked)
    steps, fewest, most, found = math.ceil(math.log2(n)), 1, n, None
    for _ in range(steps):
        m = (fewest + most) // 2
        m = int(np.searchsorted(-ranked, -ranked[m - 1], "right"))  # equal confidences are accepted together
        if bdtr(errors[m - 1], m, risk) < DELTA / steps:
            found, fewest = float(ranked[m - 1]), min(m, n)
        else:
            most = m
    return found


def kept(confidence: Array, wrong: Array, risk: float, method: Threshold, sets: int, size: int) -> Kept:
    """Return what becomes of the promises of a method, over all images."""
    ranked, errors = _risk_coverage(confidence, wrong)
    random = np.random.default_rng(0)
    coverage, none, broken = 0.0, 0, 0
    for _ in range(sets):
        rows = random.integers(0, len(confidence), size)
        threshold = method(confidence[rows], wrong[rows], risk)
        if threshold is None:
            none += 1
            continue
        accepted = int(np.searchsorted(-ranked, -threshold, "right"))
        coverage += accepted / len(ranked)
        broken += errors[accepted - 1] > risk * accepted
    return Kept(coverage / sets, none / sets, broken / sets)


def oracle(confidence: Array, wrong: Array, risk: float) -> float:
    """Return the largest coverage whose risk over all images is at most ``risk``."""
    _, errors = _risk_coverage(confidence, wrong)
    fits = np.flatnonzero(errors <= risk * np.arange(1, len(errors) + 1))
    return 0.0 if len(fits) == 0 else (int(fits[-1]) + 1) / len(errors)


def _risk_coverage(confidence: Array, wrong: Array) -> tuple[Array, Array]:
    order = np.argsort(-confidence, kind="stable")
    return confidence[order], wrong[order].cumsum()


def whole_rule(predictions: Predictions, risk: float, sets: int, size: int) -> Kept:
    """Return what becomes of the promise of a whole monitor: the default levels, and the risk."""
    logits, labels = predictions.logits, predictions.labels
    wrong = logits.argmax(1) != labels
    random = np.random.default_rng(1)
    coverage, none, broken = 0.0, 0, 0
    for _ in range(sets):
        rows = random.integers(0, len(labels), size)
        try:
            monitor = candid.Monitor(risk=risk, delta=DELTA).fit(logits[rows], labels[rows])
        except CandidError:
            none += 1
            continue
        rule, columns = monitor.fitted.rule, Columns({"logits": logits})
        novel = rule.p_values(columns) <= rule.cuts[ALL]
        accepted = ~novel & (rule.named(columns["posterior"]).sum(1) == 1)
        coverage += float(accepted.mean())
        broken += bool(wrong[accepted].mean() > risk)
    return Kept(coverage / sets, none / sets, broken / sets)


def false_alarms(predictions: Predictions, sets: int, size: int = FEW, new: int = 500) -> dict[str, Any]:
    """Return how often ordinary images have small p-values if few images are cross-fitted.

    By level: the mean share, and the share of sets in the exact 95 % band, a beta-binomial count.
    """
    logits, labels = predictions.logits, predictions.labels
    features = predictions.columns["features"].astype(np.float32)
    rates = []
    for seed in range(sets):
        order = np.random.default_rng(seed).permutation(len(labels))
        known, fresh = order[:size], order[size : size + new]
        monitor = candid.Monitor(novelty=0.1).fit(logits[known], labels[known], features[known])
        p = np.array([each.p_value for each in monitor.examine(logits[fresh], features[fresh])])
        rates.append([float((p <= level + 1e-9).mean()) for level in LEVELS])
    found = {}
    for level, column in zip(LEVELS, np.array(rates).T, strict=True):
        rank = int(level * (size + 1) + 1e-9)
        low, high = betabinom(new, rank, size + 1 - rank).interval(0.95)
        inside = (column >= low / new - 1e-9) & (column <= high / new + 1e-9)
        found[f"{level:g}"] = {"mean": float(column.mean()), "inside": float(inside.mean())}
    return found


def measured(predictions: Predictions, sets: int, size: int, rule_sets: int) -> dict[str, Any]:
    """Return the figures of one model by risk."""
    confidence = predictions.posterior.max(1)
    wrong = predictions.logits.argmax(1) != predictions.labels
    found = {}
    for risk in RISKS:
        methods = {
            "walk": kept(confidence, wrong, risk, by_walk, sets, size)._asdict(),
            "SGR": kept(confidence, wrong, risk, by_bisection, sets, size)._asdict(),
        }
        if rule_sets:
            methods["whole rule"] = whole_rule(predictions, risk, rule_sets, size)._asdict()
        found[f"{risk:g}"] = {"oracle": oracle(confidence, wrong, risk), **methods}
    return found


def table(results: dict[str, Any]) -> str:
    """Return the figures in Markdown: coverage, in brackets the share of sets without a promise, broken."""
    methods = [name for name in ("walk", "SGR", "whole rule") if name in results["models"][MODELS[0]]["0.01"]]
    head = ["model", "risk", "oracle", *(f"{name}: coverage (no promise) broken" for name in methods)]
    rows = [head, ["---"] * len(head)]
    for name, by_risk in results["models"].items():
        for risk, found in by_risk.items():
            cells = [
                f"{100 * found[each]['coverage']:.1f} ({100 * found[each]['none']:.0f}) "
                f"{100 * found[each]['broken']:.1f}"
                for each in methods
            ]
            rows.append([name, f"{100 * float(risk):g} %", f"{100 * found['oracle']:.1f}", *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.promises", description=__doc__)
    parser.add_argument("data", metavar="DATA", help="CIFAR-10 as a folder of images")
    parser.add_argument("--images", type=int, help="use this number of test images, evenly spread")
    parser.add_argument("--sets", type=int, default=1000, help="held-out sets")
    parser.add_argument("--size", type=int, default=1000, help="images in each")
    parser.add_argument(
        "--rule-sets", type=int, default=100, help="held-out sets for whole monitors; 0 for none"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/promises"), help="the folder for what is written"
    )
    parser.add_argument(
        "--few-sets", type=int, default=200, help=f"held-out sets of {FEW} images; 0 for none"
    )
    asked = parser.parse_args(arguments)
    passes = {name: predicted(name, asked.data, asked.images, asked.work) for name in MODELS}
    models = {
        name: measured(found, asked.sets, asked.size, asked.rule_sets) for name, found in passes.items()
    }
    settings = {"sets": asked.sets, "size": asked.size, "rule_sets": asked.rule_sets, "delta": DELTA}
    results = {**settings, "models": models}
    if asked.few_sets:
        results["few"] = false_alarms(passes[MODELS[0]], asked.few_sets)
    text = table(results)
    write_texts({"promises.json": json.dumps(results, indent=1) + "\n", "promises.md": text}, asked.work)
    print(text, results.get("few", ""))


if __name__ == "__main__":
    main()

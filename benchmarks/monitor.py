"""What a monitor costs: verdicts from arrays, next to the network whose logits they are.

The peers are a pass of EfficientNet-Lite0 over as many photos, in onnxruntime on all cores, and the sorting
of the same logits in numpy, which every list of likely classes needs. Fitting is timed once per round.
"""

import sys
from typing import NamedTuple

import numpy as np

from benchmarks.common import Figure, Timing, alternate, conclude, parsed, parser, show_times
from candid import Monitor
from candid._support.numbers import Array
from candid.models.photo.opening import open_eye

OURS, NETWORK, SORTED, FITTED = "monitor.examine", "lite0 on as many photos", "sorting the logits", "fit"
PASS = 16


class Case(NamedTuple):
    """What a monitor is fitted to, and how much it then judges."""

    images: int
    classes: int
    features: int
    risk: float | None
    fitted: int

    @property
    def title(self) -> str:
        images = "1 image" if self.images == 1 else f"{self.images} images"
        features = f", {self.features} features" if self.features else ""
        return f"{images}, {self.classes} classes{features}{', a risk' if self.risk else ''}"


CASES = (
    Case(1, 10, 64, 0.1, 2000),
    Case(256, 10, 64, 0.1, 2000),
    Case(256, 1000, 0, None, 10_000),
    Case(256, 5000, 0, None, 10_000),
)
SMALL = (Case(2, 3, 4, None, 300),)


def drawn(case: Case, labels: Array, random: np.random.Generator) -> tuple[Array, Array | None]:
    """Logits in which the true class is likely, and features of noise."""
    logits = random.normal(size=(len(labels), case.classes)).astype(np.float32)
    logits[np.arange(len(labels)), labels] += 8
    return logits, random.normal(size=(len(labels), case.features)) if case.features else None


def measure(case: Case, rounds: int) -> dict[str, Timing]:
    """Seconds of a case."""
    random, eye = np.random.default_rng(0), open_eye("lite0")
    labels = np.arange(case.fitted) % case.classes
    logits, features = drawn(case, labels, random)
    monitor = Monitor(risk=case.risk)
    new = drawn(case, labels[: case.images], random)
    images = random.random((PASS, 3, eye.size, eye.size), np.float32)

    def network() -> None:
        for first in range(0, case.images, PASS):
            eye.statistics(images[: min(PASS, case.images - first)])

    def examine() -> None:
        for examined in monitor.examine(*new):
            _ = examined.verdict, examined.classes  # names are sorted when they are read

    return alternate(
        {
            FITTED: lambda: monitor.fit(logits, labels, features),
            OURS: examine,
            NETWORK: network,
            SORTED: lambda: np.argsort(-new[0], axis=1),
        },
        rounds,
    )


def main() -> int:
    options = parsed(parser("benchmarks.monitor", __doc__))
    cases = {
        case.title: measure(case, 1 if options.quick else 5) for case in (SMALL if options.quick else CASES)
    }
    figures = {}
    ours: dict[str, dict[str, Timing]] = {}
    for title, times in cases.items():
        ours[title] = {name: times[name] for name in (OURS, NETWORK, SORTED, FITTED)}
        show_times(title, ours[title])
        figures[f"{title}: {OURS} / {NETWORK}"] = Figure(times[OURS].ratios(times[NETWORK]), 1.0)
    return conclude("monitor", options.quick, ours, figures)


if __name__ == "__main__":
    sys.exit(main())

"""The options of verdicts, declared once for the commands and the Python calls."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from candid._support.config import Option, check_fields
from candid.trust.scores import SCORES

ScoreName = Annotated[
    str | None,
    Option(
        f"The score that p-values are computed from: {', '.join(SCORES)}.",
        metavar="SCORE",
        default="joint for a pixel model, else combined",
    ),
]
Novelty = Annotated[
    float | None,
    Option(
        "False-alarm rate: at most this share of ordinary images is flagged as novel.",
        above=0,
        below=1,
        default="0.01",
    ),
]
ErrorLevel = Annotated[
    float | None,
    Option(
        "Error level of class sets: at most this share of ordinary images has a true class outside its set.",
        above=0,
        below=1,
        default="0.05",
    ),
]
RiskLevel = Annotated[
    float | None,
    Option(
        "Error rate of accepted images: at most this share of them is wrong, with confidence 1 - delta. Half "
        "of the held-out images then test the rule instead of shaping it.",
        above=0,
        below=1,
        default="no promise",
    ),
]
Delta = Annotated[
    float,
    Option(
        "Probability that the promise of --risk is wrong, over the draw of the held-out images.",
        above=0,
        below=1,
    ),
]
Promise = Annotated[
    Literal["average", "confident"],
    Option(
        "What --novelty promises: the rate on average over held-out sets, or a rate that holds with 95 % "
        "confidence for this model."
    ),
]


@dataclass(frozen=True)
class ExamineOptions:
    """How images are judged."""

    score: ScoreName = None
    novelty: Novelty = None
    error: ErrorLevel = None
    risk: RiskLevel = None
    delta: Delta = 0.05
    novelty_promise: Promise = "average"
    skip_bad: Annotated[
        bool, Option("Leave out images that can't be used, instead of stopping at the first.", hidden=True)
    ] = False
    batch: Annotated[
        int | None,
        Option("Images that pass the network at a time.", least=1, hidden=True),
    ] = None
    __post_init__ = check_fields  # type: ignore[misc]


@dataclass(frozen=True)
class MonitorOptions:
    """What the verdicts of a monitor promise, and the score that decides what is novel."""

    novelty: Novelty = None
    error: ErrorLevel = None
    risk: RiskLevel = None
    delta: Delta = 0.05
    score: str = "combined"
    novelty_promise: Promise = "average"
    __post_init__ = check_fields  # type: ignore[misc]


@dataclass(frozen=True)
class WatchOptions:
    """When the alarm rings, and where the state of a watch is."""

    alarm: Annotated[
        float,
        Option(
            "If the images do not change, the probability that the alarm ever rings is at most this.",
            above=0,
            below=1,
        ),
    ] = 0.01
    among: Annotated[
        Literal["held-out", "stream"],
        Option(
            "Rank each image among the held-out and all earlier ones, or among the earlier ones alone. The "
            "level of 'stream' holds for every model, but it can't see a change before the first image."
        ),
    ] = "held-out"
    once: Annotated[bool, Option("Watch the images that are there, and stop.")] = False
    state: Annotated[
        Path | None,
        Option(
            "The file with the state: it is read if it exists, and each image counts once.",
            metavar="FILE",
            default="'.candid-watch.sqlite' in the folder; none with --once",
        ),
    ] = None
    __post_init__ = check_fields  # type: ignore[misc]


@dataclass(frozen=True)
class CalibrateOptions:
    """Which held-out images are measured."""

    part: Annotated[
        Literal["train", "val", "test", "all"] | None,
        Option(
            "Part of the data to measure.",
            default="what was kept out of training; else test if present, else val, else all",
        ),
    ] = None
    images: Annotated[int | None, Option("Measure this number of images, evenly spread.", least=1)] = None
    skip_bad: Annotated[bool, Option("Leave out images that can't be used, instead of stopping.")] = False
    devices: Annotated[
        int | None,
        Option("Number of processes, one on each GPU.", least=1, default="all GPUs, or one CPU process"),
    ] = None
    workers: Annotated[
        int, Option("Processes that load images, for each process that computes.", least=0)
    ] = 2
    __post_init__ = check_fields  # type: ignore[misc]

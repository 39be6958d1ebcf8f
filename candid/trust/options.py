"""The options of verdicts, declared once for the commands and the Python calls."""

from dataclasses import dataclass
from typing import Annotated

from candid._support.config import Option, check_fields

ScoreName = Annotated[
    str | None,
    Option(
        "The score that p-values are computed from.",
        metavar="SCORE",
        default="joint; mahalanobis for a ResNet",
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


@dataclass(frozen=True)
class ExamineOptions:
    """How images are judged."""

    score: ScoreName = None
    novelty: Novelty = None
    error: ErrorLevel = None

    def __post_init__(self) -> None:
        check_fields(self)

"""What verdicts are asked to promise: levels, as options of commands and calls, and the test of a risk.

numpy and scipy are imported only where they compute, so that help texts need neither.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import Option, check_fields
from candid._support.text import percent, plural
from candid.trust.scores import SCORES

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from candid.trust.verdict import Risk

PHI = 0.25
"""The walk starts among this share of the most confident images: fixed before any label is seen."""
LISTED = (0.01, 0.02, 0.05, 0.1)
"""The risks that are tried if the one that was asked for can't be promised."""
MOST_ERRORS = 2**14
"""An estimate of the number of images that needs more errors than this is not given."""
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
        default="0.05",
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
Confidence = Annotated[
    float,
    Option(
        "An accepted answer has at least this posterior; with less, the most probable classes are listed. "
        "0 switches it off.",
        least=0,
        below=1,
    ),
]
Fdr = Annotated[
    float | None,
    Option(
        "Of the images of this call that are called novel, at most this share is ordinary, on average. It "
        "replaces --novelty.",
        above=0,
        below=1,
        default="--novelty decides",
    ),
]
AcceptKinds = Annotated[
    int,
    Option("Accept a named kind of at most this many classes, such as 'terrier', as an answer.", least=0),
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
class Levels:
    """The score that decides what is novel, and what verdicts promise."""

    score: ScoreName = None
    novelty: Novelty = None
    error: ErrorLevel = None
    risk: RiskLevel = None
    delta: Delta = 0.05
    novelty_promise: Promise = "average"
    confidence: Confidence = 0.8
    accept_kinds: AcceptKinds = 0
    fdr: Fdr = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.risk is not None and self.accept_kinds:
            raise CandidError(
                "The risk is promised of single classes: leave accept_kinds (--accept-kinds) or risk out."
            )
        if self.fdr is not None and self.novelty is not None:
            raise CandidError("Both novelty and fdr say what is novel: leave one of them out.")
        if self.fdr is not None and self.risk is not None:
            raise CandidError(
                "The risk is tested image by image, but fdr decides about all images of a call: leave one of "
                "them out."
            )


@dataclass(frozen=True)
class ExamineOptions(Levels):
    """How images are judged."""

    skip_bad: Annotated[
        bool, Option("Leave out images that can't be used, instead of stopping at the first.", hidden=True)
    ] = False
    batch: Annotated[
        int | None,
        Option("Images that pass the network at a time.", least=1, hidden=True),
    ] = None


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
    watch: Annotated[
        Literal["images", "classes", "both"],
        Option(
            "What the alarm is about: 'images' that look different, 'classes' that are more or less frequent "
            "than among the held-out images, or both."
        ),
    ] = "both"
    acknowledge: Annotated[
        bool, Option("Stop repeating an alarm that has rung, and start to watch again from here on.")
    ] = False
    score: Annotated[
        str | None,
        Option(
            f"Watch this score alone: {', '.join(SCORES)}.", metavar="SCORE", default="novelty and confidence"
        ),
    ] = None
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


def needed_images(risk: float, errors: int = 0, delta: float = 0.05) -> int:
    """Return the least number m of images with which ``errors`` errors show that the risk is at most this.

    The least m with P(Bin(m, risk) <= errors) <= delta.

    >>> [needed_images(risk) for risk in (0.01, 0.02, 0.05, 0.1)]
    [299, 149, 59, 29]
    """
    from scipy.special import bdtr

    most = 2 * (errors + 1)
    while bdtr(errors, most, risk) > delta:
        most *= 2
    return bisect_left(range(most), True, key=lambda m: bool(bdtr(errors, m, risk) <= delta))


def start(n: int, risk: float, delta: float = 0.05) -> int:
    """Return the rank that the walk over ``n`` images starts at; it depends on nothing else.

    The number of images that shows the risk with k errors, for the largest k that needs at most a share of
    ``PHI`` of the images; with no error if even that needs more.

    >>> start(1000, 0.05), start(100, 0.05)
    (234, 59)
    """
    import numpy as np
    from scipy.special import bdtr

    among = math.floor(PHI * n)
    errors = int(np.searchsorted(bdtr(np.arange(among + 1), among, risk), delta, "right")) - 1
    return needed_images(risk, max(errors, 0), delta)


def walk(
    confidence: "ArrayLike", wrong: "ArrayLike", risk: float, delta: float = 0.05, images: int | None = None
) -> "Risk | None":
    """Return the confidence from which images can be accepted with at most a share ``risk`` of errors.

    With K_m errors among the m most confident images, every m from :func:`start` on passes while
    P(Bin(m, risk) <= K_m) <= delta. The walk stops at the first m that does not; the threshold is the
    confidence at the last one that did. Equal confidences are accepted together, so only the last of them is
    tested.

    The images must be independent draws that pass all other conditions of the verdict, and those conditions
    must have been fixed without them. Then the promise is wrong with a probability of at most ``delta``, if
    the risk of confident images rises through ``risk`` once as the threshold falls.

    Args:
        confidence: of the n held-out images that pass the other conditions, or anything that rises with it.
        wrong: whether the most probable class is not the true one, (n,).
        risk: the share of accepted images that may be wrong.
        delta: the probability that the promise is wrong.
        images: the number of held-out images before the other conditions; by default n.

    Returns:
        The promise; None if this risk can't be promised.

    Example:
        >>> import numpy as np
        >>> sure = np.linspace(0.5, 1, 1000)
        >>> risk = walk(sure, sure < 0.7, risk=0.05)
        >>> risk.accepted, risk.errors, round(risk.threshold, 2)
        (621, 21, 0.69)
    """
    import numpy as np
    from scipy.special import bdtr

    from candid.trust.verdict import Risk

    confidence, wrong = np.asarray(confidence, float), np.asarray(wrong, bool)
    if confidence.shape != wrong.shape or confidence.ndim != 1 or np.isnan(confidence).any():
        raise CandidError(
            "The confidences of n images must be n numbers, with a flag for each whether it is wrong, not "
            f"{confidence.shape} and {wrong.shape}."
        )
    n = len(confidence)
    first = start(n, risk, delta)
    order = np.argsort(-confidence, kind="stable")
    confidence, errors = confidence[order], wrong[order].cumsum()
    ends = np.flatnonzero(np.append(confidence[1:] < confidence[:-1], True)) if n else np.arange(0)
    ends = ends[ends + 1 >= first]
    passed = bdtr(errors[ends], ends + 1, risk) <= delta
    count = len(passed) if passed.all() else int(passed.argmin())
    if count == 0:
        return None
    last = int(ends[count - 1])
    images = n if images is None else images
    return Risk(
        risk, delta, float(confidence[last]), (last + 1) / images, images, last + 1, int(errors[last])
    )


def no_promise(
    confidence: "ArrayLike", wrong: "ArrayLike", risk: float, delta: float, images: int, held_out: int
) -> str:
    """Return why a risk can't be promised, which can, and how many held-out images it would take.

    What can be promised is looked for in a fixed list, each entry at a fourth of delta, so that together
    they are wrong with a probability of at most delta.

    Args:
        confidence, wrong, risk, delta, images: as in :func:`walk`.
        held_out: the number of all held-out images, including those that fixed the other conditions.
    """
    import numpy as np

    from candid.trust.verdict import in_percent

    confidence, wrong = np.asarray(confidence, float), np.asarray(wrong, bool)
    m = min(len(wrong), max(start(len(wrong), risk, delta), 1))
    surest = np.argsort(-confidence, kind="stable")[:m]
    said = (
        f"A risk of {in_percent(risk)} can't be promised with {held_out} held-out images "
        f"({plural(int(wrong[surest].sum()), 'error')} among the {m} most confident of the {images} that "
        "test it)"
    )
    fourth = delta / len(LISTED)
    for tried in LISTED:
        promised = walk(confidence, wrong, tried, fourth, images) if tried > risk else None
        if promised is not None:
            said += (
                f"; {in_percent(tried)} can, for about {percent(promised.coverage)} of images, by risk "
                f"{tried:g} and delta {fourth:g} (four risks were tried, each at a fourth of delta)"
            )
            break
    else:
        said += "; leave risk out for verdicts without this promise"
    scale = held_out / max(images, 1)
    least = math.ceil(scale * needed_images(risk, 0, delta))
    said += f"; {in_percent(risk)} takes at least {least:,} held-out images"
    about = _estimate(confidence, wrong, risk, delta)
    if about is not None:
        more = max(least, about * scale * images / max(len(wrong), 1))
        return f"{said}, about {_two_digits(more):,} if more images are like these."
    return f"{said} and a model with fewer errors among its most confident answers."


def _estimate(confidence: Array, wrong: Array, risk: float, delta: float) -> float | None:
    """Return the number of images to walk if errors stay as frequent; None if no number is enough."""
    import numpy as np

    m = math.floor(PHI * len(wrong))
    seen = int(wrong[np.argsort(-confidence, kind="stable")[:m]].sum())
    rate = (seen + 0.5) / (m + 1)
    errors = 0
    while rate * needed_images(risk, errors, delta) > errors + 0.5:
        errors = 2 * errors + 1
        if rate >= risk or errors > MOST_ERRORS:
            return None
    return needed_images(risk, errors, delta) / PHI


def _two_digits(count: float) -> int:
    unit = int(10.0 ** max(0, math.floor(math.log10(count)) - 1))
    return math.ceil(count / unit) * unit

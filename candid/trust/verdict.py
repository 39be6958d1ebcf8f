"""Verdicts: accept an image, call it ambiguous because several classes fit, or call it novel.

With each verdict come promises about images of the same kind as the held-out ones: docs/theory.md,
section 16, has the proofs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from candid._support.text import percent
from candid.trust.conformal import discovery_cut
from candid.trust.sets import Posterior

Verdict = Literal["accept", "ambiguous", "novel"]
TOP = 5
"""Classes in a record."""
WIDTHS = (24, 10, 8, 10, 0)
"""Columns of a line."""
CONFIDENCE = 0.95
"""Of the promise "with 95 % confidence for this model"."""
NOVELTY, ERROR = 0.05, 0.05
"""Default levels of the verdict."""
NoveltyPromise = Literal["average", "confident"]
UNPROVEN = "no bound is proven, since the model has learned from held-out images, each left out in turn"


class VerdictKind(NamedTuple):
    """One verdict, as every page, plot, table and store shows it."""

    word: str
    sentence: str
    """What it means, for a person."""
    colour: str
    """On a light ground."""
    dark_colour: str
    """On a dark ground."""
    tone: str
    """The name of its tone in reports: good, fair or poor."""


KINDS: dict[Verdict, VerdictKind] = {
    "novel": VerdictKind("novel", "Unlike the photos that the model knows.", "#b3400a", "#ff8f5c", "poor"),
    "ambiguous": VerdictKind(
        "ambiguous", "Looks like known photos, but several classes fit.", "#8a5a00", "#e8b04a", "fair"
    ),
    "accept": VerdictKind(
        "accept", "Looks like known photos; one class fits clearly.", "#00704f", "#4fc59a", "good"
    ),
}
"""All verdicts in the order in which people look at them: what needs attention first."""


class Level(NamedTuple):
    """One promise of a verdict about a rate: false alarms, or class sets that miss the true class."""

    asked: float | None
    """What the user asked for; None for the default."""
    in_force: float
    smallest: float
    """The smallest level that this number of held-out images allows."""
    promise: NoveltyPromise
    """Whether the rate holds on average over held-out sets, or with 95 % confidence for this model."""
    proven: float
    """What is proven for the average: the level in force, more with cross-conformal scores, at most 1
    (nothing), as if the model has learned from its held-out images."""
    upper: float
    """The 95 % upper end of the rate for this model, since its held-out images are one draw."""
    cut: float
    """Images with a p-value of at most this are rejected."""


NOTHING = Level(None, 1.0, 1.0, "average", 1.0, 1.0, 1.0)
"""The level of ``error`` if the held-out images have no labels: nothing is promised."""


@dataclass(frozen=True)
class Risk:
    """The promise that at most a share ``asked`` of the accepted images is wrong."""

    asked: float
    delta: float
    """The probability, over the draw of the held-out images, that the promise is wrong."""
    threshold: float
    """Images of at least this confidence are accepted."""
    coverage: float
    """The share of the tested held-out images that is accepted."""
    images: int
    """The number of held-out images that the rule was tested on: no others shaped it."""
    accepted: int
    """The number of them that the rule accepts."""
    errors: int
    """The number of wrong ones among these."""


@dataclass(frozen=True)
class Promises:
    """What verdicts promise."""

    score: str
    """The score that decides what is novel."""
    n_reference: int
    """The number of held-out images that an image is ranked among."""
    novelty: Level
    """The share of ordinary images that is called novel."""
    error: Level
    """The share of ordinary images whose class set misses the true class."""
    risk: Risk | None = None
    """The share of accepted images that is wrong; None if it was not asked for."""
    confidence: float = 0.0
    """An accepted answer has at least this posterior."""
    fdr: float | None = None
    """The share of ordinary images among those that one call names novel; None if novelty decides."""
    fdr_proven: bool = True
    """Whether this share is proven: with a score that is fixed before the images that rank it are seen."""
    accept_kinds: int = 0
    """A named kind of at most this many classes is accepted, too."""
    out_of_fold: bool = False
    """Whether the model has learned from held-out images, each left out in turn: no bound is proven then."""
    copies: int = 0
    """How many held-out images are copies of others, or of one series with others: these count once."""
    occasions: bool = False
    """Whether all held-out images were taken on the occasions of the training images."""
    unmeasured: int = 0
    """How many classes were taught from too few photos for a level of error of their own."""

    def to_dict(self) -> dict[str, Any]:
        """Return the promises as JSON, and in words."""
        levels = {"novelty": self.novelty._asdict(), "error": self.error._asdict()}
        return asdict(self) | levels | {"plain": self.plain(), "sentences": self.sentences()}

    def plain(self) -> str:
        """Return the promises in one line for everybody; :meth:`sentences` has all numbers and conditions."""
        unproven = self.out_of_fold
        levels = [(self.novelty, "are called novel")] if self.fdr is None else []
        if self.error.in_force < 1:
            levels.append((self.error, "get an answer without their true class"))
        shares: dict[str, list[str]] = {}
        for at, what in levels:
            about = "about" if at.proven > at.in_force else "at most"
            how = "with 95 % confidence" if at.promise == "confident" and not unproven else "on average"
            shares.setdefault(how, []).append(f"{about} {in_percent(at.in_force)} {what}")
        parts = [f"{' and '.join(rates)}, {how}" for how, rates in shares.items()]
        lines = [f"Of ordinary photos, {', and '.join(parts)}"] if parts else []
        if self.fdr is not None:
            about = "At most" if self.fdr_proven and not unproven else "About"
            lines.append(f"{about} {in_percent(self.fdr)} of what is called novel is ordinary, on average")
        if self.risk is not None:
            lines.append(f"At most {in_percent(self.risk.asked)} of the accepted answers are wrong")
            if not unproven:
                lines[-1] += f", with {in_percent(1 - self.risk.delta)} confidence"
        unproven = unproven or (self.fdr is not None and not self.fdr_proven)
        return f"{'. '.join(lines)}{'; no bound is proven' * unproven}."

    def raised(self) -> list[str]:
        """Return a sentence for each level that had to be raised above what was asked."""
        sentences = []
        for name, level, default in (("novelty", self.novelty, NOVELTY), ("error", self.error, ERROR)):
            if name == "novelty" and self.fdr is not None:
                continue
            asked = default if level.asked is None else level.asked
            if asked < level.in_force < 1:
                sentences.append(
                    f"The level of {name} is {in_percent(level.in_force)} instead of {in_percent(asked)}: "
                    "there are too few held-out images for a smaller one."
                )
        if self.fdr is not None and self.fewest_discoveries > 1:
            sentences.append(
                f"No image can be called novel at a rate of false discoveries of {in_percent(self.fdr)}: "
                f"{self.n_reference:,} held-out images rank others, and at least "
                f"{math.ceil((self.n_reference + 1) * self.fewest_discoveries - 1e-9) - 1:,} are needed."
            )
        return sentences

    @property
    def fewest_discoveries(self) -> float:
        """The share of the images of a call that are called novel if any is; above 1 none can be."""
        return 0.0 if self.fdr is None else self.novelty.smallest / self.fdr

    def sentences(self) -> list[str]:
        """Return the promises in words; first the levels that differ from what was asked, if any do."""
        sentences = [
            *self.raised(),
            self._novelty(),
            _rate("Error", self.error, "of ordinary images has an answer without its true class", self),
        ]
        if self.unmeasured and self.error.in_force < 1:
            taught = "a class that was" if self.unmeasured == 1 else f"{self.unmeasured} classes that were"
            sentences.append(
                f"This is not measured for {taught} taught from fewer than "
                f"{math.ceil(1 / self.error.in_force - 1e-9) - 1} photos: more of their images may get an "
                "answer without their true class."
            )
        if self.confidence:
            sentences.append(
                f"Confidence: an accepted answer has a posterior of at least {in_percent(self.confidence)}."
            )
        if self.accept_kinds:
            sentences.append(
                f"Kinds: a named kind of at most {self.accept_kinds} classes is accepted as an answer; the "
                "level of error and the confidence hold for it, too."
            )
        if self.risk is not None:
            how = f"with {in_percent(1 - self.risk.delta)} confidence for this model"
            if self.out_of_fold:
                how = f"as tested; {UNPROVEN}"
            sentences.append(
                f"Risk {in_percent(self.risk.asked)}: at most this share of accepted images is wrong, {how}; "
                f"accepted are {percent(self.risk.coverage)} of {self.risk.images} held-out images."
            )
        if self.copies:
            sentences.append(
                f"{self.copies} of the held-out images are copies of others or of one series with them: each "
                "counts once."
            )
        if self.occasions:
            sentences.append("All of this is for images taken on the same occasions as the training images.")
        return sentences

    def _novelty(self) -> str:
        if self.fdr is None:
            return _rate("Novelty", self.novelty, "of ordinary images is called novel", self)
        about = "at most" if self.fdr_proven and not self.out_of_fold else "about"
        share = (
            f"{in_percent(self.fdr)}: of the images of this call that are called novel, {about} "
            "this share is ordinary, on average over held-out sets and calls"
        )
        if self.out_of_fold:
            share += f"; {UNPROVEN}"
        elif not self.fdr_proven:
            share += f"; no bound is proven for the score '{self.score}'" + " with copies" * bool(self.copies)
        if self.fewest_discoveries <= 1:
            share += (
                f"; with {self.n_reference:,} held-out images to rank among, none or at least "
                f"{in_percent(self.fewest_discoveries)} of these images are called novel"
            )
        return f"False discoveries {share}."


def _rate(name: str, level: Level, what: str, promises: Promises) -> str:
    if level.in_force == 1:
        return f"{name}: nothing is promised about classes, since the held-out images have no labels."
    shown = in_percent(level.in_force)
    upper = f"95 % upper end for this model: {in_percent(level.upper)}."
    if promises.out_of_fold:
        return f"{name} about {shown}: this share {what}, as measured; {UNPROVEN}; {upper}"
    if level.promise == "confident":
        return f"{name} {shown}: at most this share {what}, with 95 % confidence for this model."
    if level.proven > level.in_force:
        proven = f"proven is at most {in_percent(level.proven)}"
        if level.proven >= 1:
            proven = "no bound is proven with so few held-out images"
        return (
            f"{name} about {shown}: this share {what}, on average over held-out sets as measured; {proven}; "
            f"{upper}"
        )
    return f"{name} {shown}: at most this share {what}, on average over held-out sets; {upper}"


def in_percent(share: float) -> str:
    """Return a share in percent with at most three digits."""
    return f"{100 * share:.3g} %"


class Sighting(NamedTuple):
    """What a watch for drift needs to know of an image."""

    score: float
    """The score that is watched: see :class:`candid.judging.watched.WatchedScore`."""
    predicted: int
    """The number of the most probable class; -1 if it was taught."""
    confidence: float


class Answer(NamedTuple):
    """What is said of an image."""

    verdict: Verdict
    classes: Sequence[str] = ()
    node: str | None = None
    node_leaves: int | None = None


@dataclass(frozen=True)
class UnusableImage:
    """An image that can't be judged: what :func:`candid.examine_stream` yields for it."""

    path: str
    reason: str


@dataclass(frozen=True)
class Examination:
    """What a model says of one image.

    Args:
        path: the file, or what the image is called.
        posterior: p(class | image) of all classes, falling.
        p_value: the share of held-out images that are at least as unusual; None, like the verdict, of a model
            without held-out scores.
        class_p_value: the same among held-out images of the same predicted class.
        verdict: a key of :data:`KINDS`: ``"accept"``, ``"ambiguous"`` or ``"novel"``.
        classes: the names in the class set, most probable first; empty of a novel image. :meth:`to_dict` has
            the first five, and their number.
        node: a kind of classes that covers them, such as "terrier"; None for a list, or if no kind is small
            enough to say something.
        node_leaves: the number of classes of the kind.
        log_density: log p(image) in nats; None of a model without a density.
        promises: what the verdict promises.
        evidence: the image and the outputs of the network, if they were asked for.
        sighting: what a watch for drift needs to know, if it was asked for.

    Example:
        >>> examined = Examination("cat.png", {"cat": 0.9, "dog": 0.1}, 0.4, 0.5, "accept", ("cat",))
        >>> examined.label, examined.confidence
        ('cat', 0.9)
    """

    path: str
    posterior: Mapping[str, float]
    p_value: float | None = None
    class_p_value: float | None = None
    verdict: Verdict | None = None
    classes: Sequence[str] | None = None
    node: str | None = None
    node_leaves: int | None = None
    log_density: float | None = None
    promises: Promises | None = None
    evidence: Any = field(default=None, repr=False, compare=False)
    sighting: Sighting | None = field(default=None, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.posterior.label if isinstance(self.posterior, Posterior) else next(iter(self.posterior))

    @property
    def confidence(self) -> float:
        """The largest posterior."""
        return self.posterior.largest if isinstance(self.posterior, Posterior) else self.posterior[self.label]

    @property
    def plain(self) -> str:
        """What the verdict means, in one line for everybody."""
        if self.verdict is None:
            return "The most probable class; without held-out images, nothing says whether to trust it."
        if self.verdict == "accept" and self.node is not None:
            return "Looks like known photos; one kind of classes fits clearly."
        return KINDS[self.verdict].sentence

    @property
    def answer(self) -> str:
        """What it is, in words: a class, a short list of classes or a kind of classes.

        >>> Examination("x.png", {"cat": 0.6, "dog": 0.4}, 0.4, classes=("cat", "dog")).answer
        'cat or dog'
        """
        classes = self.classes or ()
        if self.node is not None:
            return f"some {self.node}: {self.node_leaves} classes"
        if len(classes) > TOP:
            return f"no common kind: {', '.join(classes[:TOP])}, …"
        return f"{', '.join(classes[:-1])} or {classes[-1]}" if len(classes) > 1 else "".join(classes)

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as JSON, with the five most probable classes, also of those that fit."""
        shares = self.posterior if isinstance(self.posterior, Posterior) else Posterior.of(self.posterior)
        return {
            "path": self.path,
            "label": self.label,
            "confidence": self.confidence,
            "posterior": shares.top(TOP),
            "p_value": self.p_value,
            "class_p_value": self.class_p_value,
            "verdict": self.verdict,
            "plain": self.plain,
            "classes": None if self.classes is None else list(self.classes[:TOP]),
            "class_count": None if self.classes is None else len(self.classes),
            "node": self.node,
            "node_leaves": self.node_leaves,
            "log_density_nats": self.log_density,
            "promises": None if self.promises is None else self.promises.to_dict(),
        }

    def line(self) -> str:
        """Return one line for a terminal, in the columns of :func:`heading`."""
        p_value = "–" if self.p_value is None else f"{self.p_value:.3f}"
        line = _line(self.label, f"{100 * self.confidence:.1f} %", p_value, self.verdict or "–", self.path)
        return line if self.classes is None or len(self.classes) < 2 else f"{line}  ({self.answer})"


def discovered(examinations: Sequence[Examination], fdr: float) -> list[Examination]:
    """Return examinations of which those that are discoveries at this rate are novel, and no others."""
    p_values = [1.0 if e.p_value is None else e.p_value for e in examinations]
    return with_novel(examinations, discovery_cut(np.array(p_values), fdr))


def with_novel(examinations: Sequence[Examination], cut: float) -> list[Examination]:
    """Return examinations of which those with a p-value of at most ``cut`` are novel."""
    return [
        examined
        if examined.p_value is None or examined.p_value > cut
        else replace(examined, **Answer("novel")._asdict())
        for examined in examinations
    ]


def heading() -> str:
    """Return what stands above the lines of examinations."""
    return _line("class", "posterior", "p-value", "verdict", "image")


def _line(*columns: str) -> str:
    return " ".join(f"{column:<{width}}" for column, width in zip(columns, WIDTHS, strict=True)).rstrip()


def level(
    asked: float | None,
    default: float,
    n: int,
    promise: NoveltyPromise = "average",
    folds: int = 1,
    least_rank: int = 1,
) -> Level:
    """Return the level in force with ``n`` held-out images to rank among: what was asked, or the smallest.

    An image is rejected if its p-value, (1 + number of held-out scores at least as extreme) / (n + 1), is at
    most k / (n + 1). Given the held-out images, the share of ordinary images that this happens to has the
    distribution Beta(k, n + 1 - k). On average k = floor(level (n + 1)); with 95 % confidence it is the
    largest k whose 95 % quantile is at most the level.

    Args:
        asked: the level; None for the default.
        default: the level if none was asked for.
        n: the number of held-out images that p-values are ranks among.
        promise: on average over held-out sets, or with 95 % confidence for this model.
        folds: the number of folds of cross-conformal scores; 1 for scores of a fixed function.
        least_rank: the smallest p-value is ``least_rank / (n + 1)``.

    Example:
        >>> level(None, 0.01, 20).in_force == 1 / 21
        True
        >>> level(0.01, 0.01, 1000, "confident").cut == 5 / 1001
        True
    """
    confident = promise == "confident"
    smallest = upper_end(least_rank, n) if confident else least_rank / (n + 1)
    in_force = max(default if asked is None else asked, smallest)
    if confident:
        from scipy.special import bdtr

        rank = max(least_rank, int(np.searchsorted(bdtr(np.arange(n), n, in_force), 1 - CONFIDENCE, "right")))
        cut = rank / (n + 1)
    else:
        rank, cut = max(least_rank, math.floor(in_force * (n + 1) + 1e-9)), in_force
    upper = in_force if confident else upper_end(rank, n)
    proven = in_force if folds == 1 else cross_conformal_bound(in_force, n, folds)
    return Level(asked, in_force, smallest, promise, proven, upper, cut)


def upper_end(rank: int, n: int) -> float:
    """Return the 95 % upper end of the rate at which p-values are at most ``rank / (n + 1)``.

    The quantile of Beta(rank, n + 1 - rank): the share u with P(Bin(n, u) < rank) = 5 %.

    >>> round(upper_end(10, 1000), 4)
    0.0157
    """
    if rank > n:
        return 1.0
    below = np.arange(rank)
    log_choices = np.append(0.0, np.log((n - below[:-1]) / (below[:-1] + 1)).cumsum())
    low, high = rank / (n + 1), 1.0
    for _ in range(60):  # bisections
        u = (low + high) / 2
        terms = np.exp(log_choices + below * math.log(u) + (n - below) * math.log1p(-u))
        low, high = (u, high) if terms.sum() > 1 - CONFIDENCE else (low, u)
    return low


def cross_conformal_bound(level: float, n: int, folds: int) -> float:
    """Return what is proven about P(p <= level) of a cross-conformal p-value from n images.

    2 level + 2 (1 - level) (K - 1) / (n + K) with K folds; see docs/theory.md, section 16, and
    Gasparin & Ramdas (2025), https://arxiv.org/abs/2503.01495

    >>> round(cross_conformal_bound(0.05, 180, 5), 3)
    0.141
    """
    return min(1.0, 2 * level + 2 * (1 - level) * (folds - 1) / (n + folds))


def rounded_up(share: float) -> float:
    """Return the share with two digits, never less than it was: advice that names it can be followed.

    >>> rounded_up(1 / 41), rounded_up(0.05)
    (0.025, 0.05)
    """
    digits = 1 - math.floor(math.log10(share))
    return round(math.ceil(share * 10**digits) / 10**digits, digits)

"""Verdicts: accept an image, call it ambiguous because several classes fit, or call it novel."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.protocol import Outputs
from candid.trust.detectors import checked_level, p_values
from candid.trust.promises import Promises, rounded_up

Kind = Literal["accept", "ambiguous", "novel"]
TOP = 5
"""Classes in a record."""
WIDTHS = (24, 10, 8, 10, 0)
"""Columns of a line."""


class Verdict(NamedTuple):
    """What to do with one image, as in Figure 1 of the paper.

    >>> Verdict("ambiguous", (3, 5)).kind
    'ambiguous'
    """

    kind: Kind
    """A typical image of one class; a typical image that several classes fit; not a typical image."""
    classes: tuple[int, ...]
    """The numbers of the classes that fit, in order of falling posterior: one, several, none. Of an image
    that is ambiguous because its confidence is too low for the promised risk: the class and the runner-up."""


class Evidence(NamedTuple):
    """What an explanation starts from."""

    image: Tensor
    """As the model saw it, (C, H, W) uint8."""
    outputs: Outputs
    """Outputs of the forward pass, (1, ...)."""


class Sighting(NamedTuple):
    """What a watch for drift needs to know of an image."""

    score: float
    """The score that is watched: see :class:`candid.trust.watched.WatchedScore`."""
    predicted: int
    """The number of the most probable class."""
    confidence: float


@dataclass(frozen=True)
class Examination:
    """What a model says of one image.

    Args:
        path: the file, or what the image is called.
        posterior: p(class | image) of all classes, falling.
        p_value: the share of held-out images that are at least as unusual; None, like the verdict, of a model
            without held-out scores.
        class_p_value: the same among held-out images of the same predicted class.
        verdict: ``"accept"``, ``"ambiguous"`` or ``"novel"``.
        classes: the names in the class set, most probable first; empty of a novel image.
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
    verdict: Kind | None = None
    classes: tuple[str, ...] | None = None
    log_density: float | None = None
    promises: Promises | None = None
    evidence: Evidence | None = field(default=None, repr=False, compare=False)
    sighting: Sighting | None = field(default=None, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The most probable class."""
        return next(iter(self.posterior))

    @property
    def confidence(self) -> float:
        """The largest posterior."""
        return next(iter(self.posterior.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as JSON, with the five most probable classes."""
        return {
            "path": self.path,
            "label": self.label,
            "confidence": self.confidence,
            "posterior": dict(list(self.posterior.items())[:TOP]),
            "p_value": self.p_value,
            "class_p_value": self.class_p_value,
            "verdict": self.verdict,
            "classes": None if self.classes is None else list(self.classes),
            "log_density_nats": self.log_density,
            "promises": None if self.promises is None else self.promises.to_dict(),
        }

    def line(self) -> str:
        """Return one line for a terminal, in the columns of :func:`heading`."""
        p_value = "–" if self.p_value is None else f"{self.p_value:.3f}"
        line = _line(self.label, f"{100 * self.confidence:.1f} %", p_value, self.verdict or "–", self.path)
        if self.verdict == "ambiguous" and self.classes is not None:
            line += f"  ({', '.join(self.classes[:TOP])}{', …' if len(self.classes) > TOP else ''})"
        return line


def heading() -> str:
    """Return what stands above the lines of examinations."""
    return _line("class", "posterior", "p-value", "verdict", "image")


def _line(*columns: str) -> str:
    return " ".join(f"{column:<{width}}" for column, width in zip(columns, WIDTHS, strict=True)).rstrip()


def class_sets(posterior: Tensor, held_out_ratios: Tensor, error: float = 0.05) -> Tensor:
    """Return the classes that fit each image: a conformal prediction set, (N, M) to (N, M) bool.

    The ratio of class y is ``r(x, y) = p(y | x) / max_k p(k | x)``. From the ratios ``q_i = r(x_i, y_i)`` of
    the true classes of n held-out images, class y is in the set of x if
    ``(1 + #{i: q_i <= r(x, y)}) / (n + 1) > error``. The most probable class always is: its ratio is 1. If an
    image is exchangeable with the held-out ones, its true class is not in the set with a probability of at
    most ``error``, however bad the posteriors are.

    >>> import torch
    >>> held_out = torch.linspace(0.2, 1, 99)
    >>> class_sets(torch.tensor([[0.9, 0.1], [0.55, 0.45]]), held_out, error=0.1)
    tensor([[ True, False],
            [ True,  True]])
    """
    check_posteriors(posterior, held_out_ratios)
    check_enough("error", error, len(held_out_ratios), "no class can be ruled out")
    return p_values(-ratios(posterior), -held_out_ratios) > error


def ratios(posterior: Tensor) -> Tensor:
    """Return each posterior divided by the largest of the same image, (N, M)."""
    largest = posterior.amax(1, keepdim=True)
    return torch.where(posterior == largest, 1.0, posterior / largest)


def verdicts(
    posterior: Tensor,
    p_value: Tensor,
    held_out_ratios: Tensor | None,
    novelty: float = 0.01,
    error: float = 0.05,
    confident: Tensor | None = None,
) -> list[Verdict]:
    """Return the verdicts on N images, from posteriors (N, M) and the p-values of a score (N,).

    An image is novel if its p-value is at most ``novelty``; else it is accepted or ambiguous, by
    `class_sets`. Of images exchangeable with the held-out ones, at most a share of ``novelty`` is called
    novel and at most a share of ``error`` has a set without its true class, so at least 1 - novelty - error
    have their true class named. The shares are means over the draw of the images and of the held-out ones.

    Either level needs 1 / level - 1 held-out images. Scores whose smallest p-value is larger than 1 / (n + 1)
    need twice as many: `TwoTailed`, `TypicalSet` and `DensityOfStates`.

    ``confident`` says of each image, (N,) bool, whether its confidence is high enough for a promised risk
    (:func:`candid.trust.promises.walk`). If it is not, an image that would be accepted is ambiguous.

    Without ratios of true classes, a class set is the most probable class alone, which promises nothing.

    >>> import torch
    >>> held_out = torch.linspace(0.2, 1, 99)
    >>> posterior = torch.tensor([[0.95, 0.05], [0.45, 0.55], [0.95, 0.05]])
    >>> for verdict in verdicts(posterior, torch.tensor([0.8, 0.3, 0.01]), held_out):
    ...     print(verdict.kind, verdict.classes)
    accept (0,)
    ambiguous (1, 0)
    novel ()
    """
    if held_out_ratios is None:
        sets = torch.zeros_like(posterior, dtype=torch.bool)
        sets.scatter_(1, posterior.argmax(1, keepdim=True), True)
    else:
        sets = class_sets(posterior, held_out_ratios, error)
        check_enough("novelty", novelty, len(held_out_ratios), "no image can be called novel")
    if p_value.shape != posterior.shape[:1] or not ((p_value >= 0) & (p_value <= 1)).all():
        raise CandidError(
            f"The p-values of {len(posterior)} images must be as many numbers between 0 and 1; "
            f"given are {tuple(p_value.shape)}."
        )
    novel = (p_value.double() <= novelty).tolist()
    counts = sets.sum(1)
    if confident is not None:
        counts = torch.where(confident, counts, counts.clamp(min=2))
    sizes = counts.tolist()
    ranked = posterior.argsort(dim=1, descending=True, stable=True)[:, : max(sizes, default=0)].tolist()
    return [
        Verdict("novel", ())
        if is_novel
        else Verdict("accept" if size == 1 else "ambiguous", tuple(classes[:size]))
        for is_novel, size, classes in zip(novel, sizes, ranked, strict=True)
    ]


def check_posteriors(posterior: Tensor, held_out: Tensor) -> None:
    """Check that these are probabilities, (N, M) and (n,)."""
    if posterior.ndim != 2 or posterior.shape[1] == 0 or held_out.ndim != 1:
        raise CandidError(
            "Posteriors must have the shape (N, M), ratios of the true classes of held-out images (n,), "
            f"not {tuple(posterior.shape)} and {tuple(held_out.shape)}."
        )
    for values in (posterior, held_out):
        if not ((values >= 0) & (values <= 1)).all():
            raise CandidError("Posteriors must lie between 0 and 1: give probabilities, not logits.")


def check_enough(name: str, level: float, n: int, otherwise: str) -> None:
    """Check that ``n`` held-out images can give a p-value of ``level`` or less."""
    if 1 / (n + 1) > checked_level(name, level):
        needed = math.ceil(1 / level) - 1
        raise CandidError(
            f"With {n} held-out images {otherwise} at the level {name} = {level}: "
            f"hold out at least {needed}, or raise the level to {rounded_up(1 / (n + 1)):g}."
        )

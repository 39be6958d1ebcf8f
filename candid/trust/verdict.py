"""What to do with an image: accept it, look at it because several classes agree, or call it novel."""

import math
from typing import Literal, NamedTuple

from torch import Tensor

from candid._support.errors import CandidError
from candid.trust.detectors import checked_level, p_values


class Verdict(NamedTuple):
    """What the model says of one image, as in Figure 1 of the paper."""

    kind: Literal["accept", "ambiguous", "novel"]
    """A typical image of one class; a typical image that several classes agree with; no typical image."""
    classes: tuple[int, ...]
    """The classes that agree, in order of falling posterior: one, several, none."""


def class_sets(posterior: Tensor, held_out_true_posteriors: Tensor, error: float = 0.05) -> Tensor:
    """The classes that agree with each image: a conformal prediction set, (N, M) to (N, M) bool.

    From the posteriors ``q_i = p(y_i | x_i)`` of the true classes of n held-out images, class y is in the set
    of x if ``(1 + #{i: q_i <= p(y | x)}) / (n + 1) > error``; so is the most probable class, always. If an
    image is exchangeable with the held-out ones, its true class is not in the set with a probability of at
    most ``error``, however bad the posteriors are.

    >>> import torch
    >>> held_out = torch.linspace(0.2, 1, 99)
    >>> class_sets(torch.tensor([[0.9, 0.1], [0.55, 0.45]]), held_out, error=0.1)
    tensor([[ True, False],
            [ True,  True]])
    """
    check_posteriors(posterior, held_out_true_posteriors)
    check_enough("error", error, len(held_out_true_posteriors), "no class can be ruled out")
    agree = p_values(-posterior, -held_out_true_posteriors) > error
    return agree.scatter(1, posterior.argmax(1, keepdim=True), True)


def verdicts(
    posterior: Tensor,
    p_value: Tensor,
    held_out_true_posteriors: Tensor,
    novelty: float = 0.01,
    error: float = 0.05,
) -> list[Verdict]:
    """The verdicts on N images, from posteriors (N, M) and the p-values of an out-of-distribution test (N,).

    An image is novel if its p-value is at most ``novelty``; else it is accepted or ambiguous, by
    `class_sets`. Of images exchangeable with the held-out ones, at most a share of ``novelty`` is called
    novel and at most a share of ``error`` has a set without its true class, so at least 1 - novelty - error
    have their true class named. The shares are means over the draw of the images and of the held-out ones.

    Either level needs 1 / level - 1 held-out images. Tests whose smallest p-value is larger than 1 / (n + 1)
    need more: twice as many for `TwoTailed`, `TypicalSet` and `DensityOfStates`.

    >>> import torch
    >>> held_out = torch.linspace(0.2, 1, 99)
    >>> posterior = torch.tensor([[0.95, 0.05], [0.45, 0.55], [0.95, 0.05]])
    >>> for verdict in verdicts(posterior, torch.tensor([0.8, 0.3, 0.01]), held_out):
    ...     print(verdict.kind, verdict.classes)
    accept (0,)
    ambiguous (1, 0)
    novel ()
    """
    sets = class_sets(posterior, held_out_true_posteriors, error)
    check_enough("novelty", novelty, len(held_out_true_posteriors), "no image can be called novel")
    if p_value.shape != posterior.shape[:1] or not ((p_value >= 0) & (p_value <= 1)).all():
        raise CandidError(
            f"The p-values of {len(posterior)} images must be as many numbers between 0 and 1; "
            f"given are {tuple(p_value.shape)}."
        )
    novel = (p_value.double() <= novelty).tolist()
    sizes = sets.sum(1).tolist()
    ranked = posterior.argsort(dim=1, descending=True, stable=True)[:, : max(sizes, default=0)].tolist()
    return [
        Verdict("novel", ())
        if is_novel
        else Verdict("accept" if size == 1 else "ambiguous", tuple(classes[:size]))
        for is_novel, size, classes in zip(novel, sizes, ranked, strict=True)
    ]


def check_posteriors(posterior: Tensor, held_out: Tensor) -> None:
    """Probabilities, (N, M) and (n,)."""
    if posterior.ndim != 2 or posterior.shape[1] == 0 or held_out.ndim != 1:
        raise CandidError(
            "Posteriors must have the shape (N, M), those of the true classes of held-out images (n,), "
            f"not {tuple(posterior.shape)} and {tuple(held_out.shape)}."
        )
    for values in (posterior, held_out):
        if not ((values >= 0) & (values <= 1)).all():
            raise CandidError("Posteriors must lie between 0 and 1: give probabilities, not logits.")


def check_enough(name: str, level: float, n: int, otherwise: str) -> None:
    """``n`` held-out images can give a p-value of ``level`` or less."""
    if 1 / (n + 1) > checked_level(name, level):
        needed = math.ceil(1 / level) - 1
        raise CandidError(
            f"With {n} held-out images {otherwise} at the level {name} = {level}: "
            f"hold out at least {needed}, or raise the level."
        )

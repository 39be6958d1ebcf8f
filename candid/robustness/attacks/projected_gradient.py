"""Projected gradient ascent (Madry et al., 2018) inside an L2 ball."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from candid._support.progress import SILENT, Progress
from candid.robustness.attacks.search import (
    Attackable,
    AttackResult,
    Search,
    check_positive,
    lengths,
    result_of,
)


@torch.enable_grad()
def projected_gradient(
    model: Attackable,
    images: Tensor,
    targets: Tensor | Sequence[int] | None = None,
    *,
    labels: Tensor | Sequence[int] | None = None,
    radius: float = 0.5,
    steps: int = 40,
    step_size: float | None = None,
    batch: int | None = None,
    keep_path: bool = False,
    keep_latents: bool = False,
    progress: Progress = SILENT,
) -> AttackResult:
    """Projected gradient ascent of the margin (Madry et al., 2018) inside an L2 ball and [0, 1].

    ``x <- P(x + step_size g / |g|)`` with g the gradient of the margin, from the image itself; P scales the
    perturbation to ``radius`` if it is longer, then clips. Of all steps, the one with the largest margin is
    kept. The other arguments are those of :func:`carlini_wagner`.

    Args:
        radius: of the ball, in the L2 norm of images in [0, 1].
        steps: all of them are taken.
        step_size: 2.5 ``radius`` / ``steps`` if None.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    >>> found = projected_gradient(model, x, labels=model.predict(x / 255), radius=0.2)
    >>> bool((found.distance <= 0.2 + 1e-6).all())
    True
    """
    step_size = 2.5 * radius / max(steps, 1) if step_size is None else step_size
    check_positive(radius=radius, steps=steps, step_size=step_size)
    search = Search(model, images, targets, labels, keep_path or keep_latents, keep_latents)
    parts = (_ascent(search, numbers, radius, steps, step_size) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "attacking", len(search.x)), maxlen=0)
    return result_of(search, batch)


def _ascent(search: Search, numbers: Tensor, radius: float, steps: int, step_size: float) -> Iterator[int]:
    """Run projected gradients on the images ``numbers``; yield them at the end."""
    x = moved = search.x[numbers]
    for step in range(steps + 1):
        moved = moved.detach().requires_grad_()
        seen = search.evaluate(moved, numbers)
        (gradient,) = torch.autograd.grad(seen.margin.sum(), moved)
        moved = moved.detach()
        if step == 0:
            search.already_misclassified[numbers] = seen.margin > 0
        search.keep(numbers, moved, seen, -seen.margin.detach().double(), math.inf)
        change = moved + step_size * gradient / lengths(gradient) - x
        moved = (x + change * (radius / lengths(change)).clamp(max=1)).clamp(0, 1)
    yield from numbers.tolist()

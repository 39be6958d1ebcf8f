"""Adam on the loss of an attack, as Carlini and Wagner (2017) use it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from candid.robustness.attacks.search import Objective, Search

LEARNING_RATE = 0.01
REACH = 0.99
"""The largest tanh(w). Stretched to 1, so that black and white pixels have a finite w and can move."""
ADAM = (0.9, 0.999, 1e-8)


def descent(
    search: Search,
    numbers: Tensor,
    objective: Objective,
    steps: int,
    patience: int,
    *,
    learning_rate: float = LEARNING_RATE,
    start: Tensor | None = None,
) -> Iterator[int]:
    """Run Adam on the images ``numbers``; yield those that have converged.

    Adam begins at the originals with a constant learning rate or, at ``start``, with one that falls to zero.
    """
    beta1, beta2, epsilon = ADAM
    x, limit = search.x[numbers], math.atanh(REACH)
    origin = REACH * (2 * x - 1)
    w = (origin if start is None else REACH * (2 * start - 1)).atanh()
    origin = origin.atanh().tanh()
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    lowest, waited = torch.full_like(search.loss[numbers], math.inf), torch.zeros_like(numbers)
    for step in range(steps + 1 if len(numbers) else 0):
        tanh = w.tanh()
        # (tanh / REACH + 1) / 2, from the image, so that rounding does not move it before the attack does.
        moved = (x + (tanh - origin) / (2 * REACH)).clamp(0, 1).requires_grad_()
        seen = search.evaluate(moved, numbers, density=objective.d > 0)
        loss = objective.loss(moved - x, seen)
        (gradient,) = torch.autograd.grad(loss.sum(), moved)
        loss = loss.detach()
        if step == 0 and start is None:
            search.already_misclassified[numbers] = seen.margin > 0
        better = search.keep(numbers, moved.detach(), seen, loss, objective.kappa)
        waited = torch.where(better | (loss < lowest), 0, waited + 1)
        lowest = lowest.minimum(loss)
        left = (waited < patience) & (step < steps)
        yield from numbers[~left].tolist()
        if not left.any():
            return
        gradient = gradient * (1 - tanh.square()) / (2 * REACH)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        scale = (second / (1 - beta2 ** (step + 1))).sqrt() + epsilon
        rate = learning_rate if start is None else learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
        w = (w - rate * first / (1 - beta1 ** (step + 1)) / scale).clamp(-limit, limit)
        if not left.all():
            x, w, origin, first, second = (each[left] for each in (x, w, origin, first, second))
            numbers, waited, lowest = numbers[left], waited[left], lowest[left]

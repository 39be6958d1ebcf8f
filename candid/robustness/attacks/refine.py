"""Refinement: from an original to the nearest image that fools a model."""

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from candid.robustness.attacks.descent import descent
from candid.robustness.attacks.search import Objective, Search, dot, lengths, squares, wide

APPROACH, SHORT_APPROACH = 100, 40
"""Steps of the search that starts at the original; fewer if the detection is to be fooled after that."""
GROWTH = 0.05
"""The share by which its radius changes at a step."""
FIRST, LAST = 15, 40
"""Most steps of refinement before and after Adam, if the detection is to be fooled, too."""
FINE, FINE_RATE = 80, 0.003
"""Steps and first learning rate of Adam between these."""
RETURN = 0.05
"""The share of the way back to the original at a step along images with the wanted likelihood."""
WORTH = 1e-3
"""The share by which refinement has to lower the loss to go on."""


def refinement(
    search: Search, numbers: Tensor, objective: Objective, steps: int, patience: int
) -> Iterator[int]:
    """Find the nearest images that reach kappa, from the originals ``numbers``; yield these when done.

    Images that the spheres of the approach don't bring to kappa are left to Adam. If the detection is to be
    fooled, too, the likelihood of some images is too curved for the steps of refinement: small steps of Adam
    get these there.
    """
    approach = APPROACH if objective.d == 0 else SHORT_APPROACH
    start = _approached(search, numbers, objective, min(approach, steps))
    failed = ~search.reached[numbers]
    deque(descent(search, numbers[failed], objective, steps, patience), maxlen=0)
    start = torch.where(wide(failed), search.images[numbers], start)
    reached = search.reached[numbers]
    own, start = numbers[reached], start[reached]
    if objective.d == 0:
        _refine(search, own, start, objective, steps, max(1, patience // 2))
    else:
        _refine(search, own, start, objective, min(FIRST, steps), patience)
        change = search.images[own] - search.x[own]
        detected = search.loss[own] + objective.c * objective.kappa > 2 * squares(change)
        own, fine = own[detected], min(FINE, steps)
        start = search.images[own]
        deque(descent(search, own, objective, fine, fine, learning_rate=FINE_RATE, start=start), maxlen=0)
        _refine(search, own, search.images[own], objective, min(LAST, steps), patience)
    yield from numbers.tolist()


def _refine(
    search: Search, numbers: Tensor, moved: Tensor, objective: Objective, steps: int, patience: int
) -> None:
    """Lower the loss of the images ``numbers``, from ``moved``.

    A step goes to the original or, if the detection is to be fooled, to where the likelihood would be right
    if it were linear, and a little towards the original; then to the nearest image in [0, 1] where the
    margin, linear around the present one, is kappa. Where kappa is missed, steps get shorter; halfway through
    the patience, it starts again from the best image.
    """
    kappa, c, d, median = objective
    x = search.x[numbers]
    share, waited = x.new_ones(len(x)), torch.zeros_like(numbers)
    for _ in range(steps if len(numbers) else 0):
        moved.requires_grad_()
        seen = search.evaluate(moved, numbers, density=d > 0)
        (rise,) = torch.autograd.grad(seen.margin.sum(), moved, retain_graph=d > 0)
        margin, down = seen.margin.detach(), moved.detach() - x
        loss = objective.loss(down, seen).detach()
        if seen.log_density is not None:
            missing = median - seen.per_dimension
            (slope,) = torch.autograd.grad(missing.sum(), moved)
            weight = d / (1 + d * squares(slope))
            across = missing.detach().to(x) - RETURN * dot(slope, down)
            down = RETURN * down + wide(weight * across) * slope
        moved = moved.detach()
        enough = search.loss[numbers] - WORTH * (search.loss[numbers] + c * kappa)
        better = search.keep(numbers, moved, seen, loss, kappa)
        waited = torch.where(better & (loss < enough), 0, waited + 1)
        share = torch.where(margin >= kappa, (1.5 * share).clamp(max=1), share / 2)
        rounding = 4 * torch.finfo(x.dtype).eps * seen.logits.detach().abs().amax(1)
        moved = _projected(moved - wide(share) * down, moved, rise, 1.01 * kappa + rounding - margin)
        again = waited == (patience + 1) // 2
        moved = torch.where(wide(again), search.images[numbers], moved)
        share = torch.where(again, 0.3, share)
        left = waited < patience
        if not left.all():
            x, moved, share, waited, numbers = (each[left] for each in (x, moved, share, waited, numbers))
        if not len(numbers):
            return


def _approached(search: Search, numbers: Tensor, objective: Objective, steps: int) -> Tensor:
    """Return the nearest images on spheres around the originals that reach kappa, or the best known ones.

    A step goes along the margin's gradient and back to the sphere, whose radius is at first where kappa would
    be if the margin were linear; it shrinks while kappa is reached and grows while it is not (Rony et al.,
    2019).
    """
    x, kappa = search.x[numbers], objective.kappa
    change, nearest = torch.zeros_like(x), search.images[numbers]
    radius = shortest = x.new_full((len(x),), math.inf)
    for step in range(steps):
        moved = (x + change).requires_grad_()
        seen = search.evaluate(moved, numbers, density=objective.d > 0)
        (rise,) = torch.autograd.grad(seen.margin.sum(), moved)
        margin, moved = seen.margin.detach(), moved.detach()
        if step == 0:
            search.already_misclassified[numbers] = margin > 0
        search.keep(numbers, moved, seen, objective.loss(change, seen).detach(), kappa)
        distance = squares(change).sqrt()
        nearer = (margin >= kappa) & (distance < shortest)
        nearest = torch.where(wide(nearer), moved, nearest)
        shortest = torch.where(nearer, distance, shortest)
        if step == 0:
            radius = (kappa - margin).abs().clamp(min=1e-4) / lengths(rise).flatten()
        else:
            radius = radius * torch.where(margin >= kappa, 1 - GROWTH, 1 + GROWTH)
        pace = 0.5 * (1 + math.cos(math.pi * step / steps))
        change = change + wide(max(pace, 0.01) * radius) * rise / lengths(rise)
        change = (x + change * wide(radius) / lengths(change)).clamp(0, 1) - x
    return nearest


def _projected(goal: Tensor, x: Tensor, rise: Tensor, wanted: Tensor) -> Tensor:
    """Return the image in [0, 1] nearest to ``goal`` with ``rise . (image - x) >= wanted``, if there is one.

    It is ``goal + lambda rise``, clipped, with lambda from what would do without clipping to 2^20 of it.
    """
    missing = (wanted - dot(rise, goal - x)).clamp(min=0)
    least = missing / squares(rise).clamp(min=torch.finfo(x.dtype).tiny)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, 20)
    for _ in range(20):
        middle = (low + high) / 2
        enough = dot(rise, (goal + wide(least * 2**middle) * rise).clamp(0, 1) - x) >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return (goal + wide(least * 2**high) * rise).clamp(0, 1)

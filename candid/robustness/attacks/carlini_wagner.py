"""The attack of Carlini and Wagner (2017): the smallest change of an image that fools a model.

Adam moves w, with ``x' = (tanh(w) / 0.99 + 1) / 2`` and ``|tanh(w)| <= 0.99``, to minimise ::

    |x' - x|^2  +  c max(max_{y != t} l_y - l_t, -kappa)  +  d (median - log q(x') / D)^2

in the logits l and the target t; without targets, ``max(l_t - max_{y != t} l_y, -kappa)`` leads away from
the label t. The last term fools the test for unusual images as well (``d`` = 66 and 1000 in the paper).
An image has converged when its loss has not fallen for ``patience`` steps; then it leaves the batch. Of
all its steps, the one with the smallest loss is kept among those whose margin has reached kappa; with
``d`` = 0 that is the smallest perturbation.

Adam's first step alone changes all pixels by about 0.005, often far more than is needed, and its way is
too long even for linear logits. So for finite kappa the search starts at the original, on spheres whose
radius adapts, and the nearest image that it finds is tightened: the same loss is minimised with steps
that are exact where the margin is linear. Adam is left what this does not reach.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import SILENT, Progress
from candid.models.protocol import Model, can, require
from candid.robustness.attacks.eight_bit import eight_bit as rounding
from candid.robustness.attacks.metrics import AttackedImages
from candid.robustness.attacks.search import (
    Attackable,
    Classes,
    Objective,
    Search,
    attacked_images,
    check_positive,
    dot,
    lengths,
    squares,
    wide,
)

KAPPA, C, PATIENCE = 0.01, 10.0, 20
"""The patience of the paper."""
STEPS = 1000
"""Largest number of steps: attacks with infinite kappa take them all, others stop by themselves."""
DETECTION = 1000.0
"""The weight of fooling the detection if there is one: the paper's largest."""
LEARNING_RATE = 0.01
REACH = 0.99
"""The largest tanh(w). Stretched to 1, so that black and white pixels have a finite w and can move."""
ADAM = (0.9, 0.999, 1e-8)
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


@torch.enable_grad()
def carlini_wagner(
    model: Attackable | Model,
    images: Tensor | Array,
    targets: Classes | None = None,
    *,
    labels: Classes | None = None,
    kappa: float = KAPPA,
    c: float = C,
    d: float | None = None,
    median: float | None = None,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    patience: int = PATIENCE,
    tighten: bool = True,
    eight_bit: bool = False,
    seed: int = 0,
    batch: int | None = None,
    keep_path: bool = False,
    keep_latents: bool = False,
    progress: Progress = SILENT,
) -> AttackedImages:
    """Return the smallest perturbation of each image for a wrong decision; the module says how.

    Args:
        model: a model with gradients, or anything with ``logits``; its evaluation mode is used.
        images: (N, C, H, W), 8-bit or floats in [0, 1], an array or a tensor.
        targets: the class that each image shall be taken for, (N,); None for any but the label.
        labels: the true classes, (N,); with targets only to check that they differ.
        kappa: by how much the target's logit shall exceed the others'; infinity for as much as possible.
        c: weight of the decision.
        d: weight of the likelihood; None for 1000 if a median is given, else 0.
        median: of log q(x) / D over usual images, in nats per dimension; see ``metrics.median_log_density``.
        steps: at most, of each phase.
        learning_rate: of w.
        patience: steps without an improvement.
        tighten: False for the paper's attack, which stops where Adam does; so does any at infinite kappa.
        eight_bit: whether the result also has 8-bit images that reach kappa under any dequantisation noise.
        seed: of the noise patterns that these are made and measured with.
        batch: images at once; it changes results by no more than rounding.
        keep_path: whether to return margin and distance at every step.
        keep_latents: whether to return the latents as well.
        progress: shows the progress, by images.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    >>> attacked = carlini_wagner(model, x, (model.predict(x / 255) + 1) % 10, steps=50, eight_bit=True)
    >>> file = (255 * torch.from_numpy(attacked.eight_bit.images)).round().byte()
    >>> attacked.success.tolist(), torch.from_numpy(attacked.eight_bit.images).equal(file / 255)
    ([True, True], True)
    """
    check_positive(c=c, steps=steps, learning_rate=learning_rate, patience=patience)
    objective = _objective(model, kappa, c, d, median)
    search = Search(model, images, targets, labels, keep_path or keep_latents, keep_latents)
    adam = partial(descent, learning_rate=learning_rate)
    attack = refinement if tighten and kappa < math.inf else adam
    parts = (attack(search, numbers, objective, steps, patience) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "attacking", len(search.x)), maxlen=0)
    attacked = attacked_images(search, batch)
    if not eight_bit:
        return attacked
    parts = (rounding(search, numbers, objective, seed) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "rounding", len(search.x)), maxlen=0)
    return replace(attacked, eight_bit=replace(attacked_images(search, batch), traces=None))


def _objective(
    model: Attackable | Model, kappa: float, c: float, d: float | None, median: float | None
) -> Objective:
    """Return what is minimised, once it is known to make sense for ``model``."""
    if not kappa >= 0:
        raise CandidError(f"'kappa' must be zero, a positive number or infinity, not {kappa}.")
    d = (0.0 if median is None else DETECTION) if d is None else d
    if not 0 <= d < math.inf:
        raise CandidError(f"'d' of an attack must be zero or a positive number, not {d}.")
    if d > 0 and not can(model, "density"):
        require(model, "invert", "A likelihood to fool (d > 0)")
    if d > 0 and (median is None or not math.isfinite(median)):
        raise CandidError(
            f"Fooling the detection (d = {d:g}) needs the median of log q(x) / D over held-out images, "
            f"not {median}: give it in nats per dimension."
        )
    return Objective(kappa, c, d, median or 0.0)


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
            x, w, origin, first, second = (part[left] for part in (x, w, origin, first, second))
            numbers, waited, lowest = numbers[left], waited[left], lowest[left]


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
    left, start = numbers[reached], start[reached]
    if objective.d == 0:
        _refine(search, left, start, objective, steps, max(1, patience // 2))
    else:
        _refine(search, left, start, objective, min(FIRST, steps), patience)
        change = search.images[left] - search.x[left]
        detected = search.loss[left] + objective.c * objective.kappa > 2 * squares(change)
        left, fine = left[detected], min(FINE, steps)
        start = search.images[left]
        deque(descent(search, left, objective, fine, fine, learning_rate=FINE_RATE, start=start), maxlen=0)
        _refine(search, left, search.images[left], objective, min(LAST, steps), patience)
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
            x, moved, share, waited, numbers = (part[left] for part in (x, moved, share, waited, numbers))
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

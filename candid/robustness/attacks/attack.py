"""Adversarial attacks: images changed as little as possible until a model calls them something else."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid.models.protocol import require_latent
from candid.robustness.attacks.refine import tightening
from candid.robustness.attacks.search import Attackable, Objective, Search, lengths

KAPPA, C, LEARNING_RATE, PATIENCE = 0.01, 10.0, 0.01, 20
"""The paper's."""
STEPS = 1000
"""At most: an attack without an end (kappa is infinite) takes them all, others stop by themselves."""
DETECTION = 1000.0
"""The weight of fooling the detection where there is one: the paper's largest."""
REACH = 0.99
"""The largest tanh(w). Stretched to 1, so that black and white pixels have a finite w and can move."""
ADAM = (0.9, 0.999, 1e-8)


@dataclass(frozen=True)
class Trace:
    """The way of one image, from the original to where the attack stopped: n - 1 steps."""

    margins: Tensor
    """Of the logits, (n,): positive where the model is fooled."""
    distances: Tensor
    """L2 norm from the original, (n,)."""
    latents: Tensor | None = None
    """(n, D), if they were asked for."""


@dataclass(frozen=True)
class Attack:
    """What became of N images, on the CPU."""

    images: Tensor
    """(N, C, H, W), floats in [0, 1]."""
    success: Tensor
    """Whether the margin reached kappa, (N,); for an infinite one and within a radius, if it is > 0."""
    rounded_success: Tensor
    """Whether the image is still misclassified as wanted when it is rounded to 8 bits, (N,)."""
    already: Tensor
    """Whether it was before anything was done, (N,)."""
    distance: Tensor
    """L2 norm of the perturbation, (N,) in float64; black to white is 1 for each number of a pixel."""
    margin: Tensor
    """``l_t - max l_y`` over all y but the target t, (N,); untargeted, ``max l_y - l_t`` from the label t."""
    posterior: Tensor
    """Of ``images``, (N, M) in float64."""
    log_density: Tensor | None
    """Of ``images``, (N,) in nats, in float64; None without a likelihood."""
    steps: Tensor
    """Gradient steps until the attack stopped, (N,)."""
    traces: tuple[Trace, ...] | None
    """The ways there, if they were asked for."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def per_pixel(self) -> Tensor:
        """Root mean square of the perturbation, (N,): the distance by the square root of C H W."""
        return self.distance / math.sqrt(self.images[0].numel())


@torch.enable_grad()
def carlini_wagner(
    model: Attackable,
    images: Tensor,
    targets: Tensor | Sequence[int] | None = None,
    *,
    labels: Tensor | Sequence[int] | None = None,
    kappa: float = KAPPA,
    c: float = C,
    d: float | None = None,
    median: float | None = None,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    patience: int = PATIENCE,
    tighten: bool = True,
    batch: int | None = None,
    keep_path: bool = False,
    keep_latents: bool = False,
    progress: Progress = SILENT,
) -> Attack:
    """The attack of Carlini and Wagner (2017): the smallest perturbation for a wrong decision.

    Adam moves w, with ``x' = (tanh(w) / 0.99 + 1) / 2`` and ``|tanh(w)| <= 0.99``, to minimise ::

        |x' - x|^2  +  c max(max_{y != t} l_y - l_t, -kappa)  +  d (median - log q(x') / D)^2

    in the logits l and the target t; without targets, ``max(l_t - max_{y != t} l_y, -kappa)`` leads away from
    the label t. The last term fools the test for unusual images as well (``d`` = 66 and 1000 in the paper).
    An image has converged when its loss has not fallen for ``patience`` steps; then it leaves the batch. Of
    all its steps, the one with the smallest loss is kept among those whose margin has reached kappa; with
    ``d`` = 0 that is the smallest perturbation.

    Adam's first step alone changes all pixels by about 0.005, often far more than is needed, and its way is
    too long even for linear logits. So a second search starts at the original, on spheres whose radius
    adapts, and the nearest image that it finds is tightened: the same loss is minimised again, with steps
    that are exact where the margin is linear.

    Args:
        model: a generative classifier, a ResNet, or anything with ``logits``; its evaluation mode is used.
        images: (N, C, H, W), 8-bit or floats in [0, 1].
        targets: the class that each image shall be taken for, (N,); None for any but the label.
        labels: the true classes, (N,); with targets only to check that they differ.
        kappa: by how much the target's logit shall exceed the others'; infinity for as much as possible.
        c: weight of the decision.
        d: weight of the likelihood; None for 1000 if a median is given, else 0.
        median: of log q(x) / D over usual images, in nats per dimension: see
            :func:`~candid.robustness.attacks.detection.typical_score`.
        steps: at most, of each phase.
        learning_rate: of w.
        patience: steps without an improvement.
        tighten: False for the paper's attack, which stops where Adam does; nothing is tightened if ``kappa``
            is infinite.
        batch: images at once; it changes results by no more than rounding.
        keep_path: whether to return margin and distance at every step.
        keep_latents: whether to return the latents as well.
        progress: shows the progress, by images.

    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    >>> found = carlini_wagner(model, x, (model.predict(x / 255) + 1) % 10, steps=50)
    >>> found.success.tolist(), found.posterior.shape, found.steps.shape
    ([True, True], torch.Size([2, 10]), torch.Size([2]))
    """
    _check_positive(c=c, steps=steps, learning_rate=learning_rate, patience=patience)
    if not kappa >= 0:
        raise CandidError(f"'kappa' must be zero, a positive number or infinity, not {kappa}.")
    d = (0.0 if median is None else DETECTION) if d is None else d
    _check_detection(model, d, median)
    search = Search(model, images, targets, labels, keep_path or keep_latents, keep_latents)
    objective = Objective(kappa, c, d, median or 0.0)
    phases: dict[str, Callable[..., Iterator[int]]] = {
        "attacking": partial(_descent, learning_rate=learning_rate)
    }
    if tighten and kappa < math.inf:
        phases["tightening"] = tightening
    for name, phase in phases.items():
        parts = (phase(search, numbers, objective, steps, patience) for numbers in search.batches(batch))
        deque(progress.track(chain.from_iterable(parts), name, len(search.x)), maxlen=0)
    return _result(search, batch)


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
) -> Attack:
    """Projected gradient ascent of the margin (Madry et al., 2018) inside an L2 ball and [0, 1].

    ``x <- P(x + step_size g / |g|)`` with g the gradient of the margin, from the image itself; P scales the
    perturbation to ``radius`` if it is longer, then clips. Of all steps, the one with the largest margin is
    kept. The other arguments are those of :func:`carlini_wagner`.

    Args:
        radius: of the ball, in the L2 norm of images in [0, 1].
        steps: all of them are taken.
        step_size: 2.5 ``radius`` / ``steps`` if None.

    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    >>> found = projected_gradient(model, x, labels=model.predict(x / 255), radius=0.2)
    >>> bool((found.distance <= 0.2 + 1e-6).all())
    True
    """
    step_size = 2.5 * radius / max(steps, 1) if step_size is None else step_size
    _check_positive(radius=radius, steps=steps, step_size=step_size)
    search = Search(model, images, targets, labels, keep_path or keep_latents, keep_latents)
    parts = (_ascent(search, numbers, radius, steps, step_size) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "attacking", len(search.x)), maxlen=0)
    return _result(search, batch)


def _descent(
    search: Search, numbers: Tensor, objective: Objective, steps: int, patience: int, *, learning_rate: float
) -> Iterator[int]:
    """Adam on the images ``numbers``; yields those that have converged."""
    beta1, beta2, epsilon = ADAM
    x = search.x[numbers]
    w = (REACH * (2 * x - 1)).atanh()
    start, limit = w.tanh(), math.atanh(REACH)
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    lowest, waited = search.loss[numbers], torch.zeros_like(numbers)
    for step in range(steps + 1):
        tanh = w.tanh()
        # (tanh / REACH + 1) / 2, from the image, so that rounding does not move it before the attack does.
        moved = (x + (tanh - start) / (2 * REACH)).clamp(0, 1).requires_grad_()
        look = search.look(moved, numbers, density=objective.d > 0)
        loss = objective.loss(moved - x, look)
        (gradient,) = torch.autograd.grad(loss.sum(), moved)
        loss = loss.detach()
        if step == 0:
            search.already[numbers] = look.margin > 0
        better = search.keep(numbers, moved.detach(), look, loss, objective.kappa)
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
        w = (w - learning_rate * first / (1 - beta1 ** (step + 1)) / scale).clamp(-limit, limit)
        if not left.all():
            x, w, start, first, second = (each[left] for each in (x, w, start, first, second))
            numbers, waited, lowest = numbers[left], waited[left], lowest[left]


def _ascent(search: Search, numbers: Tensor, radius: float, steps: int, step_size: float) -> Iterator[int]:
    """Projected gradients on the images ``numbers``; yields them in the end."""
    x = moved = search.x[numbers]
    for step in range(steps + 1):
        moved = moved.detach().requires_grad_()
        look = search.look(moved, numbers)
        (gradient,) = torch.autograd.grad(look.margin.sum(), moved)
        moved = moved.detach()
        if step == 0:
            search.already[numbers] = look.margin > 0
        search.keep(numbers, moved, look, -look.margin.detach().double(), math.inf)
        change = moved + step_size * gradient / lengths(gradient) - x
        moved = (x + change * (radius / lengths(change)).clamp(max=1)).clamp(0, 1)
    yield from numbers.tolist()


@torch.no_grad()
def _result(search: Search, batch: int | None) -> Attack:
    """What was found."""
    rounded, densities = [], []
    for numbers in search.batches(batch):
        images = search.images[numbers]
        rounded.append(search.look((255 * images).round() / 255, numbers).margin > 0)
        densities.append(search.look(images, numbers, density=True).log_density)
    known = [each for each in densities if each is not None]
    return Attack(
        search.images.cpu(),
        search.reached.cpu(),
        torch.cat(rounded).cpu(),
        search.already.cpu(),
        (search.images.double() - search.x.double()).flatten(1).norm(dim=1).cpu(),
        search.margin.cpu(),
        search.logits.double().softmax(1).cpu(),
        torch.cat(known).cpu() if known else None,
        search.steps.cpu(),
        _traces(search) if search.keep_path else None,
    )


def _traces(search: Search) -> tuple[Trace, ...]:
    numbers, *seen = (torch.cat(each) for each in zip(*search.path, strict=True))
    of_each = ([each[numbers == i] for each in seen] for i in range(len(search.x)))
    return tuple(Trace(*own) for own in of_each)


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise CandidError(f"'{name}' of an attack must be a positive number, not {number}.")


def _check_detection(model: Attackable, d: float, median: float | None) -> None:
    if not 0 <= d < math.inf:
        raise CandidError(f"'d' of an attack must be zero or a positive number, not {d}.")
    if d > 0:
        require_latent(model, "A likelihood to fool (d > 0)")
    if d > 0 and (median is None or not math.isfinite(median)):
        raise CandidError(
            f"Fooling the detection (d = {d:g}) needs the median of log q(x) / D over training images, "
            f"not {median}: give it in nats per dimension."
        )

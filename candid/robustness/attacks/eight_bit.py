"""Attacks that work as a file: 8-bit images that fool a model whatever its dequantisation noise."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from candid._support.randomness import generator
from candid.robustness.attacks.search import Evaluation, Objective, Search, squares, wide
from candid.robustness.options import FRESH

STEPS = 12
"""Gradient steps, in turn with the model's own noise and with a pattern that is drawn for the step."""
PROBES = 5
"""Strengths of the push that are tried after that."""
FIRST_CHANGE, CHANGE_DECAY = 0.25, 0.6
"""How much the strength changes after a probe, and how much less after each once one has passed."""
CHECKS = 5
"""Noise patterns that a probe is checked with."""
NOISE = 1 / (255 * math.sqrt(12))
"""The standard deviation of a pixel's noise, and of its change when it is rounded."""
FLAT = 1e-12
"""The smallest squared gradient that is divided by."""
PACE = 0.5
"""The share of what is missing that a step makes up for; rounding answers up to twice as strongly."""
SPREAD = 3.5
"""By how many standard deviations over noise patterns the margin has to exceed kappa."""
STEP_NOISE, CHECK_NOISE, FRESH_NOISE = 12, 13, 14


class Checked(NamedTuple):
    """What the model says of B images under several noise patterns."""

    margins: Tensor
    """(P, B)."""
    loss: Tensor
    """The attack's loss with the mean margin and log density, (B,)."""
    logits: Tensor
    """With the first pattern, (B, M)."""

    def spread(self) -> Tensor:
        """Return the standard deviation of the margins over the noise, (B,)."""
        return self.margins.std(0, correction=0)


def rounded(images: Tensor) -> Tensor:
    """Return the nearest 8-bit images, as multiples of 1 / 255 in [0, 1].

    >>> rounded(torch.tensor([-0.1, 0.5, 2.0])).mul(255).tolist()
    [0.0, 128.0, 255.0]
    """
    return (255 * images.clamp(0, 1)).round() / 255


def eight_bit(search: Search, numbers: Tensor, objective: Objective, seed: int) -> Iterator[int]:
    """Replace the best versions of the images ``numbers`` by 8-bit ones; yield these when done.

    Of all 8-bit images, ``round(x + a g)`` is the nearest to x with its margin where margins are linear with
    the gradient g: pixels with a large gradient change by a level, all others not at all. So the real-valued
    image is pushed along the gradient, a mean over the noise, and then rounded. Of the pushes that are tried,
    the weakest is kept that holds under the noise of CHECKS. An image is a success if it reaches kappa with
    the model's own noise pattern and FRESH other ones, which the search has not seen.
    """
    finite = objective.kappa < math.inf
    least = objective.kappa if finite else 0.0
    checks, fresh = (
        [torch.zeros_like(search.x[0]), *_patterns(search, count, seed, key)]
        for count, key in ((CHECKS, CHECK_NOISE), (FRESH, FRESH_NOISE))
    )
    best, centre = rounded(search.images[numbers]), search.images[numbers]
    first = _check(search, best, numbers, objective, checks)
    push, spread = torch.zeros_like(best), first.spread()
    if finite or objective.d > 0:
        centre, push, spread = _push(search, numbers, objective, spread, seed)
    loss, strength = torch.full_like(first.loss, math.inf), torch.ones_like(spread)
    change = torch.full_like(spread, FIRST_CHANGE)
    for _ in range(PROBES if finite else 1):
        images = rounded(centre + wide(strength) * push)
        checked = _check(search, images, numbers, objective, checks)
        passed = checked.margins.mean(0) >= least + SPREAD * spread.maximum(checked.spread())
        better = torch.where(passed, checked.loss < loss, loss.isinf())
        best = torch.where(wide(better), images, best)
        loss = torch.where(passed & better, checked.loss, loss)
        strength = strength * torch.where(passed, 1 - change, 1 + change)
        change = torch.where(loss.isinf(), change, CHANGE_DECAY * change)
    margins, _, logits = _check(search, best, numbers, objective, fresh)
    search.images[numbers], search.logits[numbers], search.margin[numbers] = best, logits, margins[0]
    search.reached[numbers] = (margins >= least if finite else margins > 0).all(0)
    yield from numbers.tolist()


def _patterns(search: Search, count: int, *key: int) -> Iterator[Tensor]:
    """Yield what turns the model's own noise pattern into ``count`` others; nothing if it adds no noise."""
    noise: Tensor | None = search.model.noise if search.invertible else None
    if noise is None:
        return
    for i in range(count):
        other = torch.rand(noise.shape, generator=generator(*key, i), dtype=noise.dtype)
        yield (other.to(noise.device) - noise) / 255


@torch.no_grad()
def _check(
    search: Search, images: Tensor, numbers: Tensor, objective: Objective, patterns: Sequence[Tensor]
) -> Checked:
    seen = [search.evaluate(images + each, numbers, density=objective.d > 0) for each in patterns]
    margins = torch.stack([each.margin for each in seen])
    densities = [each.log_density for each in seen if each.log_density is not None]
    density = torch.stack(densities).mean(0) if densities else None
    mean = seen[0]._replace(margin=margins.mean(0), log_density=density)
    return Checked(margins, objective.loss(images - search.x[numbers], mean), mean.logits)


def _push(
    search: Search, numbers: Tensor, objective: Objective, spread: Tensor, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return real-valued images, a push that takes them to kappa and beyond, and the spread of margins.

    The push is along the mean gradient of the last steps. Its length follows the margin that their sum has
    once it is rounded, which is to exceed kappa by SPREAD times the ``spread`` of margins over the noise: the
    measured one, or that of linear margins if it is larger. If the detection is to be fooled, too, the images
    are shifted until rounding leaves their likelihood as near to the median as it was; where it gets worse,
    shifts get shorter.
    """
    x, start = search.x[numbers], search.images[numbers]
    least = objective.kappa if objective.kappa < math.inf else 0.0
    rise, shift, length = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(spread)
    pace, gaps = torch.full_like(spread, PACE), [torch.full_like(spread, math.inf)] * 2
    with torch.no_grad():
        near = _missing(search.evaluate(start, numbers, density=objective.d > 0), objective, x).abs()
    own_noise = torch.zeros_like(x[0])
    drawn = list(_patterns(search, STEPS // 2, seed, STEP_NOISE))
    others = drawn or [own_noise] * (STEPS // 2)
    for step, pattern in enumerate(each for other in others for each in (own_noise, other)):
        images = rounded(start + shift + wide(length) * rise).requires_grad_()
        seen = search.evaluate(images + pattern, numbers, density=objective.d > 0)
        (own,) = torch.autograd.grad(seen.margin.sum(), images, retain_graph=objective.d > 0)
        rise = own if step == 0 else (rise + own) / 2
        steepness = squares(rise).clamp(min=FLAT)
        own_spread = spread.maximum(NOISE * steepness.sqrt()) if drawn else spread
        length = length + PACE * (least + SPREAD * own_spread - seen.margin.detach()) / steepness
        length = length.maximum(NOISE / steepness.sqrt())
        if objective.d > 0:
            missing = _missing(seen, objective, x)
            (slope,) = torch.autograd.grad(missing.sum(), images)
            missing = missing.detach()
            pace = torch.where(missing.abs() > gaps[step % 2], pace / 2, pace)  # of the same kind of noise
            gaps[step % 2] = missing.abs()
            too_far = missing - missing.clamp(-near, near)
            shift = shift - wide(pace * too_far / squares(slope).clamp(min=FLAT)) * slope
        search.steps[numbers] += 1
    return start + shift, wide(length) * rise, own_spread


def _missing(seen: Evaluation, objective: Objective, x: Tensor) -> Tensor:
    """Return the median minus the log density per dimension, (B,); 0 if it was not evaluated."""
    if seen.log_density is None:
        return torch.zeros_like(seen.margin)
    return (objective.median - seen.per_dimension).to(x)

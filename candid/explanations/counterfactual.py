"""Counterfactuals: latents that are moved along the class means and turned back into images."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array
from candid._support.randomness import generator
from candid.explanations.options import TARGET, check_target
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.network import array_of
from candid.models.protocol import require

CLOSE = 0.01
"""How close to its target the posterior of the 8-bit image has to be."""
LEGS = 100
"""Turns of a path before it is given up."""
RIVALS = 100
"""Other classes that a path takes into account at once."""
PLACES = 16
"""Places on a path that are tried at a time."""
ROUNDS = 6
NUDGES, NEAR = 20, 0.1
"""How often a pixel is changed by a grey level, and how close the posterior must be before this is tried."""


@dataclass(frozen=True)
class LatentPath:
    """Straight legs from corner to corner in latent space."""

    corners: Tensor
    """(n, D), two or more; the first is the start."""

    @property
    def lengths(self) -> Tensor:
        """Length of the path up to each corner, in standard deviations of a class, (n,) in float64."""
        steps = self.corners.double().diff(dim=0).norm(dim=1)
        return torch.cat((steps.new_zeros(1), steps.cumsum(0)))

    def at(self, t: Tensor) -> Tensor:
        """Return the latents at the shares ``t`` of the path, (N, D); beyond 1 its last leg continues."""
        lengths = self.lengths
        place = t.to(lengths) * lengths[-1]
        leg = torch.searchsorted(lengths[1:-1].contiguous(), place, right=True)
        length = lengths[leg + 1] - lengths[leg]
        share = (place - lengths[leg]) / length.clamp(min=torch.finfo(length.dtype).tiny)
        start, end = self.corners[leg], self.corners[leg + 1]
        return start + share[:, None].to(start) * (end - start)


@torch.no_grad()
def path_towards(model: GenerativeClassifier, z: Tensor, y: int, target: float = TARGET) -> LatentPath:
    """Return the path from the latent ``z`` (D,) along the means to a posterior of ``y`` of ``target``.

    Each leg goes in the direction ``mu_y - mu_c``, away from the most probable other class c; where that
    would help a third class more, away from the average of all others, weighted by their posteriors. Logits
    are linear in z, so log p(y | z) is concave along a leg: it rises to the target, which is then met
    exactly, or to a maximum, where the path turns.
    """
    check_target(target)
    if not 0 <= y < model.config.classes:
        raise CandidError(f"Classes go from 0 to {model.config.classes - 1}: {y} is none of them.")
    logits = model.mixture.logits(z[None])[0].double()
    if (reached := float(logits.softmax(0)[y])) >= target:
        raise CandidError(
            f"'{model.class_names[y]}' already has a posterior of {reached:.3g}: set the target above it, "
            "or choose another class."
        )
    corners = [z]
    for _ in range(LEGS):
        step, slope = _direction(model, logits, y)
        length, arrived = _leg(logits, slope, y, math.log(target))
        corners.append(corners[-1] + length * step)
        logits = logits + length * slope
        if arrived:
            return LatentPath(torch.stack(corners))
    raise CandidError(
        f"No path along the means gives '{model.class_names[y]}' a posterior of {target}: lower the target."
    )


def _direction(model: GenerativeClassifier, logits: Tensor, y: int) -> tuple[Tensor, Tensor]:
    """Return a step along the means (D,) that makes ``y`` more probable, and each logit's gain, (M,)."""
    others = logits.index_fill(0, torch.tensor(y, device=logits.device), -math.inf)
    posterior = logits.softmax(0)
    rival = others.argmax()[None]
    step = model.mixture.means(rival.new_tensor([y]))[0] - model.mixture.means(rival)[0]
    slope = model.mixture.products(step[None])[0].double()
    if slope[y] <= (posterior * slope).sum():
        likely = others.topk(min(len(others) - 1, RIVALS)).indices
        weights = others[likely].softmax(0).to(step.dtype)
        step = model.mixture.means(rival.new_tensor([y]))[0] - weights @ model.mixture.means(likely)
        slope = model.mixture.products(step[None])[0].double()
    return step, slope


def _leg(logits: Tensor, slope: Tensor, y: int, log_target: float) -> tuple[float, bool]:
    """Return how far to go until log p(y) is ``log_target`` or falls again, and which of the two happens."""

    def value(t: float) -> float:
        return float((logits + t * slope).log_softmax(0)[y])

    def rises(t: float) -> bool:
        return float(slope[y] - ((logits + t * slope).softmax(0) * slope).sum()) > 0

    end = 1.0
    while value(end) < log_target and rises(end) and end < 1e12:
        end *= 2
    if value(end) < log_target:
        top = _bisected(rises, 0.0, end)
        if value(top) < log_target:
            return top, False
        end = top
    return _bisected(lambda t: value(t) < log_target, 0.0, end), True


def _bisected(before: Callable[[float], bool], low: float, high: float) -> float:
    """Return the place where ``before`` stops being true."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if before(middle) else (low, middle)
    return high


@dataclass(frozen=True)
class Counterfactual:
    """An image, and the 8-bit image that the model would call something else."""

    original: Array
    """(C, H, W) uint8."""
    image: Array
    """(C, H, W) uint8."""
    y: int
    """The class that was aimed at."""
    target: float
    posterior: Array
    """Posterior of ``image``, (M,) in float64."""
    in_pixels: float
    """Posterior of the class at the path's end, computed from its pixels before they are rounded."""
    when_rounded: float
    """The same with 8-bit pixels, before the place on the path was corrected for the rounding."""
    share: float
    """Where on the path ``image`` is: 1 is the place where the latent itself has the target."""
    length: float
    """Length of the path up to there, in standard deviations of a class."""
    bits_per_dim: tuple[float, float]
    """Bits/dim of the original and of ``image``: does it still look like an image to the model?"""
    steps: Array
    """8-bit images along the path, from the original to ``image``, (n, C, H, W)."""
    shares: Array
    """The positions of ``steps`` on the path, (n,)."""
    posteriors: Array
    """Posteriors of these images, (n, M) in float64."""

    @property
    def reached(self) -> bool:
        """Whether the posterior of the 8-bit image is the target, up to 0.01."""
        return abs(float(self.posterior[self.y]) - self.target) <= CLOSE

    @property
    def difference(self) -> Array:
        """The change in grey levels, (C, H, W) int16."""
        change: Array = self.image.astype(np.int16) - self.original.astype(np.int16)
        return change


@torch.no_grad()
def counterfactual(
    model: GenerativeClassifier, image: Array, y: int, target: float = TARGET, steps: int = 7
) -> Counterfactual:
    """Move an 8-bit image (C, H, W) along the means until the posterior of class ``y`` is ``target``.

    Rounding to 8 bits and clipping to [0, 255] move the posterior again. So places on the path, and beyond
    it, are tried as 8-bit images, closer and closer to where their posterior passes the target.

    Args:
        model: in evaluation mode.
        image: the 8-bit image to start from.
        y: number of the class to reach.
        target: its posterior at the end of the path.
        steps: number of images on the path, with both ends.

    Returns:
        The last image, the path to it, and what the model says along the path.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> changed = counterfactual(model, np.full((1, 8, 8), 99, np.uint8), y=3, target=0.12)
    >>> changed.image.shape, changed.steps.shape
    ((1, 8, 8), (7, 1, 8, 8))
    """
    if steps < 2:
        raise CandidError(f"A path has at least its two ends: ask for 2 steps or more, not {steps}.")
    frozen = _checked(model, image).frozen()
    original = torch.from_numpy(image)
    path = path_towards(frozen, frozen.latent(_scaled(original[None], frozen))[0], y, target)
    pixels, _ = frozen.flow.inverse(path.at(torch.ones(1)))
    in_pixels = float(frozen.mixture.posterior(frozen.flow(pixels)[0])[0, y])
    if not math.isfinite(in_pixels):
        raise NonFiniteError("The path leads to where the network overflows: lower the target.")
    share, when_rounded = _place(frozen, path, y, target)
    shares = torch.linspace(0, share, steps)
    shown = torch.cat((original[None], _rounded(frozen, path.at(shares[1:]))))
    shown[-1] = _nudged(frozen, shown[-1], y, target)
    outputs = frozen(_scaled(shown, frozen))
    bits = -frozen.log_density_of(outputs) / (frozen.dimensions * math.log(2))
    posteriors = array_of(outputs.logits.double().softmax(1))
    return Counterfactual(
        image,
        array_of(shown[-1]),
        y,
        target,
        posteriors[-1],
        in_pixels,
        when_rounded,
        share,
        share * float(path.lengths[-1]),
        (float(bits[0]), float(bits[-1])),
        array_of(shown),
        array_of(shares),
        posteriors,
    )


def _place(model: GenerativeClassifier, path: LatentPath, y: int, target: float) -> tuple[float, float]:
    """Return the share of ``path`` whose 8-bit image has the target, and the posterior at its end."""
    low, high = 0.0, 2.0
    tried: dict[float, float] = {}
    for _ in range(ROUNDS):
        places = torch.linspace(low, high, PLACES + 1)[1:].tolist()
        tried |= _reached(model, path, places, y)
        passed = [place for place in places if tried[place] >= target]
        if not passed or _closest(tried, target)[1] <= CLOSE / 4:
            break
        low, high = max((place for place in places if place < passed[0]), default=low), passed[0]
    return _closest(tried, target)[0], tried[1.0]


def _nudged(model: GenerativeClassifier, image: Tensor, y: int, target: float) -> Tensor:
    """Return ``image`` with some pixels changed by a grey level, if its posterior is near the target.

    Of images with few pixels, those next to each other on a path can differ by more than that.
    """
    random, rows = generator(0), torch.arange(4 * PLACES)
    for _ in range(NUDGES):
        error = abs(float(model.posterior(_scaled(image[None], model))[0, y]) - target)
        if not CLOSE < error < NEAR:
            break
        pixels = torch.randint(image.numel(), (len(rows),), generator=random)
        changed = image.flatten().int().repeat(len(rows), 1)
        changed[rows, pixels] += 1 - 2 * (rows % 2).int()
        candidates = changed.clamp(0, 255).to(torch.uint8).view(-1, *image.shape)
        errors = (model.posterior(_scaled(candidates, model))[:, y] - target).abs().cpu()
        if float(errors.min()) < error:
            image = candidates[errors.argmin()]
    return image


def _closest(tried: dict[float, float], target: float) -> tuple[float, float]:
    """Return the place with the posterior closest to ``target``, and the difference."""
    return min(((place, abs(reached - target)) for place, reached in tried.items()), key=lambda pair: pair[1])


def _reached(
    model: GenerativeClassifier, path: LatentPath, places: list[float], y: int
) -> dict[float, float]:
    """Return the posteriors of ``y`` for the 8-bit images at ``places``."""
    images = _rounded(model, path.at(torch.tensor(places)))
    reached = model.posterior(_scaled(images, model))[:, y]
    return dict(zip(places, reached.tolist(), strict=True))


def _rounded(model: GenerativeClassifier, z: Tensor) -> Tensor:
    """Return the 8-bit images of latents, (N, C, H, W)."""
    return (255 * model.invert(z)).round().clamp(0, 255).to(torch.uint8).cpu()


def _scaled(images: Tensor, model: GenerativeClassifier) -> Tensor:
    """Return 8-bit images as floats in [0, 1] where the model is."""
    return images.to(model.device).float() / 255


def _checked(model: GenerativeClassifier, image: Array) -> GenerativeClassifier:
    require(model, "invert", "A counterfactual")
    if image.dtype != np.uint8 or tuple(image.shape) != model.image_shape:
        expected = " x ".join(map(str, model.image_shape))
        raise CandidError(
            f"Give one 8-bit image of {expected}, not {tuple(image.shape)} of {image.dtype}: fit it first."
        )
    return model


@dataclass(frozen=True)
class Interpolation:
    """Images between two images."""

    images: Array
    """(n, C, H, W) uint8; the first and the last are the given ones."""
    posteriors: Array
    """Posteriors of these images, (n, M) in float64."""


@torch.no_grad()
def interpolate(model: GenerativeClassifier, first: Array, second: Array, steps: int = 9) -> Interpolation:
    """Return images between one 8-bit image (C, H, W) and another, through latent space.

    The means of their classes are joined by a straight line. What the images have beyond them is turned from
    the one to the other: a straight line would pass nearer to the means than any image lies.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> two = np.arange(128, dtype=np.uint8).reshape(2, 1, 8, 8)
    >>> between = interpolate(model, *two, steps=5)
    >>> between.images.shape, np.array_equal(between.images[[0, -1]], two)
    ((5, 1, 8, 8), True)
    """
    if steps < 2:
        raise CandidError(
            f"An interpolation has at least its two ends: ask for 2 steps or more, not {steps}."
        )
    frozen = _checked(_checked(model, first), second).frozen()
    outputs = frozen(_scaled(torch.from_numpy(np.stack((first, second))), frozen))
    means = frozen.mixture.means(outputs.logits.argmax(1))
    t = torch.linspace(0, 1, steps, device=means.device, dtype=means.dtype)[:, None]
    beyond = outputs.z - means
    z = torch.lerp(means[0], means[1], t) + _turned(beyond[0], beyond[1], t)
    images = _rounded(frozen, z)
    images[0], images[-1] = torch.from_numpy(first), torch.from_numpy(second)
    return Interpolation(array_of(images), array_of(frozen.posterior(_scaled(images, frozen)).double()))


def _turned(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Return vectors from ``a`` to ``b`` (D,) by a rotation, the length changing evenly, (n, D)."""
    cosine = torch.dot(a.double(), b.double()) / (a.double().norm() * b.double().norm())
    angle = cosine.clamp(-1, 1).acos()
    if not 1e-3 < float(angle) < math.pi - 1e-3:
        return torch.lerp(a, b, t)
    lengths = torch.lerp(a.norm(), b.norm(), t)
    turn = t.double()
    directions = (
        torch.sin((1 - turn) * angle) * (a / a.norm()) + torch.sin(turn * angle) * (b / b.norm())
    ) / torch.sin(angle)
    return lengths * directions.to(a)


def samples(
    model: GenerativeClassifier,
    classes: list[int],
    temperatures: tuple[float, ...],
    n: int = 1,
    seed: int = 0,
) -> Array:
    """Return 8-bit images of classes, (temperatures, classes, n, C, H, W); temperatures share their noise."""
    frozen = model.eval().frozen()
    drawn = [frozen.sample(classes, n, temperature, generator(seed)) for temperature in temperatures]
    return array_of((255 * torch.stack(drawn)).round().to(torch.uint8).unflatten(1, (len(classes), n)))

"""Images under attack: what a model says of their versions, and the best one of each."""

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array
from candid._support.progress import SILENT, Progress
from candid.models.flow.network import array_of
from candid.models.protocol import Model, can, density_dimensions, require
from candid.robustness.attacks.metrics import AttackedImages, Trace
from candid.robustness.options import NUMBERS_A_BATCH

Classes = Tensor | Array | Sequence[int]
"""A class number for each of N images."""


class Attackable(Protocol):
    """What can be attacked: images in [0, 1] in, logits (B, M) out, differentiable."""

    image_shape: tuple[int, int, int]

    def logits(self, x: Tensor) -> Tensor:
        """Return logits, (B, M)."""
        ...


class Evaluation(NamedTuple):
    """What the model says about B images."""

    logits: Tensor
    margin: Tensor
    log_density: Tensor | None
    z: Tensor | None
    dimensions: int
    """How many numbers the density is of."""

    @property
    def per_dimension(self) -> Tensor:
        """The log density in nats per dimension, (B,)."""
        assert self.log_density is not None
        return self.log_density / self.dimensions


class Objective(NamedTuple):
    """What a perturbation minimises."""

    kappa: float
    c: float
    d: float
    median: float
    """Median of log q(x) / D over held-out images, in nats per dimension."""

    def loss(self, change: Tensor, seen: Evaluation) -> Tensor:
        """Return ``|change|^2 + c max(-margin, -kappa) + d (median - log q / D)^2``, (B,) in float64."""
        loss = squares(change).double() + self.c * (-seen.margin).clamp(min=-self.kappa).double()
        if seen.log_density is None:
            return loss
        return loss + self.d * (self.median - seen.per_dimension).square()


class Search:
    """N images under attack, and the best that was found of each.

    Args:
        model: its evaluation mode is attacked.
        images: (N, C, H, W), 8-bit or floats in [0, 1], an array or a tensor.
        targets: the class that each image shall be taken for, (N,); None for any but the label.
        labels: the true classes, (N,).
        keep_path: whether to remember all versions' margins and distances.
        keep_latents: whether to remember their latents, too.
    """

    def __init__(
        self,
        model: Attackable | Model,
        images: Tensor | Array,
        targets: Classes | None,
        labels: Classes | None,
        keep_path: bool,
        keep_latents: bool,
    ) -> None:
        if keep_latents:
            require(model, "invert", "Latents")
        self.model: Any = differentiable(model)
        self.invertible = can(self.model, "invert")
        self.of_features = can(self.model, "eye")
        self.x = _checked_images(self.model, images)
        with torch.no_grad():
            classes = self.model.logits(self.x[:1]).shape[1]
        self.targeted = targets is not None
        self.classes = self._checked_classes(targets, labels, classes)
        n, device = len(self.x), self.x.device
        self.images = self.x.clone()
        self.logits = self.x.new_zeros(n, classes)
        self.margin, self.loss = self.x.new_zeros(n), torch.full((n,), math.inf, device=device).double()
        self.reached, self.already_misclassified = torch.zeros(2, n, device=device, dtype=torch.bool)
        self.steps = torch.full((n,), -1, device=device)
        self.keep_path, self.keep_latents = keep_path, keep_latents
        self.path: list[tuple[Tensor, ...]] = []

    def _checked_classes(
        self,
        targets: Classes | None,
        labels: Classes | None,
        classes: int,
    ) -> Tensor:
        """Return the classes whose logits rise or, in untargeted attacks, fall, (N,)."""
        if targets is None and labels is None:
            raise CandidError("An attack needs a target for each image, or labels to lead away from.")
        if classes < 2:
            raise CandidError("A model of one class can't be fooled: attack one with two classes or more.")
        wanted, true = (
            None if given is None else _checked_numbers(given, name, len(self.x), classes).to(self.x.device)
            for name, given in (("targets", targets), ("labels", labels))
        )
        if wanted is not None and true is not None and len(same := (wanted == true).nonzero()):
            i = int(same[0])
            raise CandidError(f"The target of image {i} is its label, {int(true[i])}: choose another class.")
        chosen = true if wanted is None else wanted
        assert chosen is not None
        return chosen

    def batches(self, batch: int | None) -> Iterator[Tensor]:
        """Yield the numbers of the images that are attacked at once."""
        if batch is not None and batch < 1:
            raise CandidError(f"'batch' must be at least 1, not {batch}.")
        size = batch or max(1, NUMBERS_A_BATCH // self.x[0].numel())
        return iter(torch.arange(len(self.x), device=self.x.device).split(size))

    def evaluate(self, x: Tensor, numbers: Tensor, density: bool = False) -> Evaluation:
        """Evaluate the model at ``x``, versions of the images ``numbers``."""
        log_density = z = None
        if self.invertible:
            outputs = self.model(x)
            logits, z = outputs.logits, outputs.z
            log_density = self.model.log_density_of(outputs) if density else None
        elif self.of_features and density:
            outputs = self.model.tensor_outputs(x)
            logits, log_density = outputs.logits, outputs.log_density_terms.sum(1)
        else:
            logits = self.model.logits(x)
        classes = self.classes[numbers][:, None]
        others = logits.scatter(1, classes, -math.inf).amax(1)
        margin = logits.gather(1, classes).squeeze(1) - others
        dimensions = density_dimensions(self.model) if self.of_features else x[0].numel()
        return Evaluation(logits, margin if self.targeted else -margin, log_density, z, dimensions)

    @torch.no_grad()
    def keep(self, numbers: Tensor, x: Tensor, seen: Evaluation, loss: Tensor, kappa: float) -> Tensor:
        """Keep what is better than before and return where it is, (B,)."""
        if not torch.isfinite(loss).all():
            raise NonFiniteError("The model's logits are not finite: check its weights.")
        reached = seen.margin > 0 if math.isinf(kappa) else seen.margin >= kappa
        before = self.reached[numbers]
        better = (reached & ~before) | ((reached == before) & (loss < self.loss[numbers]))
        where = numbers[better]
        self.images[where], self.logits[where] = x[better], seen.logits[better]
        self.margin[where], self.loss[where] = seen.margin[better], loss[better]
        self.reached[where] = reached[better]
        self.steps[numbers] += 1
        if self.keep_path:
            distances = (x - self.x[numbers]).double().flatten(1).norm(dim=1)
            step = (numbers, seen.margin, distances, seen.z if self.keep_latents else None)
            self.path.append(tuple(part.detach().cpu() for part in step if part is not None))
        return better


def wide(per_image: Tensor) -> Tensor:
    """Return (B,) as (B, 1, 1, 1)."""
    return per_image[:, None, None, None]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of each image of ``a`` with that of ``b``, (B,)."""
    return (a * b).flatten(1).sum(1)


def squares(x: Tensor) -> Tensor:
    """Return the squared L2 norm of each image, (B,)."""
    return x.square().flatten(1).sum(1)


def lengths(x: Tensor) -> Tensor:
    """Return the L2 norm of each image, never zero, (B, 1, 1, 1)."""
    return wide(x.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny))


def differentiable(model: Attackable | Model) -> Any:
    """Return the model in torch and in evaluation mode, without gradients of its weights."""
    if hasattr(model, "can"):
        require(model, "gradients", "be attacked")
    if can(model, "invert"):
        return model.frozen()  # type: ignore[union-attr]
    if can(model, "gradients") and not isinstance(model, nn.Module):
        from candid.models.photo.torch_models import photo_module

        return photo_module(model)  # type: ignore[arg-type]
    if not isinstance(model, nn.Module) or _is_fixed(model):
        return model
    return copy.deepcopy(model).eval().requires_grad_(False)


def _is_fixed(module: nn.Module) -> bool:
    return not module.training and not any(weights.requires_grad for weights in module.parameters())


def _checked_images(model: Attackable, images: Tensor | Array) -> Tensor:
    """Return floats in [0, 1] of the type and on the device of the model, (N, C, H, W)."""
    images = torch.from_numpy(images) if isinstance(images, np.ndarray) else images
    if not isinstance(images, Tensor) or not (images.dtype == torch.uint8 or images.is_floating_point()):
        kind = getattr(images, "dtype", type(images).__name__)
        raise CandidError(f"Images must be 8-bit or floats in [0, 1], not {kind}: convert them first.")
    if images.dim() != 4 or tuple(images.shape[1:]) != tuple(model.image_shape) or not len(images):
        expected, shape = (" x ".join(map(str, s)) for s in (model.image_shape, images.shape))
        raise CandidError(
            f"The attack needs a batch of {expected} images (channels x height x width), "
            f"not a tensor of {shape or 'no dimensions'}: resize or crop them first."
        )
    pixels = images.to(*_place(model, images))
    pixels = pixels / 255 if images.dtype == torch.uint8 else pixels
    bad = (~((pixels >= 0) & (pixels <= 1))).flatten(1).any(1).nonzero()
    if len(bad):
        raise CandidError(
            f"Image {int(bad[0])} has pixels outside [0, 1], or NaN: divide 8-bit ones by 255, or remove it."
        )
    return pixels


def _place(model: Attackable, images: Tensor) -> tuple[torch.device, torch.dtype]:
    """Return where the model is, and the type of its numbers."""
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else (images,)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return (floats[0].device, floats[0].dtype) if floats else (images.device, torch.get_default_dtype())


def _checked_numbers(given: Classes, name: str, n: int, classes: int) -> Tensor:
    numbers = torch.as_tensor(given)
    if numbers.shape != (n,) or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise CandidError(
            f"{n} images need {n} class numbers as {name}, not {numbers.dtype} of {tuple(numbers.shape)}."
        )
    unknown = numbers[(numbers < 0) | (numbers >= classes)]
    if len(unknown):
        raise CandidError(f"Classes go from 0 to {classes - 1}: {int(unknown[0])} in {name} is none of them.")
    return numbers.long()


@torch.no_grad()
def attacked_images(search: Search, batch: int | None) -> AttackedImages:
    """Return the best version of each image."""
    rounded, densities = [], []
    for numbers in search.batches(batch):
        images = search.images[numbers]
        rounded.append(search.evaluate((255 * images).round() / 255, numbers).margin > 0)
        densities.append(search.evaluate(images, numbers, density=True).log_density)
    evaluated = [density for density in densities if density is not None]
    best = (search.images, search.reached, search.already_misclassified, search.margin, search.steps)
    attacked, success, already, margin, steps = (array_of(part.clone()) for part in best)  # it may go on
    return AttackedImages(
        attacked,
        success,
        array_of(torch.cat(rounded)),
        already,
        array_of((search.images.double() - search.x.double()).flatten(1).norm(dim=1)),
        margin,
        array_of(search.logits.double().softmax(1)),
        array_of(torch.cat(evaluated)) if evaluated else None,
        steps,
        _traces(search) if search.keep_path else None,
    )


def _traces(search: Search) -> tuple[Trace, ...]:
    numbers, *columns = (torch.cat(column).numpy() for column in zip(*search.path, strict=True))
    return tuple(Trace(*(column[numbers == i] for column in columns)) for i in range(len(search.x)))


def check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise CandidError(f"'{name}' of an attack must be a positive number, not {number}.")


@torch.enable_grad()
def projected_gradient(
    model: Attackable | Model,
    images: Tensor | Array,
    targets: Classes | None = None,
    *,
    labels: Classes | None = None,
    radius: float = 0.5,
    steps: int = 40,
    step_size: float | None = None,
    batch: int | None = None,
    keep_path: bool = False,
    keep_latents: bool = False,
    progress: Progress = SILENT,
) -> AttackedImages:
    """Projected gradient ascent of the margin (Madry et al., 2018) inside an L2 ball and [0, 1].

    ``x <- P(x + step_size g / |g|)`` with g the gradient of the margin, from the image itself; P scales the
    perturbation to ``radius`` if it is longer, then clips. Of all steps, the one with the largest margin is
    kept. The other arguments are those of :func:`~candid.robustness.attacks.carlini_wagner.carlini_wagner`.

    Args:
        radius: of the ball, in the L2 norm of images in [0, 1].
        steps: all of them are taken.
        step_size: 2.5 ``radius`` / ``steps`` if None.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    >>> attacked = projected_gradient(model, x, labels=model.predict(x / 255), radius=0.2)
    >>> bool((attacked.distance <= 0.2 + 1e-6).all())
    True
    """
    step_size = 2.5 * radius / max(steps, 1) if step_size is None else step_size
    check_positive(radius=radius, steps=steps, step_size=step_size)
    search = Search(model, images, targets, labels, keep_path or keep_latents, keep_latents)
    parts = (_ascent(search, numbers, radius, steps, step_size) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "attacking", len(search.x)), maxlen=0)
    return attacked_images(search, batch)


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

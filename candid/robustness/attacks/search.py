"""Images under attack: what a model says of their versions, and the best one of each."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from candid._support.errors import CandidError, NonFiniteError
from candid.models.protocol import Model, as_latent, density_dimensions, require_latent

NUMBERS_A_BATCH = 4 * 3 * 224 * 224
"""Numbers in the images that are attacked at once."""


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


@dataclass(frozen=True)
class Trace:
    """The path of one image, from the original to where the attack stopped: n - 1 steps."""

    margins: Tensor
    """Margin of the logits, (n,): positive where the model is fooled."""
    distances: Tensor
    """L2 norm from the original, (n,)."""
    latents: Tensor | None = None
    """Latents, (n, D), if they were asked for."""


@dataclass(frozen=True)
class AttackResult:
    """The attacked versions of N images, on the CPU."""

    images: Tensor
    """(N, C, H, W), floats in [0, 1]."""
    success: Tensor
    """Whether the margin reached kappa, (N,); for an infinite one and within a radius, if it is > 0."""
    rounded_success: Tensor
    """Whether the image is still misclassified as wanted when it is rounded to 8 bits, (N,)."""
    already_misclassified: Tensor
    """Whether the image was misclassified as wanted before the attack, (N,)."""
    distance: Tensor
    """L2 norm of the perturbation, (N,) in float64; black to white is 1 for each number of a pixel."""
    margin: Tensor
    """``l_t - max l_y`` over all y but the target t, (N,); untargeted, ``max l_y - l_t`` from the label t."""
    posterior: Tensor
    """Posterior of ``images``, (N, M) in float64."""
    log_density: Tensor | None
    """Log density of ``images``, (N,) in nats, in float64; None without a likelihood."""
    steps: Tensor
    """Gradient steps until the attack stopped, (N,)."""
    traces: tuple[Trace, ...] | None
    """The path of each image, if it was asked for."""
    eight_bit: "AttackResult | None" = None
    """The attack that works as a file, if it was asked for: ``images`` are multiples of 1 / 255, and a
    ``success`` reaches kappa with the model's own noise pattern and with others that the attack has not seen;
    all else is with the model's own."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def as_file(self) -> "AttackResult":
        """The attack with 8-bit images, or with real-valued ones if there are no others."""
        return self if self.eight_bit is None else self.eight_bit

    @property
    def per_pixel(self) -> Tensor:
        """Root mean square of the perturbation, (N,): the distance by the square root of C H W."""
        return self.distance / math.sqrt(self.images[0].numel())


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
        images: (N, C, H, W), 8-bit or floats in [0, 1].
        targets: the class that each image shall be taken for, (N,); None for any but the label.
        labels: the true classes, (N,).
        keep_path: whether to remember all versions' margins and distances.
        keep_latents: whether to remember their latents, too.
    """

    def __init__(
        self,
        model: Attackable,
        images: Tensor,
        targets: Tensor | Sequence[int] | None,
        labels: Tensor | Sequence[int] | None,
        keep_path: bool,
        keep_latents: bool,
    ) -> None:
        self.model = _prepared(model)
        self.latent = as_latent(self.model)
        self.described = features_model(self.model)
        if keep_latents:
            require_latent(self.model, "Latents")
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
        targets: Tensor | Sequence[int] | None,
        labels: Tensor | Sequence[int] | None,
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
        if self.latent is not None:
            outputs = self.latent(x)
            logits, z = outputs.logits, outputs.z
            log_density = self.latent.log_density_of(outputs) if density else None
        elif self.described is not None and density:
            outputs = self.described.outputs(x)
            assert outputs.log_density_terms is not None
            logits, log_density = outputs.logits, outputs.log_density_terms.sum(1)
        else:
            logits = self.model.logits(x)
        own = self.classes[numbers][:, None]
        others = logits.scatter(1, own, -math.inf).amax(1)
        margin = logits.gather(1, own).squeeze(1) - others
        dimensions = x[0].numel() if self.described is None else density_dimensions(self.described)
        return Evaluation(logits, margin if self.targeted else -margin, log_density, z, dimensions)

    @torch.no_grad()
    def keep(self, numbers: Tensor, x: Tensor, seen: Evaluation, loss: Tensor, kappa: float) -> Tensor:
        """Keep what is better than before and return where it is, (B,)."""
        if not torch.isfinite(loss).all():
            raise NonFiniteError("The model's logits are not finite: check its weights.")
        reached = seen.margin > 0 if math.isinf(kappa) else seen.margin >= kappa
        known = self.reached[numbers]
        better = (reached & ~known) | ((reached == known) & (loss < self.loss[numbers]))
        where = numbers[better]
        self.images[where], self.logits[where] = x[better], seen.logits[better]
        self.margin[where], self.loss[where] = seen.margin[better], loss[better]
        self.reached[where] = reached[better]
        self.steps[numbers] += 1
        if self.keep_path:
            distances = (x - self.x[numbers]).double().flatten(1).norm(dim=1)
            step = (numbers, seen.margin, distances, seen.z if self.keep_latents else None)
            self.path.append(tuple(each.detach().cpu() for each in step if each is not None))
        return better


def features_model(model: object) -> Model | None:
    """Return the model if it has a density of features, else None."""
    return cast(Model, model) if getattr(model, "density_of", None) == "features" else None


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


def _prepared(model: Attackable) -> Attackable:
    """Return the model in evaluation mode, without gradients of its weights."""
    latent = as_latent(model)
    if latent is not None:
        return latent.frozen()
    eye = getattr(model, "eye", None)
    if eye is not None and not eye.differentiable:
        raise CandidError(
            f"The eye '{eye.name}' runs in onnxruntime, which gives no gradients, so this model can't be "
            "attacked: train it with an eye in torch, such as lite0 or a .pt2 file."
        )
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).eval().requires_grad_(False)
    return model


def _checked_images(model: Attackable, images: Tensor) -> Tensor:
    """Return floats in [0, 1] of the type and on the device of the model, (N, C, H, W)."""
    if not isinstance(images, Tensor) or not (images.dtype == torch.uint8 or images.is_floating_point()):
        given = getattr(images, "dtype", type(images).__name__)
        raise CandidError(f"Images must be 8-bit or floats in [0, 1], not {given}: convert them first.")
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
    known = [(each.device, each.dtype) for each in tensors if each.is_floating_point()]
    return known[0] if known else (images.device, torch.get_default_dtype())


def _checked_numbers(given: Tensor | Sequence[int], name: str, n: int, classes: int) -> Tensor:
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
def result_of(search: Search, batch: int | None) -> AttackResult:
    """Return what was found."""
    rounded, densities = [], []
    for numbers in search.batches(batch):
        images = search.images[numbers]
        rounded.append(search.evaluate((255 * images).round() / 255, numbers).margin > 0)
        densities.append(search.evaluate(images, numbers, density=True).log_density)
    known = [each for each in densities if each is not None]
    kept = (search.images, search.reached, search.already_misclassified, search.margin, search.steps)
    images, success, already, margin, steps = (each.clone().cpu() for each in kept)  # the search may go on
    return AttackResult(
        images,
        success,
        torch.cat(rounded).cpu(),
        already,
        (search.images.double() - search.x.double()).flatten(1).norm(dim=1).cpu(),
        margin,
        search.logits.double().softmax(1).cpu(),
        torch.cat(known).cpu() if known else None,
        steps,
        _traces(search) if search.keep_path else None,
    )


def _traces(search: Search) -> tuple[Trace, ...]:
    numbers, *seen = (torch.cat(each) for each in zip(*search.path, strict=True))
    of_each = ([each[numbers == i] for each in seen] for i in range(len(search.x)))
    return tuple(Trace(*own) for own in of_each)


def check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise CandidError(f"'{name}' of an attack must be a positive number, not {number}.")

"""The contract of an invertible layer, chains of layers, and backpropagation by inversion.

Gomez et al., *The Reversible Residual Network* (2017), for any :class:`Invertible`: nothing is stored, all is
computed again. The memory of a training step then holds one layer's activations instead of all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from candid._support.errors import CandidError, NonFiniteError
from candid.models.flow.config import Memory
from candid.models.flow.subnets import FullResolutionEntry


class Invertible(nn.Module, ABC):
    """A differentiable bijection with a known log-determinant.

    - Forward goes from the image to the latent, inverse goes back.
    - Both return ``(output, log_det)``. ``log_det`` is ``log |det d output / d input|`` of the direction
      travelled: in nats, of shape (B,), in the input's dtype and on its device. So the two
      log-determinants of a round trip add up to zero.
    - A layer stores nothing between calls and never writes to its input.
    - Fixed tensors are buffers; permutations are indices.
    - The arithmetic of the bijection is done in the input's precision, under autocast too;
      only the networks that predict coefficients may run in a lower one.
    """

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]: ...


Direction = Literal["forward", "inverse"]

LARGEST_ERROR = 0.01
"""Largest relative error of the recovered input; 1e-5 is normal in float32, 1e-3 under bfloat16 autocast."""

ParameterGradients = dict[nn.Parameter, Tensor]


class Gradients(NamedTuple):
    """Gradients of the loss with respect to a layer's output and its log-determinant."""

    z: Tensor
    log_det: Tensor


class PulledBack(NamedTuple):
    """A layer's input, found from its output, and the loss's gradients there."""

    x: Tensor
    grad_x: Tensor | None
    parameters: ParameterGradients


@runtime_checkable
class PullsBack(Protocol):
    """A layer that inverts itself and pulls gradients back in one evaluation of its subnets.

    It is called without gradients. ``grad_x`` is wanted only if ``goes_on``.
    """

    def pull_back(self, z: Tensor, gradients: Gradients, goes_on: bool) -> PulledBack: ...


def _pull_back(layer: Invertible, z: Tensor, gradients: Gradients, goes_on: bool) -> PulledBack:
    """Pull gradients back through any layer: its inverse, then its forward pass again."""
    parameters = _trainable([layer])
    x = layer.inverse(z)[0].detach().requires_grad_(goes_on)
    with torch.enable_grad():
        outputs = layer(x)
    pairs = [(output, g) for output, g in zip(outputs, gradients, strict=True) if output.requires_grad]
    heads, weights = zip(*pairs, strict=True)
    results = iter(torch.autograd.grad(heads, [x, *parameters] if goes_on else parameters, weights))
    grad_x = next(results) if goes_on else None
    return PulledBack(x.detach(), grad_x, dict(zip(parameters, results, strict=True)))


@contextmanager
def _switched(modules: Sequence[nn.Module], attribute: str, value: bool) -> Iterator[None]:
    before = [getattr(module, attribute) for module in modules]
    for module in modules:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            setattr(module, attribute, old)


def frozen_statistics(*modules: nn.Module) -> AbstractContextManager[None]:
    """Let batch norm normalise as before without changing its running statistics."""
    norms = [
        m for m in _submodules(modules) if isinstance(m, _BatchNorm) and m.training and m.track_running_stats
    ]
    return _switched(norms, "track_running_stats", False)


def frugal(*modules: nn.Module) -> AbstractContextManager[None]:
    """Let subnets that can trade time for memory do so."""
    return _switched([m for m in _submodules(modules) if isinstance(m, FullResolutionEntry)], "frugal", True)


def _submodules(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()


def run_reversibly(layers: Sequence[Invertible], x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the chain of ``layers`` to ``x``, with backpropagation by inversion."""
    parameters = _trainable(layers)
    if not parameters and not x.requires_grad:
        return _run(layers, x)
    return _Reversible.apply(layers, x, *parameters)


def _trainable(layers: Iterable[Invertible]) -> list[nn.Parameter]:
    unique = {p: None for layer in layers for p in layer.parameters() if p.requires_grad}
    return list(unique)


def _first_trainable(layers: Sequence[Invertible]) -> int:
    return next(i for i, layer in enumerate(layers) if _trainable([layer]))


def _run(layers: Sequence[Invertible], x: Tensor) -> tuple[Tensor, Tensor]:
    log_det = x.new_zeros(x.shape[0])
    for layer in layers:
        x, term = layer(x)
        log_det += term
    return x, log_det


def _same_autocast(x: Tensor) -> AbstractContextManager[object]:
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    # Uncached: a weight cast under no_grad must not be found again where its gradient is needed.
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


def _state(layers: Sequence[Invertible]) -> list[object]:
    """Return what must be equal in both passes: which parameters are trained, and every module's mode."""
    return [*map(id, _trainable(layers)), *(module.training for module in _submodules(layers))]


class _Reversible(torch.autograd.Function):
    """Parameters are inputs, so that their gradients take autograd's usual way (hooks, DDP).

    They are also saved, so that autograd notices if one was changed in place before the backward pass.
    Layers below the first one that is trained need no way back. The input of that one is saved only
    to see whether the inversion found it again.
    """

    @staticmethod
    def forward(
        ctx: Any, layers: Sequence[Invertible], x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        lowest = 0 if ctx.needs_input_grad[1] else _first_trainable(layers)
        ctx.layers, ctx.state, ctx.autocast = layers[lowest:], _state(layers[lowest:]), _same_autocast(x)
        with ctx.autocast:
            start, log_det_below = _run(layers[:lowest], x)
            z, log_det = _run(ctx.layers, start)
        ctx.save_for_backward(start, z, *parameters)
        return z, log_det + log_det_below

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_z: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, ...]:
        start, z, *parameters = ctx.saved_tensors
        if _state(ctx.layers) != ctx.state:
            raise CandidError(
                "With memory='inverse' the network must not change between the forward and the backward "
                "pass (modes, frozen or swapped parameters): use memory='plain'."
            )
        x_needs_grad: bool = ctx.needs_input_grad[1]
        total: ParameterGradients = {}
        with torch.no_grad(), frozen_statistics(*ctx.layers), frugal(*ctx.layers), ctx.autocast:
            for depth, layer in reversed(list(enumerate(ctx.layers))):
                goes_on = x_needs_grad or depth > 0
                step = layer.pull_back if isinstance(layer, PullsBack) else partial(_pull_back, layer)
                z, grad_x, of_parameters = step(z, Gradients(grad_z, grad_log_det), goes_on)
                if grad_x is not None:
                    grad_z = grad_x
                for parameter, gradient in of_parameters.items():
                    so_far = total.get(parameter)
                    total[parameter] = gradient if so_far is None else so_far + gradient
        _check_found_again(z, start)
        return None, grad_z if x_needs_grad else None, *map(total.get, parameters)


def _check_found_again(recomputed: Tensor, start: Tensor) -> None:
    error, size = (recomputed - start).abs().max(), start.abs().max()
    if not error <= LARGEST_ERROR * size:
        raise NonFiniteError(
            f"Going back through the network missed its input by {float(error / size):.1e} of its size, so "
            "that gradients would be wrong: some layer is nearly singular, use memory='plain'."
        )


class Chain(Invertible):
    """Invertible layers one after another; log-determinants add up.

    ``memory="inverse"`` keeps no activations for the backward pass and recomputes them from the
    output, layer by layer (see the module). It applies to the outermost chain; its
    gradients can't be differentiated again.

    >>> from candid.models.flow.coupling import Permutation
    >>> from candid.models.flow.pooling import HaarPooling
    >>> chain = Chain({"pool": HaarPooling(), "shuffle": Permutation(12)})
    >>> z, log_det = chain(torch.rand(2, 3, 8, 8))
    >>> z.shape, log_det.shape
    (torch.Size([2, 12, 4, 4]), torch.Size([2]))
    """

    def __init__(
        self, layers: Mapping[str, Invertible] | Iterable[Invertible], memory: Memory = "plain"
    ) -> None:
        super().__init__()
        if not isinstance(layers, Mapping):
            layers = {str(i): layer for i, layer in enumerate(layers)}
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.memory = memory

    @property
    def memory(self) -> Memory:
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        if memory not in ("plain", "inverse"):
            raise CandidError(f"memory must be 'plain' or 'inverse', not {memory!r}.")
        self._memory = memory

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Invertible]]:
        """Yield the layers with their dotted names, nested chains unrolled, in forward order."""
        for name, layer in self._layers():
            if isinstance(layer, Chain):
                yield from layer.leaves(f"{prefix}{name}.")
            else:
                yield prefix + name, layer

    def _layers(self) -> list[tuple[str, Invertible]]:
        # Not named_children(), which passes over a layer that stands in the chain twice.
        return [(name, cast(Invertible, layer)) for name, layer in self._modules.items()]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.memory == "inverse" and torch.is_grad_enabled():
            return run_reversibly([layer for _, layer in self.leaves()], x)
        log_det = x.new_zeros(x.shape[0])
        for _, layer in self._layers():
            x, term = layer(x)
            log_det = log_det + term
        return x, log_det

    def forward_by_layer(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and return the log-determinant of each layer of this chain under its name."""
        terms = {}
        for name, layer in self._layers():
            x, terms[name] = layer(x)
        return x, terms

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        log_det = z.new_zeros(z.shape[0])
        for _, layer in reversed(self._layers()):
            z, term = layer.inverse(z)
            log_det = log_det + term
        return z, log_det

    @torch.no_grad()
    def first_nonfinite(self, x: Tensor, direction: Direction) -> NonFiniteError | None:
        """Return the error that names the first layer whose result is not finite, if there is one.

        It runs the chain again, layer by layer: call it only once a result is known to be bad.
        """
        if not torch.isfinite(x).all():
            return NonFiniteError(
                f"The input of the {direction} pass contains NaN or infinite values: clean it first."
            )
        leaves = list(self.leaves())
        with frozen_statistics(self):
            for name, layer in leaves if direction == "forward" else reversed(leaves):
                x, log_det = layer(x) if direction == "forward" else layer.inverse(x)
                for value, what in ((x, "activations"), (log_det, "log-determinant")):
                    if not torch.isfinite(value).all():
                        return NonFiniteError(
                            f"The {what} of layer '{name}' ({type(layer).__name__}) became non-finite "
                            f"in the {direction} pass: look at its weights and at the size of its input; "
                            "in training, lower the learning rate."
                        )
        return None

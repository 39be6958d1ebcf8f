"""The chain that composes invertible layers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, cast

import torch
from torch import Tensor

from candid._support.errors import CandidError, NonFiniteError
from candid.models.flow.config import Memory
from candid.models.flow.invertible import Invertible
from candid.models.flow.reversible import frozen_statistics, run_reversibly

Direction = Literal["forward", "inverse"]


class Chain(Invertible):
    """Invertible layers one after another; log-determinants add up.

    ``memory="inverse"`` keeps no activations for the backward pass and recomputes them from the
    output, layer by layer (:mod:`candid.models.flow.reversible`). It applies to the outermost chain; its
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

    def _layers(self) -> list[tuple[str, "Invertible"]]:
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

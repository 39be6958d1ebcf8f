"""Initial numbers of a model's tensors, from torch's default generator.

On the meta device, where a model is built before its weights are loaded, nothing is drawn: torch would load
its compiler and sympy to compute nothing, which takes half a second.
"""

import torch
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return normally distributed numbers."""
    empty = torch.empty(shape, dtype=dtype)
    return empty if empty.is_meta else empty.normal_()


def uniform(*shape: int) -> Tensor:
    """Return numbers between 0 and 1."""
    empty = torch.empty(shape)
    return empty if empty.is_meta else empty.uniform_()

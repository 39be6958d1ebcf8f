"""Code that must run without autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of ``x``."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for the bijection's own arithmetic on ``x``."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()

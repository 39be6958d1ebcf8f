"""What several tests share."""

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from candid import ClassifierConfig, FlowConfig, GenerativeClassifier
from candid._support.progress import Progress
from candid.cli.app import run as run_command

M = TypeVar("M", bound=nn.Module)
SHARED = Path(os.environ.get("CANDID_SHARED", Path(__file__).parents[2] / "shared"))
"""Reference files and data sets that are too large for the repository; tests that need them skip without."""


def randomise(module: M, seed: int = 0, strength: float = 0.3) -> M:
    """Parameters and running statistics drawn away from their start, which is near the identity."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            spread = p.std().clamp(min=1.0 if p.dim() == 1 else 0.1) if p.numel() > 1 else 1.0
            p.add_(strength * spread * torch.randn(p.shape, generator=g, dtype=p.dtype))
        for m in module.modules():
            if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None and m.running_var is not None:
                m.running_mean.copy_(0.3 * torch.randn(m.running_mean.shape, generator=g, dtype=p.dtype))
                m.running_var.copy_(0.5 + torch.rand(m.running_var.shape, generator=g, dtype=p.dtype))
    return module


def autograd_log_det(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Log |det| of the Jacobian of ``function`` at each sample of ``x``, from autograd, (B,)."""

    def jacobian(sample: Tensor) -> Tensor:
        def flat(v: Tensor) -> Tensor:
            return function(v.view(1, *sample.shape)).flatten()

        matrix: Tensor = torch.func.jacrev(flat, chunk_size=256)(sample.flatten())
        return matrix

    return torch.stack([torch.linalg.slogdet(jacobian(sample)).logabsdet for sample in x])


def small_classifier(seed: int = 0, **flow: object) -> GenerativeClassifier:
    """A quick three-class model on 3 x 16 x 16 images, in evaluation mode, away from the identity."""
    settings: dict[str, object] = {"blocks": (1, 1), "widths": (4, 4), "entry_width": 4, "pointwise_width": 4}
    config = ClassifierConfig(FlowConfig(3, 16, 16, **(settings | flow)), classes=3, rank=2)  # type: ignore[arg-type]
    return randomise(GenerativeClassifier(config, seed=seed), seed).eval()


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


class RecordedProgress(Progress):
    """Keeps what it is told: messages, and for each loop (description, total, images an item, items seen)."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.loops: list[tuple[str, int, int, list[Any]]] = []

    def log(self, text: str) -> None:
        self.messages.append(text)

    def track(self, iterable: Iterable[Any], description: str, total: int, images: int = 1) -> Iterator[Any]:
        seen: list[Any] = []
        self.loops.append((description, total, images, seen))
        for item in iterable:
            seen.append(item)
            yield item


class Done(NamedTuple):
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str
    exception: Exception | None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def candid_command(*arguments: object) -> Done:
    """Run ``candid`` with these arguments in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code, exception = 2, None
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = run_command([*map(str, arguments)]) or 0
        except Exception as error:
            exception = error
    return Done(code, stdout.getvalue(), stderr.getvalue(), exception)

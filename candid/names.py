"""What models are called."""

import math
from collections.abc import Sequence
from pathlib import Path


def short_name(model: Path) -> str:
    """``cifar10`` of runs/cifar10/model/best, ``cifar10-last`` of runs/cifar10/model/last."""
    parts = [part for part in model.resolve().parts[1:][-3:] if part not in ("model", "best")]
    return "-".join(parts[-2:] if parts[-1:] == ["last"] else parts[-1:]) or "model"


def number(value: float) -> str:
    """As people write it.

    >>> number(0.01), number(1.0), number(float("inf"))
    ('0.01', '1', '∞')
    """
    return "∞" if value == math.inf else f"{value:g}"


def short_names(models: Sequence[Path]) -> list[str]:
    """Short where that tells them apart, else their whole paths.

    >>> short_names([Path("a/cat/model/best"), Path("b/cat/model/best"), Path("dog")])
    ['a/cat/model/best', 'b/cat/model/best', 'dog']
    """
    short = [short_name(model) for model in models]
    return [str(model) if short.count(name) > 1 else name for model, name in zip(models, short, strict=True)]

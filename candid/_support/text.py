"""What models and figures are called."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

METRICS = {
    "accuracy": ("top-1 accuracy", 100, "{:.2f} %"),
    "top5_accuracy": ("top-5 accuracy", 100, "{:.2f} %"),
    "cross_entropy": ("cross-entropy (nats)", 1, "{:.3f}"),
    "bits_per_dim": ("bits/dim", 1, "{:.3f}"),
    "L_X": ("L_X (as in the paper)", 1, "{:.3f}"),
    "L_Y": ("L_Y (as in the paper)", 1, "{:.3f}"),
    "ece": ("ECE, all classes", 100, "{:.2f} %"),
    "mce": ("MCE, all classes", 100, "{:.2f} %"),
    "oce": ("OCE (sure: ≥ 99.7 %)", 1, "{:.2f}"),
    "top1_ece": ("ECE, top class", 100, "{:.2f} %"),
}
"""Of an evaluation: what each is called, by how much it is multiplied to be shown, and how it is written."""


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


def printable(text: str) -> str:
    r"""Return ``text`` with control characters written out, so that a file name can't steer a terminal.

    >>> printable("cat\x1b[2J.jpg")
    'cat\\x1b[2J.jpg'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def percent(share: float) -> str:
    """With one decimal; never a rounded 100 or 0.

    >>> percent(0.5), percent(0.9995), percent(1.0), percent(0.0001)
    ('50.0 %', '> 99.9 %', '100 %', '< 0.1 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if share >= 0.9995:
        return "> 99.9 %"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def span(low: float, high: float) -> str:
    """An interval of shares."""
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def listed(items: Iterable[str]) -> str:
    """With commas, and an 'and' before the last.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last

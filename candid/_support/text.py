"""How numbers, lists and names are written for people."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from candid._support.errors import CandidError


class Metric(NamedTuple):
    """How a metric of an evaluation is shown."""

    label: str
    scale: float
    form: str

    def shown(self, value: float) -> str:
        """Return the value as text.

        >>> METRICS["accuracy"].shown(0.9123)
        '91.23 %'
        """
        return self.form.format(self.scale * value)

    def interval(self, ends: Sequence[float]) -> str:
        """Return an interval of values as text.

        >>> METRICS["accuracy"].interval((0.9, 0.92))
        '90.00 to 92.00'
        """
        low, high = (self.shown(end).removesuffix(" %") for end in ends)
        return f"{low} to {high}"


METRICS = {
    "accuracy": Metric("top-1 accuracy", 100, "{:.2f} %"),
    "top5_accuracy": Metric("top-5 accuracy", 100, "{:.2f} %"),
    "cross_entropy": Metric("cross-entropy (nats)", 1, "{:.3f}"),
    "bits_per_dim": Metric("bits/dim", 1, "{:.3f}"),
    "L_X": Metric("L_X (as in the paper)", 1, "{:.3f}"),
    "L_Y": Metric("L_Y (as in the paper)", 1, "{:.3f}"),
    "ece": Metric("ECE, all classes, 15 bins", 100, "{:.2f} %"),
    "mce": Metric("MCE, all classes, 15 bins", 100, "{:.2f} %"),
    "oce": Metric("OCE (confident: ≥ 99.7 %)", 1, "{:.2f}"),
    "top1_ece": Metric("ECE, top class, 15 bins", 100, "{:.2f} %"),
}
"""The metrics of an evaluation, in the order in which they are shown."""


def number(value: float) -> str:
    """Return a number as people write it.

    >>> number(0.01), number(1.0), number(float("inf"))
    ('0.01', '1', '∞')
    """
    return "∞" if value == math.inf else f"{value:g}"


def percent(share: float) -> str:
    """Return a share in percent with one decimal; it is never rounded to 100 or 0.

    >>> percent(0.5), percent(0.9995), percent(1.0), percent(0.0001)
    ('50.0 %', '> 99.9 %', '100 %', '< 0.1 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if share >= 0.9995:
        return "> 99.9 %"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def hundredths(share: float | None, digits: int = 1) -> str:
    """Return a share in percent without the sign, for a column of a table; a dash if there is none.

    >>> hundredths(0.123), hundredths(0.12345, 2), hundredths(None)
    ('12.3', '12.35', '–')
    """
    return "–" if share is None else f"{100 * share:.{digits}f}"


def span(low: float, high: float) -> str:
    """Return an interval of shares in percent."""
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def listed(items: Iterable[str]) -> str:
    """Return ``items`` with commas, and with 'and' before the last.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: ``many``, or ``one`` with an s, unless the count is 1.

    >>> plural(1, "photo"), plural(1200, "photo"), plural(2, "class", "classes")
    ('1 photo', '1,200 photos', '2 classes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def short_name(model: Path) -> str:
    """Return ``cifar10`` for runs/cifar10/model/best, ``cifar10-last`` for runs/cifar10/model/last."""
    parts = [part for part in model.resolve().parts[1:][-3:] if part not in ("model", "best")]
    return "-".join(parts[-2:] if parts[-1:] == ["last"] else parts[-1:]) or "model"


def short_names(models: Sequence[Path]) -> list[str]:
    """Return short names where these differ, and whole paths where they don't.

    >>> short_names([Path("a/cat/model/best"), Path("b/cat/model/best"), Path("dog")])
    ['a/cat/model/best', 'b/cat/model/best', 'dog']
    """
    short = [short_name(model) for model in models]
    return [str(model) if short.count(name) > 1 else name for model, name in zip(models, short, strict=True)]


def printable(text: str, breaks: bool = True) -> str:
    r"""Return ``text`` with control characters written out, so that a file name can't steer a terminal.

    Args:
        text: what is to be printed.
        breaks: whether line breaks and tabs stay; a single name has none.

    >>> printable("cat\x1b[2J.jpg"), printable("a\nb", breaks=False)
    ('cat\\x1b[2J.jpg', 'a\\nb')
    """
    kept = "\n\t" if breaks else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def named_pairs(values: Iterable[str], flag: str, form: str = "NAME=PATH") -> dict[str, str]:
    """Return values of the ``form`` NAME=PATH by their names.

    >>> named_pairs(["mnist=data/mnist"], "--ood")
    {'mnist': 'data/mnist'}
    """
    found: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path:
            raise CandidError(f"{flag} takes {form}, not '{value}'.")
        if name in found:
            raise CandidError(f"{flag} has the name '{name}' twice: give each a name of its own.")
        found[name] = path
    return found

"""The registry of corruptions. Those of ImageNet-C (Hendrycks & Dietterich 2019) have five severities each.

A new corruption is a function with :func:`corruption` above it. The parameters of the present ones are the
published ones of ImageNet-C (224 pixels), Tiny-ImageNet-C (64) and CIFAR-10-C (32).
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from candid._support.errors import CandidError, did_you_mean

Kind = Literal["noise", "blur", "weather", "digital"]
Severities = tuple[float | tuple[float, ...], ...]
"""The parameters of severity 1 to 5; a number stands for one parameter."""
Function = TypeVar("Function", bound=Callable[..., Any])
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST_PUBLISHED = 32


@dataclass(frozen=True)
class Corruption:
    """A function of float images in levels of 0 to 255, one generator per image, and parameters."""

    name: str
    short: str
    """The name in the head of a table."""
    kind: Kind
    apply: Callable[..., Any] = field(repr=False)
    parameters: Mapping[int, Severities]
    """By the side of the images that they were published for, in pixels."""
    lengths: tuple[int, ...]
    """The parameters that are lengths in pixels, by their position."""
    alexnet: float | None
    """AlexNet's mean error over the severities, as published with ImageNet-C."""
    number: int
    """Part of the key of its random numbers; tables are in this order."""

    def parameters_for(self, side: int, severity: int) -> tuple[float, ...]:
        """Return the parameters of the nearest published size; lengths scale with the image.

        Images below 32 pixels have the lengths of 32: these are of a pixel or less.

        >>> from candid.robustness.corruptions.benchmark import CORRUPTIONS
        >>> CORRUPTIONS["motion_blur"].parameters_for(448, severity=1)
        (20.0, 6.0)
        """
        nearest = min(self.parameters, key=lambda size: abs(math.log(size / side)))
        scale = max(side, SMALLEST_PUBLISHED) / nearest
        published = self.parameters[nearest][severity - 1]
        values = published if isinstance(published, tuple) else (published,)
        return tuple(value * scale if i in self.lengths else value for i, value in enumerate(values))


CORRUPTIONS: dict[str, Corruption] = {}
"""All corruptions by name; import it from :mod:`candid.robustness.corruptions.benchmark`, which fills it."""


def corruption(
    kind: Kind,
    parameters: Mapping[int, Severities],
    *,
    short: str | None = None,
    lengths: tuple[int, ...] = (),
    alexnet: float | None = None,
    number: int | None = None,
) -> Callable[[Function], Function]:
    """Register the function below as a corruption, under its own name.

    Args:
        kind: the group that it belongs to.
        parameters: by image side in pixels, those of severity 1 to 5; the nearest side is used.
        short: the name in the head of a table.
        lengths: the positions of the parameters that are lengths in pixels and scale with the image.
        alexnet: AlexNet's mean error, if it was published; else the corruption is in no mCE of AlexNet.
        number: key of its random numbers and place in tables; by default a hash of the name, so it is last.
    """

    def register(function: Function) -> Function:
        name = function.__name__
        key = (1 << 32) + zlib.crc32(name.encode()) if number is None else number
        entry = Corruption(name, short or name, kind, function, parameters, lengths, alexnet, key)
        together = sorted((*CORRUPTIONS.values(), entry), key=lambda entry: entry.number)
        CORRUPTIONS.clear()
        CORRUPTIONS.update((entry.name, entry) for entry in together)
        return function

    return register


def check_names(names: Iterable[str]) -> None:
    """Refuse a corruption that is not registered."""
    for name in names:
        if name not in CORRUPTIONS:
            raise CandidError(f"Unknown corruption '{name}': {did_you_mean(name, CORRUPTIONS)}")


def check_severities(severities: Iterable[int]) -> None:
    """Refuse a severity that does not exist."""
    for severity in severities:
        if severity not in SEVERITIES:
            raise CandidError(f"Severity {severity} does not exist: choose 1, 2, 3, 4 or 5.")

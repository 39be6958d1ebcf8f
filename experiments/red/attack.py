"""The registry of attacks: an attack is a function that raises if what is promised does not hold."""

import os
from collections.abc import Callable
from dataclasses import dataclass


class BrokenError(Exception):
    """A promise does not hold."""


@dataclass(frozen=True)
class Attack:
    """What is promised, and how it is attacked."""

    name: str
    promise: str
    seconds: float
    """The attack has failed if it takes longer."""
    run: Callable[[], str]
    """Returns what was measured; raises if the promise does not hold."""


ATTACKS: dict[str, Attack] = {}


def attack(promise: str, seconds: float) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function without arguments as an attack, under its name.

    Args:
        promise: what should hold, in one sentence.
        seconds: the deadline of the whole attack.

    Returns:
        The decorator. The function returns what it measured, and raises if the promise does not hold.
    """

    def register(run: Callable[[], str]) -> Callable[[], str]:
        name = run.__name__.replace("_", "-")
        if name in ATTACKS:
            raise ValueError(f"two attacks are called {name}")
        ATTACKS[name] = Attack(name, promise, seconds, run)
        return run

    return register


def check(holds: bool, otherwise: str) -> None:
    """Raise with ``otherwise`` unless it holds; unlike an assert, also under ``python -O``."""
    if not holds:
        raise BrokenError(otherwise)


def full() -> bool:
    """Return whether to use the large counts of docs/security.md: ``make red FULL=1``."""
    return os.environ.get("FULL", "") not in ("", "0")

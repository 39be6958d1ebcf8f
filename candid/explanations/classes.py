"""Classes chosen by name, number or pattern."""

import operator
from collections.abc import Sequence
from fnmatch import fnmatchcase

from candid._support.errors import CandidError, did_you_mean

LONGEST_HINT = 300


def chosen_classes(names: Sequence[str], spec: str | Sequence[str | int]) -> list[int]:
    """Return class numbers from class names, class numbers and patterns with ``*``, ``?`` and ``[]``.

    ``spec`` is a list of them or a string with commas between them. Names may have commas, too: in a string
    the longest name that fits is taken. A name comes before a number, a number before a pattern. The order is
    kept, a class that comes again is left out; a name of several classes stands for all of them.

    >>> chosen_classes(["tench, Tinca tinca", "cat", "tiger cat", "dog"], "dog, *cat, 0, tench, Tinca tinca")
    [3, 1, 2, 0]
    """
    if isinstance(spec, str):
        spec = _split(names, spec)
    if not spec:
        raise CandidError("No classes are chosen: give names, numbers or patterns with commas between them.")
    return list(dict.fromkeys(number for item in spec for number in _numbers(names, item)))


def _split(names: Sequence[str], spec: str) -> list[str]:
    """Return the items of a string; pieces between commas stay together if they are a name."""
    known, most = set(names), 1 + max(name.count(",") for name in names)
    pieces, items = spec.split(","), []
    while pieces:
        for length in range(min(most, len(pieces)), 0, -1):
            item = ",".join(pieces[:length]).strip()
            if item in known or length == 1:
                break
        items.append(item)
        pieces = pieces[length:]
    return [item for item in items if item]


def _numbers(names: Sequence[str], item: str | int) -> list[int]:
    """Return the classes that one name, number or pattern stands for."""
    if isinstance(item, str):
        if found := [number for number, name in enumerate(names) if name == item]:
            return found
        if not item.removeprefix("-").isdecimal():
            if found := [number for number, name in enumerate(names) if fnmatchcase(name, item)]:
                return found
            raise CandidError(f"The model has no class '{item}': {_hint(item, names)}")
    number = operator.index(item) if not isinstance(item, str) else int(item)
    if not 0 <= number < len(names):
        raise CandidError(f"The model has no class {number}: class numbers go from 0 to {len(names) - 1}.")
    return [number]


def _hint(item: str, names: Sequence[str]) -> str:
    """Return the nearest names, few enough for one sentence."""
    holding = [name for name in names if item.lower() in name.lower()]
    hint = did_you_mean(item, holding or names)
    return hint if len(hint) < LONGEST_HINT else f"choose from its {len(names)} names, such as '{names[0]}'."

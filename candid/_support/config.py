"""Frozen dataclasses to and from plain dictionaries (JSON, TOML), strictly.

An unknown key, a wrong type or a missing value stops with one sentence that names the key.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from candid._support.errors import CandidError, did_you_mean

T = TypeVar("T")
MaybeInfinite = Annotated[float, "inf is a value"]
"""The type of a field that takes infinity; a plain float field is finite."""


def to_dict(config: Any) -> dict[str, Any]:
    """The dataclass as nested dictionaries and lists, ready for JSON."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass ``cls``; every key is known, every needed one is there, every type fits.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Size:
    ...     height: int
    ...     width: int = 8
    >>> from_dict(Size, {"height": 4})
    Size(height=4, width=8)
    >>> from_dict(Size, {"heigth": 4})
    Traceback (most recent call last):
    ...
    candid._support.errors.CandidError: Unknown key 'heigth' in the configuration: did you mean 'height'?
    """
    if not isinstance(values, Mapping):
        raise CandidError(f"The configuration{_at(where)} must be a table of keys, not {values!r}.")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise CandidError(
                f"Unknown key '{where}{key}' in the configuration: {did_you_mean(str(key), fields)}"
            )
    for name, field in fields.items():
        if name not in values and _is_required(field):
            raise CandidError(f"The configuration lacks the key '{where}{name}': add it.")
    return cls(**{key: convert(value, hints[key], where + key) for key, value in values.items()})


def check_fields(config: Any) -> None:
    """For ``__post_init__``: every field has its type; lists become tuples and whole numbers floats."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        object.__setattr__(config, name, convert(getattr(config, name), hint, name))


def check_range(config: Any, low: int, high: int, *names: str) -> None:
    """Every number of the fields ``names`` lies in [low, high]."""
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not low <= number <= high:
                raise CandidError(f"'{name}' must be at least {low} and at most {high}, not {number}.")


def convert(value: Any, hint: Any, key: str) -> Any:
    """``value`` as the type ``hint``, or an error that names ``key``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        return from_dict(typing.cast(type, hint), value, where=key + ".")
    if hint == MaybeInfinite:
        return math.inf if value == math.inf else convert(value, float, key)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            raise CandidError(f"'{key}' must be a table of keys, not {value!r}.")
        return dict(value)
    if origin is Literal:
        if value not in arguments:
            choices = [str(a) for a in arguments]
            raise CandidError(f"'{key}' can't be {value!r}: {did_you_mean(str(value), choices)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return convert(value, hint, key)
    if origin is tuple:
        return _convert_tuple(value, arguments, key)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, key)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise CandidError(f"'{key}' must be of type {hint.__name__}, not {value!r}.")
    return value


def _finite(value: float, key: str) -> float:
    try:
        if math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise CandidError(f"'{key}' must be a finite number.")


def _convert_tuple(value: Any, arguments: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise CandidError(f"'{key}' must be a list, not {value!r}.")
    if arguments[-1] is Ellipsis:
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        raise CandidError(f"'{key}' must have {len(arguments)} entries, not {len(value)}.")
    return tuple(
        convert(entry, hint, f"{key}[{i}]")
        for i, (entry, hint) in enumerate(zip(value, arguments, strict=True))
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _at(where: str) -> str:
    return f" at '{where.rstrip('.')}'" if where else ""

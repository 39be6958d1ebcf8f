"""Options as frozen dataclasses: from dictionaries (JSON, TOML), Python calls and to command lines.

Each option is declared once, as a field with its type, its default and an :class:`Option`. A wrong key,
type or value stops with one sentence that names the key. Also checks of the records that options stand in.
"""

import dataclasses
import math
import shlex
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from candid._support.errors import CandidError, CheckpointError, did_you_mean

TRIES = 100
"""How often a folder that others save to at the same time is read again."""

T = TypeVar("T")
_INFINITE = "inf is a value"
MaybeInfinite = Annotated[float, _INFINITE]
"""The type of a field that takes infinity; a plain float field is finite."""


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field means and which values it takes: ``Annotated[int, Option("Images per step.", least=1)]``.

    Args:
        help: one or two sentences: what the option changes, and in which unit.
        least, most: the smallest and the largest value (of each entry, if the field is a list).
        above, below: values lie strictly above or below this.
        metavar: what stands for the value in help. With a comma in it, the entries of a list of strings are
            separated by commas; else the flag is repeated. Lists of numbers always use commas.
        flag: the name on the command line if it differs from the field's: ``--json``, ``--flip/--no-flip``.
        default: what help shows as the default if that is not a fixed value.
        positional: whether the command takes it by position.
        hidden: whether only Python and recipes have it.
    """

    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    metavar: str | None = None
    flag: str | None = None
    default: str | None = None
    positional: bool = False
    hidden: bool = False

    @property
    def range(self) -> str:
        """The range in words.

        >>> Option("", above=0, most=1).range, Option("").range
        ('above 0 and at most 1', '')
        >>> Option("", most=25_000_000).range
        'at most 25000000'
        """
        limits = (("least", "at least"), ("above", "above"), ("most", "at most"), ("below", "below"))
        ends = [(word, getattr(self, name)) for name, word in limits if getattr(self, name) is not None]
        return " and ".join(f"{word} {_word(float(value))}" for word, value in ends)

    def allows(self, value: float) -> bool:
        """Return whether ``value`` lies in the range."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


MISSING = dataclasses.MISSING
"""The default of a field that must be given."""


class Field(NamedTuple):
    """A field of an options class."""

    name: str
    type: Any
    """Without its annotations."""
    option: Option
    default: Any
    """:data:`MISSING` if it is required."""

    @classmethod
    def of(cls, name: str, hint: Any, default: Any) -> "Field":
        """Return the field of this annotated type."""
        return cls(name, _without_option(hint), option_of(hint) or Option(""), default)

    @property
    def plain(self) -> Any:
        """The type without None and annotations, such as ``float``."""
        return _without_option(_without_none(self.type))

    @property
    def flag(self) -> str:
        """The flag on the command line, such as ``--learning-rate``."""
        return (self.option.flag or f"--{self.name.replace('_', '-')}").partition("/")[0]

    @property
    def by_commas(self) -> bool:
        """Whether the value is a list that is written with commas."""
        entry = self.entry
        return entry is not None and (entry is not str or "," in (self.option.metavar or ""))

    @property
    def entry(self) -> Any:
        """The type of the entries of a list, None if it is no list."""
        return get_args(self.plain)[0] if get_origin(self.plain) in (tuple, list) else None


def fields(cls: type) -> Iterator[Field]:
    """Yield the fields of the dataclass ``cls`` that have an :class:`Option`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if option_of(hints[field.name]) is not None:
            factory = field.default_factory
            yield Field.of(field.name, hints[field.name], field.default if factory is MISSING else factory())


def option_of(hint: Any) -> Option | None:
    """Return the :class:`Option` of an annotated type."""
    return next((entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, Option)), None)


def _without_option(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    return MaybeInfinite if _INFINITE in hint.__metadata__ else hint.__origin__


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (choice for choice in get_args(hint) if choice is not type(None))
    return hint


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the options ``cls`` with the keyword arguments ``values`` of a Python call.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     novelty: Annotated[float, Option("False-alarm rate.", above=0, below=1)] = 0.05
    ...     def __post_init__(self) -> None:
    ...         check_fields(self)
    >>> build(Options, {"novelty": 0.1})
    Options(novelty=0.1)
    >>> build(Options, {"noveltiy": 0.1})
    Traceback (most recent call last):
    ...
    candid._support.errors.CandidError: There is no option 'noveltiy': did you mean 'novelty'?
    >>> build(Options, {"novelty": 1})
    Traceback (most recent call last):
    ...
    candid._support.errors.CandidError: 'novelty' must be above 0 and below 1, not 1.
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise CandidError(f"There is no option '{key}': {did_you_mean(key, names)}")
    return from_dict(cls, values)


def as_command(command: str, positionals: typing.Sequence[object], options: Any) -> str:
    """Return the command line that has the same effect; options that have their default are left out.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     severities: Annotated[tuple[int, ...], Option("Severities.")] = (1, 3, 5)
    ...     skip_bad: Annotated[bool, Option("Skip bad images.")] = False
    >>> as_command("candid corrupt", ["my model", "data"], Options((1, 2), True))
    "candid corrupt 'my model' data --severities 1,2 --skip-bad"
    """
    words = [*map(str, positionals)]
    for field in fields(type(options)):
        value = getattr(options, field.name)
        if value == field.default or field.option.hidden or value is None:
            continue
        if field.option.positional:
            words += map(str, value) if field.entry is not None else [str(value)]
        elif isinstance(value, bool):
            words.append(field.flag if value else f"--no-{field.flag[2:]}")
        elif field.entry is None:
            words += [field.flag, _word(value)]
        elif field.by_commas:
            words += [field.flag, ",".join(map(_word, value))]
        else:
            words += [word for entry in value for word in (field.flag, _word(entry))]
    return " ".join([command, *map(shlex.quote, words)])


def _word(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the dataclass as nested dictionaries and lists, ready for JSON."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


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
        raise CandidError(f"The configuration{_at(where)} must be a table of keys, not {_shown(values)}.")
    hints = typing.get_type_hints(cls, include_extras=True)
    by_name = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in by_name:
            raise CandidError(
                f"Unknown key '{where}{key}' in the configuration: {did_you_mean(str(key), by_name)}"
            )
    for name, field in by_name.items():
        if name not in values and _is_required(field):
            raise CandidError(f"The configuration lacks the key '{where}{name}': add it.")
    return cls(**{key: convert(value, hints[key], where + key) for key, value in values.items()})


def check_fields(config: Any) -> None:
    """Check types and ranges in ``__post_init__``; lists become tuples, whole numbers floats, text paths."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        object.__setattr__(config, name, convert(getattr(config, name), hint, name))


def check_range(config: Any, low: int, high: int, *names: str) -> None:
    """Check that every number of the fields ``names`` lies in [low, high]."""
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not low <= number <= high:
                raise CandidError(f"'{name}' must be at least {low} and at most {high}, not {number}.")


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return ``value`` as the type ``hint``, or raise an error that names ``key``."""
    option = option_of(hint)
    if option is not None:
        converted = convert(value, _without_option(hint), key)
        for number in converted if isinstance(converted, tuple) else (converted,):
            if isinstance(number, int | float) and not option.allows(number):
                raise CandidError(f"'{key}' must be {option.range}, not {_word(float(number))}.")
        return converted
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        return from_dict(typing.cast(type, hint), value, where=key + ".")
    if hint == MaybeInfinite:
        return math.inf if value == math.inf else convert(value, float, key)
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            raise CandidError(f"'{key}' must be a table of keys, not {_shown(value)}.")
        return dict(value)
    if origin is Literal:
        if value not in arguments:
            choices = [str(a) for a in arguments]
            raise CandidError(f"'{key}' can't be {_shown(value)}: {did_you_mean(str(value), choices)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return convert(value, _without_none(hint), key)
    if origin is tuple:
        return _convert_tuple(value, arguments, key)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, key)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise CandidError(f"'{key}' must be of type {hint.__name__}, not {_shown(value)}.")
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
        raise CandidError(f"'{key}' must be a list, not {_shown(value)}.")
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


def _shown(value: Any) -> str:
    """Return a wrong value for a message, without the end of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _at(where: str) -> str:
    return f" at '{where.rstrip('.')}'" if where else ""


def named_option(name: str) -> str:
    """Return how an error names an option: for Python calls and, in brackets, for the command line.

    >>> named_option("split_seed")
    "'split_seed' (--split-seed)"
    """
    return f"'{name}' (--{name.replace('_', '-')})"


def checked_names(names: Sequence[str] | None, classes: int) -> tuple[str, ...]:
    """Return one name per class; the class numbers if ``names`` is None."""
    checked = tuple(map(str, range(classes)) if names is None else names)
    if not all(isinstance(name, str) and name.strip() for name in checked):
        raise CandidError("Class names must be text that is not empty: check all of them.")
    if len(checked) != classes:
        raise CandidError(
            f"There are {classes} classes but {len(checked)} class names: give one name per class."
        )
    if len(set(checked)) < classes:
        twice = next(name for i, name in enumerate(checked) if name in checked[:i])
        raise CandidError(f"Two classes have the name '{twice[:60]}': give each class its own name.")
    return checked


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file as a dictionary, or raise a ValueError if a key stands twice."""
    if len(content := dict(pairs)) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key '{twice[:60]}' stands twice")
    return content


def loaded_again(record: Path, read: Callable[[], T]) -> T:
    """Return what ``read`` finds; if it fails and ``record`` was replaced meanwhile, it reads again."""

    def content() -> bytes | None:
        return record.read_bytes() if record.is_file() else None

    for _ in range(TRIES):
        before = content()
        try:
            return read()
        except CheckpointError:
            if content() == before:
                raise
        time.sleep(0.02)
    return read()

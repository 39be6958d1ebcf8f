"""Commands from functions: parameters with an Option, and options classes whose fields become flags.

How to convert a command:

1. Declare its options once, as a frozen dataclass of the package that does the work, in a module that does
   not import torch: ``novelty: Annotated[float, Option("False-alarm …", above=0, below=1)] = 0.01``, with
   ``check_fields(self)`` in ``__post_init__``.
2. Write the command as a plain function in ``cli/NAME.py`` under ``@command``. Parameters before ``/`` are
   positionals, the others flags; each is ``Annotated[type, Option(help)]``. A parameter whose type is an
   options class becomes one flag for each of its fields, and arrives as a checked object.
   ``given: Annotated[dict[str, Any], Typed(TrainOptions)]`` brings only what the user typed, for recipes.
3. The docstring is the help: its first sentence is in ``candid --help``.
4. Import what is heavy (torch, figures) inside the function; everything above is loaded for ``--help``.
5. Call one function of the package, show its result, and return an exit code or None.
6. Add the command to ``COMMANDS`` in ``cli/app.py``.

``cli/examine.py`` is an example.
"""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter, Token

from candid._support import config
from candid._support.config import MISSING, Field, MaybeInfinite, Option
from candid._support.errors import CandidError

MODEL_HELP = "A bundled model ('candid models' lists them), a model folder or a run folder."
ModelName = Annotated[str, Option(MODEL_HELP, metavar="MODEL")]
JsonFlag = Annotated[bool, Option("Print JSON on standard output, and nothing else there.", flag="--json")]


@dataclasses.dataclass(frozen=True)
class Typed:
    """Marks a dictionary parameter that gets those fields of ``options`` that the user typed."""

    options: type


def command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return ``function`` with its options classes flattened, in the form that cyclopts reads."""
    hints = get_type_hints(function, include_extras=True)
    flat: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, bool]] = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        typed = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Typed)), None)
        if typed is not None or dataclasses.is_dataclass(hint):
            cls = hint if typed is None else typed.options
            groups[parameter.name] = (cls, typed is not None)
            flat += [
                _parameter(f, False, typed is not None) for f in config.fields(cls) if not f.option.hidden
            ]
        else:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            field = config.Field.of(parameter.name, hint, default)
            flat.append(_parameter(field, parameter.kind is parameter.POSITIONAL_ONLY))
    flat.sort(key=lambda each: each.kind)

    @functools.wraps(function)
    def run(*positionals: Any, **given: Any) -> int | None:
        for name, value in given.items():
            if name in hints and (option := config.option_of(hints[name])) is not None and option.range:
                config.convert(value, hints[name], name)
        for name, (cls, typed) in groups.items():
            own = {f.name: given.pop(f.name) for f in config.fields(cls) if f.name in given}
            given[name] = own if typed else config.build(cls, own)
        return function(*positionals, **given)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flat}
    run.__doc__ = reflowed(function.__doc__ or "")
    del run.__wrapped__
    return run


def _parameter(field: Field, positional: bool, typed: bool = False) -> inspect.Parameter:
    """Return the parameter that cyclopts parses for ``field``."""
    option, required = field.option, field.default is MISSING
    flag, _, negative = (option.flag or "").partition("/")
    is_bool = field.plain is bool
    if is_bool and not negative and (field.default is True or typed):
        negative = f"--no-{field.flag[2:]}"
    split = field.entry is not None and not positional
    shown: Any = option.default or (False if field.default in (None, False, ()) else _default)
    settings = Parameter(
        name=None if positional else flag or field.flag,
        help=option.help + (f" ({option.range})" if option.range else ""),
        metavar=option.metavar or _METAVAR.get(field.plain if field.entry is None else field.entry),
        negative=negative if is_bool else "",
        converter=functools.partial(_entries, field) if split else None,
        n_tokens=1 if split else None,
        show_default=False if required else shown,
        required=required,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_ONLY if positional else inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else field.default,
        annotation=Annotated[field.type, settings],
    )


_METAVAR = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _default(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _entries(field: Field, _: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
    """Return the entries of a list: ``--d 0,66 --d 1000`` is (0.0, 66.0, 1000.0)."""
    texts = [token.value for token in tokens]
    if field.by_commas:
        texts = [text.strip() for line in texts for text in line.split(",") if text.strip()]
    kind = float if field.entry == MaybeInfinite else field.entry
    kind = kind if kind in (int, float, Path) else str
    try:
        return tuple(kind(text) for text in texts)
    except ValueError:
        raise CandidError(f"{field.flag} takes {_LISTS[kind]}, not '{', '.join(texts)}'.") from None


_LISTS = {int: "whole numbers separated by commas", float: "numbers separated by commas"}


def reflowed(text: str) -> str:
    r"""Return a docstring with each paragraph on one line.

    >>> reflowed('''Judge images.
    ...
    ...     One line
    ...     each.''')
    'Judge images.\n\nOne line each.'
    """
    paragraphs = textwrap.dedent(inspect.cleandoc(text)).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

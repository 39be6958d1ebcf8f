"""The command line: it parses, calls one function and shows the result.

The module of a command is imported when the command runs; help and mistakes don't wait for torch. How to
write a command:

1. Declare its options once, as a frozen dataclass of the package that does the work, in a module that does
   not import torch: ``novelty: Annotated[float, Option("False-alarm …", above=0, below=1)] = 0.01``, with
   ``check_fields(self)`` in ``__post_init__``.
2. Write the command as a plain function in ``cli/NAME.py`` under ``@command``. Parameters before ``/`` are
   positionals, the others flags; each is ``Annotated[type, Option(help)]``. A parameter whose type is an
   options class becomes one flag for each of its fields, and arrives as a checked object.
   ``given: Annotated[dict[str, Any], Typed(TrainOptions)]`` brings only what the user typed, for recipes.
   ``Annotated[..., Panel("Photos")]`` shows a parameter, or all fields of a class, under a title of its own.
3. The docstring is the help: its first sentence is in ``candid --help``.
4. Import what is heavy (torch, figures) inside the function; everything above is loaded for ``--help``.
5. Call one function of the package, show its result, and return an exit code or None.
6. Add the command to :data:`COMMANDS`.

``cli/examine.py`` is an example.
"""

import dataclasses
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)

from candid._support import __version__
from candid._support import options as config
from candid._support.errors import CandidError, did_you_mean, missing_extra
from candid._support.files import system_error
from candid._support.options import MISSING, Field, MaybeInfinite, Option
from candid._support.progress import is_first_process
from candid._support.text import printable

Mark = TypeVar("Mark")
MODEL_HELP = "A bundled model ('candid models' lists them), a model folder or a run folder."
ModelName = Annotated[str, Option(MODEL_HELP, metavar="MODEL")]
JsonFlag = Annotated[bool, Option("Print JSON on standard output, and nothing else there.", flag="--json")]
COMMANDS = {
    "examine": "candid.cli.examine:examine",
    "train": "candid.cli.train:train",
    "adopt": "candid.cli.adopt:adopt",
    "evaluate": "candid.cli.evaluate:evaluate",
    "calibrate": "candid.cli.evaluate:calibrate",
    "refit": "candid.cli.evaluate:refit",
    "compare": "candid.cli.evaluate:compare",
    "group": "candid.cli.group:group",
    "teach": "candid.cli.teach:teach",
    "forget": "candid.cli.teach:forget",
    "rename": "candid.cli.teach:rename",
    "merge": "candid.cli.teach:merge",
    "undo": "candid.cli.teach:undo",
    "corrupt": "candid.cli.corrupt:corrupt",
    "attack": "candid.cli.attack:attack",
    "explain": "candid.cli.explain:explain",
    "plane": "candid.cli.plane:plane",
    "models": "candid.cli.models:models",
    "info": "candid.cli.models:info",
    "import": "candid.cli.models:import_model",
    "watch": "candid.cli.watch:watch",
    "serve": "candid.cli.serve:serve",
    "export": "candid.cli.export:export",
    "audit": "candid.cli.audit:audit",
    "demo": "candid.cli.demo:demo",
}
"""Where the function of each command is; it is imported when the command runs or help lists it."""
USAGE = {"examine": "Usage: candid examine [OPTIONS] [MODEL] IMAGES..."}
"""Of commands whose first argument may be left out, which a signature can't say."""
KINDS = {int: "a whole number", float: "a number", bool: "no value"}
FLAGS = ("-h", "--help", "--version")


def main() -> None:
    """Run the command line; a user's mistake ends in one line on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(run(sys.argv[1:]))
    except BrokenPipeError:  # the reader stopped, as in '| head'
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        message = "stopped."
    except CandidError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        missing = missing_extra(error, f"'candid {' '.join(sys.argv[1:2])}'")
        if missing is None:
            raise
        message = str(missing)
    except OSError as error:
        message = system_error(error)
    except CycloptsError as error:
        message = sentence(error)
    if is_first_process():
        print(f"candid: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


def run(arguments: list[str]) -> int | None:
    """Run the command in ``arguments`` and return its exit code."""
    name = arguments[0] if arguments else "--help"
    if name.startswith("-") and name not in FLAGS:
        raise CandidError(f"There is no option '{name}': {did_you_mean(name, FLAGS)}")
    if not name.startswith("-") and name not in COMMANDS:
        raise CandidError(f"There is no command '{name}': {did_you_mean(name, COMMANDS)}")
    if name in ("-h", "--help"):
        for each in COMMANDS:  # the list needs their first sentences
            app[each].help  # noqa: B018
    if name in COMMANDS:
        arguments = [name, *ordered(app[name], arguments[1:])]
    result = app(arguments, exit_on_error=False, print_error=False)
    return result if isinstance(result, int) else None


def ordered(command: App, words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with all options, and their values, before the positionals.

    cyclopts ends a list of positionals at the first option: of ``MODEL --novelty 0.1 a.jpg b.jpg`` it would
    leave b.jpg over.

    Args:
        command: the command, which declares its options.
        words: its arguments.
    """
    declared = command.assemble_argument_collection()
    with_value = {name for each in declared if each.token_count()[0] for name in each.names}
    options: list[str] = []
    positionals: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            positionals += rest
        elif not word.startswith("-") or word == "-":
            positionals.append(word)
        else:
            options += [word, *(islice(rest, 1) if word in with_value else ())]
    return [*options, "--", *positionals] if positionals else options


def sentence(error: CycloptsError) -> str:
    """Return what is wrong with the arguments, and what to do."""
    command = f"candid {' '.join(error.command_chain or ())}".strip()
    help = f"'{command} --help' shows what it takes."
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        known = [name for argument in error.argument_collection or () for name in argument.names]
        return f"There is no option '{word}': {did_you_mean(word, [n for n in known if n.startswith('--')])}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"'{error.unused_tokens[0]}' is one argument too many for '{command}': {help}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        if error.keyword is not None or error.argument.tokens:
            return f"{error.keyword or error.argument.name} needs a value: {help}"
        return f"{error.argument.name} is missing: {help}"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given twice: leave one out."
    if isinstance(error, CoercionError) and error.token is not None and error.msg is None:
        name = error.token.keyword or (error.argument and error.argument.name)
        if get_origin(error.target_type) is Literal:
            choices = map(str, get_args(error.target_type))
            return f"{name} can't be '{error.token.value}': {did_you_mean(error.token.value, choices)}"
        if error.target_type in KINDS:
            return f"{name} takes {KINDS[error.target_type]}, not '{error.token.value}'."
    return str(error)


@dataclasses.dataclass(frozen=True)
class Typed:
    """Marks a dictionary parameter that gets those fields of ``options`` that the user typed."""

    options: type


@dataclasses.dataclass(frozen=True)
class Panel:
    """Marks a parameter whose flags are listed under this title in the help."""

    title: str


def command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return ``function`` with its options classes flattened, in the form that cyclopts reads."""
    hints = get_type_hints(function, include_extras=True)
    panels: dict[str, Group] = {}
    flat: dict[str, inspect.Parameter] = {}
    classes: dict[str, tuple[type, bool]] = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        typed, panel = _mark(hint, Typed), _mark(hint, Panel)
        plain = hint if panel is None else get_args(hint)[0]
        group = None
        if panel is not None:
            group = panels.setdefault(panel.title, Group(panel.title, sort_key=len(panels)))
        if typed is not None or dataclasses.is_dataclass(plain):
            cls = plain if typed is None else typed.options
            classes[parameter.name] = (cls, typed is not None)
            for field in config.fields(cls):
                if not field.option.hidden:  # one that two classes share is shown with the first
                    flat.setdefault(field.name, _parameter(field, False, typed is not None, group))
        else:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            field = config.Field.of(parameter.name, hint, default)
            positional = parameter.kind is parameter.POSITIONAL_ONLY
            flat[parameter.name] = _parameter(field, positional, group=group)
    parameters = sorted(flat.values(), key=lambda each: each.kind)

    @functools.wraps(function)
    def run(*positionals: Any, **given: Any) -> int | None:
        for name, value in given.items():
            if name in hints and (option := config.option_of(hints[name])) is not None and option.range:
                config.convert(value, hints[name], name)
        built: dict[str, Any] = {}
        for name, (cls, typed) in classes.items():
            values = {field.name: given[field.name] for field in config.fields(cls) if field.name in given}
            built[name] = values if typed else config.build(cls, values)
        direct = {name: value for name, value in given.items() if name in hints}
        return function(*positionals, **direct, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = reflowed(function.__doc__ or "")
    del run.__wrapped__
    return run


def _mark(hint: Any, kind: type[Mark]) -> Mark | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, kind)), None)


def _parameter(
    field: Field, positional: bool, typed: bool = False, group: Group | None = None
) -> inspect.Parameter:
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
        annotation=Annotated[field.type, settings, *([] if group is None else [Parameter(group=group)])],
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


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, tight: bool = False
) -> None:
    """Print a table; its first ``left`` columns are text, the others numbers; ``tight`` saves width.

    Names may come from data, so control characters are written out and markup is not interpreted. Numbers may
    have their interval on a second line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left")
    if tight:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for i, column in enumerate(columns):
        table.add_column(
            Text(printable(column)),
            justify="left" if i < left else "right",
            overflow="fold",
            no_wrap=(i > 0) != tight,
        )
    for row in rows:
        table.add_row(*(Text(printable(cell, breaks=i >= left)) for i, cell in enumerate(row)))
    Console().print(table)


def safe(text: object) -> str:
    """Return a name for rich: without control characters, and with markup written out."""
    from rich.markup import escape

    return escape(printable(str(text), breaks=False))


app = App(
    name="candid",
    help="Image classifiers that say when not to trust them.",
    version=f"candid {__version__}",
    version_flags="--version",
    help_format="plaintext",
    group_parameters="Options",
    result_action="return_value",
)
for _name, _function in COMMANDS.items():
    app.command(_function, name=_name, usage=USAGE.get(_name))

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
6. Add the command to :data:`COMMANDS`, and to :data:`GROUPS` with an example.

``cli/examine.py`` is an example.
"""

import dataclasses
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, Token

from candid._support import __version__
from candid._support import options as config
from candid._support.errors import CandidError, did_you_mean, missing_extra
from candid._support.files import system_error
from candid._support.options import MISSING, Field, MaybeInfinite, Option
from candid._support.progress import is_first_process
from candid._support.text import printable
from candid._support.text import safe as safe
from candid._support.text import show_table as show_table
from candid.cli.arguments import check_order, sentence

Mark = TypeVar("Mark")
MODEL_HELP = (
    "A bundled model ('candid models' lists them), a model folder, a run folder, or hf:OWNER/NAME[@REVISION] "
    "of the Hugging Face Hub."
)
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
    "eyes": "candid.cli.models:eyes",
    "info": "candid.cli.models:info",
    "import": "candid.cli.models:import_model",
    "watch": "candid.cli.watch:watch",
    "serve": "candid.cli.serve:serve",
    "export": "candid.cli.export:export",
    "push": "candid.cli.export:push",
    "audit": "candid.cli.audit:audit",
    "demo": "candid.cli.demo:demo",
}
"""Where the function of each command is; it is imported when the command runs or help lists it."""
GROUPS = {
    "Start here": {
        "demo": "candid demo",
        "examine": "candid examine photo.jpg",
        "train": "candid train photos --out mine",
        "models": "candid models clothing",
    },
    "Photos from week to week": {
        "group": "candid group mine new-photos --sort-into sorted",
        "teach": "candid teach mine banana=sorted/unknown-1 pear=more-pears",
        "rename": "candid rename mine pear='Conference pear'",
        "merge": "candid merge mine apples=apple1,apple2",
        "forget": "candid forget mine banana",
        "undo": "candid undo mine",
        "watch": "candid watch mine incoming",
    },
    "Measure and decide": {
        "evaluate": "candid evaluate mine test-photos --ood other=other-photos",
        "compare": "candid compare evaluation/mine evaluation/mine2",
        "audit": "candid audit mine --data test-photos --ood other=other-photos --quick",
        "calibrate": "candid calibrate mine photos",
        "corrupt": "candid corrupt mine test-photos --images 200 --severities 1,3",
        "attack": "candid attack mine test-photos --images 2 --steps 40",
    },
    "Look inside": {
        "explain": "candid explain mine --data test-photos",
        "plane": "candid plane mine photos --classes apple,pear,plum",
        "info": "candid info mine",
        "eyes": "candid eyes",
    },
    "Use elsewhere": {
        "serve": "candid serve mine --port 8000",
        "export": "candid export mine --out mine.onnx",
        "push": "candid push mine hf:user/model",
    },
    "Classifiers from elsewhere, and networks": {
        "adopt": "candid adopt lite0 photos --tree imagenet --out adopted",
        "import": "candid import beta_1.avg.pt --out imported",
        "refit": "candid refit runs/cifar data/cifar10",
    },
}
"""The commands as their list shows them, each with the example in its own help."""
COMPLETION = "--install-completion"
DATA = "--data"
"""The flag that takes the data set of every command that has one."""
PANELS = {
    "Levels": Group("Verdicts", sort_key=10),
    "ReadOptions": Group("Which images, and how", sort_key=11),
    "ImageOptions": Group("Which images, and how", sort_key=11),
    "DataOptions": Group("Which images, and how", sort_key=11),
}
"""The titles of options that several commands share, by the class that declares them."""
USAGE = {"examine": "Usage: candid examine [OPTIONS] [MODEL] IMAGES..."}
"""Of commands whose first argument may be left out, which a signature can't say."""
FLAGS = ("-h", "--help", "--version", COMPLETION)


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
        for listed in COMMANDS:  # the list needs their first sentences
            app[listed].help  # noqa: B018
    if name in COMMANDS:
        arguments = [name, *ordered(app[name], arguments[1:])]
    result = app(arguments, exit_on_error=False, print_error=False)
    return result if isinstance(result, int) else None


def ordered(command: App, words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with all options, and their values, before the positionals.

    cyclopts ends a list of positionals at the first option: of ``MODEL --novelty 0.1 a.jpg b.jpg`` it would
    leave b.jpg over. A data set that a command takes as its last positional may also be given as ``--data``.

    Args:
        command: the command, which declares its options.
        words: its arguments.

    Raises:
        CandidError: if the images come before the model.
    """
    declared = command.assemble_argument_collection()
    with_value = {name for argument in declared if argument.token_count()[0] for name in argument.names}
    wanted = [argument.parameter.metavar or "" for argument in declared if argument.index is not None]
    by_name = DATA not in with_value and bool(wanted) and wanted[-1].endswith("DATA")
    options: list[str] = []
    positionals: list[str] = []
    data: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            positionals += rest
        elif by_name and word.partition("=")[0] == DATA:
            data += [word.partition("=")[2]] if "=" in word else islice(rest, 1)
        elif not word.startswith("-") or word == "-":
            positionals.append(word)
        else:
            options += [word, *(islice(rest, 1) if word in with_value else ())]
    positionals += data
    if wanted and "MODEL" in wanted[0] and len(positionals) > 1 and not is_model(positionals[0]):
        check_order(command.name[0], positionals, is_model)
    return [*options, "--", *positionals] if positionals else options


def is_model(name: str) -> bool:
    """Return whether ``name`` is that of a model, bundled or on the Hub, or the folder of one or of a run.

    >>> is_model("everyday"), is_model("photos")
    (True, False)
    """
    from candid.models import zoo

    path = Path(name)
    records = (path / record for record in (zoo.RECORD, zoo.RUN / zoo.RECORD))
    named = name in zoo.MODELS or name.startswith(zoo.HUB)
    return named or path.name == zoo.RECORD or any(map(Path.is_file, records))


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
                    shown = group or PANELS.get(_declared_by(cls, field.name))
                    flat.setdefault(field.name, _parameter(field, False, typed is not None, shown))
        else:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            field = config.Field.of(parameter.name, hint, default)
            positional = parameter.kind is parameter.POSITIONAL_ONLY
            flat[parameter.name] = _parameter(field, positional, group=group)
    parameters = sorted(flat.values(), key=lambda parameter: parameter.kind)

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
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = reflowed(function.__doc__ or "")
    del run.__wrapped__
    return run


def _declared_by(cls: type, name: str) -> str:
    """Return the class that declares a field of ``cls``: itself, or one that it is based on."""
    return next(base.__name__ for base in cls.__mro__ if name in vars(base).get("__annotations__", ()))


def _mark(hint: Any, kind: type[Mark]) -> Mark | None:
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, kind)), None)


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


app = App(
    name="candid",
    help="Image classifiers that say when not to trust them.",
    version=f"candid {__version__}",
    version_flags="--version",
    help_format="plaintext",
    group_arguments=Group("Arguments", sort_key=-1),
    group_parameters=Group("Options", sort_key=0),
    result_action="return_value",
)
for _title, _examples in GROUPS.items():
    _group = Group(_title, sort_key=list(GROUPS).index(_title))
    for _place, (_name, _example) in enumerate(_examples.items()):
        app.command(
            COMMANDS[_name],
            name=_name,
            usage=USAGE.get(_name),
            group=_group,
            sort_key=_place,
            help_epilogue=f"Example: {_example}",
        )
_flags = Group("Flags", sort_key=len(GROUPS))
app.register_install_completion_command(
    COMPLETION, help="Let the shell complete commands and options (bash, zsh, fish).", group=_flags
)
for _name in ("--help", "--version"):
    app[_name].group = _flags

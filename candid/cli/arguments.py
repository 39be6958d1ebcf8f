"""One sentence for what is wrong with the arguments of a command."""

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import join
from typing import Literal, get_args, get_origin

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from candid._support.errors import CandidError, did_you_mean

KINDS = {int: "a whole number", float: "a number", bool: "no value"}


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


def check_order(name: str, positionals: Sequence[str], is_model: Callable[[str], bool]) -> None:
    """Raise an error if the first positional is a file or a folder of images and the last one a model.

    Args:
        name: the name of the command.
        positionals: at least two, the first of which is no model.
        is_model: whether a word names a model; a folder of images may be called like a bundled one.
    """
    *others, last = positionals
    are_images = Path(others[0]).exists() or glob.has_magic(others[0])
    if are_images and is_model(last) and not (Path(last).is_dir() and not is_model(f"./{last}")):
        line = join(["candid", name, last, *others[:2]]) + " …" * (len(others) > 2)
        raise CandidError(f"'{last}' is a model and '{others[0]}' is not: the model comes first: {line}")

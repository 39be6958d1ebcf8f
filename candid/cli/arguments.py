"""Arguments of a command in any order, and what is wrong with them in the words of this package."""

from collections.abc import Sequence
from itertools import islice
from typing import Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from candid._support.errors import did_you_mean

KINDS = {int: "a whole number", float: "a number", bool: "no value"}


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

"""Commands as data: ``pipe:COMMAND`` runs a command, so the user must type it and allow it with a flag."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from candid._support.errors import CandidError

PIPE, FLAG = "pipe:", "--allow-pipe"
_typed: list[str] = []
"""What the user typed next to the flag."""


@contextmanager
def allowing_pipes(arguments: Sequence[str]) -> Iterator[None]:
    """Allow the commands that end one of the ``arguments`` of a command line."""
    before = _typed[:]
    _typed[:] = arguments
    try:
        yield
    finally:
        _typed[:] = before


def check_pipe(spec: str, urls: Sequence[str]) -> None:
    """Raise an error if ``spec``, which means ``urls``, runs a command that was not typed with the flag.

    >>> with allowing_pipes(["--val-data=pipe:cat val.tar"]):
    ...     check_pipe("pipe:cat val.tar", ["pipe:cat val.tar"])
    >>> check_pipe("{pip}e:cat val.tar", ["pipe:cat val.tar"])
    Traceback (most recent call last):
    ...
    candid._support.errors.CandidError: '{pip}e:cat val.tar' runs a command: ...
    """
    runs = any(PIPE in url.lower() for url in urls)
    if runs and not any(argument.endswith(spec) for argument in _typed):
        raise CandidError(
            f"'{spec}' runs a command: type it on the command line itself, together with {FLAG}. A command "
            "in a recipe, a run folder or a Python call is never run."
        )

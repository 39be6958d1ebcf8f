"""How an option is named in a message: as a flag on the command line, as an argument in Python."""

from collections.abc import Iterator
from contextlib import contextmanager

_in_command = [False]


@contextmanager
def from_command_line() -> Iterator[None]:
    """Name options as flags in the messages of what is run within."""
    before = _in_command[0]
    _in_command[0] = True
    try:
        yield
    finally:
        _in_command[0] = before


def named_option(name: str, value: str = "...") -> str:
    """Return how a user gives the option ``name``.

    >>> named_option("out"), named_option("resume", "True")
    ('out=...', 'resume=True')
    >>> with from_command_line():
    ...     named_option("split_seed")
    '--split-seed'
    """
    return f"--{name.replace('_', '-')}" if _in_command[0] else f"{name}={value}"

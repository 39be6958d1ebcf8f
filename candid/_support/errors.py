"""The errors that a user can fix; their message is one sentence that says how."""

import difflib
from collections.abc import Iterable


class CandidError(ValueError):
    r"""An input of the user is wrong: the message names it and says what to do, on one line.

    Args:
        message: one sentence; line breaks in it become spaces.

    >>> str(CandidError("Unknown name 'a\nb', from a damaged file."))
    "Unknown name 'a b', from a damaged file."
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class CheckpointError(CandidError):
    """A model file is missing, cut, foreign or of another version.

    >>> issubclass(CheckpointError, CandidError)
    True
    """


class NonFiniteError(CandidError, ArithmeticError):
    """An activation or a log-determinant became infinite or NaN; the message names the layer.

    >>> issubclass(NonFiniteError, ArithmeticError)
    True
    """


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the hint that ends an error about an unknown word.

    >>> did_you_mean("imagnet", ["imagenet", "cifar"])
    "did you mean 'imagenet'?"
    >>> did_you_mean("zebra", ["imagenet", "cifar"])
    'choose one of cifar, imagenet.'
    >>> did_you_mean("SHOE", ["Shoe", "hat", "shoe"])
    "did you mean 'Shoe' or 'shoe'?"
    """
    by_letters: dict[str, list[str]] = {}
    for choice in sorted(choices):
        by_letters.setdefault(choice.casefold(), []).append(choice)
    nearest = difflib.get_close_matches(word.casefold(), by_letters, n=1)
    if nearest:
        quoted = [f"'{each}'" for each in by_letters[nearest[0]]]
        return f"did you mean {' or '.join(quoted)}?"
    return f"choose one of {', '.join(each for own in by_letters.values() for each in own)}."

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
    """
    choices = sorted(choices)
    nearest = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(choices)}."

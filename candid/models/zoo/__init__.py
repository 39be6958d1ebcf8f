"""The trained models that come with the package: a folder each, with the model and its card."""

import json
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError, did_you_mean

FOLDER = Path(__file__).parent
CARD = "card.json"
RECORD = "model.json"
"""What makes a folder that of a model."""
RUN = Path("model", "best")
"""Where the folder of a training run has its best model."""
DEFAULT = "everyday"
"""The model of commands that are given none."""


def names() -> list[str]:
    """Return the names of all bundled models."""
    return sorted(card.parent.name for card in FOLDER.glob(f"*/{CARD}"))


def folder(name: str) -> Path | None:
    """Return the folder of the bundled model ``name``; None if there is no such model."""
    return FOLDER / name if name in names() else None


def card(name: str) -> dict[str, Any]:
    """Return the card of the bundled model ``name``: what it was made from, and what it can and can't do."""
    found = folder(name)
    if found is None:
        raise CandidError(f"There is no bundled model '{name}': {did_you_mean(name, names())}")
    return json.loads((found / CARD).read_text(encoding="utf-8"))

"""The trained models that come with the package: a folder each, with the model and its card."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError, did_you_mean
from candid._support.text import METRICS

FOLDER = Path(__file__).parent
CARD = "card.json"
RECORD = "model.json"
"""What makes a folder that of a model."""
RUN = Path("model", "best")
"""Where the folder of a training run has its best model."""
HUB = "hf:"
"""How the names of repositories of the Hugging Face Hub begin."""
DEFAULT = "everyday"
"""The model of commands that are given none."""


SEPARATE = ("cifar10-", "tiny20")
"""How the names of models begin that are a distribution of their own, so that the package stays small."""
MODELS = {card.parent.name: card.parent for card in sorted(FOLDER.glob(f"*/{CARD}"))}
"""The folders of all bundled models by name."""


def names() -> list[str]:
    """Return the names of all bundled models."""
    return list(MODELS)


def hint(name: str) -> str:
    """Return the hint that ends an error about a name that no model here has.

    >>> hint("wast")
    "did you mean 'waste'?"
    """
    if name.startswith(SEPARATE) and not any(each.startswith(SEPARATE) for each in MODELS):
        return "it is one of the pixel models: pip install 'candid-vision[models]'."
    return did_you_mean(name, MODELS)


def card(name: str) -> dict[str, Any]:
    """Return the card of the bundled model ``name``: what it was made from, and what it can and can't do."""
    if name not in MODELS:
        raise CandidError(f"There is no bundled model '{name}': {hint(name)}")
    return json.loads((MODELS[name] / CARD).read_text(encoding="utf-8"))


SHOWN = 20
"""Classes that a card names."""


TAGS = ("uncertainty", "out-of-distribution-detection", "conformal-prediction")


def as_readme(card: dict[str, Any]) -> str:
    """Return the card as Markdown, with the YAML on top that the Hugging Face Hub reads.

    The accuracy is in it if the card has one; the licence, if ``card["licence"]`` is one.
    """
    head: dict[str, Any] = {"license": card["licence"]} if card.get("licence") else {}
    head |= {"library_name": "candid-vision", "pipeline_tag": "image-classification", "tags": list(TAGS)}
    if card["figures"]:
        accuracy = {"type": "accuracy", "value": round(card["figures"]["accuracy"], 4)}
        data = {"name": card["tested_on"], "type": "images"}
        task = {"type": "image-classification"}
        results = [{"task": task, "dataset": data, "metrics": [accuracy]}]
        head["model-index"] = [{"name": card["name"], "results": results}]
    return "\n".join(["---", *_yaml(head), "---", "", as_markdown(card)])


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Return the lines of nested lists and dictionaries; texts as in JSON, which is YAML, too."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, dict | list):
                yield f"{indent}{key}:"
                yield from _yaml(each, indent + "  ")
            else:
                yield f"{indent}{key}: {json.dumps(each, ensure_ascii=False)}"
    else:
        for each in value:
            first, *rest = _yaml(each, indent + "  ") if isinstance(each, dict) else [json.dumps(each)]
            yield f"{indent}- {first.strip()}"
            yield from rest


def as_markdown(card: dict[str, Any]) -> str:
    """Return the card as Markdown."""
    return "\n".join(_lines(card)) + "\n"


def _lines(card: dict[str, Any]) -> Iterator[str]:
    shown = card["classes"][:SHOWN]
    rest = f" and {len(card['classes']) - SHOWN} more" if len(card["classes"]) > SHOWN else ""
    yield from (f"# {card['name']}", "", card["summary"], "", f"Classes: {', '.join(shown)}{rest}.", "")
    for key, title in (("data", "Data"), ("training", "Training"), ("storage", "Storage")):
        yield from (f"## {title}", "", *(f"- {line}" for line in card[key]), "")
    if card["figures"]:
        yield from ("## Results", "", f"{card['measured']}", "")
        yield from ("| | measured | 95 % interval |", "|---|---:|---:|")
        yield from (_row(card["figures"], key) for key in METRICS if card["figures"].get(key) is not None)
        yield from (f"| {name} | {value} | |" for name, value in card["more_figures"].items())
        yield ""
    for key, title in (("limits", "Limits"), ("not_for", "Not to be used for")):
        yield from (f"## {title}", "", *(f"- {line}" for line in card[key]), "")


def _row(figures: dict[str, Any], key: str) -> str:
    metric = METRICS[key]
    interval = metric.interval(figures["intervals"][key])
    return f"| {metric.label} | {metric.shown(figures[key])} | {interval} |"

"""Model cards as text."""

from collections.abc import Iterator
from typing import Any

from candid._support.text import METRICS

SHOWN = 20
"""Classes that a card names."""


def as_markdown(card: dict[str, Any]) -> str:
    """Return the card as Markdown."""
    return "\n".join(_lines(card)) + "\n"


def _lines(card: dict[str, Any]) -> Iterator[str]:
    shown = card["classes"][:SHOWN]
    more = f" and {len(card['classes']) - SHOWN} more" if len(card["classes"]) > SHOWN else ""
    yield from (f"# {card['name']}", "", card["summary"], "", f"Classes: {', '.join(shown)}{more}.", "")
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

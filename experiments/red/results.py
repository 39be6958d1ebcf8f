"""The table of docs/security.md: what ``make red FULL=1`` measured, from docs/results/red.json."""

import json
from pathlib import Path
from typing import TypedDict

from candid._support.files import write_text

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RECORD = DOCS / "security.md", DOCS / "results" / "red.json"
START, END = "<!-- red: from results/red.json -->\n", "<!-- /red -->\n"
"""What is between these lines of the page is written by the run."""


class Result(TypedDict):
    """What one attack showed."""

    promise: str
    held: bool
    said: str
    inputs: int
    kills: int
    minutes: float


def read() -> dict[str, Result]:
    """Return the results by the name of the attack; those of attacks that never ran are missing."""
    if not RECORD.exists():
        return {}
    found: dict[str, Result] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def table(results: dict[str, Result]) -> str:
    """Return the table as it stands in the page."""
    lines = ["| attack | inputs | kills | minutes | result |", "|---|---:|---:|---:|---|"]
    for name, each in results.items():
        counts = " | ".join(f"{each[key]:,}" if each[key] else "" for key in ("inputs", "kills"))
        said = each["said"].replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| `{name}` | {counts} | {each['minutes']:.1f} | {'' if each['held'] else 'BROKEN: '}{said} |"
        )
    inputs, kills, minutes = (
        sum(each[key] for each in results.values()) for key in ("inputs", "kills", "minutes")
    )
    lines.append(f"| {len(results)} attacks | {inputs:,} | {kills:,} | {minutes:.0f} | |")
    return "\n".join(lines) + "\n"


def with_table(page: str, results: dict[str, Result]) -> str:
    """Return the page with this table instead of its own."""
    before, rest = page.split(START)
    return before + START + table(results) + END + rest.split(END)[1]


def write(name: str, result: Result, order: list[str]) -> None:
    """Store the result of one attack, and write the page; attacks that are gone leave the table."""
    results = {**read(), name: result}
    results = {name: results[name] for name in order if name in results}
    write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", RECORD)
    write_text(with_table(PAGE.read_text(encoding="utf-8"), results), PAGE)

"""docs/speed.json from the results of all benchmarks, and the tables of docs/speed.md from it.

    python -m benchmarks.page

``python -m benchmarks`` does that at its end. A test holds the page to the file, and refuses a quick one.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, spread
from candid._support.files import replacing
from candid._support.text import markdown_table
from experiments.tables import filled

ROOT = Path(__file__).parents[1]
JSON, PAGE = ROOT / "docs" / "speed.json", ROOT / "docs" / "speed.md"
SCRIPTS = (
    "startup",
    "monitor",
    "photos",
    "forward",
    "training",
    "inverse",
    "mixture",
    "memory",
    "loading",
    "cifar",
    "evaluation",
    "explanations",
    "serving",
)
MISSING = "*Not measured yet: `make bench` on a quiet machine writes this table.*"
BUSY = 0.5
"""A load average from which on other processes disturb what is measured."""
Results = Mapping[str, Any]


def collected(folder: Path) -> dict[str, Any]:
    """Return what the scripts wrote to ``folder``: environment, seconds of each round, and figures.

    Raises:
        SystemExit: if the results of a script are missing.
    """
    missing = [script for script in SCRIPTS if not (folder / f"{script}.json").exists()]
    if missing:
        sys.exit(f"No results of {', '.join(missing)}: run python -m benchmarks --only {' '.join(missing)}.")
    found = {script: json.loads((folder / f"{script}.json").read_text()) for script in SCRIPTS}
    return {
        "quick": any(results["environment"]["quick"] for results in found.values()),
        "minutes": round(sum(results["environment"]["seconds"] for results in found.values()) / 60, 1),
        "scripts": {script: rounded(results) for script, results in found.items()},
    }


def rounded(value: Any) -> Any:
    """Return results with four digits, without what follows from the rest."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items() if key != "ratios of the first to each"}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def collect() -> Path:
    """Write docs/speed.json and the page, or, of a quick run, a file next to the results; return it."""
    results = collected(RESULTS)
    path = RESULTS / "speed.json" if results["quick"] else JSON
    with replacing(path) as file:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not results["quick"]:
        with replacing(PAGE) as file:
            file.write_text(written(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    return path


def committed(path: Path = JSON) -> dict[str, Any] | None:
    """Return docs/speed.json; None as long as nobody has measured.

    Raises:
        ValueError: if it is of a quick run, whose figures mean nothing.
    """
    if not path.exists():
        return None
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results["quick"]:
        raise ValueError(f"{path.name} is of a quick run: run make bench on a quiet machine.")
    return results


def written(page: str, results: Results | None) -> str:
    """Return the page with its tables; without results each of them says so."""
    tables: dict[str, str] = {}
    for script in SCRIPTS:
        tables[script] = MISSING if results is None else script_tables(results["scripts"][script])
    return filled(page, {"machine": MISSING if results is None else machine(results), **tables})


def machine(results: Results) -> str:
    """Return a sentence on where and when everything was measured."""
    places = [each["environment"] for each in results["scripts"].values()]
    first, load = places[0], places[0]["load_average"]
    busy = ", **while other processes were busy**" if load > BUSY else ""
    return (
        f"Measured on {first['date'][:10]} in {results['minutes']:.0f} minutes{busy}: {first['processor']}, "
        f"{first['threads']} threads, torch {first['torch']}, Python {first['python']}."
    )


def script_tables(results: Results) -> str:
    """Return the tables of a script: the seconds of each case, and its figures."""
    parts = [case_table(name, rounds) for name, rounds in results.get("seconds", {}).items()]
    return "\n\n".join([*parts, figure_table(results["figures"])])


def case_table(name: str, rounds: Mapping[str, Sequence[float]]) -> str:
    """Return a table of seconds, and of the ratio of the first row to each."""
    first, ours = next(iter(rounds.items()))
    rows = [
        (contender, seconds(theirs), spread([a / b for a, b in zip(ours, theirs, strict=True)]))
        for contender, theirs in rounds.items()
    ]
    return markdown_table((name, "s", f"{first} / this"), rows)


def figure_table(figures: Results) -> str:
    """Return a table of what was measured and what was aimed at."""
    rows = []
    for name, figure in figures.items():
        target = figure["target"]
        aim = "" if target is None else f"{'≥' if figure['at_least'] else '≤'} {target:.3g}"
        measured = statistics.median(figure["rounds"])
        met = target is None or (measured >= target if figure["at_least"] else measured <= target)
        rows.append((name, spread(figure["rounds"]), aim if met else f"{aim}: missed"))
    return markdown_table(("figure", "measured", "target"), rows)


def seconds(rounds: Sequence[float]) -> str:
    """Return a median with its range, with three digits.

    >>> seconds([0.0001234, 0.0001, 0.0002])
    '0.000123 (0.0001 to 0.0002)'
    """
    median = f"{statistics.median(rounds):.3g}"
    return median if len(rounds) == 1 else f"{median} ({min(rounds):.3g} to {max(rounds):.3g})"


def main() -> None:
    print(collect())


if __name__ == "__main__":
    main()

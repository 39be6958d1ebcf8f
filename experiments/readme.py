"""The parts of the README that were measured: ``python -m experiments.readme`` writes them."""

import json
import re
from pathlib import Path
from typing import Any

from candid._support.files import replacing
from experiments.tables import filled, markdown

ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
SETS = ("bloodcells8", "trashnet6", "clothing10")
BUSY = 0.5
"""With a higher load before the installation, its seconds mean nothing."""
RIVALS = ("logistic", "logistic, standardised")


def promises() -> str:
    """Return the table: what is promised, and what was measured."""
    return markdown(
        ("", "promised", "measured on blood cells / waste / clothes"),
        (
            ("novelty: ordinary photos called novel", "5 % on average", _own("false_alarms_0.05")),
            ("error: class sets without the true class", "at most 5 % on average", _own("missed")),
            (
                "alarm (`candid watch`): quiet streams that ever ring",
                "at most 1 %",
                f"{quiet():.2f} % at worst, 2000 streams ([drift](docs/drift.md))",
            ),
            ("accuracy [linear probe]", "–", _next_to("accuracy")),
            ("far photos found, AUROC [linear probe]", "–", _next_to("far", "far_msp", "far_energy")),
            (
                "near unknowns found, AUROC [linear probe]",
                "–",
                _next_to("unknown", "unknown_msp", "unknown_energy"),
            ),
        ),
    )


def _splits() -> Any:
    return json.loads((DOCS / "results" / "photos.json").read_text(encoding="utf-8"))["splits"]


def _mean(rows: Any, key: str) -> float:
    return 100 * sum(row[key] for row in rows) / len(rows)


def _own(key: str) -> str:
    return " / ".join(f"{_mean(_splits()[each]['candid'], key):.1f}" for each in SETS) + " %"


def _next_to(key: str, *rival_keys: str) -> str:
    """Return a figure of each set, and in brackets the best one of the logistic regressions."""
    best = [
        max(_mean(_splits()[each][rival], other) for rival in RIVALS for other in rival_keys or (key,))
        for each in SETS
    ]
    return f"{_own(key)} [{' / '.join(f'{value:.1f}' for value in best)}]"


def installed() -> str:
    """Return what an installation takes, as ``make check`` measured it (docs/install.json)."""
    found = json.loads((DOCS / "install.json").read_text(encoding="utf-8"))
    base = found["base"]
    size = f"The installation takes {base['megabytes']:.0f} MB"
    if found["load"] > BUSY:
        return f"{size}."
    return (
        f"{size} and {base['seconds']:.0f} seconds, the first verdict {base['first']:.0f} seconds "
        "(two cores, downloads included)."
    )


def quiet() -> float:
    """Return the largest share (%) of quiet streams that ever ring in docs/drift.md, of both watches."""
    rows = re.findall(
        r"^\| [\w ,-]+ \| sequential \| [\d.]+ % \| [\d.]+ % \| ([\d.]+) % \|", _page("drift"), re.M
    )
    return max(map(float, rows))


def _page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def main() -> None:
    """Write them."""
    text = filled(README.read_text(encoding="utf-8"), {"promises": promises(), "install": installed()})
    with replacing(README) as file:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

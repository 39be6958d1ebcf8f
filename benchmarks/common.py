"""What the benchmarks share: alternating timings, tables, result files."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
console = Console() if Console().is_terminal else Console(width=120)


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio(self, peer: "Timing") -> float:
        """Median of the rounds' own ratios to ``peer``: a slow round slows both and cancels."""
        return statistics.median(a / b for a, b in zip(self.seconds, peer.seconds, strict=True))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({min(self.seconds):.3f} to {max(self.seconds):.3f})"


def alternate(
    contenders: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, Timing]:
    """Times the contenders in turn, A, B, A, B, ..., so that a drift of the machine meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(warmup + repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if round_ >= warmup:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(rounds)) for name, rounds in seconds.items()}


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    options = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: does it run at all?"
    )
    options.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="threads of torch (default: all cores, %(default)s)",
    )
    return options


def set_threads(threads: int) -> None:
    """Fixes torch's thread count and says so if other processes will disturb the timings."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(f"[yellow]Other processes are busy (load {load:.1f}): seconds will be too long.[/]")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def write(script: str, quick: bool, results: Mapping[str, Any]) -> None:
    """Writes ``results/<script>.json``, with what is needed to judge the figures later."""
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{script}.json"
    path.write_text(json.dumps({"environment": environment, **results}, indent=2) + "\n")
    console.print(f"Written to {path}")

"""What the benchmarks share: alternating timings, the machine's limit, tables, figures, result files."""

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

from benchmarks.limit import Limit

STARTED = time.monotonic()
LOAD = os.getloadavg()[0]
"""Before anything is measured: more than 0.5 says that others disturb it."""
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
LIMIT = "limit"
console = Console() if Console().is_terminal else Console(width=120)


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, peer: "Timing") -> tuple[float, ...]:
        """The rounds' own ratios to ``peer``: a slow round slows both and cancels."""
        return tuple(a / b for a, b in zip(self.seconds, peer.seconds, strict=True))

    def ratio(self, peer: "Timing") -> float:
        """Median of :meth:`ratios`."""
        return statistics.median(self.ratios(peer))

    def __str__(self) -> str:
        return spread(self.seconds)


Timings = Mapping[str, Timing]


@dataclass(frozen=True)
class Figure:
    """A figure of each round; its median should be at most ``target``, or at least."""

    rounds: tuple[float, ...]
    target: float | None = None
    at_least: bool = False

    @property
    def measured(self) -> float:
        return statistics.median(self.rounds)

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    @property
    def row(self) -> tuple[str, str, str]:
        if self.target is None:
            return spread(self.rounds), "", ""
        sign = ">=" if self.at_least else "<="
        return spread(self.rounds), f"{sign} {self.target:.3g}", "met" if self.met else "missed"


def spread(values: Sequence[float]) -> str:
    """Median and range; a single value as it is."""
    median = statistics.median(values)
    digits = 3 if median >= 0.1 else 5
    if len(values) == 1:
        return f"{median:.{digits}f}"
    return f"{median:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


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


def alternate_with_limit(
    contenders: Mapping[str, Callable[[], object]], repeats: int, gmacs: float, limit: Limit
) -> dict[str, Timing]:
    """:func:`alternate`, and what ``gmacs`` take at the limit's rate, which each round measures again."""
    rates: list[float] = []
    times = alternate({**contenders, LIMIT: lambda: rates.append(limit.rate())}, repeats)
    return {**times, LIMIT: Timing(tuple(gmacs / rate for rate in rates[-repeats:]))}


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


def parsed(options: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked; torch then has that number of threads."""
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    warn_if_busy()
    return chosen


def warn_if_busy() -> None:
    """Says so if other processes will disturb the timings."""
    if LOAD > 0.5:
        console.print(f"[yellow]Other processes are busy (load {LOAD:.1f}): seconds will be too long.[/]")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def show_times(title: str, times: Timings) -> None:
    """Seconds of every contender, and those of the first one as a share of them."""
    first, ours = next(iter(times.items()))
    rows = [(name, timing, spread(ours.ratios(timing))) for name, timing in times.items()]
    show(f"{title}: median (lowest to highest)", ("", "s", f"{first} / this"), rows)


def conclude(
    script: str,
    quick: bool,
    cases: Mapping[str, Timings],
    figures: Mapping[str, Figure],
    more: Mapping[str, Any] | None = None,
) -> int:
    """Shows the figures and writes everything; 1 if a target was missed, which a quick run can't."""
    if quick:
        figures = {name: Figure(figure.rounds) for name, figure in figures.items()}
    rows = [(name, *figure.row) for name, figure in figures.items()]
    show("Figures", ("", "measured", "target", ""), rows)
    seconds = {case: {name: t.seconds for name, t in times.items()} for case, times in cases.items()}
    ratios = {
        case: {name: ours.ratios(t) for name, t in times.items()}
        for case, times in cases.items()
        for ours in [next(iter(times.values()))]
    }
    judged = {
        name: {"measured": f.measured, "rounds": f.rounds, "target": f.target, "at_least": f.at_least}
        for name, f in figures.items()
    }
    write(
        script,
        quick,
        {"seconds": seconds, "ratios of the first to each": ratios, "figures": judged, **(more or {})},
    )
    return int(not all(figure.met for figure in figures.values()))


def processor() -> str:
    """Return the name of the CPU and its widest vector instructions, as far as Linux says them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = entries.get("flags", "").split()
    widest = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags), "")
    return ", ".join(filter(None, (entries.get("model name", platform.machine()), widest)))


def write(script: str, quick: bool, results: Mapping[str, Any]) -> None:
    """Writes ``results/<script>.json``, with what is needed to judge the figures later."""
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": LOAD,
        "seconds": round(time.monotonic() - STARTED, 1),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{script}.json"
    path.write_text(json.dumps({"environment": environment, **results}, indent=2) + "\n")
    console.print(f"Written to {path}")

"""Time and memory against depth, classes, image size and batch; the laws behind them.

Around one base case, one axis changes at a time. Each case runs in a process of its own: the median time of
a training step (loss, gradients, clipping, SGD with momentum) and of a forward pass of the frozen model,
and the peak of what torch's allocator hands out in a step, as in benchmarks.memory. docs/scaling.md
explains the laws (benchmarks.scaling_laws) and what follows from them.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.common import RESULTS, Timing, console, parser, show, warn_if_busy, write
from benchmarks.memory import measure
from benchmarks.scaling_laws import (
    EPOCHS,
    FLOAT,
    TRAINING_IMAGES,
    Case,
    Gpu,
    Laws,
    Point,
    Points,
    count,
    fit,
    gpu_bytes,
    largest_batch,
    total,
)
from candid import GenerativeClassifier, information_bottleneck_loss
from candid._support.processes import keep_freed_memory
from candid._support.text import markdown_table

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MODES = {"plain": "step, plain", "inverse": "step, inverse", "frozen": "forward, frozen"}
STEPS = ("plain", "inverse")
IMAGENET = Case("imagenet", (3, 4, 6, 3), 1000, 224, 64, mixing="orthogonal")


FULL: tuple[Case, dict[str, list[Any]]] = (
    Case("imagenet", (3, 4, 6, 3), 1000, 128, 4),
    {
        "blocks": [(3, 4, 6, 3), (6, 8, 12, 6), (12, 16, 24, 12)],
        "classes": [10, 1000, 21_000],
        "size": [32, 64, 128, 224, 448],
        "batch": [1, 2, 4, 8, 16],
    },
)
QUICK: tuple[Case, dict[str, list[Any]]] = (
    Case("tiny", (2, 3, 3), 200, 32, 4),
    {"blocks": [(2, 3, 3), (4, 6, 6)], "classes": [200, 2000], "size": [32, 64], "batch": [2, 4]},
)


def axes(quick: bool) -> dict[str, list[Case]]:
    """The cases by the axis that changes; the base case is on all of them."""
    base, values = QUICK if quick else FULL
    return {
        "depth": [replace(base, blocks=b) for b in values["blocks"]],
        "classes": [replace(base, classes=c) for c in values["classes"]],
        "size": [replace(base, size=s) for s in values["size"]],
        "batch": [replace(base, batch=b) for b in values["batch"]],
    }


POSITIONS: dict[str, tuple[str, Callable[[Case], int]]] = {
    "depth": ("coupling blocks", lambda case: sum(case.blocks)),
    "classes": ("classes", lambda case: case.classes),
    "size": ("height and width in pixels", lambda case: case.size),
    "batch": ("images in a batch", lambda case: case.batch),
}


def measure_case(case: Case, repeats: int) -> Point:
    keep_freed_memory()
    model = GenerativeClassifier(case.config)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)  # all its work, no movement
    x = torch.rand(case.batch, *model.image_shape)
    y = torch.arange(case.batch) % case.classes

    def gradients() -> None:
        information_bottleneck_loss(model, x, y, beta=1.0).total.backward()

    def step() -> None:
        optimiser.zero_grad()
        gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 8.0)
        optimiser.step()

    seconds, peaks = {}, {}
    for model.memory in ("plain", "inverse"):
        seconds[model.memory] = _median(step, repeats)
        optimiser.zero_grad()
        peaks[model.memory] = measure(model, gradients)
    frozen = model.frozen()
    with torch.inference_mode():
        forward = _median(lambda: frozen(x), repeats)
    plain, inverse = peaks["plain"], peaks["inverse"]
    return Point(seconds["plain"], seconds["inverse"], forward, plain.peak, inverse.peak, plain.parameters)


def _median(run: Callable[[], object], repeats: int) -> float:
    run()
    rounds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        rounds.append(time.perf_counter() - start)
    return Timing(tuple(rounds)).median


def in_process(case: Case, quick: bool, threads: int) -> Point:
    """``case`` measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--threads", str(threads)] + ["--quick"] * quick
    done = subprocess.run([*command, "--case", json.dumps(asdict(case))], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    return Point(**json.loads(done.stdout.splitlines()[-1]))


def draw(points: Points, laws: Laws, grid: Mapping[str, list[Case]], folder: Path) -> None:
    figure = _figure(
        grid,
        "seconds",
        MODES,
        lambda mode, case: float(getattr(points[case], mode)),
        laws.seconds,
    )
    _legend(figure)
    figure.savefig(folder / "scaling_time.png", dpi=110)
    figure = _figure(
        grid,
        "peak memory in GB",
        {"plain": "plain", "inverse": "inverse"},
        lambda mode, case: total(points[case], mode) / 1e9,
        lambda mode, case: laws.peak(mode, case) / 1e9,
    )
    for panel, (axis, cases) in zip(figure.axes, grid.items(), strict=True):
        floor = [(points[c].state + FLOAT * count(c.config).total) / 1e9 for c in cases]
        x = [POSITIONS[axis][1](case) for case in cases]
        panel.plot(x, floor, "--", color="0.5", label="parameters and gradients")
        panel.set_yscale("linear")
        panel.set_ylim(bottom=0)
    _legend(figure)
    figure.savefig(folder / "scaling_memory.png", dpi=110)
    console.print(f"Figures in {folder}")


def _figure(
    grid: Mapping[str, list[Case]],
    label: str,
    modes: Mapping[str, str],
    measured: Callable[[str, Case], float],
    law: Callable[[str, Case], float],
) -> Figure:
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for panel, (axis, cases) in zip(figure.subplots(2, 2).flat, grid.items(), strict=True):
        name, position = POSITIONS[axis]
        x = [position(case) for case in cases]
        for colour, (mode, title) in enumerate(modes.items()):
            panel.plot(x, [measured(mode, c) for c in cases], "o", color=f"C{colour}", label=title)
            panel.plot(x, [law(mode, c) for c in cases], "-", color=f"C{colour}", alpha=0.6)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(x, [f"{v:,}".replace(",", " ") for v in x])
        panel.minorticks_off()
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.tick_params(labelsize=11)
        panel.set_xlabel(name, fontsize=12)
        panel.set_ylabel(label, fontsize=12)
        panel.grid(alpha=0.3)
    return figure


def _legend(figure: Figure) -> None:
    figure.axes[0].legend(fontsize=11, title="points: measured, lines: law")


def law_rows(points: Points, laws: Laws) -> list[tuple[str, ...]]:
    errors = laws.errors(points)
    rows: list[tuple[str, ...]] = []
    for mode, title in MODES.items():
        a, b, c = laws.time[mode]
        rate = f"{1e-9 / b:.1f}" if b else "-"
        rows.append((title, f"{a:.3f}", rate, f"{1e9 * c:.2f}", f"{100 * errors[f'time, {mode}']:.0f} %"))
    return rows


def point_rows(points: Points, laws: Laws) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for case, point in points.items():
        counts = count(case.config)
        seconds = (f"{getattr(point, m):.3f} ({laws.seconds(m, case):.3f})" for m in MODES)
        peaks = (
            f"{total(point, m) / 1e9:.3f} ({laws.peak(m, case) / 1e9:.3f})" for m in ("plain", "inverse")
        )
        macs = f"{counts.training_macs(case.batch) / 1e9:.1f}"
        rows.append((str(case), macs, f"{counts.total / 1e6:.1f}", *seconds, *peaks))
    return rows


def memory_rows(laws: Laws) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for mode in STEPS:
        sizes = (f"{gpu_bytes(laws, mode, replace(IMAGENET, batch=b)) / 1e9:.1f}" for b in (64, 128, 256))
        fits = (str(largest_batch(laws, mode, IMAGENET, card * 1e9)) for card in (16, 40, 80))
        rows.append((mode, *sizes, *fits))
    return rows


def gpu_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for mixing in ("orthogonal", "permutation"):
        counts = count(replace(IMAGENET, mixing=mixing).config)
        for gpus in (1, 8, 64):
            gpu, batch = Gpu(), IMAGENET.batch
            hours = [replace(gpu, reached=u).run_hours(counts, batch, gpus) for u in (0.4, 0.3)]
            images = gpus * batch / gpu.step_seconds(counts, batch, gpus)
            rows.append(
                (
                    f"{mixing}, {gpus}",
                    f"{1e3 * gpu.step_seconds(counts, batch, 1):.0f}",
                    f"{1e3 * gpu.reduce_seconds(counts, gpus):.1f}",
                    f"{images:.0f}",
                    f"{hours[0]:.1f} to {hours[1]:.1f}",
                )
            )
    return rows


def cpu_days(laws: Laws, mixing: str) -> float:
    """The recipe's run on the machine that was measured, from the law of plain steps."""
    case = replace(IMAGENET, batch=384, mixing=mixing)
    return TRAINING_IMAGES / case.batch * EPOCHS * laws.seconds("plain", case) / 86400


TIME_COLUMNS = ("time", "a in s", "1 / b in GMAC/s", "c in ns", "largest error")
POINT_COLUMNS = ("case", "T in GMAC", "P in M", *MODES.values(), "GB, plain", "GB, inverse")
MEMORY_COLUMNS = ("memory", "64 images: GB", "128", "256", "fits into 16 GB: images", "40 GB", "80 GB")
GPU_COLUMNS = ("mixing, GPUs", "computing in ms", "all-reduce in ms", "images/s", "hours")


def report(points: Points, laws: Laws, table: Callable[..., None]) -> None:
    errors = laws.errors(points)
    table("Seconds = a + b T + c P", TIME_COLUMNS, law_rows(points, laws))
    table("Measured, in brackets the law", POINT_COLUMNS, point_rows(points, laws))
    i, j, o = (f"{v:.1f}" for v in laws.inverse)
    memory = [
        ("plain", "nothing fitted", "", "", f"{100 * errors['memory, plain']:.1f} %"),
        ("inverse", i, j, o, f"{100 * errors['memory, inverse']:.1f} %"),
    ]
    table("Peak memory", ("law", "i", "j", "o", "largest error"), memory)
    table("ImageNet on a GPU: memory, derived", MEMORY_COLUMNS, memory_rows(laws))
    table("ImageNet on GPUs: time, derived, 64 images a GPU", GPU_COLUMNS, gpu_rows())
    days = [(mixing, f"{cpu_days(laws, mixing):.0f}") for mixing in ("permutation", "orthogonal")]
    table("ImageNet on this CPU: time, derived from the law", ("mixing", "days"), days)


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    print(f"**{title}**\n\n{markdown_table(columns, rows)}\n")


def to_json(points: Points, laws: Laws) -> dict[str, Any]:
    measured = [{"case": asdict(case), "measured": asdict(point)} for case, point in points.items()]
    return {"points": measured, "laws": asdict(laws), "largest_errors": laws.errors(points)}


def from_json(results: Mapping[str, Any]) -> dict[Case, Point]:
    return {_case(entry["case"]): Point(**entry["measured"]) for entry in results["points"]}


def _case(fields: dict[str, Any]) -> Case:
    return Case(**{**fields, "blocks": tuple(fields["blocks"])})


def main() -> None:
    options = parser("benchmarks.scaling", __doc__)
    options.add_argument("--figures", action="store_true", help="redraw from the results, without measuring")
    options.add_argument("--markdown", action="store_true", help="print the results' tables for the page")
    options.add_argument("--case", help="measure one case in this process and print JSON")
    chosen = options.parse_args()
    repeats, grid = (2 if chosen.quick else 5), axes(chosen.quick)
    torch.set_num_threads(chosen.threads)
    if chosen.case:
        print(json.dumps(asdict(measure_case(_case(json.loads(chosen.case)), repeats))))
        return
    if chosen.figures or chosen.markdown:
        path = RESULTS / "scaling.json"
        if not path.exists():
            sys.exit(f"There is no {path}: measure first.")
        points = from_json(json.loads(path.read_text()))
        laws = fit(points)
        if chosen.figures:
            draw(points, laws, grid, IMAGES)
        if chosen.markdown:
            report(points, laws, markdown)
        return
    warn_if_busy()
    points = {}
    for case in dict.fromkeys(case for cases in grid.values() for case in cases):
        points[case] = in_process(case, chosen.quick, chosen.threads)
        console.print(f"{case}: {points[case].plain:.3f} s a step", highlight=False)
    laws = fit(points)
    report(points, laws, show)
    draw(points, laws, grid, Path(tempfile.mkdtemp()) if chosen.quick else IMAGES)
    if not chosen.quick:
        write("scaling", chosen.quick, to_json(points, laws))


if __name__ == "__main__":
    main()

"""Peak memory of training steps.

(a) imagenet preset, batch 8: memory="inverse" against plain autograd
(b) the same with twice the blocks: does the memory of "inverse" grow with depth?
(c) the latent mixture alone, forward and backward: how much does it need beside its parameters?

Each case runs in a process of its own. Bytes are those that torch's CPU allocator hands out,
read from the profiler's trace: they are the same in every run. "Beyond" is the peak of the whole step
without parameters, buffers and all gradients. As a cross-check, the growth of the resident memory
over an unprofiled step is printed beside it: that one also has oneDNN's scratch memory and misses what
was allocated but never touched.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import console, parser, set_threads, show, write
from candid import GenerativeClassifier, information_bottleneck_loss
from candid.mixture import LatentMixture, log_standard_normal

MB = 1e6
Step = Callable[[], None]


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of one step."""

    parameters: int
    """Parameters and buffers, there before the step."""
    gradients: int
    """Of all parameters, at the end of the step."""
    peak: int
    """Highest sum of what the step has allocated, gradients included."""
    resident: int
    """Growth of the resident memory over a step without the profiler; 0 where it can't be read."""
    alive: list[str]
    """The largest tensors alive at the peak."""

    @property
    def total(self) -> int:
        return self.parameters + self.peak

    @property
    def beyond(self) -> int:
        return self.peak - self.gradients


def classifier_step(quick: bool, **changes: Any) -> tuple[nn.Module, Step]:
    model = GenerativeClassifier.from_preset("tiny" if quick else "imagenet", **changes)
    x, y = torch.rand(8, *model.image_shape), torch.arange(8)

    def step() -> None:
        information_bottleneck_loss(model, x, y, beta=1.0).total.backward()

    return model, step


def mixture_step(quick: bool) -> tuple[nn.Module, Step]:
    classes, constant, dimensions, rank = (100, 192, 9408, 16) if quick else (1000, 3072, 150528, 128)
    mixture = LatentMixture(classes, constant, dimensions, rank)
    z, y = torch.randn(64, dimensions, requires_grad=True), torch.arange(64)

    def step() -> None:
        logits = mixture.logits(z)
        log_density = log_standard_normal(z) + logits.logsumexp(1)
        (F.cross_entropy(logits, y) - log_density.mean() / dimensions).backward()
        z.grad = None

    return mixture, step


def double_blocks(quick: bool) -> tuple[int, ...]:
    return (4, 6, 6) if quick else (6, 8, 12, 6)


CASES: dict[str, Callable[[bool], tuple[nn.Module, Step]]] = {
    "plain": lambda quick: classifier_step(quick, memory="plain"),
    "inverse": lambda quick: classifier_step(quick, memory="inverse"),
    "inverse, twice the blocks": lambda quick: classifier_step(
        quick, memory="inverse", blocks=double_blocks(quick)
    ),
    "mixture": mixture_step,
}


def measure(model: nn.Module, step: Step) -> Peak:
    resident = _resident_growth(step)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    peak, alive = _peak(_trace(profiler))
    parameters = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return Peak(parameters, gradients, peak, resident, alive)


def _trace(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _peak(events: list[dict[str, Any]], largest: int = 12) -> tuple[int, list[str]]:
    """The highest sum of live allocations, and which operations made the most of it."""
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"]))
    live: dict[int, tuple[int, float]] = {}
    at_peak = dict(live)
    now = peak = 0
    for event in changes:
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        now += size
        if size > 0:
            live[address] = size, float(event["ts"])
        else:
            live.pop(address, None)
        if now > peak:
            peak, at_peak = now, dict(live)
    kinds = Counter((size, _operation(events, when)) for size, when in at_peak.values() if size > MB)
    top = sorted(kinds.items(), key=lambda kind: -kind[0][0] * kind[1])[:largest]
    return peak, [f"{count} x {size / MB:.1f} MB  {operation}" for (size, operation), count in top]


def _operation(events: list[dict[str, Any]], when: float) -> str:
    """The outermost and the innermost recorded operations running at ``when``."""
    running = [
        (float(e["ts"]), e["name"])
        for e in events
        if e.get("cat") == "cpu_op" and float(e["ts"]) <= when <= float(e["ts"]) + float(e["dur"])
    ]
    names = [name.removeprefix("autograd::engine::evaluate_function: ") for _, name in sorted(running)]
    return " > ".join(dict.fromkeys(names[:1] + names[-3:]))


def _resident_growth(step: Step) -> int:
    """Highest resident memory during ``step`` less that before it; Linux only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
        step()
        return _status("VmHWM") - before
    except OSError:
        step()
        return 0


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def in_process(case: str, quick: bool, threads: int) -> Peak:
    """``case`` measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--threads", str(threads)]
    # Every larger block is mapped by itself, so that freed memory leaves the resident set at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        command + ["--quick"] * quick,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"The case '{case}' failed:\n{done.stderr}")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def report(peaks: dict[str, Peak], quick: bool, explain: bool) -> dict[str, Any]:
    rows = [
        (
            name,
            *(
                f"{n / MB:.1f}"
                for n in (p.parameters, p.gradients, p.total, p.beyond, p.resident - p.gradients)
            ),
        )
        for name, p in peaks.items()
    ]
    columns = ("step", "parameters", "gradients", "peak in total", "peak beyond", "beyond, resident")
    show("Memory in MB", columns, rows)
    plain, inverse, deep, mixture = (peaks[name] for name in CASES)
    figures = {
        "(a) inverse / plain, beyond": (inverse.beyond / plain.beyond, 1 / 3),
        "(a) inverse / plain, with gradients": (inverse.peak / plain.peak, 1 / 3),
        "(a) inverse / plain, in total": (inverse.total / plain.total, None),
        "(b) growth of inverse, beyond, in %": (100 * (deep.beyond / inverse.beyond - 1), 15),
        "(c) mixture, peak / parameters": (mixture.peak / mixture.parameters, 3),
    }
    judged = [
        (name, f"{value:.3f}", *_judge(value, None if quick else limit))
        for name, (value, limit) in figures.items()
    ]
    show("Figures", ("figure", "measured", "target", ""), judged)
    if explain:
        for name, p in peaks.items():
            show(f"Alive at the peak of '{name}'", ("tensor",), [(line,) for line in p.alive])
    return {
        "bytes": {name: asdict(p) for name, p in peaks.items()},
        "figures": {name: {"measured": value, "target": limit} for name, (value, limit) in figures.items()},
    }


def _judge(value: float, limit: float | None) -> tuple[str, str]:
    if limit is None:
        return "", ""
    return f"{limit:.3f}", "met" if value <= limit else "missed"


def main() -> None:
    options = parser("benchmarks.memory", __doc__)
    options.add_argument("--explain", action="store_true", help="list the largest tensors alive at each peak")
    options.add_argument("--case", choices=CASES, help="measure one case in this process and print JSON")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.case:
        print(json.dumps(asdict(measure(*CASES[chosen.case](chosen.quick)))))
        return
    set_threads(chosen.threads)
    with console.status("measuring"):
        peaks = {case: in_process(case, chosen.quick, chosen.threads) for case in CASES}
    write("memory", chosen.quick, report(peaks, chosen.quick, chosen.explain))


if __name__ == "__main__":
    main()

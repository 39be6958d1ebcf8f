"""Peak memory of training steps.

(a) imagenet preset, batch 8: memory="inverse" against plain autograd
(b) the same with twice the blocks: does the memory of "inverse" grow with depth?
(c) the latent mixture alone, forward and backward: how much does it need beside its parameters?
(d) imagenet preset with permutations, batch 16: both beside the straightforward formulation
    (benchmarks/straightforward.py)

Each case runs in a process of its own (--quick: all in one). Bytes are those that torch's CPU allocator
hands out, read from the profiler's trace: they are the same in every run. "Beyond" is the peak of the
whole step without parameters, buffers and all gradients. As a cross-check, the growth of the resident memory
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Figure, conclude, console, parser, show, warn_if_busy
from benchmarks.models import classifier
from benchmarks.straightforward import Straightforward
from candid import information_bottleneck_loss
from candid.models.flow.mixture import LatentMixture, log_standard_normal

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


def classifier_step(quick: bool, batch: int = 8, **changes: Any) -> tuple[nn.Module, Step]:
    model = classifier(quick, **changes)
    x, y = torch.rand(batch, *model.image_shape), torch.arange(batch)

    def step() -> None:
        information_bottleneck_loss(model, x, y, beta=1.0).total.backward()

    return model, step


def straightforward_step(quick: bool) -> tuple[nn.Module, Step]:
    model = Straightforward(classifier(quick))
    x, y = torch.rand(16, *model.noise.shape), torch.arange(16)

    def step() -> None:
        model.loss(x, y).backward()

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
    "plain": partial(classifier_step, memory="plain", mixing="orthogonal"),
    "inverse": partial(classifier_step, memory="inverse", mixing="orthogonal"),
    "inverse, twice the blocks": lambda quick: classifier_step(
        quick, memory="inverse", mixing="orthogonal", blocks=double_blocks(quick)
    ),
    "mixture": mixture_step,
    "plain, batch 16": partial(classifier_step, batch=16, memory="plain"),
    "inverse, batch 16": partial(classifier_step, batch=16, memory="inverse"),
    "straightforward, batch 16": straightforward_step,
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
    operations = [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"])
        for e in events
        if e.get("cat") == "cpu_op"
    ]
    kinds = Counter((size, _operation(operations, when)) for size, when in at_peak.values() if size > MB)
    top = sorted(kinds.items(), key=lambda kind: -kind[0][0] * kind[1])[:largest]
    return peak, [f"{count} x {size / MB:.1f} MB  {operation}" for (size, operation), count in top]


def _operation(operations: list[tuple[float, float, str]], when: float) -> str:
    """The outermost and the innermost recorded operations running at ``when``."""
    running = sorted((start, name) for start, end, name in operations if start <= when <= end)
    names = [name.removeprefix("autograd::engine::evaluate_function: ") for _, name in running]
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


def in_process(cases: list[str], quick: bool, threads: int) -> dict[str, Peak]:
    """``cases`` measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--threads", str(threads), "--cases", *cases]
    # Every larger block is mapped by itself, so that freed memory leaves the resident set at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        command + ["--quick"] * quick,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"Failed: {', '.join(cases)}\n{done.stderr}")
    return {name: Peak(**peak) for name, peak in json.loads(done.stdout.splitlines()[-1]).items()}


def report(peaks: dict[str, Peak], explain: bool) -> dict[str, Figure]:
    """Shows the bytes; what follows from them."""
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
    if explain:
        for name, p in peaks.items():
            show(f"Alive at the peak of '{name}'", ("tensor",), [(line,) for line in p.alive])
    plain, inverse, deep, mixture, plain16, inverse16, straightforward = (peaks[name] for name in CASES)
    return {
        **less_memory("(a) batch 8", inverse, plain),
        "(b) growth of inverse, beyond, in %": Figure((100 * (deep.beyond / inverse.beyond - 1),), 15),
        "(c) mixture, peak / parameters": Figure((mixture.peak / mixture.parameters,), 3),
        **less_memory("(d) batch 16", inverse16, plain16),
        "(d) batch 16, plain / straightforward, in total": Figure(
            (plain16.total / straightforward.total,), 0.5
        ),
        "(d) batch 16, inverse / straightforward, in total": Figure(
            (inverse16.total / straightforward.total,)
        ),
    }


def less_memory(case: str, inverse: Peak, plain: Peak) -> dict[str, Figure]:
    return {
        f"{case}, inverse / plain, beyond": Figure((inverse.beyond / plain.beyond,), 1 / 3),
        f"{case}, inverse / plain, with gradients": Figure((inverse.peak / plain.peak,)),
        f"{case}, inverse / plain, in total": Figure((inverse.total / plain.total,)),
    }


def main() -> int:
    options = parser("benchmarks.memory", __doc__)
    options.add_argument("--explain", action="store_true", help="list the largest tensors alive at each peak")
    options.add_argument(
        "--cases", nargs="+", choices=CASES, help="measure these in this process and print JSON"
    )
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.cases:
        print(json.dumps({case: asdict(measure(*CASES[case](chosen.quick))) for case in chosen.cases}))
        return 0
    warn_if_busy()
    peaks: dict[str, Peak] = {}
    with console.status("measuring"):
        for cases in [list(CASES)] if chosen.quick else [[case] for case in CASES]:
            peaks |= in_process(cases, chosen.quick, chosen.threads)
    figures = report(peaks, chosen.explain)
    return conclude(
        "memory", chosen.quick, {}, figures, {"bytes": {name: asdict(p) for name, p in peaks.items()}}
    )


if __name__ == "__main__":
    sys.exit(main())

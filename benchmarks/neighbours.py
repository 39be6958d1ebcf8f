"""What other jobs on the same cores cost: training and inference, alone and next to two busy processes.

Training is the real command, ``candid train``, on digits and on a folder of CIFAR-sized images that the
loader reads; images/s come from its metrics.csv. The forward pass is that of the ``imagenet`` preset. With
``--before PATH`` everything is also measured with another checkout, in turn, and compared::

    python -m benchmarks.neighbours --before ../candid-before
"""

import contextlib
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.common import Figure, conclude, console, parser, show, spread

HERE = Path(__file__).parents[1]
NEIGHBOURS = 2
ALONE, BUSY = "alone", f"next to {NEIGHBOURS} busy processes"
TARGETS = {
    ("digits training", BUSY): 3.0,
    ("cifar training", BUSY): 2.0,
    ("digits training", ALONE): 0.80,
    ("cifar training", ALONE): 0.90,
    ("imagenet forward", ALONE): 0.95,
}
"""Images/s of this code divided by those of the code before: at least."""
FORWARD = """
import sys, time
import candid
import torch
size, batch, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = candid.GenerativeClassifier.from_preset(size).eval().frozen()
x = torch.rand(batch, *model.image_shape)
with torch.inference_mode():
    model.posterior(x)
    start = time.perf_counter()
    for _ in range(rounds):
        model.posterior(x)
print(batch * rounds / (time.perf_counter() - start))
"""


def environment(checkout: Path) -> dict[str, str]:
    """Nothing set for threads: what the code does by itself counts."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "GOMP_", "MKL_", "KMP_", "CANDID_THREADS"))
    }
    return {**kept, "PYTHONPATH": str(checkout)}


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that are always busy, until the block ends."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def training(data: str, preset: str, epochs: int, checkout: Path) -> float:
    """Images/s of the last epochs of a real run; the first one warms up."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ["train", data, "--preset", preset, "--epochs", str(epochs), "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "candid", *command],
            env=environment(checkout),
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        with (out / "metrics.csv").open() as file:
            rates = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    return statistics.median(rates[1:] or rates)


def forward(preset: str, batch: int, rounds: int, checkout: Path) -> float:
    """Images/s of a forward pass in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FORWARD, preset, str(batch), str(rounds)],
        env=environment(checkout),
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def colour_images(folder: Path, count: int) -> str:
    """Two classes of random 32 x 32 images as PNG files, which the loader decodes."""
    import torch
    from PIL import Image

    random = torch.Generator().manual_seed(0)
    for i in range(count):
        place = folder / "train" / ("light", "dark")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 128 + 127 * (i % 2), (32, 32, 3), generator=random, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(place / f"{i}.png")
    return str(folder)


def measure(
    jobs: Mapping[str, Callable[[Path], float]], checkouts: Mapping[str, Path], rounds: int
) -> dict[tuple[str, str, str], list[float]]:
    """Images/s by job, situation and checkout; everything takes turns, so that a drift meets all alike."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(rounds):
        for job, run in jobs.items():
            for situation, count in ((ALONE, 0), (BUSY, NEIGHBOURS)):
                for name, checkout in checkouts.items():
                    with neighbours(count):
                        found.setdefault((job, situation, name), []).append(run(checkout))
    return found


def main() -> int:
    options = parser("benchmarks.neighbours", __doc__)
    options.add_argument("--before", type=Path, help="another checkout of candid to compare with")
    chosen = options.parse_args()
    quick: bool = chosen.quick
    checkouts = {"this code": HERE}
    if chosen.before is not None:
        checkouts["before"] = chosen.before.resolve()
    with tempfile.TemporaryDirectory() as folder, console.status("measuring"):
        data = colour_images(Path(folder), 300 if quick else 4000)
        jobs: dict[str, Callable[[Path], float]] = {
            "digits training": partial(training, "digits", "digits", 1 if quick else 8),
            "cifar training": partial(training, data, "cifar", 1 if quick else 3),
            "imagenet forward": partial(forward, *(("digits", 4, 1) if quick else ("imagenet", 8, 3))),
        }
        found = measure(jobs, checkouts, 1 if quick else 3)
    show(
        "Images/s: median (lowest to highest)",
        ("", *checkouts),
        [
            (f"{job}, {situation}", *(spread(found[job, situation, name]) for name in checkouts))
            for job in jobs
            for situation in (ALONE, BUSY)
        ],
    )
    figures = {}
    if "before" in checkouts:
        for job in jobs:
            for situation in (ALONE, BUSY):
                pairs = zip(found[job, situation, "this code"], found[job, situation, "before"], strict=True)
                ratios = tuple(ours / theirs for ours, theirs in pairs)
                name = f"{job}, {situation}: this code / before"
                figures[name] = Figure(ratios, TARGETS.get((job, situation)), at_least=True)
    more = {"images per second": {", ".join(key): values for key, values in found.items()}}
    return conclude("neighbours", quick, {}, figures, more)


if __name__ == "__main__":
    sys.exit(main())

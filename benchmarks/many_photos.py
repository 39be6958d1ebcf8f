"""Memory and CPU time of fitting a photo model to many photos in one or several processes, and what follows.

    python -m benchmarks.many_photos                  # 25 000 and 100 000 photos in 1, 2 and 4 processes
    python -m benchmarks.many_photos --quick          # does it run at all?
    python -m benchmarks.many_photos --images 0.02    # with seconds per photo of an eye, for the core-hours

The statistics are synthetic: 1408 numbers of a photo follow from its number. They pass through the
extraction, the cache on disk and the fit of ``candid train``; decoding and eye are left out, and take what
``--images`` says. The memory is the highest resident size of the largest process, libraries included.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import console, parser, show, warn_if_busy, write
from candid._support.numbers import Array
from candid._support.processes import gathered, launch
from candid._support.progress import SILENT
from candid.data.batches import NamedBatch
from candid.data.images import Preprocessing
from candid.data.shards import ShardSplit
from candid.models.photo.eye import Eye
from candid.training import many_photos
from candid.training.features import Extraction, FeatureCache
from candid.training.options import PhotoOptions

SIDE = 2
"""Pixels of the images that carry the numbers of photos."""
WRONG = 500
"""Every so many photos one has a wrong label."""


class NumberEye(Eye):
    """Draws the statistics of a photo from the number that its pixels say."""

    name, size, sha256 = "numbers", SIDE, "0" * 64

    def __init__(self, dimensions: int, classes: int) -> None:
        self.groups = (dimensions // 2, dimensions - dimensions // 2)
        self.means = np.random.default_rng(0).normal(size=(classes, dimensions)).astype(np.float32)

    @property
    def preprocessing(self) -> Preprocessing:
        """Images are taken as they are."""
        return Preprocessing(3, SIDE, SIDE)

    def statistics(self, images: Array) -> Array:
        """Return Gaussian numbers around the mean of the class, (B, D)."""
        rows = np.rint(images * 255).astype(np.int64).reshape(len(images), -1)
        numbers = rows[:, :4] @ 256 ** np.arange(4)
        scale = 0.2 * np.sqrt(self.dimensions)
        noise = [
            np.random.default_rng(i).standard_normal(self.dimensions, np.float32) for i in numbers.tolist()
        ]
        return self.means[numbers % len(self.means)] + scale * np.stack(noise)


@dataclass(frozen=True)
class Numbers(ShardSplit):
    """Photos that are numbers, from ``first`` on."""

    first: int = 0

    def named_batches(
        self, preprocessing: Preprocessing, batch: int, rank: int, world: int, workers: int
    ) -> Iterator[NamedBatch]:
        """Yield the images of this process."""
        for start in range(rank * batch, self.images, world * batch):
            numbers = self.first + np.arange(start, min(start + batch, self.images))
            pixels = np.zeros((len(numbers), 3 * SIDE * SIDE), np.uint8)
            pixels[:, :4] = numbers[:, None] // 256 ** np.arange(4) % 256
            labels = (numbers + (numbers % WRONG == 0)) % self.classes
            yield (
                pixels.reshape(-1, 3, SIDE, SIDE),
                labels.astype(np.int64),
                tuple(f"part-{i // 10_000:05}.tar/{i:09}" for i in numbers.tolist()),
            )


@dataclass(frozen=True)
class Case:
    """A training that is measured."""

    photos: int
    processes: int
    dimensions: int
    classes: int


def work(case: Case, folder: Path) -> None:
    """Fit the head in this process and those that it starts, and store what they used and found."""
    processes = launch(case.processes, network=False)
    start = time.process_time()
    eye = NumberEye(case.dimensions, case.classes)
    cache = FeatureCache(eye, SILENT, folder)
    extraction = Extraction(eye, cache, processes, SILENT)
    parts = {
        "train": Numbers((), case.photos, case.classes),
        "val": Numbers((), min(case.photos, many_photos.SAMPLE), case.classes, first=case.photos),
    }
    shares = {name: extraction.share(part) for name, part in parts.items()}
    extracted = time.process_time() - start
    names = tuple(f"class {y}" for y in range(case.classes))
    whole = many_photos.fit_many(shares, PhotoOptions(data="."), names, eye.groups, processes)
    own = {
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "extracting": extracted,
        "fitting": time.process_time() - start - extracted,
    }
    everyone = gathered(processes, own)
    if whole is None:
        return
    head = whole.head
    columns: dict[str, Any] = {
        "keys": whole.parts["train"].keys,
        "held_out": whole.parts["val"].keys,
        "means": head.whitened.means,
        "factor": head.whitened.factor,
        "logits": head.out_of_fold.logits,
        "novelty": head.out_of_fold.novelty,
        "counts": whole.counts,
        "findings": np.array([f"{each.kind} {each.path}" for each in whole.findings]),
        **{name: np.array(value) for name, value in whole.results.items()},
    }
    np.savez(folder / "found.npz", **columns)
    (folder / "used.json").write_text(json.dumps(everyone))


def in_processes(case: Case, folder: Path, threads: int) -> list[dict[str, float]]:
    """Return what each process of a training used."""
    numbers = [case.photos, case.processes, case.dimensions, case.classes]
    command = [sys.executable, "-m", "benchmarks.many_photos", "--worker", str(folder), *map(str, numbers)]
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    subprocess.run(command, check=True, env={**os.environ, **variables}, timeout=7200)
    used: list[dict[str, float]] = json.loads((folder / "used.json").read_text())
    return used


def row(case: Case, used: list[dict[str, float]]) -> tuple[str, str, str]:
    """Return a line of the table."""
    return (
        f"{case.photos:,} photos, {case.processes} processes",
        f"{max(each['bytes'] for each in used) / 1e6:.0f}",
        f"{sum(each['fitting'] for each in used):.0f}",
    )


def law(cases: list[Case], used: list[list[dict[str, float]]]) -> tuple[float, float, float]:
    """Return bytes = a + b (photos of a process), and the CPU seconds of fitting for each photo.

    Each number of processes has its own constant, since a single one needs no torch; a is the largest.
    """
    counts = sorted({case.processes for case in cases})
    same = np.array([[case.processes == count for count in counts] for case in cases], float)
    shares = np.array([case.photos / case.processes for case in cases])
    peaks = np.array([max(each["bytes"] for each in processes) for processes in used])
    *constants, b = np.linalg.lstsq(np.column_stack((same, shares)), peaks)[0].tolist()
    photos = np.array([case.photos for case in cases])
    seconds = np.array([sum(each["fitting"] for each in processes) for processes in used])
    *_, each = np.linalg.lstsq(np.column_stack((same, photos)), seconds)[0].tolist()
    return max(constants), b, each


def main() -> int:
    options = parser("benchmarks.many_photos", __doc__)
    options.add_argument(
        "--photos", type=int, nargs="+", help="training photos, all sizes (a fifth more is held out)"
    )
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--classes", type=int, default=10)
    options.add_argument("--images", type=float, help="CPU seconds of a photo: decoding and eye")
    options.add_argument("--worker", nargs=5, help="measure one case in this process")
    chosen = options.parse_args()
    if chosen.worker:
        folder, *numbers = chosen.worker
        work(Case(*map(int, numbers)), Path(folder))
        return 0
    warn_if_busy()
    dimensions = 48 if chosen.quick else 1408
    sizes = chosen.photos or ([2_000, 4_000] if chosen.quick else [25_000, 100_000])
    cases = [Case(size, count, dimensions, chosen.classes) for size in sizes for count in chosen.processes]
    used = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder, console.status(str(case)):
            used.append(in_processes(case, Path(folder), 1))
        console.print(": ".join(row(case, used[-1])[:2]), "MB")
    rows = [row(case, processes) for case, processes in zip(cases, used, strict=True)]
    show("The largest process, and the fit of all", ("", "MB", "CPU s"), rows)
    a, b, seconds = law(cases, used)
    console.print(f"bytes of the largest process = {a / 1e6:.0f} MB + {b:.0f} x photos of a process")
    console.print(f"CPU seconds of the fit for each further photo: {1e3 * seconds:.2f} ms")
    each = seconds + (chosen.images or 0)
    predicted = [
        (f"{n:.0e} photos, {p} processes", f"{(a + b * n / p) / 1e9:.2f}", f"{n * each / 3600:.1f}")
        for n in (1e7, 1e8)
        for p in (8, 64)
    ]
    what = "fit alone" if chosen.images is None else "fit, decoding and eye"
    show(f"Predicted by the law ({what})", ("", "GB", "core-hours"), predicted)
    measured = [
        {"case": vars(case), "processes": processes} for case, processes in zip(cases, used, strict=True)
    ]
    write("many_photos", chosen.quick, {"measured": measured, "law": {"a": a, "b": b, "seconds": seconds}})
    return 0


if __name__ == "__main__":
    sys.exit(main())

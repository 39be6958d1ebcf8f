"""Engines judge photos with two workers: every photo once, with the verdicts of one process.

    make engines                                    # builds build/engines and runs this there
    make engines COUNT=5000
    python -m experiments.engines --photos 600 --engines processes ray spark

The photos are those that ship with Candid, repeated, in files of their own; one of fifty is no photo. One
worker of Ray kills itself while it works; Ray starts a new one and gives it the batch again. Two plain
processes, which do nothing else, say what an engine costs. Spark is tried where pyspark and Java are.
"""

import argparse
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import candid
from candid._support.text import listed

MODEL = "everyday"
SAMPLES = Path(candid.__file__).parent / "reports/demo/samples"
COLUMNS = ("label", "verdict", "p_value", "confidence", "error")
BATCH = 25
Rows = dict[str, tuple[Any, ...]]
"""What was said of photos, by name."""


class Judge:
    """What a worker of Ray runs: one examiner; the first one in its third batch kills its process."""

    def __init__(self, examiner: Any, grave: str) -> None:
        self.examiner, self.grave, self.batches = examiner, Path(grave), 0

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Return the table of a batch of photos, as Arrow has it."""
        self.batches += 1
        if self.batches == 3:
            with suppress(FileExistsError):
                (self.grave / "killed").mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.examiner.table(batch["bytes"], names=batch["path"]).to_arrow()


def in_ray(paths: list[str], grave: Path) -> Rows:
    """Return what two workers of Ray say of photos, by name."""
    import ray

    ray.init(
        num_cpus=4,
        object_store_memory=2**28,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    photos = ray.data.read_binary_files(
        paths, include_paths=True, override_num_blocks=max(2, len(paths) // BATCH)
    )
    tables = photos.map_batches(
        Judge,
        fn_constructor_args=(candid.Examiner(MODEL), str(grave)),
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )
    rows = tables.take_all()
    times = Counter(row["path"] for row in rows)
    assert set(times) == set(paths) and set(times.values()) == {1}, "a photo is missing, or there twice"
    return {row["path"]: tuple(row[name] for name in COLUMNS) for row in rows}


def by_name(table: Any) -> Rows:
    """Return the rows of a table, by the names of their photos."""
    rows = zip(table["path"], *(table[name] for name in COLUMNS), strict=True)
    return {path: tuple(row) for path, *row in rows}


def judge(examiner: candid.Examiner, paths: list[str]) -> Rows:
    """Judge a batch in a plain process."""
    return by_name(examiner.table([Path(path).read_bytes() for path in paths], names=paths))


def in_processes(paths: list[str], grave: Path) -> Rows:
    """Return what two plain processes say of photos, by name."""
    batches = [paths[i : i + BATCH] for i in range(0, len(paths), BATCH)]
    found: Rows = {}
    variables = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            for rows in pool.map(judge, repeat(candid.Examiner(MODEL)), batches):
                found |= rows
    finally:
        os.environ.clear()
        os.environ.update(before)
    return found


def in_spark(paths: list[str], grave: Path) -> Rows:
    """Return what Spark with two local workers says of photos: the recipe of docs/scaling.md."""
    from pyspark.sql import SparkSession

    examiner = candid.Examiner(MODEL)
    kinds = "path string, label string, verdict string, p_value double, confidence double, error string"

    def judged(frames: Any) -> Any:
        for frame in frames:
            table = examiner.table(frame["content"], names=frame["path"])
            yield table.to_pandas()[[kind.split()[0] for kind in kinds.split(", ")]]

    os.environ["PYSPARK_PYTHON"] = sys.executable
    local = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in local.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        photos = spark.read.format("binaryFile").load(str(Path(paths[0]).parent / "*.jpg"))
        rows = photos.select("path", "content").mapInPandas(judged, kinds).collect()
    finally:
        spark.stop()
    times = Counter(row["path"].removeprefix("file:") for row in rows)
    assert set(times.values()) == {1}, "a photo is there twice"
    return {row["path"].removeprefix("file:"): tuple(_plain(row[name]) for name in COLUMNS) for row in rows}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def equal(row: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether label, verdict and error are equal, and numbers but for rounding.

    A network rounds in the order that its number of threads gives: an image may pass its neighbour in rank.
    """
    (*said, p, confidence), (*expected, p_other, other_confidence) = (
        (label, verdict, error, p, confidence) for label, verdict, p, confidence, error in (row, other)
    )
    if said != expected or p is None or p_other is None:
        return said == expected and p == p_other
    return abs(p - p_other) < 0.003 and abs(confidence - other_confidence) < 1e-5


ENGINES: dict[str, Callable[[list[str], Path], Rows]] = {
    "processes": in_processes,
    "ray": in_ray,
    "spark": in_spark,
}


def main() -> None:
    """Compare engines with one process, and print how long each takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=int, default=600)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["processes", "ray"])
    asked = parser.parse_args()
    samples = [path.read_bytes() for path in sorted(SAMPLES.rglob("*.jpg"))]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        grave = Path(folder) / "grave"
        grave.mkdir()
        paths = [str(Path(folder) / f"{i:05}.jpg") for i in range(asked.photos)]
        for i, path in enumerate(paths):
            Path(path).write_bytes(samples[i % len(samples)] if i % 50 else b"no photo")
        start = time.perf_counter()
        table = candid.Examiner(MODEL).table(paths)
        seconds["one process"] = time.perf_counter() - start
        expected = by_name(table)
        for name in asked.engines:
            start = time.perf_counter()
            found = ENGINES[name](paths, grave)
            seconds[name] = time.perf_counter() - start
            assert found.keys() == expected.keys(), f"{name} lost a photo"
            different = [path for path in paths if not equal(found[path], expected[path])]
            assert not different, f"{len(different)} verdicts differ, such as {found[different[0]]}"
        assert "ray" not in asked.engines or (grave / "killed").exists(), "no worker was killed"
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(table["verdict"]).items())
    print(
        f"{asked.photos} photos ({kinds}): each once, and equal in one process and in {listed(asked.engines)}"
    )
    for name, each in seconds.items():
        ratio = (
            f", {each / seconds['processes']:.2f} of two plain processes" if "processes" in seconds else ""
        )
        print(f"{name}: {each:.1f} s with its start{ratio}")


if __name__ == "__main__":
    main()

"""Ray Data judges photos with two workers, one of which is killed: every photo once, with the same verdicts.

    make engines                                    # builds build/engines and runs this there
    python -m experiments.engines --photos 600

The photos are those that ship with Candid, repeated, in files of their own. One worker kills itself while it
works; Ray starts a new one and gives it the batch again.
"""

import argparse
import os
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import candid

MODEL = "everyday"
SAMPLES = Path(candid.__file__).parent / "reports/demo/samples"
COLUMNS = ("label", "verdict", "p_value", "confidence", "error")


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


def in_ray(paths: list[str], grave: Path) -> dict[str, tuple[Any, ...]]:
    """Return what two workers of Ray say of photos, by name."""
    import ray

    ray.init(num_cpus=4, object_store_memory=2**28, include_dashboard=False, log_to_driver=False)
    files = [{"path": path, "bytes": Path(path).read_bytes()} for path in paths]
    photos = ray.data.from_items(files, override_num_blocks=len(files) // 25)
    tables = photos.map_batches(
        Judge,
        fn_constructor_args=(candid.Examiner(MODEL), str(grave)),
        batch_size=25,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )
    rows = tables.take_all()
    times = Counter(row["path"] for row in rows)
    assert set(times) == set(paths) and set(times.values()) == {1}, "a photo is missing, or there twice"
    return {row["path"]: tuple(row[name] for name in COLUMNS) for row in rows}


def main() -> None:
    """Compare the engine with one process, and print both times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=600)
    photos = parser.parse_args().photos
    samples = [path.read_bytes() for path in sorted(SAMPLES.rglob("*.jpg"))]
    with tempfile.TemporaryDirectory() as folder:
        grave = Path(folder) / "grave"
        grave.mkdir()
        paths = [str(Path(folder) / f"{i:05}.jpg") for i in range(photos)]
        for i, path in enumerate(paths):
            Path(path).write_bytes(samples[i % len(samples)] if i % 50 else b"no photo")
        start = time.perf_counter()
        table = candid.Examiner(MODEL).table(paths)
        alone = time.perf_counter() - start
        rows = zip(table["path"], *(table[name] for name in COLUMNS), strict=True)
        expected = {path: row for path, *row in rows}
        start = time.perf_counter()
        found = in_ray(paths, grave)
        together = time.perf_counter() - start
        assert (grave / "killed").exists(), "no worker was killed"
        different = [path for path in paths if list(found[path]) != expected[path]]
        assert not different, f"{len(different)} verdicts differ, such as {found[different[0]]}"
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(table["verdict"]).items())
    print(f"{photos} photos ({kinds}): each once, equal in one process and in Ray with a worker killed")
    print(f"one process {alone:.0f} s, Ray with two workers {together:.0f} s, its start included")


if __name__ == "__main__":
    main()

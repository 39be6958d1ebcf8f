"""Photo models: extraction, examining many photos, and CPU seconds of commands.

``python -m benchmarks.photos --photos FOLDER`` takes a folder of class folders; without it, photos are made.
The peer is what can't be left out, on all cores and in the same run: decoding alone with Pillow, and then the
network alone in onnxruntime on images that are decoded already. Extraction, an open ``candid.Examiner`` and
``candid examine`` in bulk are compared with the sum. The bulk command starts its processes within its time.
Commands run in processes of their own, with an empty cache.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

import candid
from benchmarks.common import Figure, Timing, alternate, conclude, parsed, parser, show_times
from candid._support.numbers import Array
from candid._support.processes import launch
from candid._support.progress import SILENT
from candid.data.formats import image_files, subfolders
from candid.models.photo.eye import Eye
from candid.models.photo.opening import open_eye
from candid.training.features import BATCH, Extraction, FeatureCache

MADE, QUICK = 600, 24
BARE, EXTRACTED, EXAMINED, BULK = "bare decoding and bare network", "extraction", "Examiner", "in bulk"
MODEL = "everyday"
REPEATED = 10
"""How often the bulk command meets each photo: its start takes a second or two."""


def made(folder: Path, photos: int) -> Path:
    """Write JPEG photos of three classes: smooth noise in a different colour each."""
    random = np.random.default_rng(0)
    for number in range(photos):
        coarse = random.integers(0, 200, (12, 16, 3), dtype=np.uint8)
        coarse[..., number % 3] //= 3
        file = folder / "abc"[number % 3] / f"{number:04}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((512, 384), Image.Resampling.BICUBIC).save(file, quality=90)
    return folder


def decoded(file: Path, side: int) -> Array:
    """Return the centre square of a photo as Pillow decodes it at its fastest."""
    with Image.open(file) as image:
        image.draft("RGB", (side, side))
        width, height = image.size
        edge = min(width, height)
        left, top = (width - edge) / 2, (height - edge) / 2
        box = (left, top, left + edge, top + edge)
        return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC, box))


def bare(eye: Eye, files: Sequence[Path], threads: int) -> None:
    """Decode all files in threads, then pass as many images through the network."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(partial(decoded, side=eye.size), files):
            pass
    images = np.random.default_rng(0).random((BATCH, 3, eye.size, eye.size), np.float32)
    for first in range(0, len(files), BATCH):
        eye.statistics(images[: min(BATCH, len(files) - first)])


def extracted(eye: Eye, folder: Path) -> None:
    """Extract statistics from files, with an empty cache on disk."""
    split = image_files(folder, [entry.name for entry in subfolders(folder)])
    with tempfile.TemporaryDirectory() as cache:
        Extraction(eye, FeatureCache(eye, SILENT, Path(cache)), launch(1), SILENT)(split)


def shards(folder: Path, files: Sequence[Path], times: int) -> Path:
    """Write the photos into tar files, each several times, under different names."""
    folder.mkdir()
    for number in range(times):
        with tarfile.open(folder / f"{number:03}.tar", "w") as tar:
            for file in files:
                tar.add(file, f"{number}-{file.name}")
    return folder


def in_bulk(shards: Path, processes: int) -> None:
    """Run the command with tables as its result."""
    with tempfile.TemporaryDirectory() as out:
        command("examine", MODEL, shards, "--out", Path(out) / "verdicts", "--processes", processes)


def command(*arguments: object, cache: Path | None = None) -> float:
    """Run a command and return its CPU seconds, start included."""
    before = os.times()
    environment = os.environ | ({} if cache is None else {"CANDID_CACHE": str(cache)})
    line = [sys.executable, "-m", "candid", *map(str, arguments)]
    subprocess.run(line, env=environment, check=True, capture_output=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def bytes_in(folder: Path) -> int:
    """Return what the files of a folder take."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def many(room: Path, folder: Path, quick: bool, threads: int) -> dict[str, dict[str, Timing]]:
    """Return the seconds of extraction, of an examiner and of the bulk command, each next to its peer."""
    eye = open_eye("lite0")
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    examiner = candid.Examiner(MODEL)
    repeated = 1 if quick else REPEATED
    tars = shards(room / "shards", files, repeated)
    cases = {}
    title = f"{len(files)} photos from files"
    cases[title] = alternate(
        {
            EXTRACTED: lambda: extracted(eye, folder),
            EXAMINED: lambda: sum(1 for _ in examiner.examine(files)),
            BARE: lambda: bare(eye, files, threads),
        },
        1 if quick else 5,
    )
    title = f"{repeated * len(files)} photos in {repeated} tar files"
    cases[title] = alternate(
        {
            BULK: lambda: in_bulk(tars, threads),
            BARE: lambda: bare(eye, files * repeated, threads),
        },
        1 if quick else 3,
        warmup=0,
    )
    return cases


def main() -> int:
    options = parser("benchmarks.photos", __doc__)
    options.add_argument("--photos", type=Path, help="a folder with one folder of photos per class")
    asked = parsed(options)
    room = Path(tempfile.mkdtemp())
    try:
        folder = asked.photos or made(room / "photos", QUICK if asked.quick else MADE)
        photos = sum(len(list(each.iterdir())) for each in subfolders(folder))
        cases = many(room, folder, asked.quick, asked.threads)
        for title, times in cases.items():
            show_times(title, times)
        trained = [command("train", folder, "--out", room / "first", cache=room / "cache")]
        if not asked.quick:
            trained.append(command("train", folder, "--out", room / "again", cache=room / "cache"))
        photo = next(file for file in sorted(folder.rglob("*")) if file.is_file())
        one = tuple(
            command("examine", room / "first", photo, cache=room / "cache")
            for _ in range(1 if asked.quick else 5)
        )
        stored, size = bytes_in(room / "cache" / "features"), bytes_in(room / "first" / "model")
    finally:
        shutil.rmtree(room)
    from_files, from_tars = cases.values()
    figures = {
        f"{EXTRACTED} / {BARE}": Figure(from_files[EXTRACTED].ratios(from_files[BARE]), 1.08),
        f"rate of {EXAMINED} / of {BARE}": Figure(
            from_files[BARE].ratios(from_files[EXAMINED]), 0.9, at_least=True
        ),
        f"rate of candid examine {BULK} / of {BARE}": Figure(
            from_tars[BARE].ratios(from_tars[BULK]), 0.9, at_least=True
        ),
        f"candid train of {photos} photos, CPU s": Figure((trained[0],)),
        "the same with cached statistics, CPU s": Figure((trained[-1],)),
        "candid examine of one photo, CPU s": Figure(one, 3.0),
        "kB of cached statistics per photo": Figure((stored / photos / 1e3,)),
        "MB of the model": Figure((size / 1e6,), 6.0),
    }
    return conclude("photos", asked.quick, cases, figures, {"photos": photos})


if __name__ == "__main__":
    sys.exit(main())

"""Photo models: what extraction costs beyond the bare network, and CPU seconds of training and examining.

``python -m benchmarks.photos --photos FOLDER`` takes a folder of class folders; without it, photos are made.
The peer is the same network in onnxruntime on images that are decoded already, in the same run: decoding has
to be hidden behind it. Commands run in processes of their own, with an empty cache, then again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common import Figure, Timing, conclude, parsed, parser, show_times
from candid._support.processes import launch
from candid._support.progress import SILENT
from candid.data.formats import image_files, subfolders
from candid.models.photo.eye import Eye
from candid.models.photo.opening import open_eye
from candid.training.features import BATCH, Extraction, FeatureCache

MADE, QUICK = 180, 24
PEER, OURS = "the bare network", "extraction from files"


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


def bare(eye: Eye, photos: int) -> float:
    """Return the seconds of the network alone on as many images."""
    images = np.random.default_rng(0).random((BATCH, 3, eye.size, eye.size), np.float32)
    start = time.perf_counter()
    for first in range(0, photos, BATCH):
        eye.statistics(images[: min(BATCH, photos - first)])
    return time.perf_counter() - start


def extracted(eye: Eye, folder: Path) -> float:
    """Return the seconds of extraction from files, with an empty cache on disk."""
    split = image_files(folder, [entry.name for entry in subfolders(folder)])
    with tempfile.TemporaryDirectory() as cache:
        extract = Extraction(eye, FeatureCache(eye, SILENT, Path(cache)), launch(1), SILENT)
        start = time.perf_counter()
        extract(split)
        return time.perf_counter() - start


def cpu_seconds(*arguments: object, cache: Path) -> float:
    """Return the CPU seconds of a command, start included."""
    before = os.times()
    environment = {**os.environ, "CANDID_CACHE": str(cache)}
    command = [sys.executable, "-m", "candid", *map(str, arguments)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def bytes_in(folder: Path) -> int:
    """Return what the files of a folder take."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> int:
    options = parser("benchmarks.photos", __doc__)
    options.add_argument("--photos", type=Path, help="a folder with one folder of photos per class")
    asked = parsed(options)
    room = Path(tempfile.mkdtemp())
    try:
        folder = asked.photos or made(room / "photos", QUICK if asked.quick else MADE)
        photos = sum(len(list(each.iterdir())) for each in subfolders(folder))
        eye = open_eye("lite0")
        bare(eye, BATCH)  # opens it
        rounds = [(extracted(eye, folder), bare(eye, photos)) for _ in range(1 if asked.quick else 3)]
        ours, peer = (Timing(tuple(each)) for each in zip(*rounds, strict=True))
        times = {OURS: ours, PEER: peer}
        show_times(f"{photos} photos", times)
        first = cpu_seconds("train", folder, "--out", room / "first", cache=room / "cache")
        again = {}
        if not asked.quick:
            seconds = cpu_seconds("train", folder, "--out", room / "again", cache=room / "cache")
            again = {"candid train again, CPU s": Figure((seconds,))}
        photo = next(file for file in sorted(folder.rglob("*")) if file.is_file())
        one = cpu_seconds("examine", room / "first", photo, cache=room / "cache")
        stored, size = bytes_in(room / "cache" / "features"), bytes_in(room / "first" / "model")
    finally:
        shutil.rmtree(room)
    full = not asked.quick
    figures = {
        "extraction / bare network": Figure(tuple(a / b for a, b in rounds), 1.2 if full else None),
        "candid train, CPU s": Figure((first,)),
        **again,
        "candid examine of one photo, CPU s": Figure((one,), 3.0 if full else None),
        "kB of cached statistics a photo": Figure((stored / photos / 1e3,)),
        "MB of the model": Figure((size / 1e6,), 6.0 if full else None),
    }
    return conclude("photos", asked.quick, {"extraction": times}, figures)


if __name__ == "__main__":
    sys.exit(main())

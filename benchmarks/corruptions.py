"""Corrupting photos: Candid, in batches, and imagecorruptions-imaug, one by one.

The peer needs packages that Candid must not have, so it runs in an interpreter of its own, in a subprocess
that stays (``--peer PYTHON``); each of the 75 corruptions and severities is timed there and here in turn, on
the same photos. Without ``--peer`` only Candid is timed. The photos are centre crops of 224 pixels of the
images in ``--photos``, a folder or a tar file; without it, parts of two photos.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from sklearn.datasets import load_sample_images

from benchmarks.common import Figure, Timing, conclude, console, parsed, parser, show
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.data.images import EXTENSIONS, centre_box, decode
from candid.robustness.corruptions.benchmark import CORRUPTIONS, SEVERITIES, corrupted

SIZE = (224, 224)
OURS, PEER = "Candid", "imagecorruptions"
VARIED = {"frost", "snow", "fog"}
SECONDS, RATIO = "seconds a photo", "times faster"
CHANGE, WEATHER = "largest relative difference of mean changes", "the same, of frost, snow and fog"


def photos(source: Path | None, number: int) -> Array:
    """8-bit photos (N, 3, 224, 224)."""
    if source is None:
        both = np.stack(load_sample_images().images).transpose(0, 3, 1, 2)
        places = np.lib.stride_tricks.sliding_window_view(both, SIZE, (2, 3))[:, :, ::50, ::50]
        return places.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 3, *SIZE)[:number]
    files: list[Path | bytes]
    if source.is_dir():
        files = [path for path in sorted(source.rglob("*")) if path.suffix.lower() in EXTENSIONS]
    else:
        with tarfile.open(source) as tar:
            members = sorted((each for each in tar if each.isfile()), key=lambda each: each.name)
            files = [file.read() for each in members if (file := tar.extractfile(each)) is not None]
    crops = [decode(each, 3, SIZE, lambda w, h: centre_box(w, h, SIZE, 256 / 224)) for each in files[:number]]
    return np.stack(crops)


class Peer:
    """The other package, in its own interpreter."""

    def __init__(self, python: str, images: Array, folder: Path) -> None:
        np.save(folder / "photos.npy", images.transpose(0, 2, 3, 1))
        command: list[str | Path] = [
            python,
            Path(__file__).with_name("corruptions_peer.py"),
            folder / "photos.npy",
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, name: str, severity: int) -> dict[str, float]:
        """Seconds and mean absolute change."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(name, severity, file=self.process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def measure(images: Array, name: str, severity: int) -> dict[str, float]:
    """Seconds and mean absolute change, here."""
    start = time.perf_counter()
    found = corrupted(images, name, severity, draws(0, severity).numpy)
    seconds = time.perf_counter() - start
    change = abs(found.astype(np.float32) - images.astype(np.float32)).mean()
    return {"seconds": seconds, "change": float(change)}


def main() -> int:
    options = parser("benchmarks.corruptions", __doc__)
    options.add_argument("--peer", metavar="PYTHON", help="the interpreter that has imagecorruptions-imaug")
    options.add_argument("--photos", type=Path, help="a folder or a tar file of photos")
    options.add_argument("--number", type=int, default=24, help="so many photos (default: %(default)s)")
    arguments = parsed(options)
    images = photos(arguments.photos, 2 if arguments.quick else arguments.number)
    rounds = 1 if arguments.quick else 3
    measure(images[:1], "frost", 1)  # draws the windows
    measure(images, "gaussian_noise", 1)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, console.status("measuring"):
        contenders: dict[str, Callable[[str, int], dict[str, float]]] = {OURS: partial(measure, images)}
        if arguments.peer:
            contenders[PEER] = stack.enter_context(Peer(arguments.peer, images, Path(folder))).measure
        seconds = {name: {who: [0.0] * rounds for who in contenders} for name in CORRUPTIONS}
        changes = {name: {who: [0.0] * len(SEVERITIES) for who in contenders} for name in CORRUPTIONS}
        for name, severity, round_ in product(CORRUPTIONS, SEVERITIES, range(rounds)):
            for who, run in contenders.items():
                answer = run(name, severity)
                seconds[name][who][round_] += answer["seconds"] / len(images) / len(SEVERITIES)
                changes[name][who][severity - 1] = answer["change"]

    cases = {
        name: {who: Timing(tuple(each)) for who, each in found.items()} for name, found in seconds.items()
    }
    everything = {
        who: Timing(tuple(np.mean([each[who].seconds for each in cases.values()], axis=0).tolist()))
        for who in contenders
    }
    cases = {"all 75": everything, **cases}
    figures = {SECONDS: Figure(everything[OURS].seconds)}
    if arguments.peer:
        ratio = everything[PEER].ratios(everything[OURS])
        figures[RATIO] = Figure(ratio, target=5, at_least=True)
        for figure, names, target in ((CHANGE, set(CORRUPTIONS) - VARIED, 0.15), (WEATHER, VARIED, 0.3)):
            figures[figure] = Figure((max(difference(changes[name]) for name in names),), target=target)
        rows: list[tuple[str, ...]] = [
            (
                name,
                *(f"{1000 * times[who].median:.2f}" for who in contenders),
                f"{times[PEER].ratio(times[OURS]):.1f}",
                f"{100 * difference(changes[name]):.1f} %" if name in changes else "",
            )
            for name, times in cases.items()
        ]
        columns: tuple[str, ...] = ("", f"{OURS}, ms", f"{PEER}, ms", RATIO, "changes differ by")
    else:
        rows = [(name, f"{1000 * times[OURS].median:.2f}") for name, times in cases.items()]
        columns = ("", f"{OURS}, ms")
    show(f"A photo of 224 x 224, mean of 5 severities, {len(images)} photos", columns, rows)
    return conclude("corruptions", arguments.quick, cases, figures, {"mean absolute changes": changes})


def difference(changes: dict[str, list[float]]) -> float:
    """The largest relative one between Candid and the peer, over the severities."""
    return max(abs(ours / peer - 1) for ours, peer in zip(changes[OURS], changes[PEER], strict=True))


if __name__ == "__main__":
    sys.exit(main())

"""What serving costs: images a second through ``POST /v1/examine``, as a share of the bare network's.

The peer is the frozen network on batches of decoded images, as large as the server's, in one process on all
cores; beside it the same in a process for each core, which is faster. A request also pays for reading,
decoding, p-values, verdicts and JSON, and here for the clients, too. The target is for requests with several
images: of one image, Python's part is as long as the network's. Then, how long a visitor of the page waits.

The server decodes in processes, so that no image can end it. What that costs is the rate next to that of the
same server with decoders in its own threads, for small images and for photos of 12 megapixels.
"""

import http.client
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import candid
from benchmarks.common import Figure, alternate, conclude, parsed, parser, show_times
from candid.data.uploads import decode_upload
from candid.models.protocol import batch_size
from candid.serve import Limits

CLIENTS = 32
BOUNDARY = b"candid-benchmark"
BARE, APART = "bare network, one process", "bare network, a process a core"
SINGLE, SEVERAL = "one image a request", "16 images a request"
HERE, PHOTOS, PHOTOS_HERE = "16 images, decoded in threads", "photos", "photos, decoded in threads"
PHOTO = (4000, 3000)
SHARED_PHOTOS = 16
IN_THREADS = (
    "import sys, candid.serve.app, benchmarks.serving, candid.cli.app; "
    "candid.serve.app.Decoder = benchmarks.serving.Here; candid.cli.app.run(sys.argv[1:])"
)
"""The server with decoders in its own threads, as a program."""
EXPLAINED = "/v1/examine?explain=true"
VISITS = 20
own: dict[str, Any] = {}
"""What a process of the peer has loaded."""


class Here:
    """In place of :class:`candid.serve.worker.Decoder`: decodes in the thread that asks."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of :mod:`candid.data.uploads` returns."""
        return function(*arguments)

    def started(self) -> None:
        """Do nothing: no process has to start."""

    def end(self) -> None:
        """Do nothing."""


def large_photo() -> bytes:
    """A JPEG of 12 megapixels."""
    file = BytesIO()
    Image.fromarray(load_sample_image("china.jpg")).resize(PHOTO).save(file, "JPEG", quality=90)
    return file.getvalue()


def photo_patches(n: int, size: int) -> list[bytes]:
    """PNG files of ``n`` places of a photo."""
    photo = Image.fromarray(load_sample_image("china.jpg"))
    random = torch.Generator().manual_seed(0)
    left = torch.randint(0, photo.width - size, (n,), generator=random).tolist()
    top = torch.randint(0, photo.height - size, (n,), generator=random).tolist()
    files = [BytesIO() for _ in range(n)]
    for file, x, y in zip(files, left, top, strict=True):
        photo.crop((x, y, x + size, y + size)).save(file, "PNG")
    return [file.getvalue() for file in files]


def body(files: Sequence[bytes]) -> bytes:
    """Of a multipart request."""
    head = b'--%s\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' % BOUNDARY
    return b"".join(head + file + b"\r\n" for file in files) + b"--%s--\r\n" % BOUNDARY


def send(port: int, bodies: Sequence[bytes], path: str = "/v1/examine") -> list[float]:
    """One client: a request after the other; how long each took."""
    seconds = []
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
    for each in bodies:
        started = time.perf_counter()
        connection.request("POST", path, each, headers)
        answer = connection.getresponse()
        content = answer.read()
        seconds.append(time.perf_counter() - started)
        if answer.status != 200 or b'"unusable"' in content:
            raise RuntimeError(f"{answer.status}: {content!r}")
    connection.close()
    return seconds


def load_bare(name: str, batches: Sequence[torch.Tensor]) -> None:
    """In a process of its own, with one core."""
    torch.set_num_threads(1)
    own["network"], own["batches"] = candid.load(name).frozen(), batches


@torch.inference_mode()
def pass_bare(part: slice) -> None:
    """On a part of the batches."""
    for batch in own["batches"][part]:
        own["network"](batch / 255)


@contextmanager
def server(model: str, threads: int, in_threads: bool = False) -> Iterator[int]:
    """``candid serve`` in a process of its own; its port."""
    program = ["-c", IN_THREADS] if in_threads else ["-m", "candid"]
    command = [sys.executable, *program, "serve", model, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found is not None
            yield int(found[1])
        finally:
            process.terminate()


def main() -> int:
    options = parser("benchmarks.serving", __doc__)
    options.add_argument("--model", default="cifar10-beta1", help="bundled or a folder (%(default)s)")
    arguments = parsed(options)
    images, rounds = (64, 1) if arguments.quick else (2048, 5)

    model = candid.load(arguments.model).frozen()
    _, height, width = model.image_shape
    files = photo_patches(images, height)
    photos = [large_photo()] * (4 if arguments.quick else SHARED_PHOTOS)
    preprocessing, limits = model.preprocessing, Limits()
    decoded = np.stack([decode_upload(file, preprocessing, limits.max_pixels) for file in files])
    batches = torch.from_numpy(decoded).split(limits.batch or min(64, batch_size(model)))

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            model(batch / 255)

    parts = [slice(i, None, arguments.threads) for i in range(arguments.threads)]
    with (
        multiprocessing.get_context("spawn").Pool(
            arguments.threads, load_bare, (arguments.model, batches)
        ) as processes,
        server(arguments.model, arguments.threads) as port,
        server(arguments.model, arguments.threads, in_threads=True) as port_of_threads,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):

        def served(size: int, port: int = port, files: Sequence[bytes] = files) -> None:
            bodies = [body(files[i : i + size]) for i in range(0, len(files), size)]
            list(clients.map(partial(send, port), [bodies[i::CLIENTS] for i in range(CLIENTS)]))

        def apart() -> None:
            processes.map(pass_bare, parts, chunksize=1)

        times = alternate(
            {
                BARE: bare,
                APART: apart,
                SINGLE: lambda: served(1),
                SEVERAL: lambda: served(16),
                HERE: lambda: served(16, port_of_threads),
                PHOTOS: lambda: served(2, files=photos),
                PHOTOS_HERE: lambda: served(2, port_of_threads, photos),
            },
            rounds,
        )
        visits = send(port, [body([file]) for file in files[:VISITS]], EXPLAINED)
    show_times(f"{images} images of {width} x {height}", times)
    figures = {
        f"{name}: share of the rate of the {peer}": Figure(
            times[peer].ratios(times[name]), target, at_least=True
        )
        for name, peer, target in (
            (SINGLE, BARE, None),
            (SEVERAL, BARE, 0.8),
            (SEVERAL, APART, None),
            (SEVERAL, HERE, None),
            (PHOTOS, PHOTOS_HERE, None),
        )
    }
    more = {
        "images a second": {
            name: (len(photos) if name in (PHOTOS, PHOTOS_HERE) else images) / timing.median
            for name, timing in times.items()
        },
        "seconds for an explained image": {"median": statistics.median(visits), "longest": max(visits)},
    }
    return conclude("serving", arguments.quick, {"seconds": times}, figures, more)


if __name__ == "__main__":
    sys.exit(main())

"""The peer of ``benchmarks.bulk``: what Pillow and the network do with shards, without anything else.

    python -m benchmarks.bulk_peer FOLDER MODEL PROCESSES

It loads no more than it needs, so that its start is not held against it.
"""

import io
import multiprocessing
import os
import sys
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from candid._support.numbers import Array
from candid.models import checkpoint
from candid.models.photo.model import PhotoModel

BATCH, AHEAD = 16, 3


def look(content: bytes, size: int) -> Array:
    """Decode the centre square of a photo."""
    image = Image.open(io.BytesIO(content))
    scale = min(image.size) / size
    image.draft("RGB", (int(image.width / scale), int(image.height / scale)))
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    square = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box, reducing_gap=3.0)
    return np.asarray(square).transpose(2, 0, 1)


def contents(path: Path) -> Iterator[bytes]:
    with tarfile.open(path, "r|") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            yield file.read()
            tar.members.clear()  # type: ignore[attr-defined]


def bare(model_name: str, paths: list[Path]) -> int:
    """Pass shards through the network; images are decoded in threads while earlier ones pass it."""
    model = checkpoint.resolve(model_name).ready()
    size, waiting, seen = model.preprocessing.height, deque[list[Future[Array]]](), 0
    with ThreadPoolExecutor() as pool:
        for path in paths:
            files = list[bytes]()
            for content in contents(path):
                files.append(content)
                if len(files) == BATCH:
                    waiting.append([pool.submit(look, each, size) for each in files])
                    files = []
                if len(waiting) > AHEAD:
                    seen += passed(model, waiting.popleft())
            waiting.append([pool.submit(look, each, size) for each in files])
        return seen + sum(passed(model, each) for each in waiting)


def passed(model: PhotoModel, images: list[Future[Array]]) -> int:
    if images:
        model.eye.statistics(np.stack([image.result() for image in images]).astype(np.float32) / 255)
    return len(images)


def bare_in_processes(folder: Path, model_name: str, processes: int) -> int:
    """Share the shards among processes."""
    paths = sorted(folder.iterdir())
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "OPENBLAS_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return sum(pool.map(partial(bare, model_name), [paths[i::processes] for i in range(processes)]))


if __name__ == "__main__":
    print(bare_in_processes(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

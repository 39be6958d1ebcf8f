"""Image files, folders and shards for the tests of the data sets."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from candid._support.numbers import Array
from candid.data.batches import named_batches
from candid.data.images import Preprocessing
from candid.data.splits import Split


def pixels(seed: int, height: int = 10, width: int = 12) -> NDArray[np.uint8]:
    """A smooth image, (height, width, 3), different for each seed."""
    phases = np.random.default_rng(seed).uniform(0, 6, (2, 3))
    rows = np.arange(height)[:, None, None] / height * 3 + phases[0]
    columns = np.arange(width)[None, :, None] / width * 3 + phases[1]
    waves: NDArray[np.float64] = 127 + 63 * np.sin(rows) + 63 * np.cos(columns)
    return waves.astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a file with ``image``."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(seed: int, height: int = 10, width: int = 12, kind: str = "PNG") -> bytes:
    """A file with ``pixels``."""
    return encoded(Image.fromarray(pixels(seed, height, width)), kind)


def write_folder(folder: Path, classes: dict[str, int], start: int = 0, width: int = 12) -> Path:
    """A folder for each class with that many pictures, all different."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i:03}.png").write_bytes(picture(start, width=width))
            start += 1
    return folder


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    """A tar file with ``files`` in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_shard(path: Path, seeds: range, classes: int = 3) -> Path:
    """A shard of ``picture(seed)`` with the label seed % classes."""
    files = {}
    for seed in seeds:
        files[f"{seed:05}.png"] = picture(seed)
        files[f"{seed:05}.cls"] = str(seed % classes).encode()
    return write_tar(path, files)


def evaluation_batches(
    split: Split, preprocessing: Preprocessing, batch: int, rank: int = 0, world: int = 1, workers: int = 0
) -> Iterator[tuple[Array, Array]]:
    """The batches of ``named_batches`` without the names."""
    return ((x, y) for x, y, _ in named_batches(split, preprocessing, batch, rank, world, workers))

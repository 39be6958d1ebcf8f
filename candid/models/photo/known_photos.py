"""A few photos of each class that are kept with a photo model, as thumbnails: its nearest known photos."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from candid._support.numbers import Array
from candid.data.images import Preprocessing, decode_as
from candid.data.thumbnails import SIDE, thumbnail

EACH = 20
"""The most photos of a class."""
MOST_BYTES = 1_000_000
"""What all thumbnails of a model may take."""


@dataclass(frozen=True)
class KnownPhotos:
    """Thumbnails of N photos, and where they lie between the classes."""

    jpeg: Array
    """The JPEG files one after the other, uint8."""
    ends: Array
    """Where each file ends, (N,)."""
    labels: Array
    """(N,)."""
    places: Array
    """Their coordinates along the span of the class means (:meth:`PhotoModel.places`), (N, K - 1)."""

    @classmethod
    def of(cls, paths: Sequence[Path], labels: Array, places: Array, classes: int) -> "KnownPhotos | None":
        """Keep some of these photos: as many of each class, evenly spread, as there is room for.

        Args:
            paths: the files of N photos.
            labels: (N,).
            places: (N, K - 1).
            classes: K.

        Returns:
            None if there are no photos, or no room for one of each class.
        """
        members = [np.flatnonzero(labels == y) for y in range(classes)]
        rows = [own[np.linspace(0, len(own) - 1, min(EACH, len(own))).round().astype(int)] for own in members]
        rounds = [[int(own[i]) for own in rows if i < len(own)] for i in range(EACH)]
        kept: list[tuple[int, bytes]] = []
        size = 0
        for photos in rounds:
            made = [(row, thumbnail(paths[row])) for row in photos]
            size += sum(len(file) for _, file in made)
            if not made or size > MOST_BYTES:
                break
            kept += made
        if not kept:
            return None
        chosen, files = zip(*kept, strict=True)
        jpeg = np.frombuffer(b"".join(files), np.uint8)
        ends = np.cumsum([len(file) for file in files], dtype=np.int64)
        return cls(jpeg, ends, labels[[*chosen]], places[[*chosen]].astype(np.float32))

    @classmethod
    def read(cls, tensors: dict[str, Array], classes: int) -> "KnownPhotos | None":
        """Return what :meth:`to_tensors` wrote; None if there is none, or it is of other classes."""
        if tensors.keys() != set(cls.__dataclass_fields__):
            return None
        photos = cls(**tensors)
        count = len(photos.ends)
        return photos if photos.places.shape == (count, classes - 1) and len(photos.labels) == count else None

    def to_tensors(self) -> dict[str, Array]:
        """Return everything as arrays by name."""
        return dict(vars(self))

    def __len__(self) -> int:
        return len(self.ends)

    def nearest(self, place: Array, count: int, y: int | None = None) -> list[int]:
        """Return the photos nearest to ``place`` (K - 1,), nearest first; of class ``y`` alone if given."""
        distances = ((self.places.astype(np.float64) - place.astype(np.float64)) ** 2).sum(1)
        if y is not None:
            distances[self.labels != y] = np.inf
        order = np.argsort(distances, kind="stable")[:count]
        return [int(row) for row in order if distances[row] < np.inf]

    def file(self, row: int) -> bytes:
        """Return a thumbnail as a JPEG file."""
        start = int(self.ends[row - 1]) if row else 0
        return self.jpeg[start : int(self.ends[row])].tobytes()

    def picture(self, row: int) -> Array:
        """Return a thumbnail, (3, H, W) uint8."""
        return decode_as(self.file(row), Preprocessing(3, SIDE, SIDE))

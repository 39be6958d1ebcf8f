"""A few photos of each class that are kept with a photo model, as thumbnails: its nearest known photos."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from candid.data.images import Preprocessing, decode_as
from candid.data.thumbnails import SIDE, thumbnail

EACH = 20
"""The most photos of a class."""
MOST_BYTES = 1_000_000
"""What all thumbnails of a model may take."""


@dataclass(frozen=True)
class KnownPhotos:
    """Thumbnails of N photos, and where they lie between the classes."""

    jpeg: Tensor
    """The JPEG files one after the other, uint8."""
    ends: Tensor
    """Where each file ends, (N,)."""
    labels: Tensor
    """(N,)."""
    places: Tensor
    """Their coordinates along the span of the class means (:meth:`PhotoModel.places`), (N, K - 1)."""

    @classmethod
    def of(cls, paths: Sequence[Path], labels: Tensor, places: Tensor, classes: int) -> "KnownPhotos | None":
        """Keep some of these photos: as many of each class, evenly spread, as there is room for.

        Args:
            paths: the files of N photos.
            labels: (N,).
            places: (N, K - 1).
            classes: K.

        Returns:
            None if there are no photos, or no room for one of each class.
        """
        rows = [(labels == y).nonzero()[:, 0] for y in range(classes)]
        rows = [own[torch.linspace(0, len(own) - 1, min(EACH, len(own))).round().long()] for own in rows]
        rounds = [[int(own[i]) for own in rows if i < len(own)] for i in range(EACH)]
        kept: list[tuple[int, bytes]] = []
        size = 0
        for each in rounds:
            made = [(row, thumbnail(paths[row])) for row in each]
            size += sum(len(file) for _, file in made)
            if not made or size > MOST_BYTES:
                break
            kept += made
        if not kept:
            return None
        chosen, files = zip(*kept, strict=True)
        jpeg = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
        ends = torch.tensor([len(each) for each in files]).cumsum(0)
        return cls(jpeg, ends, labels[[*chosen]], places[[*chosen]].float())

    @classmethod
    def read(cls, tensors: dict[str, Tensor], classes: int) -> "KnownPhotos | None":
        """Return what :meth:`to_tensors` wrote; None if there is none, or it is of other classes."""
        if tensors.keys() != set(cls.__dataclass_fields__):
            return None
        found = cls(**tensors)
        fits = found.places.shape == (len(found.ends), classes - 1) and len(found.labels) == len(found.ends)
        return found if fits else None

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors by name."""
        return dict(vars(self))

    def __len__(self) -> int:
        return len(self.ends)

    def nearest(self, place: Tensor, count: int, y: int | None = None) -> list[int]:
        """Return the photos nearest to ``place`` (K - 1,), nearest first; of class ``y`` alone if given."""
        distances = (self.places.double() - place.cpu().double()).square().sum(1)
        if y is not None:
            distances[self.labels != y] = torch.inf
        order = distances.argsort(stable=True)[:count]
        return [int(row) for row in order if distances[row] < torch.inf]

    def file(self, row: int) -> bytes:
        """Return a thumbnail as a JPEG file."""
        start = int(self.ends[row - 1]) if row else 0
        return bytes(self.jpeg[start : int(self.ends[row])].numpy())

    def picture(self, row: int) -> Tensor:
        """Return a thumbnail, (3, H, W) uint8."""
        return decode_as(self.file(row), Preprocessing(3, SIDE, SIDE))

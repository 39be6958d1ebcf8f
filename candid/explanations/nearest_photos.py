"""The known photos that are nearest to a photo: photo models show them in place of counterfactuals."""

from dataclasses import dataclass

from torch import Tensor

from candid.models.heads.photo import PhotoModel

NEAREST, INSTEAD = 5, 3
NO_INVERSE = "This model looks through a pretrained eye, which has no inverse to pixels"
NO_THUMBNAILS = "no photos were kept with this model (--no-thumbnails), so the nearest ones can't be shown"


@dataclass(frozen=True)
class KnownPhoto:
    """A photo that is kept with the model."""

    y: int
    """Its class."""
    jpeg: bytes
    """A thumbnail of it."""
    picture: Tensor
    """The same, (3, H, W) uint8."""


@dataclass(frozen=True)
class NearestPhotos:
    """Known photos near one photo, nearest first, by distance along the span of the class means."""

    nearest: tuple[KnownPhoto, ...]
    """Of all classes."""
    instead: int
    """The class that it could be instead."""
    of_instead: tuple[KnownPhoto, ...]
    """Of that class."""
    missing: tuple[int, ...] = ()
    """Classes that no photo is kept of, such as those that were taught."""


def nearest_photos(model: PhotoModel, latent: Tensor, instead: int) -> NearestPhotos | None:
    """Return the known photos nearest to a photo.

    Args:
        model: a photo model.
        latent: of the photo, (1, D).
        instead: the class that it could be instead.

    Returns:
        None if no photos were kept with the model.
    """
    known = model.known_photos
    if known is None:
        return None
    place = model.places(latent)[0]

    def found(rows: list[int]) -> tuple[KnownPhoto, ...]:
        return tuple(KnownPhoto(int(known.labels[row]), known.file(row), known.picture(row)) for row in rows)

    missing = set(range(len(model.class_names))) - set(known.labels.tolist())
    return NearestPhotos(
        found(known.nearest(place, NEAREST)),
        instead,
        found(known.nearest(place, INSTEAD, instead)),
        tuple(sorted(missing)),
    )

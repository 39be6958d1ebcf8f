"""The demonstration that needs no data and no training: a photo to latent space and back."""

from typing import NamedTuple

import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from candid.classifier import GenerativeClassifier


class RoundTrip(NamedTuple):
    """One photo, its latent, and the photo recovered from it."""

    image: Tensor
    """(3, H, W) in [0, 1]."""
    z: Tensor
    """(D,)."""
    spread: Tensor
    """Standard deviation over channels of each cosine coefficient of z, (height, width)."""
    restored: Tensor
    """(3, H, W)."""

    @property
    def largest_error(self) -> float:
        """In pixel units of [0, 1]."""
        return float((self.restored - self.image).abs().max())


def sample_photo(size: int = 224) -> Tensor:
    """A photo that scikit-learn ships, its centre at ``size`` x ``size``, (3, size, size) in [0, 1]."""
    photo = Image.fromarray(load_sample_image("china.jpg"))
    scale = size * 8 / 7 / min(photo.size)
    width, height = (round(side * scale) for side in photo.size)
    left, top = (width - size) // 2, (height - size) // 2
    photo = photo.resize((width, height), Image.Resampling.BICUBIC)
    photo = photo.crop((left, top, left + size, top + size))
    pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8)
    return pixels.view(size, size, 3).permute(2, 0, 1) / 255


@torch.inference_mode()
def round_trip(preset: str = "imagenet") -> RoundTrip:
    """The sample photo through an untrained network and back."""
    model = GenerativeClassifier.from_preset(preset).eval()
    flow = model.config.flow
    image = sample_photo(flow.height)
    z = model.latent(image[None])
    by_frequency = z.view(
        flow.width // flow.downsampling, flow.height // flow.downsampling, flow.constant_coefficients
    )
    return RoundTrip(image, z[0], by_frequency.std(2).T, model.invert(z)[0])

"""Models whose mixture matters and whose network does not."""

import torch
from torch import Tensor

from candid import ClassifierConfig, FlowConfig, GenerativeClassifier
from candid.models.flow.network import array_of
from candid.models.protocol import Outputs
from tests.helpers import small_classifier


def mixture_model(
    classes: int = 4,
    size: tuple[int, int] = (4, 6),
    rank: int | None = None,
    priors: tuple[float, ...] | None = None,
    planar: bool = False,
    scale: float = 3.0,
    seed: int = 0,
    **flow: object,
) -> GenerativeClassifier:
    """In float64, with means about ``scale`` standard deviations apart."""
    layout = FlowConfig(1, *size, blocks=(1,), widths=(1,), pointwise_width=1, entry="none", **flow)  # type: ignore[arg-type]
    config = ClassifierConfig(layout, classes, rank, priors=priors, planar=planar)
    model = GenerativeClassifier(config, seed=seed).double().eval()
    with torch.no_grad():
        for part in (model.mixture.mean, model.mixture.prototypes):
            part.mul_(2 * scale)
    return model


def outputs_for(model: GenerativeClassifier, z: Tensor) -> Outputs:
    """As if an image had the latent ``z``."""
    latent = array_of(z)
    return Outputs(array_of(model.mixture.logits(z)), latent[:, : model.feature_size], None, latent)


def latents(model: GenerativeClassifier, images: int = 3, spread: float = 1.0, seed: int = 0) -> Tensor:
    """Random ones, (images, D)."""
    random = torch.Generator().manual_seed(seed)
    return spread * torch.randn(images, model.dimensions, generator=random, dtype=model.noise.dtype)


def decided_classifier() -> GenerativeClassifier:
    """The small classifier with its means farther apart, not to be trained."""
    model = small_classifier().requires_grad_(False)
    with torch.no_grad():
        model.mixture.mean.mul_(3)
    return model

"""Refit the mixture of a trained model: put its class means where held-out images say they belong."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candid._support.errors import CandidError, require_extra
from candid._support.numbers import Array
from candid._support.options import build
from candid._support.processes import launch, summed
from candid._support.progress import SILENT, Progress
from candid.data.batches import NamedBatch
from candid.data.images import Preprocessing, to_float
from candid.data.splits import Split
from candid.inference.options import CalibrateOptions
from candid.inference.runner import Runner
from candid.judging.calibrate import calibration_splits, fewer, measure
from candid.models import checkpoint, saving
from candid.models.protocol import Model, require

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch import Tensor

    from candid.models.flow.classifier import GenerativeClassifier

LOG_SCALES = (-3.0, 4.0)
"""Where the logarithm of the scale is searched."""
RECORD = "refit"
"""The entry of the metadata that says how a model was refitted."""


@dataclass(frozen=True)
class RefitResult:
    """How the class means of a model were moved, and what that is worth.

    >>> print(RefitResult(2.5, 18.0, 1.0, 2.5, images=1000))
    class means moved from 1.00 to 2.50 sigma apart: +18.00 nats per held-out image, the same posteriors
    """

    scale: float
    """The factor by which the class means are farther apart than training left them."""
    gain: float
    """Gain in log-likelihood over the means that training left, in nats per held-out image."""
    distance_before: float
    """Mean distance of two class means as training left them, in standard deviations."""
    distance: float
    """The same after refitting."""
    images: int
    """Number of held-out images."""

    def __str__(self) -> str:
        return (
            f"class means moved from {self.distance_before:.2f} to {self.distance:.2f} sigma apart: "
            f"{self.gain:+.2f} nats per held-out image, the same posteriors"
        )


def refit(
    model: Model | str | os.PathLike[str],
    data: str,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> RefitResult:
    """Scale the distances between the class means so that held-out images are most likely.

    Posteriors and classes stay the same; the density, and with it p-values, decision spaces and expected
    uncertainties, describe the images better. ``candid train`` does this at its end. Held-out scores are
    measured again.

    Args:
        model: a generative classifier, which is changed in place; or its folder.
        data: the data that it was trained on, or other images of its classes with labels.
        out: the folder for the refitted model; by default the model's own folder.
        progress: where to show messages and bars.
        **options: fields of :class:`~candid.inference.options.CalibrateOptions`.

    Returns:
        The scale, and what was gained.

    Raises:
        CandidError: if the model has no class means, or they are affinely dependent.

    Example:
        >>> import candid
        >>> model = candid.GenerativeClassifier.from_preset("digits").eval()
        >>> refit(model, "digits", images=50).images
        50
    """
    chosen = build(CalibrateOptions, options)
    target = None if out is None else Path(out)
    if target is None and isinstance(model, str | os.PathLike):
        target = checkpoint.own_folder(model)
    earlier = None if target is None else saving.record_hash(target)
    loaded = require(checkpoint.resolve(model), "geometry", "Refitting")
    if "mixture" not in loaded.can:
        raise CandidError(
            "The head of this model is fitted in closed form: its class means are where the photos are, and "
            "there is nothing to refit. To measure held-out photos again, run 'candid calibrate'."
        )
    require_extra("torch", "paper", "Refitting")
    fabric = launch(chosen.devices)
    progress = progress if fabric.is_global_zero else SILENT
    train, held_out = calibration_splits(loaded, data, chosen, progress)
    result = refit_mixture(loaded, fabric, held_out, loaded.preprocessing, chosen.workers, progress)
    runner = Runner(loaded, fabric, None, chosen.workers, progress)
    scores = measure(runner, train, held_out, loaded.preprocessing, chosen.together)
    if scores is not None:
        scores.attach(loaded)
        if target is not None:
            saving.save(loaded, target, expected=earlier)
    return result


def can_refit(model: Model) -> bool:
    """Return whether ``model`` has class means that :func:`refit_mixture` can move."""
    if "mixture" not in model.can:
        return False
    from candid.models.flow.means import span_of

    try:
        return bool(span_of(model.mixture))  # type: ignore[attr-defined]
    except CandidError:
        return False


def refit_mixture(
    model: "GenerativeClassifier",
    fabric: "Fabric",
    held_out: Split,
    preprocessing: Preprocessing,
    workers: int,
    progress: Progress,
) -> RefitResult:
    """Refit ``model`` in place, in all processes alike; its held-out scores are dropped."""
    import torch

    from candid.models.flow.means import restore, span_of

    restore(model)
    span = span_of(model.mixture)
    runner = Runner(model, fabric, None, workers, progress)

    def coordinates(batch: NamedBatch) -> Array:
        z = runner.frozen.outputs(to_float(batch[0])).latent
        assert z is not None
        return span.layer.coordinates(torch.from_numpy(z).double()).numpy()

    parts = runner.each(coordinates, fewer(held_out), preprocessing, "latents of held-out images")
    places = torch.cat([span.places[:0], *map(torch.from_numpy, parts)])
    return _refitted(model, places, lambda values: summed(fabric, values))


def refit_to(model: Any, latents: Array) -> RefitResult:
    """Refit ``model``, which was not refitted before, to its latents of held-out images, (N, D)."""
    import torch

    from candid.models.flow.means import span_of

    span = span_of(model.mixture)
    return _refitted(model, span.layer.coordinates(torch.from_numpy(latents).double()), lambda values: values)


def _refitted(model: Any, places: "Tensor", added: Callable[[Array], Array]) -> RefitResult:
    """Refit to places in the span of the means, (N, M - 1); ``added`` adds numbers of all processes."""
    import torch
    from scipy.optimize import minimize_scalar

    from candid.models.flow.means import rescale, span_of

    span, log_priors = span_of(model.mixture), torch.as_tensor(model.log_priors).double()
    images = int(added(np.array([float(len(places))]))[0])

    def mean(log_scale: float) -> float:
        total = span.log_likelihood(places, log_priors, log_scale).sum()
        return float(added(total[None].numpy())[0]) / images

    before, distance = mean(0.0), _mean_distance(model)
    best = minimize_scalar(lambda log_scale: -mean(log_scale), bounds=LOG_SCALES, method="bounded")
    scale = float(torch.tensor(float(best.x)).exp())
    rescale(model, scale)
    result = RefitResult(scale, mean(float(best.x)) - before, distance, _mean_distance(model), images)
    model.metadata[RECORD] = asdict(result)
    return result


def _mean_distance(model: Any) -> float:
    distances = model.mixture.pairwise_distances()
    return float(distances.sum() / (len(distances) * (len(distances) - 1)))

"""What a model has learned as a whole."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from candid._support.config import build
from candid._support.distributed import best_device, launch
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid._support.text import short_names
from candid.data.datasets import open_part
from candid.data.images import Preprocessing
from candid.data.loader import named_batches
from candid.data.options import Part
from candid.data.splits import Split
from candid.explanations.coefficients import mean_spread
from candid.explanations.counterfactual import Interpolation, interpolate, samples
from candid.explanations.nearest_photos import NO_INVERSE, NO_THUMBNAILS
from candid.explanations.options import ExplainOptions
from candid.explanations.receptive_field import ReceptiveField, receptive_field
from candid.explanations.similarity import Pair, Similarity, held_out_uncertainty, similarity
from candid.inference.metrics import measured_uncertainty
from candid.inference.predictions import batch_size, to_float
from candid.inference.runner import Runner
from candid.models import checkpoint
from candid.models.flow.plane import DecisionPlane, decision_plane
from candid.models.heads.photo import PhotoModel
from candid.models.protocol import LatentModel, Model, require_mixture

MEASURED_IMAGES = 2000
"""Images of the data on which the uncertainty of pairs of classes is measured."""
EXACT_CHANNELS, PROJECTIONS = 512, 64
"""Above this number of channels, receptive fields are estimated, from this number of projections."""
SAMPLED_CLASSES, SAMPLES = 10, 2
INTERPOLATIONS = 3
KNOWN = 6
"""Known photos of each class of a photo model."""


@dataclass(frozen=True)
class Overview:
    """Everything that was found."""

    class_names: tuple[str, ...]
    similarity: Similarity
    groups: dict[str, Similarity]
    pairs: list[Pair]
    measured_on: str | None
    """The images on which uncertainties were measured; None if there are none."""
    spread: Tensor | None
    """Spread of the class means in each cosine coefficient, (h, w); None of a photo model."""
    sampled: list[int]
    """The classes that were sampled, or whose known photos are shown."""
    samples: Tensor | None
    """(temperatures, classes, n, C, H, W) uint8; None of a photo model."""
    known: dict[int, list[Tensor]] = field(default_factory=dict)
    """Known photos of the sampled classes of a photo model, each (3, H, W) uint8."""
    missing: str | None = None
    """What can't be shown, and why."""
    fields: dict[str, ReceptiveField] = field(default_factory=dict)
    interpolations: list[Interpolation] = field(default_factory=list)
    plane: DecisionPlane | None = None
    """The plane of the means; None unless the model is planar."""
    points: Tensor | None = None
    """Real images in the plane, (N, 2)."""
    labels: Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        return {
            "closest_pairs": [
                {
                    "classes": [self.class_names[pair.first], self.class_names[pair.second]],
                    "distance": pair.distance,
                    "expected_uncertainty": pair.uncertainty,
                    "measured_uncertainty": pair.measured,
                    "differs": pair.differs,
                }
                for pair in self.pairs
            ],
            "measured_on": self.measured_on,
            "mean_spread": None if self.spread is None else self.spread.tolist(),
            "missing": self.missing,
            "receptive_fields": {
                name: {
                    "width_at_half_maximum_pixels": each.width_at_half_maximum,
                    "images": each.images,
                    "projections": each.projections,
                }
                for name, each in self.fields.items()
            },
        }


ModelLike = Model | str | Path
"""A model, or what :func:`candid.load` takes."""


def explain(
    model: ModelLike,
    *,
    compare_with: Sequence[ModelLike] = (),
    progress: Progress = SILENT,
    **options: Any,
) -> Overview:
    """Describe what a generative classifier has learned, with all classes or some.

    Args:
        model: A generative classifier or a photo model, the name of a bundled one, a model folder or a run
            folder.
        compare_with: Further models, also ResNets, whose receptive fields are measured on the same images.
        progress: What shows progress.
        **options: Fields of :class:`candid.explanations.options.ExplainOptions`, such as ``data="digits"``.

    Returns:
        Distances between classes, samples and, with ``data``, receptive fields, interpolations and measured
        uncertainties.

    Raises:
        CandidError: If the model has no latent, or an option is wrong.

    Example:
        >>> from candid import GenerativeClassifier
        >>> found = explain(GenerativeClassifier.from_preset("digits"), classes="1,7,4", pairs=1)
        >>> len(found.pairs), found.samples.shape
        (1, torch.Size([3, 3, 2, 1, 8, 8]))
    """
    chosen = build(ExplainOptions, options)
    if compare_with and chosen.data is None:
        raise CandidError("Models are compared by receptive fields on real images: name some with --data.")
    loaded = _resolved(model)
    latent = require_mixture(loaded, "An explanation of a whole model").to(best_device())
    photo = loaded if isinstance(loaded, PhotoModel) else None
    if photo is not None and compare_with:
        raise CandidError("Receptive fields are those of pixel models and ResNets: leave --compare-with out.")
    images = None if chosen.data is None else _Images(latent, chosen, progress)
    measured = held_out_uncertainty(latent) if images is None else images.measured()
    similar = similarity(latent, chosen.classes, chosen.order, measured)
    groups = {name: similarity(latent, spec, chosen.order, measured) for name, spec in chosen.groups.items()}
    pairs = similar.closest_pairs(chosen.pairs)
    sampled = sorted(similar.classes)[:SAMPLED_CLASSES]
    if photo is not None:
        measured_on = _measured_on(measured, images)
        known = _known_photos(photo, sampled)
        shown = NO_THUMBNAILS if photo.known_photos is None else "known photos are shown instead"
        missing = f"{NO_INVERSE}, so there are no samples and interpolations; {shown}."
        return Overview(
            latent.class_names, similar, groups, pairs, measured_on, None, sampled, None, known, missing
        )
    plane = decision_plane(latent) if latent.mixture.planar else None
    found = Overview(
        latent.class_names,
        similar,
        groups,
        pairs,
        _measured_on(measured, images),
        mean_spread(latent),
        sampled,
        samples(latent, sampled, chosen.temperatures, SAMPLES, chosen.seed),
        plane=plane,
    )
    if images is None:
        return found
    points, labels = (None, None) if plane is None else images.projected()
    return replace(
        found,
        fields=images.receptive_fields(
            dict(zip(_names([model, *compare_with]), [loaded, *compare_with], strict=True))
        ),
        interpolations=images.interpolations(),
        points=points,
        labels=labels,
    )


def _measured_on(measured: Tensor | None, images: "_Images | None") -> str | None:
    return None if measured is None else "held-out images" if images is None else images.name


def _known_photos(model: PhotoModel, classes: Sequence[int]) -> dict[int, list[Tensor]]:
    """Return known photos of each class, those nearest to its mean first."""
    known = model.known_photos
    if known is None:
        return {}
    means = model.places(model.mixture.means(torch.arange(len(model.class_names), device=model.device)))
    return {y: [known.picture(row) for row in known.nearest(means[y], KNOWN, y)] for y in classes}


def _resolved(model: ModelLike) -> Model:
    return checkpoint.load_any(model) if isinstance(model, str | Path) else model


def _names(models: Sequence[ModelLike]) -> list[str]:
    """Return a name of its own for each model: from its path if it has one, else its kind."""
    names = short_names([Path(each if isinstance(each, str | Path) else each.kind) for each in models])
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def open_images(
    model: Model, data: str, part: Part | None, count: int | None, skip_bad: bool, progress: Progress
) -> tuple[Split, str]:
    """Open at most ``count`` images of ``data`` as ``model`` sees them, and name their part."""
    chosen = open_part(data, model.class_names, part, model.record.config)
    few = chosen.split.subsample(count)
    return few.preprocess(model.preprocessing, skip_bad, progress, chosen.part), chosen.part


@torch.inference_mode()
def project(
    model: LatentModel,
    split: Split,
    preprocessing: Preprocessing,
    workers: int = 0,
    progress: Progress = SILENT,
    plane: DecisionPlane | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the points of the images of ``split`` in a plane, (N, 2), and labels, (N,).

    Without ``plane``, it is the plane of ``model``, which must be planar.
    """
    plane, frozen = decision_plane(model) if plane is None else plane, model.frozen()
    points, labels = [], []
    batch = batch_size(model)
    batches = named_batches(split, preprocessing, batch, workers=workers)
    for images, y, _ in progress.track(batches, "images in the plane", math.ceil(len(split) / batch), batch):
        points.append(plane.project(frozen.latent(to_float(images, model.device))))
        labels.append(y)
    return torch.cat(points), torch.cat(labels)


class _Images:
    """Real images, and a model's outputs for them."""

    def __init__(self, model: LatentModel, options: ExplainOptions, progress: Progress) -> None:
        assert options.data is not None
        self.model, self.options, self.progress = model, options, progress
        self.preprocessing = model.preprocessing
        self.split, self.part = open_images(
            model, options.data, options.part, MEASURED_IMAGES, options.skip_bad, progress
        )

        self.name = f"{len(self.split):,} images ({self.part})"

    def measured(self) -> Tensor:
        passes = Runner(self.model, launch(1), workers=self.options.workers, progress=self.progress)
        found = passes.predictions(self.split, self.preprocessing, self.part)
        assert found is not None
        return measured_uncertainty(found.posterior, found.labels)

    def projected(self) -> tuple[Tensor, Tensor]:
        return project(self.model, self.split, self.preprocessing, self.options.workers, self.progress)

    def receptive_fields(self, models: Mapping[str, ModelLike]) -> dict[str, ReceptiveField]:
        shown = self._few(self.options.images)
        fields: dict[str, ReceptiveField] = {}
        for name, given in models.items():
            model = _resolved(given)
            if model.image_shape != self.model.image_shape:
                raise CandidError(f"'{name}' takes images of another size: compare models of the same size.")
            model.to(self.model.device)
            projections = self.options.projections
            if projections is None:
                with torch.no_grad():
                    channels = model.feature_maps(shown[:1].to(model.device) / 255).shape[1]
                projections = PROJECTIONS if channels > EXACT_CHANNELS else 0
            fields[name] = receptive_field(
                model, shown, projections or None, seed=self.options.seed, progress=self.progress
            )
        return fields

    def interpolations(self) -> list[Interpolation]:
        """Return interpolations between images that are far apart in the data, if there are enough."""
        ends = self._few(2 * INTERPOLATIONS)
        pairs, frozen = len(ends) // 2, self.model.frozen()
        return [interpolate(frozen, ends[i], ends[i + pairs]) for i in range(pairs)]

    def _few(self, count: int) -> Tensor:
        """Return ``count`` images, evenly spread, (N, C, H, W) uint8."""
        return next(iter(named_batches(self.split.subsample(count), self.preprocessing, count)))[0]

"""What a model has learned: everything that is said of it as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from candid._support.distributed import best_device, launch
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid._support.text import short_names
from candid.data.datasets import Part, open_part
from candid.data.loader import named_batches
from candid.data.splits import Split
from candid.explanations.coefficients import mean_spread
from candid.explanations.counterfactual import Interpolation, interpolate, samples
from candid.explanations.plane import DecisionPlane, decision_plane, located
from candid.explanations.receptive_field import ReceptiveField, receptive_field
from candid.explanations.similarity import Pair, Similarity, measured_uncertainty, similarity
from candid.inference.runner import Passes
from candid.models import checkpoint
from candid.models.protocol import LatentModel, require_latent

MEASURED_IMAGES = 2000
"""Of the data, for what the model makes of pairs of classes."""
EXACT_CHANNELS, PROJECTIONS = 512, 64
"""Receptive fields of more channels are estimated by default, from so many projections."""
SAMPLED_CLASSES, SAMPLES = 10, 2
INTERPOLATIONS = 3


@dataclass(frozen=True)
class Request:
    """What to look at, and how."""

    model: Path
    data: str | None = None
    """Real images; without them there are no receptive fields, interpolations and measured uncertainties."""
    part: Part | None = None
    """Of the data."""
    classes: str | None = None
    """See :func:`candid.explanations.chosen_classes`; None for all."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Classes to compare with each other, by name of the group."""
    order: Literal["clustering", "given"] = "clustering"
    pairs: int = 10
    """How many of the closest ones."""
    beside: tuple[Path, ...] = ()
    """Other models, for their receptive fields."""
    images: int = 16
    """For receptive fields."""
    projections: int | None = None
    """For receptive fields; 0: exact, None: as the number of channels suggests."""
    temperatures: tuple[float, ...] = (0.5, 0.8, 1.0)
    seed: int = 0
    skip_bad: bool = False
    workers: int = 2


@dataclass(frozen=True)
class Overview:
    """All that was found."""

    class_names: tuple[str, ...]
    similarity: Similarity
    groups: dict[str, Similarity]
    pairs: list[Pair]
    measured: list[float | None]
    """Uncertainties of the pairs on real images."""
    spread: Tensor
    """Of the class means in each cosine coefficient, (h, w)."""
    sampled: list[int]
    """Classes."""
    samples: Tensor
    """(temperatures, classes, n, C, H, W) uint8."""
    fields: dict[str, ReceptiveField]
    interpolations: list[Interpolation]
    plane: DecisionPlane | None
    """Of a model with its means in a plane."""
    points: Tensor | None
    """Of real images in the plane, (N, 2)."""
    labels: Tensor | None

    def record(self) -> dict[str, Any]:
        """The numbers, as JSON."""
        return {
            "closest_pairs": [
                {
                    "classes": [self.class_names[pair.first], self.class_names[pair.second]],
                    "distance": pair.distance,
                    "expected_uncertainty": pair.uncertainty,
                    "measured_uncertainty": measured,
                }
                for pair, measured in zip(self.pairs, self.measured, strict=True)
            ],
            "mean_spread": self.spread.tolist(),
            "receptive_fields": {
                name: {
                    "width_at_half_maximum_pixels": each.width_at_half_maximum,
                    "images": each.images,
                    "projections": each.projections,
                }
                for name, each in self.fields.items()
            },
        }


def overview(request: Request, progress: Progress = SILENT) -> Overview:
    """Everything that ``request`` asks for."""
    if request.beside and request.data is None:
        raise CandidError("--beside compares receptive fields on real images: name some with --data.")
    if request.projections is not None and request.projections < 0:
        raise CandidError(
            f"--projections takes a number from 3 on, or 0 for none, not {request.projections}."
        )
    model = require_latent(checkpoint.load_any(request.model), "An overview of the classes")
    model.to(best_device())
    similar = similarity(model, request.classes, request.order)
    groups = {name: similarity(model, spec, request.order) for name, spec in request.groups.items()}
    pairs = similar.closest_pairs(request.pairs)
    images = None if request.data is None else _Images(model, request, progress)
    sampled = sorted(similar.classes)[:SAMPLED_CLASSES]
    plane = decision_plane(model) if model.mixture.planar else None
    points, labels = (None, None) if plane is None or images is None else images.located()
    return Overview(
        model.class_names,
        similar,
        groups,
        pairs,
        [None] * len(pairs) if images is None else images.measured(pairs),
        mean_spread(model),
        sampled,
        samples(model, sampled, request.temperatures, SAMPLES, request.seed),
        {} if images is None else images.receptive_fields(),
        [] if images is None else images.interpolations(),
        plane,
        points,
        labels,
    )


class _Images:
    """Real images, and what a model makes of them."""

    def __init__(self, model: LatentModel, request: Request, progress: Progress) -> None:
        assert request.data is not None
        chosen = open_part(request.data, model.class_names, request.part, model.record.config)
        if not chosen.split.can_index:
            raise CandidError("Of tar shards no image can be looked up: give a folder of images instead.")
        self.model, self.request, self.progress, self.part = model, request, progress, chosen.part
        self.preprocessing = model.preprocessing
        few = chosen.split.subsample(MEASURED_IMAGES)
        self.split: Split = few.preprocess(self.preprocessing, request.skip_bad, progress, chosen.part)

    def measured(self, pairs: Sequence[Pair]) -> list[float | None]:
        passes = Passes(self.model, launch(1), workers=self.request.workers, progress=self.progress)
        found = passes.predictions(self.split, self.preprocessing, self.part)
        assert found is not None
        return measured_uncertainty(found.posterior, found.labels, pairs)

    def located(self) -> tuple[Tensor, Tensor]:
        return located(self.model, self.split, self.preprocessing, self.request.workers, self.progress)

    def receptive_fields(self) -> dict[str, ReceptiveField]:
        shown = self._few(self.request.images)
        paths = [self.request.model, *self.request.beside]
        fields: dict[str, ReceptiveField] = {}
        for path, name in zip(paths, short_names(paths), strict=True):
            model = self.model if path == self.request.model else checkpoint.load_any(path)
            if model.image_shape != self.model.image_shape:
                raise CandidError(f"'{path}' takes images of another size: compare models of the same.")
            model.to(self.model.device)
            projections = self.request.projections
            if projections is None:
                with torch.no_grad():
                    channels = model.feature_maps(shown[:1].to(model.device, model.dtype) / 255).shape[1]
                projections = PROJECTIONS if channels > EXACT_CHANNELS else 0
            fields[name] = receptive_field(
                model, shown, projections or None, seed=self.request.seed, progress=self.progress
            )
        return fields

    def interpolations(self) -> list[Interpolation]:
        """Between images that are far from each other in the data, if there are enough."""
        ends = self._few(2 * INTERPOLATIONS)
        pairs, fast = len(ends) // 2, self.model.frozen()
        return [interpolate(fast, ends[i], ends[i + pairs]) for i in range(pairs)]

    def _few(self, count: int) -> Tensor:
        """So many images, evenly spread, (N, C, H, W) uint8."""
        return next(iter(named_batches(self.split.subsample(count), self.preprocessing, count)))[0]

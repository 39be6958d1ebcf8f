"""What a model has learned as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import build
from candid._support.progress import SILENT, Progress
from candid._support.text import short_names
from candid.data import Part
from candid.data.batches import named_batches
from candid.data.datasets import open_part
from candid.data.images import to_float
from candid.data.splits import IndexedSplit, Split
from candid.explanations.explainer import NO_INVERSE, no_photos
from candid.explanations.options import ExplainOptions
from candid.explanations.similarity import (
    Pair,
    Similarity,
    held_out_distances,
    held_out_uncertainty,
    mean_spread,
    similarity,
)
from candid.inference.metrics import measured_distances, measured_uncertainty
from candid.inference.runner import Runner, launch_for
from candid.models import checkpoint
from candid.models.decision_plane import DecisionPlane, check_fitted, decision_plane, fitted_plane
from candid.models.protocol import Model, batch_size, can, require

if TYPE_CHECKING:
    from candid.explanations.counterfactual import Interpolation
    from candid.explanations.receptive_field import ReceptiveField
    from candid.models.photo.model import PhotoModel

MEASURED_IMAGES = 2000
"""Images of the data on which the uncertainty of pairs of classes is measured."""
EXACT_CHANNELS, PROJECTIONS = 512, 64
"""Above this number of channels, receptive fields are estimated, from this number of projections."""
SAMPLED_CLASSES, SAMPLES = 10, 2
INTERPOLATIONS = 3
FITTED_PHOTOS = 3000
"""At most this number of photos is a plane fitted to."""
KNOWN = 6
"""Known photos of each class of a photo model."""


@dataclass(frozen=True)
class Overview:
    """What :func:`explain` found."""

    class_names: tuple[str, ...]
    similarity: Similarity
    groups: dict[str, Similarity]
    pairs: list[Pair]
    measured_on: str | None
    """The images on which uncertainties were measured; None if there are none."""
    spread: Array | None
    """Spread of the class means in each cosine coefficient, (h, w); None of a photo model."""
    sampled: list[int]
    """The classes that were sampled, or whose known photos are shown."""
    samples: Array | None = None
    """(temperatures, classes, n, C, H, W) uint8; None of a photo model."""
    known: dict[int, list[Array]] = field(default_factory=dict)
    """Known photos of the sampled classes of a photo model, each (3, H, W) uint8."""
    missing: str | None = None
    """What can't be shown, and why."""
    fields: dict[str, ReceptiveField] = field(default_factory=dict)
    interpolations: list[Interpolation] = field(default_factory=list)
    plane: DecisionPlane | None = None
    """The plane of the means; None unless the model is planar."""
    points: Array | None = None
    """Real images in the plane, (N, 2)."""
    labels: Array | None = None

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
            "distances_of_means": self.similarity.of_means,
            "mean_spread": None if self.spread is None else self.spread.tolist(),
            "missing": self.missing,
            "receptive_fields": {
                name: {
                    "width_at_half_maximum_pixels": seen.width_at_half_maximum,
                    "images": seen.images,
                    "projections": seen.projections,
                }
                for name, seen in self.fields.items()
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
        >>> overview = explain("waste", classes="glass,metal,paper", pairs=1)
        >>> len(overview.pairs), len(overview.similarity.classes)
        (1, 3)
    """
    chosen = build(ExplainOptions, options)
    if compare_with and chosen.data is None:
        raise CandidError("Models are compared by receptive fields on real images: name some with --data.")
    loaded = require(_resolved(model), "geometry", "An explanation of a whole model").ready()
    inverts = can(loaded, "invert")
    if not inverts and compare_with:
        raise CandidError("Receptive fields are those of pixel models and ResNets: leave --compare-with out.")
    images = None if chosen.data is None else _Images(loaded, chosen, progress)
    measured, distances = held_out_uncertainty(loaded), held_out_distances(loaded)
    if images is not None:
        measured, distances = images.measured(distances)
    similar = similarity(loaded, chosen.classes, chosen.order, measured, distances)
    overview = Overview(
        loaded.class_names,
        similar,
        {
            name: similarity(loaded, spec, chosen.order, measured, distances)
            for name, spec in chosen.groups.items()
        },
        similar.closest_pairs(chosen.pairs),
        None if measured is None else "held-out images" if images is None else images.name,
        mean_spread(loaded) if inverts else None,
        sorted(similar.classes)[:SAMPLED_CLASSES],
    )
    if not inverts:
        return _with_known_photos(overview, loaded)
    overview = _with_samples(overview, loaded, chosen)
    if images is None:
        return overview
    places = None if overview.plane is None else images.projected(overview.plane)
    return replace(
        overview,
        fields=images.receptive_fields(
            dict(zip(_names([model, *compare_with]), [loaded, *compare_with], strict=True))
        ),
        interpolations=images.interpolations(),
        points=None if places is None else places.points,
        labels=None if places is None else places.labels,
    )


def _with_known_photos(overview: Overview, model: PhotoModel) -> Overview:
    """Add known photos of each class, those nearest to its mean first: a photo model has no samples."""
    photos = model.known_photos if can(model, "known photos") else None
    shown = no_photos(model) if photos is None else "known photos are shown instead"
    missing = f"{NO_INVERSE}, so there are no samples and interpolations; {shown}."
    if photos is None:
        return replace(overview, missing=missing)
    means = model.places(model.geometry.means())
    nearest = {
        y: [photos.picture(row) for row in photos.nearest(means[y], KNOWN, y)] for y in overview.sampled
    }
    return replace(overview, known=nearest, missing=missing)


def _with_samples(overview: Overview, model: Any, options: ExplainOptions) -> Overview:
    """Add samples of a pixel model, and the plane of its means if there is one."""
    from candid.explanations.counterfactual import samples

    return replace(
        overview,
        samples=samples(model, overview.sampled, options.temperatures, SAMPLES, options.seed),
        plane=decision_plane(model) if model.geometry.planar else None,
    )


def _resolved(model: ModelLike) -> Model:
    return checkpoint.resolve(model) if isinstance(model, str | Path) else model


def _names(models: Sequence[ModelLike]) -> list[str]:
    """Return a name of its own for each model: from its path if it has one, else its kind."""
    names = short_names([Path(model if isinstance(model, str | Path) else model.kind) for model in models])
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def open_images(
    model: Model, data: str, part: Part | None, count: int | None, skip_bad: bool, progress: Progress
) -> tuple[Split, str]:
    """Open at most ``count`` images of ``data`` as ``model`` sees them, and name their part."""
    chosen = open_part(data, model.class_names, part, model.record.config)
    few = chosen.split.subsample(count)
    return few.preprocess(model.preprocessing, skip_bad, progress, chosen.part), chosen.part


class Places(NamedTuple):
    """Images in a plane."""

    points: Array
    """(N, 2)."""
    labels: Array
    """(N,)."""
    predicted: Array
    """The class that the model itself chooses among some classes, as a number among these, (N,)."""


def project(
    model: Model,
    split: Split,
    plane: DecisionPlane | None,
    workers: int = 0,
    progress: Progress = SILENT,
    among: Sequence[int] | None = None,
) -> Places:
    """Return where the images of ``split`` lie in a plane, and what the model chooses ``among`` classes.

    Without a plane, they lie in latent space.
    """
    frozen, batch = model.frozen(), batch_size(model)
    points, labels, predicted = [], [], []
    batches = named_batches(split, model.preprocessing, batch, workers=workers)
    for images, y, _ in progress.track(batches, "images in the plane", math.ceil(len(split) / batch), batch):
        outputs = frozen.outputs(to_float(images))
        assert outputs.latent is not None
        points.append(outputs.latent if plane is None else plane.project(outputs.latent))
        labels.append(y)
        logits = outputs.logits if among is None else outputs.logits[:, among]
        predicted.append(logits.argmax(1))
    return Places(np.concatenate(points), np.concatenate(labels), np.concatenate(predicted))


def plane_of_photos(
    model: Model,
    data: str,
    classes: Sequence[int],
    images: int | None,
    skip_bad: bool = False,
    workers: int = 0,
    progress: Progress = SILENT,
) -> tuple[DecisionPlane, Places, str]:
    """Fit the plane of some ``classes`` of a photo model, and return where other photos lie, and their part.

    It is fitted to training photos, and the photos that the model has not seen are drawn. Of data without
    parts, that the model was not trained on, every second photo is fitted to and the others are drawn.
    """
    require(model, "geometry", "A decision plane")
    check_fitted(classes)

    def of_classes(split: Split) -> IndexedSplit:
        if not isinstance(split, IndexedSplit):
            raise CandidError(f"The plane of a photo model needs photos in folders: '{data}' has shards.")
        numbers = np.full(len(model.class_names), -1, np.int64)
        numbers[list(classes)] = np.arange(len(classes))
        return split.subset(np.flatnonzero(numbers[split.labels] >= 0)).relabel(numbers)

    def prepared(split: Split, count: int | None, name: str) -> Split:
        return split.subsample(count).preprocess(model.preprocessing, skip_bad, progress, name)

    drawn, part = open_part(data, model.class_names, None, model.record.config)
    drawn = of_classes(drawn)
    if part == "all":
        fitted, drawn = (drawn.subset(np.arange(i, len(drawn), 2)) for i in (0, 1))
    else:
        fitted = of_classes(open_part(data, model.class_names, "train", model.record.config).split)
    if not len(drawn):
        names = ", ".join(model.class_names[y] for y in classes)
        raise CandidError(f"'{data}' has no photos of {names}: name other classes.")
    seen = project(model, prepared(fitted, FITTED_PHOTOS, "train"), None, workers, progress)
    plane = fitted_plane(model, classes, seen.points, seen.labels)
    return plane, project(model, prepared(drawn, images, part), plane, workers, progress, classes), part


class _Images:
    """Real images, and a model's outputs for them."""

    def __init__(self, model: Any, options: ExplainOptions, progress: Progress) -> None:
        assert options.data is not None
        self.model, self.options, self.progress = model, options, progress
        self.split, self.part = open_images(
            model, options.data, options.part, MEASURED_IMAGES, options.skip_bad, progress
        )
        self.name = f"{len(self.split):,} images ({self.part})"

    def measured(self, distances: Array | None) -> tuple[Array, Array | None]:
        """Return the uncertainties of pairs of classes, and their distances unless they are given."""
        process = launch_for(self.model, 1)
        passes = Runner(self.model, process, workers=self.options.workers, progress=self.progress)
        predictions = passes.predictions(self.split, self.model.preprocessing, self.part)
        assert predictions is not None
        if distances is None and can(self.model, "mixture"):
            labelled = predictions[np.flatnonzero(predictions.labels >= 0)]
            means = self.model.geometry.distances()
            distances = measured_distances(labelled.logits, labelled.labels, means)
        return measured_uncertainty(predictions.posterior, predictions.labels), distances

    def projected(self, plane: DecisionPlane) -> Places:
        return project(self.model, self.split, plane, self.options.workers, self.progress)

    def receptive_fields(self, models: Mapping[str, ModelLike]) -> dict[str, ReceptiveField]:
        from candid.explanations.receptive_field import channels, receptive_field

        shown = self._few(self.options.images)
        fields: dict[str, ReceptiveField] = {}
        for name, source in models.items():
            network: Any = _resolved(source)
            if network.image_shape != self.model.image_shape:
                raise CandidError(f"'{name}' takes images of another size: compare models of the same size.")
            network.to(self.model.device)
            projections = self.options.projections
            if projections is None:
                projections = PROJECTIONS if channels(network, shown[:1]) > EXACT_CHANNELS else 0
            fields[name] = receptive_field(
                network, shown, projections or None, seed=self.options.seed, progress=self.progress
            )
        return fields

    def interpolations(self) -> list[Interpolation]:
        """Return interpolations between images that are far apart in the data, if there are enough."""
        from candid.explanations.counterfactual import interpolate

        ends = self._few(2 * INTERPOLATIONS)
        pairs, frozen = len(ends) // 2, self.model.frozen()
        return [interpolate(frozen, ends[i], ends[i + pairs]) for i in range(pairs)]

    def _few(self, count: int) -> Array:
        """Return ``count`` images, evenly spread, (N, C, H, W) uint8."""
        few = self.split.subsample(count)
        return next(iter(named_batches(few, self.model.preprocessing, count)))[0]

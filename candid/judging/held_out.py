"""What a model knows of images that it was not trained on: p-values, verdicts and its rule come from it."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.files import write_texts
from candid._support.numbers import Array
from candid._support.old_formats import COLUMN_NAMES, MAHALANOBIS, with_taught
from candid._support.randomness import draws
from candid.inference.predictions import Measure, half_features
from candid.models import checkpoint
from candid.models.checkpoint import FINGERPRINT, scores_belong
from candid.models.protocol import Model, Outputs
from candid.trust.conformal import FARTHEST, checked_level
from candid.trust.learned import LearnedScore
from candid.trust.promises import Levels
from candid.trust.ranking import ALL, new_detector
from candid.trust.rule import Rule, under
from candid.trust.scores import OWN_PARTS, SCORES, Columns, Score, available_scores, chosen_score
from candid.trust.tree import Tree
from candid.trust.verdict import rounded_up

if TYPE_CHECKING:
    from candid.models import Format
    from candid.models.export import Exported

HEADER = 4
"""Bits that name the code of a row: a Rice parameter of 0 to 6, no bits at all, or plain bytes."""
SCALES = (1, 2, 4)
SMALLEST_SIDE = 4
"""Pixels: images are not shrunk further."""

LEVEL = 0.05
"""The level at which an image of another set counts as detected."""
STATISTIC, COLUMN_SCORE, FIT, PAIRS = "statistic.", "column_score.", "fit.", "pair_uncertainty"
DISTANCES = "pair_distances"
FITTED_KEYS = "fitted_keys"
OUT_OF_FOLD = "out_of_fold"
OCCASIONS = "occasions"
KEPT = ("training_keys", "remembered.", "taught.", "before.")
"""What a model carries next to the scores, and keeps when it is calibrated again: how the names start. The
last three are for teaching: see :mod:`candid.training.teach`."""


@dataclass(frozen=True)
class LearnedMeasure:
    """Measures a learned score of images in a pass, as the columns that the pass can keep would be scored."""

    score: LearnedScore

    @property
    def arrays(self) -> list[Array]:
        """What was learned: a pass is cached under a digest of it."""
        return [np.asarray(value) for value in vars(self.score).values()]

    def __call__(self, images: Array, outputs: Outputs) -> Array:
        """Return the scores of a batch, (B,)."""
        features = half_features(images, outputs)
        return self.score.score(Columns({"logits": outputs.logits, "features": features}))


@dataclass(frozen=True)
class HeldOut:
    """What a model knows of images that it was not trained on: p-values and verdicts come from it."""

    statistics: Columns
    """Columns of each image, without logits and features."""
    temperature: float
    """What the logits must be divided by for the lowest cross-entropy."""
    learned: Mapping[str, LearnedScore] = field(default_factory=dict)
    """Scores that were fitted to the features of other images, by name."""
    fitted_keys: Array | None = None
    """Keys of the images that they were fitted to, unless these are training images."""
    fits: dict[str, Array] = field(default_factory=dict)
    """Detectors that were fitted already, by score and class."""
    pair_uncertainty: Array | None = None
    """Uncertainty between each two of M classes, (M, M), see
    :func:`candid.inference.metrics.measured_uncertainty`; None with many classes, or if measured earlier."""
    pair_distances: Array | None = None
    """Distance of each two of M classes, (M, M), :func:`candid.inference.metrics.measured_distances`; None
    of a model that is no pixel model, with many classes, or if measured earlier."""
    tree: Tree | None = None
    """Kinds above the classes of the model."""
    occasions: bool = False
    """Whether these images were taken on the occasions of the training images: a part of the same folder."""
    out_of_fold: bool = False
    """Whether some of these are photos that the model learned from, each scored by a head that was fitted to
    others. New photos are scored by one head that was fitted to all, so levels hold as measured, but no bound
    is proven."""

    def __len__(self) -> int:
        return self.statistics.images

    @classmethod
    def of(cls, model: Model) -> "HeldOut | None":
        """Return what ``model`` carries; None if it was never calibrated, or if it was changed since then."""
        arrays = model.held_out
        if not arrays or not scores_belong(model):
            return None
        try:
            statistics, pairs = under(STATISTIC, arrays), (arrays.get(PAIRS), arrays.get(DISTANCES))
            _check(statistics, arrays["temperature"], pairs, len(model.class_names))
            if "taught.0.keys" in arrays and "taught" not in statistics:
                statistics = with_taught(statistics, arrays, model.fitted_classes)
            return cls(
                Columns({COLUMN_NAMES.get(name, name): values for name, values in statistics.items()}),
                float(arrays["temperature"]),
                StoredScores(arrays),
                arrays.get(FITTED_KEYS),
                under(FIT, arrays),
                *pairs,
                None if "taught" in statistics else model.tree,  # a taught class has no place in it
                bool(arrays.get(OCCASIONS, OUT_OF_FOLD in arrays)),
                OUT_OF_FOLD in arrays,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise unreadable(error) from error

    def rows(self, rows: Array) -> "HeldOut":
        """Return only some of the images."""
        return replace(self, statistics=self.statistics.rows(rows), fits={})

    def rule(self, levels: Levels | None = None, groups: Array | None = None) -> Rule:
        """Return the rule that these images give.

        Args:
            levels: the score and the levels; levels that were asked for must be possible.
            groups: the groups of the images within which the levels hold, (n,).

        Raises:
            CandidError: if there are too few images for a level that was asked for.
        """
        levels, n, columns = levels or Levels(), len(self), self.statistics
        if self.tree is not None and "true_posterior" in columns and "kind_ratio" not in columns:
            raise CandidError(
                "The model got its tree of classes after its held-out scores: calibrate it again."
            )
        detectors = self._detectors(chosen_score(columns, levels.score))
        rule = Rule.fit(
            columns,
            None,
            groups,
            columns.get("series"),
            levels,
            self.tree,
            order=lambda count: draws(0).permutation(count),
            proven=not self.out_of_fold,
            occasions=self.occasions,
            detectors=detectors,
        )
        promises, novelty = rule.promises[ALL], levels.novelty
        if promises.fewest_discoveries > 1:
            raise CandidError(promises.raised()[0])
        if novelty is not None and checked_level("novelty", novelty) < promises.novelty.in_force:
            raise CandidError(
                f"With {n} held-out images no image can be called novel at the level {novelty} by the "
                f"score '{rule.score.name}': calibrate with more images, or raise --novelty to "
                f"{rounded_up(promises.novelty.smallest):g}."
            )
        if levels.error is not None and checked_level("error", levels.error) < promises.error.in_force:
            raise CandidError(
                f"With {n} held-out images no class can be ruled out at the level error = {levels.error}: "
                f"hold out at least {math.ceil(1 / levels.error) - 1}, or raise the level to "
                f"{rounded_up(promises.error.smallest):g}."
            )
        return rule.with_class_ranks(detectors if len(rule.rankings[0].groups) == n else None)

    def _detectors(self, score: Score) -> dict[int, Any]:
        """Return the detectors of ``score`` that were stored, by predicted class, and of all images."""
        states: dict[str, dict[str, Array]] = {}
        for name, values in under(f"{score.name}.", self.fits).items():
            key, _, part = name.partition(".")
            states.setdefault(key, {})[part] = values
        return {
            ALL if key == "all" else int(key): new_detector(score).restored(state)
            for key, state in states.items()
        }

    def attach(self, model: Model) -> None:
        """Store it, and detectors of the default score, in ``model``; :func:`candid.save` writes it."""
        rule = replace(self, fits={}).rule()
        ranking, name = rule.by_class, rule.score.name
        fits = {}
        if ranking is not None:
            fits = {str(y): ranking.detector(y) for y in np.unique(ranking.groups).tolist() if y != ALL}
            fits["all"] = ranking.detector(ALL)
        model.held_out = {
            **{key: values for key, values in model.held_out.items() if key.startswith(KEPT)},
            "temperature": np.array(self.temperature),
            FINGERPRINT: np.frombuffer(bytes.fromhex(model.fingerprint()), np.uint8),
            **({} if self.pair_uncertainty is None else {PAIRS: self.pair_uncertainty}),
            **({} if self.pair_distances is None else {DISTANCES: self.pair_distances}),
            **({} if self.fitted_keys is None else {FITTED_KEYS: self.fitted_keys}),
            **({OUT_OF_FOLD: np.array(True)} if self.out_of_fold else {}),
            OCCASIONS: np.array(self.occasions),
            **{STATISTIC + column: values for column, values in self.statistics.items()},
            **{
                f"{COLUMN_SCORE}{score}.{part}": values
                for score, learned in self.learned.items()
                for part, values in learned.state().items()
            },
            **{
                f"{FIT}{name}.{key}.{part}": v for key, fit in fits.items() for part, v in fit.state().items()
            },
        }


def _check(
    statistics: Mapping[str, Array], temperature: Array, pairs: Iterable[Array | None], classes: int
) -> None:
    """Raise a ValueError if held-out scores have a shape, a type or a value that no measurement gives."""
    if not 0 < float(temperature) < math.inf:
        raise ValueError(f"the temperature is {float(temperature)}")
    predicted = statistics["predicted"]
    if predicted.dtype != np.int64 or predicted.ndim != 1:
        raise ValueError(f"'predicted' is {predicted.dtype} of {predicted.ndim} dimensions")
    if not ((predicted >= 0) & (predicted < classes)).all():
        raise ValueError(f"'predicted' names classes that are none of the {classes}")
    for name, matrix in zip((PAIRS, DISTANCES), pairs, strict=True):
        if matrix is not None and matrix.shape != (classes, classes):
            raise ValueError(f"'{name}' has the shape {matrix.shape} for {classes} classes")
    for name, values in statistics.items():
        if values.ndim < 1 or len(values) != len(predicted):
            raise ValueError(f"'{name}' has the shape {values.shape} for {len(predicted)} images")
        if values.dtype.kind not in "iuf" or np.isnan(values).any():
            raise ValueError(f"'{name}' is not made of numbers")
        if (
            name != "keys"
            and values.dtype.kind == "f"
            and (np.abs(values.astype(np.float64)) > FARTHEST).any()
        ):
            raise ValueError(f"'{name}' has values beyond {FARTHEST:g}")


class StoredScores(Mapping[str, LearnedScore]):
    """The learned scores that a model carries, each restored when it is first used.

    Those of later versions are left out.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        old = {f"mahalanobis.{part}": values for part, values in under(MAHALANOBIS, arrays).items()}
        self._parts = old | under(COLUMN_SCORE, arrays)
        self._names = [
            name
            for name in dict.fromkeys(key.rpartition(".")[0] for key in self._parts)
            if name in SCORES and SCORES[name].learns is not None
        ]
        self._restored: dict[str, LearnedScore] = {}

    def __getitem__(self, name: str) -> LearnedScore:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._restored:
            learner = SCORES[name].new_learner()
            try:
                self._restored[name] = type(learner).from_state(under(f"{name}.", self._parts))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise unreadable(error) from error
        return self._restored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def unreadable(error: Exception) -> CandidError:
    """Return the error about held-out scores that are damaged."""
    return CandidError(f"The model's held-out scores can't be read ({error}): calibrate it again.")


def needed(model: Model, path: object = "this model") -> HeldOut:
    """Return what ``model`` carries, or raise an error that says how to add it."""
    held_out = HeldOut.of(model)
    if held_out is None:
        raise CandidError(
            f"'{path}' has no held-out scores, which p-values come from: add them with "
            f"'candid calibrate {path} DATA', DATA being what it was trained on."
        )
    return held_out


def measures_for(
    scores: Iterable[Score], learned: Mapping[str, LearnedScore] | None = None
) -> dict[str, Measure]:
    """Return what must be measured of images for ``scores``; ``learned`` are those that know features."""
    measures: dict[str, Measure] = {}
    for score in scores:
        measures |= score.measures
        measures |= {name: MEASURES[name] for name in score.columns if name in MEASURES}
        parts = score.parts(learned) if learned else ()
        measures |= {name: LearnedMeasure(learned[name]) for name in parts if learned and name in learned}
    return measures


def measures_of(model: Model) -> dict[str, Measure]:
    """Return what must be measured of images for all scores; nothing for a model without held-out scores."""
    held_out = HeldOut.of(model)
    if held_out is None:
        return {}
    return measures_for(available_scores(held_out.statistics), held_out.learned)


def thresholds(model: Model) -> dict[str, Any] | None:
    """Return what turns the outputs of an exported photo model or adopted model into verdicts, as JSON.

    None if the model has no novelty scores of its own, or no held-out scores; else see :meth:`Rule.to_dict`.
    """
    held_out = HeldOut.of(model)
    if held_out is None or OWN_PARTS not in held_out.statistics:
        return None
    rule = held_out.rule(Levels(score="combined"))
    seen = {"class_names": list(model.class_names), "margin": model.preprocessing.margin}
    return {**seen, "fingerprint": model.fingerprint(), **rule.to_dict()}


def export(
    model: Any,
    out: str | os.PathLike[str] = ".",
    formats: "Sequence[Format] | None" = None,
    batch: int | None = None,
) -> "list[Exported]":
    """Write a model as files for other programs, and next to them what turns their outputs into verdicts.

    Each file is run and compared with the model before it is written. A photo model and an adopted one, also
    of a network that was given in Python, get a JSON file: see :func:`thresholds`.

    Args:
        model: a model, its folder, the folder of a run, or a bundled name.
        out: a file, whose ending then says the format (.onnx, .pt2), or a folder.
        formats: of the files in a folder; None for ONNX.
        batch: the number of images that the network takes at a time; None for any.

    Returns:
        The files that were written. If one of them is wrong, none is written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     (made,) = export("waste", folder)
        >>> made.path.name, made.verdicts.name
        ('waste.onnx', 'waste.json')
    """
    from candid.models.export import export as write_files

    loaded = checkpoint.resolve(model)
    name = model if isinstance(model, str | os.PathLike) else "model"
    files, limits = write_files(loaded, out, formats, batch, name), thresholds(loaded)
    if limits is None:
        return files
    texts = {each.path.with_suffix(".json"): json.dumps(limits) + "\n" for each in files}
    for path, text in texts.items():
        write_texts({path.name: text}, path.parent)
    return [replace(each, verdicts=each.path.with_suffix(".json")) for each in files]


def code_lengths_by_scale(images: Array, outputs: Outputs | None = None) -> Array:
    """Return :func:`code_lengths` of 8-bit images (B, C, H, W), and of them shrunk to 1/2 and 1/4, (B, S).

    Where neighbours are averages of each other, as in blurred, enlarged or compressed images, the lengths do
    not fall with the scale as they do elsewhere. Scales with fewer than four pixels per side are left out.

    >>> code_lengths_by_scale(np.zeros((2, 3, 32, 32), np.uint8)).shape
    (2, 3)
    """
    smallest = min(images.shape[-2:])
    scales = [scale for scale in SCALES if scale == 1 or smallest // scale >= SMALLEST_SIDE]
    return np.stack([code_lengths(_shrunk(images, scale)) for scale in scales], 1)


def _shrunk(images: Array, scale: int) -> Array:
    """Return the rounded means of squares of ``scale`` pixels per side."""
    if scale == 1:
        return images
    b, c, h, w = (*images.shape[:2], images.shape[2] // scale, images.shape[3] // scale)
    squares = images[..., : h * scale, : w * scale].reshape(b, c, h, scale, w, scale)
    means = squares.sum((3, 5), dtype=np.int32).astype(np.float32) / np.float32(scale**2)
    return np.rint(means).astype(np.uint8)


def code_lengths(images: Array) -> Array:
    """Return the bits of each 8-bit image (B, C, H, W) in a simple lossless code, (B,) in float64.

    Colours are coded as differences from green; a pixel as its difference, modulo 256, from what its
    left, upper and upper left neighbours predict (the median predictor of JPEG-LS); each row of a channel
    in the Rice code that suits it best. It is computed here rather than by an image library, so that a
    length stays the same on every machine: p-values compare it with lengths that a model carries.

    >>> grey = np.full((1, 3, 32, 32), 77, np.uint8)
    >>> noise = np.random.default_rng(0).integers(0, 256, (1, 3, 32, 32), np.uint8)
    >>> bool(code_lengths(grey)[0] < 600), bool(code_lengths(noise)[0] > 8 * 3072)
    (True, True)
    """
    pixels = images.astype(np.int16)
    if pixels.shape[1] == 3:
        red, green, blue = pixels[:, 0], pixels[:, 1], pixels[:, 2]
        pixels = np.stack((green, red - green, blue - green), 1) & 255
    code = _folded(pixels - _predicted(pixels))
    width = code.shape[-1]
    quotients = code.sum(-1, dtype=np.int32)
    bits = np.where(quotients > 0, 8 * width, 0).astype(np.int32)
    for parameter in range(7):
        bits = np.minimum(bits, quotients + (1 + parameter) * width)
        quotients = (code >> (parameter + 1)).sum(-1, dtype=np.int32)
    return (bits + HEADER).sum((1, 2)).astype(np.float64)


def _predicted(pixels: Array) -> Array:
    """Predict pixels from neighbours coded before; outside the image all is 0, left of it as above."""
    up, left, corner = (np.zeros_like(pixels) for _ in range(3))
    up[..., 1:, :] = pixels[..., :-1, :]
    left[..., 1:], left[..., 0] = pixels[..., :-1], up[..., 0]
    corner[..., 1:], corner[..., 0] = up[..., :-1], up[..., 0]
    return (left + up - corner).clip(np.minimum(left, up), np.maximum(left, up))


def _folded(difference: Array) -> Array:
    """Map differences modulo 256 to 0, 1, 2, ...: 0, -1, 1, -2, 2, ..."""
    centred = ((difference + 128) & 255) - 128
    return (centred << 1) ^ (centred >> 15)


MEASURES: Mapping[str, Measure] = {"complexity": code_lengths_by_scale}
"""Columns of scores that are measured of the pixels of an image."""

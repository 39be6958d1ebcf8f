"""Scores: how unlike the held-out images is an image? One entry in `SCORES` adds one for every command.

This module imports torch only where it computes, so that help texts can list the scores.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from candid._support.errors import CandidError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from candid.inference.predictions import Measure, Predictions
    from candid.models.protocol import Outputs
    from candid.trust.detectors import Detector
    from candid.trust.feature_scores import ColumnScore

Statistics = Mapping[str, "Tensor"]
"""Statistics of each image by name: all that scores, p-values and verdicts need, small enough to be saved."""


def statistics_of(predictions: "Predictions") -> dict[str, "Tensor"]:
    """Return the statistics of N images, each (N,) or (N, d), and everything that was measured of them."""
    from candid.trust.feature_scores import generalised_entropy

    logits = predictions.logits.double()
    found = {
        "predicted": logits.argmax(1),
        "max_posterior": predictions.posterior.amax(1),
        "log_evidence": logits.logsumexp(1),
        "max_logit": logits.amax(1),
        "generalised_entropy": generalised_entropy(predictions.posterior),
        **predictions.columns,
    }
    if logits.shape[1] > 1:
        found["second_posterior"] = predictions.posterior.topk(2).values[:, 1]
    if (predictions.labels >= 0).all():
        found["true_posterior"] = predictions.posterior.gather(1, predictions.labels[:, None])[:, 0]
    if predictions.log_density is not None:
        found["log_density"] = predictions.log_density
    return found


@dataclass(frozen=True)
class Score:
    """A statistic of an image and the detector that judges it.

    Args:
        name: what users call it: ``--score NAME``.
        family: "paper", "new", "classifier" (for any classifier) or "control" (needs no model).
        columns: the statistics that it needs; see :func:`statistics_of`.
        detector: makes a :class:`~candid.trust.detectors.Detector`, or the name of one in that module.
        statistic: turns the columns into (N,), low for outliers, or (N, d); by default the first column.
        measures: how to measure columns that predictions don't have: by name a function of the 8-bit images
            (B, C, H, W) and the model's outputs, to (B,) or (B, d). Results are cached by this name.
        instead: columns that serve as well.

    Example:
        >>> Score("margin", "classifier", ("max_logit",), "OneTailed").name
        'margin'
    """

    name: str
    family: Literal["paper", "new", "classifier", "control"]
    columns: tuple[str, ...]
    detector: "str | Callable[[], Detector]"
    statistic: "Callable[[Statistics], Tensor] | None" = None
    measures: "Mapping[str, Measure]" = field(default_factory=dict)
    instead: tuple[str, ...] = ()

    def is_available(self, statistics: Statistics) -> bool:
        """Return whether there are the columns that it needs."""
        return any(
            columns and all(column in statistics for column in columns)
            for columns in (self.columns, self.instead)
        )

    def of(self, statistics: Statistics) -> "Tensor":
        """Return the statistic of each image, (N,) or (N, d)."""
        return statistics[self.columns[0]] if self.statistic is None else self.statistic(statistics)

    def new_detector(self) -> "Detector":
        """Return a detector that has still to be fitted."""
        from candid.trust import detectors

        make = getattr(detectors, self.detector) if isinstance(self.detector, str) else self.detector
        return make()

    def fitted(self, held_out: Statistics) -> "Detector":
        """Return the detector, fitted to held-out images."""
        return self.new_detector().fit(self.of(held_out))


def waic(log_densities: "Tensor") -> "Tensor":
    """Return the Watanabe-Akaike criterion of an ensemble of models, for `OneTailed`: low is an outlier.

    Mean minus variance over the models of log p(x), (N, models) to (N,); the variance is the mean square
    distance from the mean (divided by the number of models, not by one less). An image to which a model
    gives an infinite log density gets -inf. Choi, Jang & Alemi (2018), https://arxiv.org/abs/1810.01392

    >>> import torch
    >>> waic(torch.tensor([[-4.0, -6.0], [-5.0, -5.0]]))
    tensor([-6., -5.], dtype=torch.float64)
    """
    from candid.trust.detectors import checked

    log_densities = checked(log_densities, 2)
    if log_densities.shape[1] < 2:
        raise CandidError(f"WAIC needs the log densities of at least 2 models, not {log_densities.shape[1]}.")
    criterion = log_densities.mean(1) - log_densities.var(1, correction=0)
    return criterion.masked_fill(log_densities.isinf().any(1), -math.inf)


def _beyond_compression(statistics: Statistics) -> "Tensor":
    """Return the nats that the model saves over a lossless code (Serrà et al., 2020)."""
    return statistics["log_density"] + math.log(2) * statistics["complexity"][:, 0]


def _joint(statistics: Statistics) -> "Tensor":
    import torch

    return torch.cat((statistics["log_density_terms"], statistics["complexity"]), 1)


HEADER = 4
"""Bits that name the code of a row: a Rice parameter of 0 to 6, no bits at all, or plain bytes."""
SCALES = (1, 2, 4)
SMALLEST_SIDE = 4
"""Pixels: images are not shrunk further."""


def code_lengths_by_scale(images: "Tensor", outputs: "Outputs | None" = None) -> "Tensor":
    """Return :func:`code_lengths` of 8-bit images (B, C, H, W), and of them shrunk to 1/2 and 1/4, (B, S).

    Where neighbours are averages of each other, as in blurred, enlarged or compressed images, the lengths do
    not fall with the scale as they do elsewhere. Scales that leave less than four pixels a side are left out.

    >>> import torch
    >>> code_lengths_by_scale(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 3])
    """
    import torch
    import torch.nn.functional as F

    smallest = min(images.shape[-2:])
    scales = [scale for scale in SCALES if scale == 1 or smallest // scale >= SMALLEST_SIDE]
    shrunk = (F.avg_pool2d(images.float(), scale).round().to(torch.uint8) for scale in scales[1:])
    return torch.stack([code_lengths(each) for each in (images, *shrunk)], dim=1)


def code_lengths(images: "Tensor") -> "Tensor":
    """Return the bits of each 8-bit image (B, C, H, W) in a simple lossless code, (B,) in float64.

    Colours are coded as differences from green; a pixel as its difference, modulo 256, from what its
    left, upper and upper left neighbours predict (the median predictor of JPEG-LS); each row of a channel
    in the Rice code that suits it best. It is computed here rather than by an image library, so that a
    length stays the same on every machine: p-values compare it with lengths that a model carries.

    >>> import torch
    >>> grey = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    >>> noise = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    >>> (code_lengths(grey) < 600).item(), (code_lengths(noise) > 8 * 3072).item()
    (True, True)
    """
    import torch

    pixels = images.contiguous().to(torch.int16)
    if pixels.shape[1] == 3:
        red, green, blue = pixels.unbind(1)
        pixels = torch.stack((green, red - green, blue - green), 1) & 255
    code = _folded(pixels - _predicted(pixels))
    width = code.shape[-1]
    quotients = code.sum(-1, dtype=torch.int32)
    bits = (8 * width * (quotients > 0)).to(torch.int32)
    for parameter in range(7):
        bits = torch.minimum(bits, quotients + (1 + parameter) * width)
        quotients = (code >> (parameter + 1)).sum(-1, dtype=torch.int32)
    return (bits + HEADER).sum((1, 2)).double()


def _predicted(pixels: "Tensor") -> "Tensor":
    """Predict pixels from neighbours coded before; outside the image all is 0, left of it as above."""
    up, left, corner = (pixels.new_zeros(pixels.shape) for _ in range(3))
    up[..., 1:, :] = pixels[..., :-1, :]
    left[..., 1:], left[..., 0] = pixels[..., :-1], up[..., 0]
    corner[..., 1:], corner[..., 0] = up[..., :-1], up[..., 0]
    return (left + up - corner).clamp(left.minimum(up), left.maximum(up))


def _folded(difference: "Tensor") -> "Tensor":
    """Map differences modulo 256 to 0, 1, 2, ...: 0, -1, 1, -2, 2, ..."""
    centred = ((difference + 128) & 255) - 128
    return (centred << 1) ^ (centred >> 15)


FITTED_SCORES = (
    "mahalanobis",
    "mahalanobis++",
    "relative-mahalanobis",
    "knn",
    "vim",
    "pca-residual",
)
"""Scores of :data:`candid.trust.feature_scores.COLUMN_SCORES` that models learn from features; also their
columns."""


OWN_PARTS = "novelty"
"""The column of scores that a model has of its own, (N, J): see :class:`candid.models.protocol.Outputs`."""


def _fitted_score(name: str) -> Score:
    return Score(name, "classifier", (name,), "OneTailed", lambda known: -known[name])


def _combined(statistics: Statistics) -> "Tensor":
    import torch

    if OWN_PARTS in statistics:
        return statistics[OWN_PARTS]
    parts = statistics["mahalanobis++"], -statistics["log_evidence"], statistics["pca-residual"]
    return torch.stack(parts, 1)


def _new_combined() -> "Detector":
    from candid.trust.combined import Combined

    return Combined()


CODE_LENGTHS: "dict[str, Measure]" = {"complexity": code_lengths_by_scale}
SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score("one-tailed", "paper", ("log_density",), "OneTailed"),
        Score("typicality", "paper", ("log_density",), "Typicality"),
        Score("two-tailed", "paper", ("log_density",), "TwoTailed"),
        Score(
            "complexity",
            "new",
            ("log_density", "complexity"),
            "OneTailed",
            _beyond_compression,
            CODE_LENGTHS,
        ),
        Score("typical-set", "new", ("log_density_terms",), "TypicalSet"),
        Score("density-of-states", "new", ("log_density_terms",), "DensityOfStates"),
        Score("joint", "new", ("log_density_terms", "complexity"), "DensityOfStates", _joint, CODE_LENGTHS),
        Score("waic", "new", ("log_densities",), "OneTailed", lambda known: waic(known["log_densities"])),
        Score("max-posterior", "classifier", ("max_posterior",), "OneTailed"),
        Score("energy", "classifier", ("log_evidence",), "OneTailed"),
        Score("max-logit", "classifier", ("max_logit",), "OneTailed"),
        Score(
            "gen",
            "classifier",
            ("generalised_entropy",),
            "OneTailed",
            lambda known: -known["generalised_entropy"],
        ),
        *map(_fitted_score, FITTED_SCORES),
        Score(
            "combined",
            "classifier",
            ("mahalanobis++", "log_evidence", "pca-residual"),
            _new_combined,
            _combined,
            instead=(OWN_PARTS,),
        ),
        Score("code-length", "control", ("complexity",), "DensityOfStates", measures=CODE_LENGTHS),
    )
}
"""All scores by name. The last one needs no model: what it detects, too, is not to a model's credit."""


DEFAULTS = ("joint", "combined", "mahalanobis", "max-posterior")
"""The first of these that a model has columns for is its default."""


def register_score(score: Score) -> Score:
    """Add a score: every command and function then offers it, for models that have its columns.

    A score with ``measures`` becomes available to models that are calibrated after this.

    Args:
        score: the score to add.

    Returns:
        The same score.

    Raises:
        CandidError: if there is a score of that name.

    Example:
        >>> added = register_score(Score("margin", "classifier", ("max_logit",), "OneTailed"))
        >>> SCORES.pop("margin") == added
        True
    """
    if score.name in SCORES:
        raise CandidError(f"There is already a score '{score.name}': choose another name.")
    SCORES[score.name] = score
    return score


def measures_for(
    scores: Iterable[Score], fitted: "Mapping[str, ColumnScore] | None" = None
) -> "dict[str, Measure]":
    """Return what must be measured of images for ``scores``; ``fitted`` are those that know features."""
    found: dict[str, Measure] = {}
    for score in scores:
        found |= score.measures
        found |= {name: each for name, each in (fitted or {}).items() if name in score.columns}
    return found


def available_scores(statistics: Statistics) -> list[Score]:
    """Return the scores that ``statistics`` suffice for."""
    return [score for score in SCORES.values() if score.is_available(statistics)]


def chosen_score(statistics: Statistics, name: str | None = None) -> Score:
    """Return the score ``name``; by default ``joint`` for a pixel model, else ``combined``."""
    available = {score.name: score for score in available_scores(statistics)}
    if name is None:
        defaults = ("combined",) if OWN_PARTS in statistics else DEFAULTS
        return next(available[best] for best in defaults if best in available)
    if name not in available:
        raise CandidError(f"There is no score '{name}' for this model: {did_you_mean(name, available)}")
    return available[name]

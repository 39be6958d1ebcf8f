"""Scores: how unlike the held-out images is an image? One entry in `SCORES` adds one everywhere.

This module imports numpy only where it computes, so that help texts can list the scores.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from candid._support.errors import CandidError, did_you_mean

if TYPE_CHECKING:
    from candid._support.numbers import Array
    from candid.trust.conformal import Detector
    from candid.trust.learned import LearnedScore

OWN_PARTS = "novelty"
"""The column of scores that a model has of its own, (N, J): see :class:`candid.models.protocol.Outputs`."""
GEN_CLASSES, GEN_POWER = 100, 0.1


class Columns(Mapping[str, "Array"]):
    """What is known of N images, (N,) or (N, d) by name; what follows from logits is computed when needed.

    Args:
        values: the columns that are given: ``logits``, ``features``, ``log_density_terms``, ...
        labels: the true classes of the images, (N,), if they are known.

    Example:
        >>> import numpy as np
        >>> columns = Columns({"logits": np.log([[0.1, 0.9]])}, labels=np.array([0]))
        >>> columns["predicted"], columns["true_posterior"]
        (array([1]), array([0.1]))
    """

    def __init__(self, values: "Mapping[str, Array]", labels: "Array | None" = None) -> None:
        self._values, self._labels = dict(values), labels
        derived: dict[str, Callable[[Columns], Array]] = {}
        if "logits" in values:
            derived = dict(_FROM_LOGITS)
            if values["logits"].shape[1] < 2:
                del derived["second_posterior"]
            if labels is not None:
                derived["true_posterior"] = _true_posterior
        if "log_density_terms" in values:
            derived["log_density"] = lambda columns: columns["log_density_terms"].sum(1)
        self._derived = {name: make for name, make in derived.items() if name not in values}

    def __getitem__(self, name: str) -> "Array":
        if name not in self._values:
            self._values[name] = self._derived[name](self)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._derived

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._values, *self._derived)))

    def __len__(self) -> int:
        return len(self._values.keys() | self._derived.keys())

    @property
    def images(self) -> int:
        """The number of images."""
        return len(next(iter(self._values.values())))

    @property
    def labels(self) -> "Array | None":
        """The true classes, (N,); None if they are not known."""
        return self._labels

    def rows(self, rows: Any) -> "Columns":
        """Return the columns of some of the images."""
        values = {name: column[rows] for name, column in self._values.items()}
        return Columns(values, None if self._labels is None else self._labels[rows])

    def with_columns(self, columns: "Mapping[str, Array]") -> "Columns":
        """Return these columns and some more."""
        return Columns({**self._values, **columns}, self._labels) if columns else self

    def given(self, name: str, column: "Array") -> None:
        """Take over a column that was computed on the way to another one."""
        self._values.setdefault(name, column)

    def statistics(self) -> "dict[str, Array]":
        """Return what p-values and verdicts need, small enough to be saved: no logits and no features."""
        return {name: self[name] for name in self if name not in ("logits", "posterior", "features")}


def _posterior(columns: Columns) -> "Array":
    """Return the posteriors; the evidence follows from the same exponentials."""
    import numpy as np

    logits = columns["logits"].astype(np.float64, copy=False)
    largest = logits.max(1, keepdims=True)
    posterior = logits - largest
    total = np.exp(posterior, out=posterior).sum(1, keepdims=True)
    if np.isfinite(largest).all():
        columns.given("log_evidence", (np.log(total) + largest)[:, 0])
    return np.divide(posterior, total, out=posterior)


def _log_evidence(columns: Columns) -> "Array":
    import numpy as np

    from candid._support.numbers import logsumexp

    return logsumexp(columns["logits"].astype(np.float64, copy=False))


def _max_logit(columns: Columns) -> "Array":
    return columns["logits"].astype(float, copy=False).max(1)


def _second_posterior(columns: Columns) -> "Array":
    import numpy as np

    return np.partition(columns["posterior"], -2, axis=1)[:, -2]


def _true_posterior(columns: Columns) -> "Array":
    import numpy as np

    assert columns.labels is not None
    return np.take_along_axis(columns["posterior"], columns.labels[:, None], 1)[:, 0]


def generalised_entropy(posterior: "Array") -> "Array":
    """Return the sum of (p (1 - p))^0.1 over the 100 most probable classes of posteriors (N, M), (N,).

    Liu et al. (2023), https://openaccess.thecvf.com/content/CVPR2023/html/Liu_GEN_CVPR_2023_paper.html

    >>> import numpy as np
    >>> generalised_entropy(np.array([[0.5, 0.5]])).round(4)
    array([1.7411])
    """
    import numpy as np

    likely = min(GEN_CLASSES, posterior.shape[1])
    top = -np.sort(np.partition(-posterior, likely - 1, axis=1)[:, :likely], axis=1)
    return ((top * (1 - top)) ** GEN_POWER).sum(1)


_FROM_LOGITS: "dict[str, Callable[[Columns], Array]]" = {
    "posterior": _posterior,
    "predicted": lambda columns: columns["logits"].argmax(1),
    "max_posterior": lambda columns: columns["posterior"].max(1),
    "log_evidence": _log_evidence,
    "max_logit": _max_logit,
    "generalised_entropy": lambda columns: generalised_entropy(columns["posterior"]),
    "second_posterior": _second_posterior,
}
"""Columns that follow from logits."""


@dataclass(frozen=True)
class Score:
    """A statistic of an image and the detector that judges it.

    Args:
        name: what users call it: ``--score NAME``.
        family: "paper", "new", "classifier" (for any classifier) or "control" (needs no model).
        columns: the columns that it needs; see :class:`Columns`.
        detector: makes a :class:`~candid.trust.conformal.Detector`, or the name of one there or in
            :mod:`candid.trust.ranking`.
        statistic: turns the columns into (N,), low for outliers, or (N, d); by default the first column.
        measures: how to measure columns that a pass doesn't have: by name a function of the 8-bit images
            (B, C, H, W) and the model's outputs, to (B,) or (B, d). Results are cached by this name.
        learns: makes a :class:`~candid.trust.learned.LearnedScore` for a score that learns from ``columns``,
            or the name of one in :mod:`candid.trust.learned`.
        of_parts: names of scores of parts of its columns: the smallest p-value says which part decided.

    Example:
        >>> Score("margin", "classifier", ("max_logit",), "OneTailed").name
        'margin'
    """

    name: str
    family: Literal["paper", "new", "classifier", "control"]
    columns: tuple[str, ...]
    detector: "str | Callable[[], Detector]" = "OneTailed"
    statistic: "Callable[[Columns], Array] | None" = None
    measures: Mapping[str, Any] = field(default_factory=dict)
    learns: "str | Callable[[], LearnedScore] | None" = None
    of_parts: tuple[str, ...] = ()

    def is_available(self, columns: "Mapping[str, Array]") -> bool:
        """Return whether there are the columns that it needs, or its own values."""
        needed = all(name in columns for name in self.columns)
        return needed or (self.learns is not None and self.name in columns)

    def parts(self, columns: "Mapping[str, object]") -> "tuple[str, ...]":
        """Return the names of the scores that it consists of: itself, unless it is a combination."""
        return (self.name,)

    def of(self, columns: "Mapping[str, Array]") -> "Array":
        """Return the statistic of each image, (N,) or (N, d), for the detector."""
        if self.learns is not None:
            return -columns[self.name]
        complete = columns if isinstance(columns, Columns) else Columns(columns)
        return complete[self.columns[0]] if self.statistic is None else self.statistic(complete)

    def new_learner(self) -> "LearnedScore":
        """Return what learns this score, and has still to be fitted."""
        from candid.trust import learned

        assert self.learns is not None
        make = getattr(learned, self.learns) if isinstance(self.learns, str) else self.learns
        learner: LearnedScore = make()
        return learner


COMBINED = {
    ("features",): ("mahalanobis++", "energy", "pca-residual"),
    ("mahalanobis++", "pca-residual"): ("mahalanobis++", "energy", "pca-residual"),
    (): ("energy", "max-posterior"),
}
"""What is combined, by the columns that there are: near unknowns show in the logits, far ones in features."""


class CombinedScore(Score):
    """The combination of several scores, or of the scores that a model has of its own."""

    def is_available(self, columns: "Mapping[str, Array]") -> bool:
        """Return whether there are scores of the model's own, logits, or stored scores of features."""
        stored = all(name in columns for name in ("mahalanobis++", "log_evidence", "pca-residual"))
        return OWN_PARTS in columns or "logits" in columns or stored

    def parts(self, columns: "Mapping[str, object]") -> tuple[str, ...]:
        """Return the names of the scores that are combined by default, for the ``columns`` that there are.

        >>> SCORES["combined"].parts({"logits": None}), SCORES["combined"].parts({"features": None})
        (('energy', 'max-posterior'), ('mahalanobis++', 'energy', 'pca-residual'))
        """
        if OWN_PARTS in columns:
            return (OWN_PARTS,)
        return next(names for needed, names in COMBINED.items() if all(name in columns for name in needed))

    def of(self, columns: "Mapping[str, Array]") -> "Array":
        """Return the scores of each image, which rise with outlyingness, (N, J)."""
        import numpy as np

        if OWN_PARTS in columns:
            return columns[OWN_PARTS]
        complete = columns if isinstance(columns, Columns) else Columns(columns)
        names = self.parts(complete)
        scores = np.empty((complete.images, len(names)))
        for j, name in enumerate(names):
            np.negative(SCORES[name].of(complete), out=scores[:, j])
        return scores


def waic(log_densities: "Array") -> "Array":
    """Return the Watanabe-Akaike criterion of an ensemble of models, for `OneTailed`: low is an outlier.

    Mean minus variance over the models of log p(x), (N, models) to (N,); the variance is the mean square
    distance from the mean (divided by the number of models, not by one less). An image to which a model
    gives an infinite log density gets -inf. Choi, Jang & Alemi (2018), https://arxiv.org/abs/1810.01392

    >>> import numpy as np
    >>> waic(np.array([[-4.0, -6.0], [-5.0, -5.0]]))
    array([-6., -5.])
    """
    import numpy as np

    from candid.trust.conformal import checked

    log_densities = checked(log_densities, 2)
    if log_densities.shape[1] < 2:
        raise CandidError(f"WAIC needs the log densities of at least 2 models, not {log_densities.shape[1]}.")
    finite = ~np.isinf(log_densities).any(1)
    criterion = np.full(len(log_densities), -math.inf)
    criterion[finite] = log_densities[finite].mean(1) - log_densities[finite].var(1)
    return criterion


def _beyond_compression(columns: Columns) -> "Array":
    """Return the nats that the model saves over a lossless code (Serrà et al., 2020)."""
    return columns["log_density"] + math.log(2) * columns["complexity"][:, 0]


def _joint(columns: Columns) -> "Array":
    import numpy as np

    return np.concatenate((columns["log_density_terms"], columns["complexity"]), 1)


def _learned(name: str, learner: str, *columns: str) -> Score:
    return Score(name, "classifier", columns or ("features",), learns=learner)


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score("one-tailed", "paper", ("log_density",), "OneTailed"),
        Score("typicality", "paper", ("log_density",), "Typicality"),
        Score("two-tailed", "paper", ("log_density",), "TwoTailed"),
        Score("complexity", "new", ("log_density", "complexity"), "OneTailed", _beyond_compression),
        Score("typical-set", "new", ("log_density_terms",), "TypicalSet"),
        Score("density-of-states", "new", ("log_density_terms",), "DensityOfStates"),
        Score(
            "joint",
            "new",
            ("log_density_terms", "complexity"),
            "DensityOfStates",
            _joint,
            of_parts=("two-tailed", "density-of-states", "code-length"),
        ),
        Score("waic", "new", ("log_densities",), "OneTailed", lambda columns: waic(columns["log_densities"])),
        Score("max-posterior", "classifier", ("max_posterior",)),
        Score("energy", "classifier", ("log_evidence",)),
        Score("max-logit", "classifier", ("max_logit",)),
        Score(
            "gen",
            "classifier",
            ("generalised_entropy",),
            statistic=lambda columns: -columns["generalised_entropy"],
        ),
        _learned("mahalanobis", "Mahalanobis"),
        _learned("mahalanobis++", "UnitMahalanobis"),
        _learned("relative-mahalanobis", "RelativeMahalanobis"),
        _learned("knn", "NearestNeighbours"),
        _learned("vim", "Vim", "features", "logits"),
        _learned("pca-residual", "PcaResidual"),
        CombinedScore("combined", "classifier", (), "Combined"),
        Score("code-length", "control", ("complexity",), "DensityOfStates"),
    )
}
"""All scores by name. The last one needs no model: what it detects, too, is not to a model's credit."""
DEFAULTS = ("joint", "combined", "mahalanobis", "max-posterior")
"""The first of these that a model has columns for is its default; with scores of its own, ``combined`` is."""


def register_score(score: Score) -> Score:
    """Add a score: every command and function then offers it, for models and arrays that have its columns.

    A score with ``measures``, or one that learns, becomes available to models that are calibrated after this.

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


def learning_scores(columns: "Mapping[str, Array]", names: Iterable[str] | None = None) -> list[Score]:
    """Return the scores that can learn from ``columns``; of ``names``, only those without values there."""
    chosen = SCORES if names is None else [name for name in names if name in SCORES and name not in columns]
    return [
        score
        for score in map(SCORES.__getitem__, chosen)
        if score.learns is not None and all(name in columns for name in score.columns)
    ]


def available_scores(columns: "Mapping[str, Array]") -> list[Score]:
    """Return the scores that ``columns`` suffice for."""
    return [score for score in SCORES.values() if score.is_available(columns)]


def chosen_score(columns: "Mapping[str, Array]", name: str | None = None, of: str = "model") -> Score:
    """Return the score ``name``; by default ``joint`` for a pixel model, else ``combined``."""
    available = {score.name: score for score in available_scores(columns)}
    if name is None:
        defaults = ("combined", *DEFAULTS) if OWN_PARTS in columns else DEFAULTS
        return next(available[best] for best in defaults if best in available)
    if name in available:
        return available[name]
    if of == "arrays" and name in SCORES and "features" in SCORES[name].columns:
        raise CandidError(
            f"The score '{name}' needs features: give them to fit and examine, or choose one of "
            f"{', '.join(available)}."
        )
    raise CandidError(f"There is no score '{name}' for {_OF[of]}: {did_you_mean(name, available)}")


_OF = {"model": "this model", "arrays": "these arrays"}

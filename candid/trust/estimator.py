"""What scikit-learn and its users expect of a monitor: parameters, predictions as arrays, probabilities.

scikit-learn is not imported, except by the method that only scikit-learn calls.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid._support.options import checked_names
from candid.trust.arrays import ROUNDING, Arrays, on_cpu
from candid.trust.verdict import Examination

SMALLEST = 1e-12
"""A probability of zero counts as this: its logarithm is finite."""
NOVEL = "novel"
"""What :meth:`Estimator.predict` says of novel images."""


class Estimator(ABC):
    """Predictions as arrays, and parameters as scikit-learn clones and sets them.

    The constructor stores its arguments as they are; what :meth:`fit` learns is kept apart.
    """

    @abstractmethod
    def fit(self, logits: Any, labels: Any, features: Any = None) -> Self:
        """Learn from labelled images."""

    @abstractmethod
    def examine(
        self, logits: Any, features: Any = None, by: Any = None, paths: Sequence[object] | None = None
    ) -> list[Examination]:
        """Return the verdict on each image."""

    @abstractmethod
    def scores(self, logits: Any, features: Any = None) -> Array:
        """Return one score of each image, which rises with outlyingness."""

    @property
    @abstractmethod
    def classes_(self) -> Array:
        """The names of the classes, (M,), once it is fitted."""

    @classmethod
    def _names(cls) -> list[str]:
        return list(inspect.signature(cls.__init__).parameters)[1:]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name; ``deep`` makes no difference."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; they count from the next :meth:`fit` on."""
        for name, value in params.items():
            if name not in self._names():
                raise CandidError(f"There is no parameter '{name}': {did_you_mean(name, self._names())}")
            setattr(self, name, value)
        return self

    def predict(self, logits: Any, features: Any = None, by: Any = None) -> Array:
        """Return the most probable class of each image, or "novel", (N,) of text."""
        examinations = self.examine(logits, features, by)
        return np.array([NOVEL if e.verdict == "novel" else e.label for e in examinations], str)

    def predict_set(self, logits: Any, features: Any = None, by: Any = None) -> Array:
        """Return which classes the answers name, (N, M) of bool; none of a novel image."""
        number = {name: y for y, name in enumerate(self.classes_.tolist())}
        examinations = self.examine(logits, features, by)
        named = np.zeros((len(examinations), len(number)), bool)
        for row, examined in zip(named, examinations, strict=True):
            row[[number[name] for name in examined.classes or ()]] = True
        return named

    def predict_p(self, logits: Any, features: Any = None, by: Any = None) -> Array:
        """Return the p-value of each image, (N,): the share of held-out images that are as unusual."""
        return np.array([examined.p_value for examined in self.examine(logits, features, by)], np.float64)

    def verdicts(self, logits: Any, features: Any = None, by: Any = None) -> Array:
        """Return "accept", "ambiguous" or "novel" of each image, (N,) of text."""
        return np.array([examined.verdict for examined in self.examine(logits, features, by)], str)

    def score_samples(self, logits: Any, features: Any = None) -> Array:
        """Return how ordinary each image is, (N,): low for outliers, as in scikit-learn; minus the scores."""
        return -self.scores(logits, features)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=True), input_tags=InputTags())


def given(logits: Any, features: Any, from_probabilities: bool, classes: int | None = None) -> Arrays:
    """Return checked arrays of logits, log-probabilities or probabilities.

    Args:
        logits: (N, M), or (M,) of a single image.
        features: (N, F), or (F,) of a single image.
        from_probabilities: whether the logits are probabilities.
        classes: M, if it is known: a single image needs it.
    """
    try:
        numbers = np.asarray(on_cpu(logits), np.float64)
    except (TypeError, ValueError, RuntimeError):
        return Arrays.of(logits, features)  # which says what is wrong
    if classes is not None and numbers.shape == (classes,):
        logits = numbers = numbers[None]
        features = None if features is None else np.atleast_2d(on_cpu(features))
    if numbers.ndim == 2 and not np.isnan(numbers).any():
        logits = _logarithms(logits, numbers, from_probabilities)
    return Arrays.of(logits, features)


def _logarithms(values: Any, numbers: Array, from_probabilities: bool) -> Any:
    """Return logarithms of probabilities, and of log-probabilities those with finite ones for zeros."""
    if from_probabilities:
        if (numbers < 0).any() or (abs(numbers.sum(1) - 1) > ROUNDING).any():
            raise CandidError(
                "These are no probabilities: each row must be at least 0 and add up to 1; give logits to a "
                "monitor without from_probabilities."
            )
        return np.log(np.maximum(numbers, SMALLEST))
    if not np.isneginf(numbers).any() or (numbers > 0).any():
        return values
    # such as predict_log_proba of a forest
    are_logarithms = (abs(np.exp(numbers).sum(1) - 1) < ROUNDING).all()
    return np.maximum(numbers, np.log(SMALLEST)) if are_logarithms else values


def numbered(labels: Any, class_names: Sequence[str] | None, columns: int) -> tuple[Any, tuple[str, ...]]:
    """Return the labels as columns of the logits, with the names of these.

    Names of text without ``class_names`` are sorted, as in ``classes_`` of scikit-learn's classifiers.
    """
    array = np.asarray(on_cpu(labels))
    names = None if class_names is None else list(map(str, class_names))
    if array.dtype.kind not in "UO" or array.ndim != 1 or not all(isinstance(name, str) for name in array):
        return labels, checked_names(names, columns)
    if names is None:
        names = sorted(set(array.tolist()))
        if len(names) != columns:
            raise CandidError(
                f"The labels have {len(names)} names and the logits {columns} columns: give class_names, one "
                "for each column."
            )
    checked = checked_names(names, columns)
    number = {name: y for y, name in enumerate(checked)}
    if unknown := sorted(set(array.tolist()) - set(number)):
        raise CandidError(f"The label '{unknown[0]}' is no class name: {did_you_mean(unknown[0], checked)}")
    return np.array([number[name] for name in array.tolist()], np.int64), checked

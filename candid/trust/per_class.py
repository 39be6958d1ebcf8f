"""One detector for each predicted class of images."""

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.trust.detectors import Detector, fitted


class PerClass:
    """One detector for each predicted class of images.

    Classes of fewer than ``minimum`` held-out images share a detector that is fitted to the images of all.

    What holds (Mondrian conformal prediction), for an image exchangeable with the held-out ones and a
    predictor that has not seen them: where its class has a detector of its own, P(p <= t | class) <= t.
    The shared p-value is valid over the images of all classes, not over those of the small classes alone, so
    over all images P(p <= t) <= t P(own) + min(t, P(shared)): valid if no class is small, else in
    excess by no more than the share of images in small classes, and never above 2 t.

    A class of n images gives p-values of 1 / (n + 1) and more: choose ``minimum`` for the level you test at.
    Scores are those of the class's detector: they rank images within a class, p-values across classes.

    >>> from candid.trust.detectors import TwoTailed
    >>> log_density = torch.cat((torch.linspace(0, 1, 50), torch.linspace(100, 101, 50)))
    >>> test = PerClass(TwoTailed).fit(log_density, torch.arange(100) // 50)
    >>> test.p_value(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
    tensor([1.0000, 0.0392], dtype=torch.float64)
    """

    _shared: Detector | None = None

    def __init__(self, detector_factory: Callable[[], Detector], minimum: int = 20) -> None:
        self._new, self._minimum = detector_factory, minimum

    def fit(self, held_out: Tensor, classes: Tensor, shared: Detector | None = None) -> Self:
        """Learn from the statistic of held-out images and their predicted classes, (n,).

        ``shared`` is a detector that was fitted to all of them already.
        """
        check_classes(held_out, classes)
        self._shared = self._new().fit(held_out) if shared is None else shared
        found, counts = classes.unique(return_counts=True)
        large = found[counts >= self._minimum].tolist()
        self._own = {c: self._new().fit(held_out[classes == c]) for c in large}
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """Return what `fit` learned, to be saved; nothing if the detectors have to be fitted again."""
        fits = {"all": fitted(self._shared), **self._own}
        return {
            f"{key}.{name}": value for key, fit in fits.items() for name, value in fit.to_tensors().items()
        }

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Take over what `to_tensors` returned."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            key, _, part = name.partition(".")
            parts.setdefault(key, {})[part] = value
        fits = {key: self._new().from_tensors(each) for key, each in parts.items()}
        self._shared = fits.pop("all")
        self._own = {int(key): fit for key, fit in fits.items()}
        return self

    @property
    def shared(self) -> Detector:
        """The detector that is fitted to the images of all classes."""
        return fitted(self._shared)

    def score(self, statistic: Tensor, classes: Tensor) -> Tensor:
        """Return how far out images are among those of the same class."""
        return self._by_class(lambda detector, rows: detector.score(rows), statistic, classes)

    def p_value(self, statistic: Tensor, classes: Tensor) -> Tensor:
        """Return how often an image of the same class is as far out."""
        return self._by_class(lambda detector, rows: detector.p_value(rows), statistic, classes)

    def _by_class(
        self, ask: Callable[[Detector, Tensor], Tensor], statistic: Tensor, classes: Tensor
    ) -> Tensor:
        shared = fitted(self._shared)
        check_classes(statistic, classes)
        answers = torch.empty(len(statistic), dtype=torch.float64, device=statistic.device)
        for c in classes.unique().tolist():
            answers[classes == c] = ask(self._own.get(c, shared), statistic[classes == c])
        return answers


def check_classes(statistic: Tensor, classes: Tensor) -> None:
    """Raise an error unless there is one whole number per image."""
    if classes.shape != statistic.shape[:1] or classes.is_floating_point():
        raise CandidError(
            f"The classes of {len(statistic) if statistic.ndim else 1} images must be as many whole numbers, "
            f"not {classes.dtype} of shape {tuple(classes.shape)}."
        )

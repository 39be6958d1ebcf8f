"""Is this image like anything the model was trained on?"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, TypeVar

import torch
from torch import Tensor

from candid._support.errors import CandidError

T = TypeVar("T")


def p_values(scores: Tensor, calibration: Tensor) -> Tensor:
    """Conformal p-values of outlier scores: ``(1 + #{calibration >= score}) / (n + 1)``.

    ``calibration`` are the scores of n images that the model was not trained on. If an image comes
    from where they come from, its p-value is at most t with a probability of at most t.

    >>> p_values(torch.tensor([0.5, 9.0]), torch.tensor([0.1, 0.2, 0.9]))
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    ordered = calibration.double().contiguous().sort().values
    at_least = len(ordered) - torch.searchsorted(ordered, scores.double().contiguous())
    return (1 + at_least).double() / (len(ordered) + 1)


def waic(log_densities: Tensor) -> Tensor:
    """The Watanabe-Akaike criterion of an ensemble of models, for `OneTailed`: low is an outlier.

    Mean minus variance over the models of log p(x), (N, models) to (N,); the variance is the mean square
    distance from the mean (divided by the number of models, not by one less). An image to which a model
    gives an infinite log density gets -inf. Choi, Jang & Alemi (2018), https://arxiv.org/abs/1810.01392

    >>> waic(torch.tensor([[-4.0, -6.0], [-5.0, -5.0]]))
    tensor([-6., -5.], dtype=torch.float64)
    """
    log_densities = checked(log_densities, 2)
    if log_densities.shape[1] < 2:
        raise CandidError(f"WAIC needs the log densities of at least 2 models, not {log_densities.shape[1]}.")
    criterion = log_densities.mean(1) - log_densities.var(1, correction=0)
    return criterion.masked_fill(log_densities.isinf().any(1), -math.inf)


class Detector(ABC):
    """A test of the hypothesis that an image comes from where the held-out images come from.

    `fit` takes a statistic of n held-out images that the model was not trained on: (n,) or (n, d).
    `score` takes that statistic of N images and rises with outlyingness, (N,) in float64.
    `p_value` takes it, too, and is conformal, (N,) in float64: if an image is exchangeable with the held-out
    ones, its p-value is at most t with a probability of at most t, for every t and any n, ties or not. The
    probability is over the draw of the image and of the held-out ones.
    """

    @abstractmethod
    def fit(self, held_out: Tensor) -> Self:
        """Learn from the statistic of held-out images."""

    @abstractmethod
    def score(self, statistic: Tensor) -> Tensor:
        """How far out; for ranking images."""

    @abstractmethod
    def p_value(self, statistic: Tensor) -> Tensor:
        """How often an image of the held-out kind is as far out."""

    @property
    @abstractmethod
    def smallest_p_value(self) -> float:
        """What the farthest of images gets: the held-out images are too few for lower levels."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Held-out images that an image is ranked among; others may have shaped the score."""


class ScalarDetector(Detector):
    """A detector of one statistic, (N,), such as log p(x), that is low for improbable images."""

    _ordered: Tensor | None = None

    def fit(self, held_out: Tensor) -> Self:
        """Keep the held-out values, in order."""
        self._ordered = checked_held_out(held_out, 1).sort().values
        return self

    @property
    def smallest_p_value(self) -> float:
        """That of an infinitely improbable image."""
        return self.p_value(torch.tensor([-math.inf])).item()

    @property
    def ordered(self) -> Tensor:
        """The held-out values, in order."""
        return fitted(self._ordered)

    @property
    def ranks(self) -> int:
        """All of them."""
        return len(self.ordered)

    @abstractmethod
    def accepted(self, alpha: float) -> tuple[float, float]:
        """The values that are not called outliers at level ``alpha``, from and to, ends included.

        Exactly those with ``p_value(...) > alpha``. An end is infinite where there is no limit.
        """


class OneTailed(ScalarDetector):
    """Improbable images are outliers: the score is ``-statistic``.

    >>> test = OneTailed().fit(torch.linspace(0, 1, 99))
    >>> test.p_value(torch.tensor([-9.0, 0.5, 9.0]))
    tensor([0.0100, 0.5100, 1.0000], dtype=torch.float64)
    >>> test.accepted(0.01)
    (0.0, inf)
    """

    def score(self, statistic: Tensor) -> Tensor:
        """-statistic."""
        fitted(self._ordered)
        return -checked(statistic, 1)

    def p_value(self, statistic: Tensor) -> Tensor:
        """``(1 + #{held-out <= value}) / (n + 1)``."""
        return p_values(-checked(statistic, 1), -self.ordered)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """From a quantile upwards."""
        k = rejected_ranks(len(self.ordered), alpha)
        return (self.ordered[k - 1].item() if k else -math.inf), math.inf


class Typicality(ScalarDetector):
    """Images far from the mean are outliers: the score is ``|statistic - mean of the held-out|``.

    Nalisnick et al. (2019), https://arxiv.org/abs/1906.02994, for single images. An estimated mean is nearer
    to the held-out values than to a new one, so the p-value of t is that of full conformal prediction: with
    m the mean of all n + 1 values, t included, it is ``(1 + #{i: |t_i - m| >= |t - m|}) / (n + 1)``. It falls
    with the score on either side of the mean.

    >>> test = Typicality().fit(torch.linspace(0, 1, 99))
    >>> test.p_value(torch.tensor([-9.0, 0.5, 9.0]))
    tensor([0.0100, 1.0000, 0.0100], dtype=torch.float64)
    """

    def score(self, statistic: Tensor) -> Tensor:
        """Distance from the mean."""
        return (checked(statistic, 1) - self._total() / len(self.ordered)).abs()

    def p_value(self, statistic: Tensor) -> Tensor:
        """The share of all values that are as far from the common mean; what rounding hides is a tie."""
        ordered, n = self.ordered, len(self.ordered)
        limits = torch.finfo(torch.float64)
        t = checked(statistic, 1).clamp(limits.min, limits.max)
        mean = (t + self._total()) / (n + 1)
        rounding = 8 * limits.eps * torch.maximum(t.abs(), ordered.abs().max())
        distance = ((t - mean).abs() - rounding).clamp(min=0)
        below = torch.searchsorted(ordered, mean - distance, right=True)
        above = n - torch.searchsorted(ordered, mean + distance)
        return (1 + (below + above).clamp(max=n)).double() / (n + 1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Around the mean, but for rounding.

        Above the mean, the i-th held-out value is as far out as t while t is at most t_i or at most
        mean + (n + 1) / (n - 1) (mean - t_i), where both are equally far from the common mean.
        """
        ordered, n = self.ordered, len(self.ordered)
        k = rejected_ranks(n, alpha)
        if k == 0 or n == 1:  # two values are equally far from their mean
            return -math.inf, math.inf
        mean = self._total() / n
        opposite = mean + (n + 1) / (n - 1) * (mean - ordered)
        low = torch.minimum(ordered, opposite).sort().values[k - 1]
        high = torch.maximum(ordered, opposite).sort().values[n - k]
        return low.item(), high.item()

    def _total(self) -> float:
        return math.fsum(self.ordered.tolist())


class TwoTailed(ScalarDetector):
    """Images in either tail are outliers: the paper's two-tailed quantile test.

    Images that are simpler than the training images, such as blank ones, often have too high a density. The
    p-value is twice the smaller one of the two tails, at most 1: the smallest is 2 / (n + 1).
    The score is 1 - 2 min(F, 1 - F) inside the range of the held-out values, where F, the share of values
    below, rises linearly from 0 at the first through i / (n - 1) at the i-th; outside it is 1 plus the
    distance from that range in standard deviations. The p-value falls with it.

    >>> test = TwoTailed().fit(torch.linspace(0, 1, 99))
    >>> test.p_value(torch.tensor([-9.0, 0.4, 9.0]))
    tensor([0.0200, 0.8200, 0.0200], dtype=torch.float64)
    >>> test.score(torch.tensor([0.5, 0.75, 1.0]))
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """

    def score(self, statistic: Tensor) -> Tensor:
        """0 in the middle, 1 at the ends of the held-out values, more beyond."""
        ordered, t = self.ordered, checked(statistic, 1)
        inside = t.clamp(ordered[0], ordered[-1])
        tail = torch.minimum(share_below(inside, ordered), share_below(-inside, -ordered.flip(0)))
        unit = ordered.std(correction=0) if ordered[0] < ordered[-1] else 1
        return torch.where(t == inside, (1 - 2 * tail).clamp(min=0), 1 + (t - inside).abs() / unit)

    def p_value(self, statistic: Tensor) -> Tensor:
        """``min(1, 2 p_low, 2 p_high)`` of the one-tailed p-values."""
        t = checked(statistic, 1)
        too_low, too_high = p_values(-t, -self.ordered), p_values(t, self.ordered)
        return (2 * torch.minimum(too_low, too_high)).clamp(max=1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Between two quantiles, with alpha / 2 of the held-out values outside of each."""
        n = len(self.ordered)
        k = rejected_ranks(n, checked_level("alpha", alpha) / 2)
        return (self.ordered[k - 1].item(), self.ordered[n - k].item()) if k else (-math.inf, math.inf)


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

    >>> log_density = torch.cat((torch.linspace(0, 1, 50), torch.linspace(100, 101, 50)))
    >>> test = PerClass(TwoTailed).fit(log_density, torch.arange(100) // 50)
    >>> test.p_value(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
    tensor([1.0000, 0.0392], dtype=torch.float64)
    """

    _shared: Detector | None = None

    def __init__(self, detector_factory: Callable[[], Detector], minimum: int = 20) -> None:
        self._new, self._minimum = detector_factory, minimum

    def fit(self, held_out: Tensor, classes: Tensor) -> Self:
        """Learn from the statistic of held-out images and their predicted classes, (n,)."""
        check_classes(held_out, classes)
        self._shared = self._new().fit(held_out)
        found, counts = classes.unique(return_counts=True)
        large = found[counts >= self._minimum].tolist()
        self._own = {c: self._new().fit(held_out[classes == c]) for c in large}
        return self

    def score(self, statistic: Tensor, classes: Tensor) -> Tensor:
        """How far out among the images of the same class."""
        return self._by_class(lambda detector, rows: detector.score(rows), statistic, classes)

    def p_value(self, statistic: Tensor, classes: Tensor) -> Tensor:
        """How often an image of the same class is as far out."""
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


def share_below(t: Tensor, ordered: Tensor) -> Tensor:
    """The distribution function of ``ordered`` at ``t`` in its range, linear between values.

    >>> share_below(torch.tensor([0.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 4.0]))
    tensor([0.0000, 0.7500, 1.0000])
    """
    last = len(ordered) - 1
    at = torch.searchsorted(ordered, t, right=True) - 1
    here, next_one = ordered[at], ordered[(at + 1).clamp(max=last)]
    part = torch.where(next_one > here, (t - here) / (next_one - here), 0)
    return (at + part) / max(last, 1)


def rejected_ranks(n: int, alpha: float) -> int:
    """How many of the p-values 1 / (n + 1), 2 / (n + 1), ... are at most ``alpha``."""
    checked_level("alpha", alpha)
    return int((torch.arange(1, n + 2).double() / (n + 1) <= alpha).sum())


def checked(statistic: Tensor, dimensions: int) -> Tensor:
    """A statistic of images in float64, of one number an image, (N,), or of several, (N, d)."""
    if statistic.ndim != dimensions or 0 in statistic.shape[1:]:
        wanted = "(N,)" if dimensions == 1 else "(N, d)"
        raise CandidError(
            f"A statistic of N images must have the shape {wanted}, not {tuple(statistic.shape)}."
        )
    if missing := int(statistic.isnan().any(1).sum() if dimensions == 2 else statistic.isnan().sum()):
        raise CandidError(f"The statistic of {missing} of {len(statistic)} images is NaN: find out why.")
    return statistic.detach().double().contiguous()


def checked_held_out(statistic: Tensor, dimensions: int, at_least: int = 1) -> Tensor:
    """The same of held-out images, which must be finite."""
    statistic = checked(statistic, dimensions)
    if len(statistic) < at_least:
        raise CandidError(f"The detector needs at least {at_least} held-out images, not {len(statistic)}.")
    if statistic.isinf().any():
        raise CandidError("The statistic of some held-out images is infinite: leave those images out.")
    return statistic


def checked_level(name: str, level: float) -> float:
    """A probability of error."""
    if not 0 < level < 1:
        raise CandidError(f"The level '{name}' must be above 0 and below 1, not {level}.")
    return level


def check_classes(statistic: Tensor, classes: Tensor) -> None:
    """One whole number an image."""
    if classes.shape != statistic.shape[:1] or classes.is_floating_point():
        raise CandidError(
            f"The classes of {len(statistic) if statistic.ndim else 1} images must be as many whole numbers, "
            f"not {classes.dtype} of shape {tuple(classes.shape)}."
        )


def fitted(part: T | None) -> T:
    """What `fit` made."""
    if part is None:
        raise CandidError("The detector has seen no held-out images yet: call fit first.")
    return part

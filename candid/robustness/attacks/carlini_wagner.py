"""The attack of Carlini and Wagner (2017): the smallest change of an image that fools a model.

Adam moves w, with ``x' = (tanh(w) / 0.99 + 1) / 2`` and ``|tanh(w)| <= 0.99``, to minimise ::

    |x' - x|^2  +  c max(max_{y != t} l_y - l_t, -kappa)  +  d (median - log q(x') / D)^2

in the logits l and the target t; without targets, ``max(l_t - max_{y != t} l_y, -kappa)`` leads away from
the label t. The last term fools the test for unusual images as well (``d`` = 66 and 1000 in the paper).
An image has converged when its loss has not fallen for ``patience`` steps; then it leaves the batch. Of
all its steps, the one with the smallest loss is kept among those whose margin has reached kappa; with
``d`` = 0 that is the smallest perturbation.

Adam's first step alone changes all pixels by about 0.005, often far more than is needed, and its way is
too long even for linear logits. So for finite kappa the search starts at the original, on spheres whose
radius adapts, and the nearest image that it finds is tightened: the same loss is minimised with steps
that are exact where the margin is linear. Adam is left what this does not reach.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid.models.protocol import require_latent
from candid.robustness.attacks.descent import LEARNING_RATE, descent
from candid.robustness.attacks.eight_bit import eight_bit as rounding
from candid.robustness.attacks.refine import refinement
from candid.robustness.attacks.search import (
    Attackable,
    AttackResult,
    Objective,
    Search,
    check_positive,
    features_model,
    result_of,
)

KAPPA, C, PATIENCE = 0.01, 10.0, 20
"""The patience of the paper."""
STEPS = 1000
"""Largest number of steps: attacks with infinite kappa take them all, others stop by themselves."""
DETECTION = 1000.0
"""The weight of fooling the detection if there is one: the paper's largest."""


@torch.enable_grad()
def carlini_wagner(
    model: Attackable,
    images: Tensor,
    targets: Tensor | Sequence[int] | None = None,
    *,
    labels: Tensor | Sequence[int] | None = None,
    kappa: float = KAPPA,
    c: float = C,
    d: float | None = None,
    median: float | None = None,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    patience: int = PATIENCE,
    tighten: bool = True,
    eight_bit: bool = False,
    seed: int = 0,
    batch: int | None = None,
    keep_path: bool = False,
    keep_latents: bool = False,
    progress: Progress = SILENT,
) -> AttackResult:
    """Return the smallest perturbation of each image for a wrong decision; the module says how.

    Args:
        model: a generative classifier, a ResNet, or anything with ``logits``; its evaluation mode is used.
        images: (N, C, H, W), 8-bit or floats in [0, 1].
        targets: the class that each image shall be taken for, (N,); None for any but the label.
        labels: the true classes, (N,); with targets only to check that they differ.
        kappa: by how much the target's logit shall exceed the others'; infinity for as much as possible.
        c: weight of the decision.
        d: weight of the likelihood; None for 1000 if a median is given, else 0.
        median: of log q(x) / D over usual images, in nats per dimension; see ``metrics.median_log_density``.
        steps: at most, of each phase.
        learning_rate: of w.
        patience: steps without an improvement.
        tighten: False for the paper's attack, which stops where Adam does; so does any at infinite kappa.
        eight_bit: whether the result also has 8-bit images that reach kappa under any dequantisation noise.
        seed: of the noise patterns that these are made and measured with.
        batch: images at once; it changes results by no more than rounding.
        keep_path: whether to return margin and distance at every step.
        keep_latents: whether to return the latents as well.
        progress: shows the progress, by images.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> x = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    >>> found = carlini_wagner(model, x, (model.predict(x / 255) + 1) % 10, steps=50, eight_bit=True)
    >>> file = (255 * found.eight_bit.images).round().byte()
    >>> found.success.tolist(), found.eight_bit.images.equal(file / 255)
    ([True, True], True)
    """
    check_positive(c=c, steps=steps, learning_rate=learning_rate, patience=patience)
    objective = _objective(model, kappa, c, d, median)
    search = Search(model, images, targets, labels, keep_path or keep_latents, keep_latents)
    adam = partial(descent, learning_rate=learning_rate)
    attack = refinement if tighten and kappa < math.inf else adam
    parts = (attack(search, numbers, objective, steps, patience) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "attacking", len(search.x)), maxlen=0)
    found = result_of(search, batch)
    if not eight_bit:
        return found
    parts = (rounding(search, numbers, objective, seed) for numbers in search.batches(batch))
    deque(progress.track(chain.from_iterable(parts), "rounding", len(search.x)), maxlen=0)
    return replace(found, eight_bit=replace(result_of(search, batch), traces=None))


def _objective(model: Attackable, kappa: float, c: float, d: float | None, median: float | None) -> Objective:
    """Return what is minimised, once it is known to make sense for ``model``."""
    if not kappa >= 0:
        raise CandidError(f"'kappa' must be zero, a positive number or infinity, not {kappa}.")
    d = (0.0 if median is None else DETECTION) if d is None else d
    if not 0 <= d < math.inf:
        raise CandidError(f"'d' of an attack must be zero or a positive number, not {d}.")
    if d > 0 and features_model(model) is None:
        require_latent(model, "A likelihood to fool (d > 0)")
    if d > 0 and (median is None or not math.isfinite(median)):
        raise CandidError(
            f"Fooling the detection (d = {d:g}) needs the median of log q(x) / D over held-out images, "
            f"not {median}: give it in nats per dimension."
        )
    return Objective(kappa, c, d, median or 0.0)

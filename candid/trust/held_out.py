"""What a checkpoint knows of images that its model was not trained on: p-values and verdicts come from it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.images import Preprocessing
from candid.data.splits import Split
from candid.inference.features import FeatureGaussian
from candid.inference.metrics import fit_temperature
from candid.inference.runner import VERSION, Passes
from candid.models.checkpoint import save_calibration
from candid.models.protocol import Model, weights_digest
from candid.trust.scores import statistics_of

MOST_IMAGES = 20_000
"""Of training images for features, and of held-out ones; more are thinned evenly."""
FEWEST_IMAGES = 20
STATISTIC, GAUSSIAN = "statistic.", "gaussian."


@dataclass(frozen=True)
class HeldOut:
    """A model's view of held-out images."""

    statistics: dict[str, Tensor]
    """Of each image; see :func:`candid.trust.scores.statistics_of`."""
    temperature: float
    """What the logits must be divided by for the lowest cross-entropy."""
    gaussian: FeatureGaussian | None
    """Where the features of the training images lie."""

    def __len__(self) -> int:
        return len(self.statistics["predicted"])

    @classmethod
    def of(cls, model: Model) -> "HeldOut | None":
        """What ``model`` carries; None if it was never calibrated, or with other weights than it has now."""
        tensors = model.held_out
        if not tensors or not torch.equal(tensors.get("weights", torch.empty(0)), weights_hash(model)):
            return None
        try:
            gaussian = {k.removeprefix(GAUSSIAN): v for k, v in tensors.items() if k.startswith(GAUSSIAN)}
            return cls(
                {k.removeprefix(STATISTIC): v for k, v in tensors.items() if k.startswith(STATISTIC)},
                float(tensors["temperature"]),
                FeatureGaussian(**gaussian) if gaussian else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CandidError(f"The model's calibration is foreign ({error}): calibrate it again.") from error

    def attach(self, model: Model) -> None:
        """Let ``model`` carry it; :func:`candid.save` then writes it."""
        gaussian = {} if self.gaussian is None else vars(self.gaussian)
        model.held_out = {
            "temperature": torch.tensor(self.temperature, dtype=torch.float64),
            "weights": weights_hash(model),
            **{STATISTIC + name: values for name, values in self.statistics.items()},
            **{GAUSSIAN + name: values for name, values in gaussian.items()},
        }


def calibrate(
    passes: Passes, train: Split | None, held_out: Split, preprocessing: Preprocessing
) -> HeldOut | None:
    """One pass over held-out images, and one over training images if there are any, for their features.

    None in all processes but the first.
    """
    gaussian = None
    if train is not None:
        gaussian = passes.feature_gaussian(fewer(train), preprocessing, "features of training images")
    split = fewer(held_out)
    found = passes.predictions(split, preprocessing, "held-out images", gaussian)
    if found is None:
        return None
    if (found.labels < 0).any():
        raise CandidError("Held-out images need labels: give a data set with class folders.")
    if len(found) < FEWEST_IMAGES:
        raise CandidError(f"{len(found)} held-out images are too few: give at least {FEWEST_IMAGES}.")
    temperature = fit_temperature(found.logits, found.labels)
    return HeldOut(statistics_of(found), temperature, gaussian)


def calibrate_saved(
    passes: Passes, train: Split, held_out: Split, preprocessing: Preprocessing, path: Path
) -> None:
    """:func:`calibrate` for the saved model in the folder ``path``, unless there are too few images."""
    if len(held_out) < FEWEST_IMAGES:
        passes.progress.log(
            f"no p-values: only {len(held_out)} images were held out, of {FEWEST_IMAGES} needed"
        )
        return
    found = calibrate(passes, train, held_out, preprocessing)
    if found is not None:
        found.attach(passes.model)
        save_calibration(passes.model, path)


def fewer(split: Split) -> Split:
    """At most ``MOST_IMAGES`` of it; all of tar shards."""
    return split if not split.can_index else split.subsample(min(MOST_IMAGES, len(split)))


def weights_hash(model: Model) -> Tensor:
    """Of all weights of ``model`` but its fixed rotations, and of what a pass computes, (32,) in uint8.

    A rotation that was stored in half precision is made orthogonal again when it is loaded; the last digit of
    that may differ between machines.
    """
    digest = weights_digest(model)
    digest.update(str(VERSION).encode())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def needed(model: Model, path: object) -> HeldOut:
    """What ``model`` carries, or an error that says how to add it."""
    found = HeldOut.of(model)
    if found is None:
        raise CandidError(
            f"'{path}' has no held-out scores, which p-values come from: add them with "
            f"'candid calibrate {path} DATA', DATA being what it was trained on."
        )
    return found

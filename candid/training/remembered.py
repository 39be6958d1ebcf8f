"""What a photo model remembers of held-out photos, so that a class can be taught without them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from candid.inference.predictions import LARGEST_HALF, Predictions
from candid.models.heads.photo import PhotoModel
from candid.models.heads.taught import Seen, TaughtClasses
from candid.trust.calibrate import held_out_scores
from candid.trust.judge import HeldOut

PREFIX = "remembered."
MOST = 800
"""Held-out photos that are remembered, evenly spread: 2.8 kB each, so that a model stays below 6 MB."""


@dataclass(frozen=True)
class Remembered:
    """What the fitted part of a head says of held-out photos that have labels."""

    seen: Seen
    labels: Tensor
    """(N,)."""
    keys: Tensor
    """A hash of the pixels of each photo, (N,)."""

    @classmethod
    def of(cls, model: PhotoModel) -> "Remembered | None":
        """Return what ``model`` remembers; None if it has no held-out photos or is of an earlier version."""
        stored = {name: each for name, each in model.held_out.items() if name.startswith(PREFIX)}
        if not stored:
            return None
        found = {name.removeprefix(PREFIX): each for name, each in stored.items()}
        z, scores, logits, novelty = (found[name].double() for name in Seen._fields[:4])
        seen = Seen(z, scores, logits, novelty, found.get("terms"))
        return cls(seen, found["labels"], found["keys"])

    def tensors(self) -> dict[str, Tensor]:
        """Return it as a model stores it; at most ``MOST`` photos, and z in half precision."""
        count = min(MOST, len(self.labels))
        rows = torch.arange(count) * len(self.labels) // max(1, count)
        parts = {**self.seen._asdict(), "labels": self.labels, "keys": self.keys}
        parts["z"] = self.seen.z.clamp(-LARGEST_HALF, LARGEST_HALF).half()
        return {
            PREFIX + name: (each.float() if each.dtype == torch.float64 and name != "terms" else each)[rows]
            for name, each in parts.items()
            if each is not None
        }

    def recalls(self, logits: Tensor, classes: int) -> list[float | None]:
        """Return the share of photos of each fitted class whose largest logit is that class."""
        right = logits.argmax(1) == self.labels
        return [
            float(right[self.labels == y].double().mean()) if (self.labels == y).any() else None
            for y in range(classes)
        ]


@torch.no_grad()
def left_out(model: PhotoModel, photos: list[Tensor]) -> list[Seen]:
    """Return what ``model`` says of the photos of each taught class, each photo left out of its class.

    Args:
        model: with taught classes.
        photos: their statistics, (n, D) each.
    """
    known, taught = model.known, TaughtClasses(*(each.double() for each in model.taught))
    found = []
    for number, own in enumerate(photos):
        seen = model.fitted_part(own.double())
        rows = []
        for i in range(len(own)):
            others = torch.arange(len(own)) != i
            again = TaughtClasses.of([seen.z[others]], known.span)
            for row, new in zip(taught, again, strict=True):
                row[number] = new[0]
            rows.append(known.extended(seen.at(i), taught))
        for row, whole in zip(taught, model.taught, strict=True):
            row[number] = whole[number]
        found.append(_joined(rows))
    return found


@torch.no_grad()
def updated_scores(model: PhotoModel, remembered: Remembered, own: list[Seen], keys: list[Tensor]) -> HeldOut:
    """Return the held-out scores of a model with taught classes.

    Args:
        model: the model.
        remembered: the held-out photos of the fitted classes.
        own: photos of the taught classes, each left out of its class.
        keys: their keys.
    """
    taught = TaughtClasses(*(each.double() for each in model.taught))
    old = model.known.extended(remembered.seen, taught)
    everyone = _joined([old, *own])
    numbers = [torch.full((len(each.z),), model.config.fitted + c) for c, each in enumerate(own)]
    labels = torch.cat((remembered.labels, *numbers))
    columns = {"novelty": everyone.novelty.float(), "keys": torch.cat((remembered.keys, *keys))}
    if everyone.terms is not None:
        columns["log_density_terms"] = everyone.terms
    names = ("",) * len(labels)
    return held_out_scores(Predictions(names, labels, everyone.logits.float(), model.log_priors, columns))


def _joined(parts: list[Seen]) -> Seen:
    """Return all photos of ``parts``; without densities if a part has none."""
    terms = [part.terms for part in parts if part.terms is not None]
    return Seen(
        torch.cat([part.z for part in parts]),
        torch.cat([part.scores for part in parts]),
        torch.cat([part.logits for part in parts]),
        torch.cat([part.novelty for part in parts]),
        torch.cat(terms) if len(terms) == len(parts) else None,
    )

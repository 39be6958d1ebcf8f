"""Measure how local heatmaps are, before and after the refit: the table of docs/theory.md, section 10.

``python -m experiments.locality cifar-10-batches-bin``

The upper left corner of each image is replaced by that of the next one. What changes is the evidence for the
most probable class of the whole image over the second one, by position of the last feature maps.
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from candid._support.numbers import Array
from candid._support.progress import SILENT
from candid.data.batches import named_batches
from candid.data.images import to_float
from candid.explanations.heatmaps import SpatialMixture
from candid.explanations.overview import open_images
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from experiments.tables import shown, table, text

IMAGES = 60
STATES = ("after the refit", "before it (drawn)")


class Locality(NamedTuple):
    """Means over images, in nats."""

    at_corner: float
    """Change of the evidence at the position of the corner."""
    opposite: float
    """Change at the opposite corner."""
    evidence: float
    """Absolute evidence at a position."""

    @property
    def ratio(self) -> float:
        """What the change at the opposite corner is of that at the corner."""
        return self.opposite / self.at_corner


@torch.no_grad()
def locality(model: GenerativeClassifier, images: Array) -> dict[str, Locality]:
    """Return how local heatmaps of 8-bit images (N, C, H, W) are, of latents after and before the refit."""
    height, width = (side // positions for side, positions in zip(images.shape[2:], model.grid, strict=True))
    changed = images.copy()
    changed[:, :, :height, :width] = np.roll(images, 1, axis=0)[:, :, :height, :width]
    whole, pasted = (model.frozen().outputs(to_float(each)) for each in (images, changed))
    first, second = np.argsort(-whole.logits, axis=1)[:, :2].T
    rows = np.arange(len(images))
    as_it_is = copy.deepcopy(model)
    as_it_is.config = replace(model.config, flow=replace(model.config.flow, span=None))
    found = {}
    for state, spatial in zip(STATES, map(SpatialMixture, (as_it_is, model)), strict=True):

        def evidence(outputs: Any, spatial: SpatialMixture = spatial) -> Array:
            latent = spatial.before_refit(torch.from_numpy(outputs.latent))
            terms = spatial.terms(spatial.maps(latent)).numpy()
            return terms[rows, :, first] - terms[rows, :, second]

        before = evidence(whole)
        change = np.abs(evidence(pasted) - before).mean(0)
        found[state] = Locality(float(change[0]), float(change[-1]), float(np.abs(before).mean()))
    return found


def markdown(found: dict[str, Locality]) -> str:
    """Return the table of the theory page."""
    records = [{"state": state, **each._asdict(), "ratio": each.ratio} for state, each in found.items()]
    return table(
        records,
        (
            ("", text("state")),
            ("at the corner (nats)", shown(2, 1, "at_corner")),
            ("at the opposite corner", shown(4, 1, "opposite")),
            ("ratio (%)", shown(1, 100, "ratio")),
            ("mean absolute evidence at a position", shown(2, 1, "evidence")),
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.locality", description=__doc__)
    parser.add_argument("data", metavar="DATA", help="CIFAR-10, as a folder of images or as published")
    parser.add_argument("--model", default="cifar10-beta1", help="a bundled pixel model (%(default)s)")
    asked = parser.parse_args(arguments)
    model = checkpoint.load(asked.model)
    assert isinstance(model, GenerativeClassifier)
    split, _ = open_images(model, asked.data, None, IMAGES, False, SILENT)
    images = next(iter(named_batches(split, model.preprocessing, IMAGES)))[0]
    print(markdown(locality(model, images)))


if __name__ == "__main__":
    main()

"""What heatmaps of the top three classes cost, beside one forward pass and beside integrated gradients.

They come from the latent of a pass that was made anyway. Captum's integrated gradients need 50 forward and
backward passes for each class, and add up to the logit's change from a black image only up to an error.
"""

import sys
from typing import Any

import torch
from captum.attr import IntegratedGradients

from benchmarks.common import (
    Figure,
    Timings,
    alternate,
    conclude,
    console,
    parsed,
    parser,
    show,
    show_times,
)
from candid import GenerativeClassifier
from candid._support.processes import keep_freed_memory
from candid._support.randomness import generator
from candid.explanations.class_maps import ClassMaps
from candid.explanations.heatmaps import SpatialMixture, heatmaps
from candid.models.protocol import Outputs, batch_size

WITH, WITHOUT, PEER = "forward pass and heatmaps", "forward pass", "integrated gradients, three classes"
STEPS, TOP = 50, 3
LIMIT = 1.2


def main() -> int:
    options = parsed(parser("benchmarks.explanations", __doc__))
    keep_freed_memory()
    cases: dict[str, Timings] = {}
    figures: dict[str, Figure] = {}
    more: dict[str, Any] = {}
    presets = (
        (("cifar", 8),) if options.quick else (("cifar", 1), ("cifar", 32), ("imagenet", 1), ("imagenet", 8))
    )
    for preset, batch in presets:
        title = f"{preset} preset, batch {batch}"
        with console.status(f"measuring: {title}"):
            measured, errors = measure(preset, batch, options.quick)
        for more_title, times in measured.items():
            cases[title + more_title] = times
            show_times(title + more_title, times)
            peer = next(name for name in times if name != WITH)
            target = LIMIT if peer == WITHOUT and preset == "imagenet" else None
            figures[f"{WITH} / {peer}, {title}"] = Figure(times[WITH].ratios(times[peer]), target)
        more[title] = errors
        show(
            f"{title}: largest error of the sums (nats)",
            ("", "error"),
            [(name, f"{error:.2g}") for name, error in errors.items()],
        )
    return conclude("explanations", options.quick, cases, figures, {"largest error of the sums": more})


def measure(preset: str, batch: int, quick: bool) -> tuple[dict[str, Timings], dict[str, float]]:
    """Times by case, and by how much the maps miss what they should add up to."""
    model = GenerativeClassifier.from_preset(preset).eval()
    with torch.no_grad():  # means as far apart as in a trained model of many classes
        model.mixture.mean.mul_(10)
        model.mixture.prototypes.mul_(10)
    fast, spatial = model.frozen(), SpatialMixture(model)
    x = torch.randint(0, 256, (batch, *model.image_shape), generator=generator(0)) / 255
    images = x.numpy()

    def forward() -> Outputs:
        return fast.outputs(images)

    def explained() -> list[ClassMaps]:
        return heatmaps(fast, forward(), top=TOP, spatial=spatial)

    maps = explained()
    classes = torch.tensor([each.classes for each in maps])
    gradients = IntegratedGradients(fast.logits)

    errors = {WITH: max(each.largest_error for each in maps)}

    def integrated() -> None:
        """With the error of completeness, which captum reports."""
        for i in range(TOP):
            _, error = gradients.attribute(
                x,
                target=classes[:, i],
                n_steps=STEPS,
                internal_batch_size=batch_size(fast),
                return_convergence_delta=True,
            )
            errors[PEER] = max(errors.get(PEER, 0.0), float(error.abs().max()))

    cases: dict[str, Timings] = {"": alternate({WITH: explained, WITHOUT: forward}, 2 if quick else 7)}
    if batch == 1 or quick:
        cases[", beside captum"] = alternate({WITH: explained, PEER: integrated}, 1, warmup=0)
    return cases, errors


if __name__ == "__main__":
    sys.exit(main())

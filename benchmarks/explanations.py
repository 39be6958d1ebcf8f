"""What heatmaps of the top three classes cost, beside one forward pass and beside integrated gradients.

They come from the latent of a pass that was made anyway. Captum's integrated gradients need 50 forward and
backward passes for each class, and add up to the logit's change from a black image only up to an error.
"""

import sys
from typing import Any

import torch
from captum.attr import IntegratedGradients

from benchmarks.common import Figure, alternate, conclude, console, parser, set_threads, show, show_times
from candid import GenerativeClassifier
from candid.explain.heatmaps import SpatialMixture, heatmaps
from candid.machine import keep_freed_memory
from candid.randomness import generator

WITH, WITHOUT, PEER = "forward pass and heatmaps", "forward pass", "integrated gradients, three classes"
STEPS, TOP = 50, 3
LIMIT = 1.2


def main() -> int:
    options = parser("benchmarks.explanations", __doc__).parse_args()
    set_threads(options.threads)
    keep_freed_memory()
    cases: dict[str, Any] = {}
    figures: dict[str, Figure] = {}
    more: dict[str, Any] = {}
    presets = (
        (("cifar", 8),) if options.quick else (("cifar", 1), ("cifar", 32), ("imagenet", 1), ("imagenet", 8))
    )
    for preset, batch in presets:
        title = f"{preset} preset, batch {batch}"
        with console.status(f"measuring: {title}"):
            times, errors = measure(preset, batch, options.quick)
        cases[title] = times
        show_times(title, times)
        target = LIMIT if preset == "imagenet" else None
        figures[f"{WITH} / {WITHOUT}, {title}"] = Figure(times[WITH].ratios(times[WITHOUT]), target)
        if PEER in times:
            figures[f"{WITH} / {PEER}, {title}"] = Figure(times[WITH].ratios(times[PEER]))
        more[title] = errors
        show(f"{title}: largest error of the sums (nats)", ("", "error"), list(errors.items()))
    return conclude("explanations", options.quick, cases, figures, {"largest error of the sums": more})


def measure(preset: str, batch: int, quick: bool) -> tuple[Any, dict[str, float]]:
    """Times, and by how much the maps miss what they should add up to."""
    model = GenerativeClassifier.from_preset(preset).eval()
    with torch.no_grad():  # means as far apart as in a trained model of many classes
        model.mixture.mean.mul_(10)
        model.mixture.prototypes.mul_(10)
    fast, spatial = model.frozen(), SpatialMixture(model)
    x = torch.randint(0, 256, (batch, *model.image_shape), generator=generator(0)) / 255

    @torch.inference_mode()
    def forward() -> Any:
        return fast(x)

    def explained() -> Any:
        return heatmaps(fast, forward(), top=TOP, spatial=spatial)

    maps = explained()
    gradients = IntegratedGradients(fast.logits)

    def integrated() -> float:
        """The largest error of completeness, which captum reports."""
        worst = 0.0
        for i in range(TOP):
            _, error = gradients.attribute(
                x,
                target=maps.classes[:, i],
                n_steps=STEPS,
                internal_batch_size=8,
                return_convergence_delta=True,
            )
            worst = max(worst, float(error.abs().max()))
        return worst

    errors = {WITH: float(maps.largest_error.max())}
    contenders = {WITH: explained, WITHOUT: forward}
    if batch == 1 or quick:
        errors[PEER] = integrated()
        contenders[PEER] = integrated
    slow = preset == "imagenet" and batch == 1
    return alternate(contenders, 2 if quick else 3 if slow else 15), errors


if __name__ == "__main__":
    sys.exit(main())

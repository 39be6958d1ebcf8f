"""What the way back costs: latents to images, and samples, against the forward pass; imagenet preset.

The peer is FrEIA's composed network (benchmarks/freia.py), run in reverse, against its own forward pass.
"""

import sys
from collections.abc import Callable

import torch

from benchmarks import freia
from benchmarks.common import (
    Figure,
    Timing,
    alternate,
    conclude,
    console,
    parsed,
    parser,
    show,
    spread,
)
from benchmarks.models import imagenet

FORWARD, INVERSE, SAMPLE = "forward", "inverse", "sample"
FROZEN, PLAIN = "Candid, frozen", "Candid"


def main() -> int:
    options = parsed(parser("benchmarks.inverse", __doc__))
    quick: bool = options.quick
    with console.status("measuring"), torch.inference_mode():
        model, x = imagenet(quick)
        frozen = model.frozen()
        z = frozen.latent(x)
        peer = freia.peers(model, x)[freia.COMPOSED].network.eval()
        v = (x - model.image_mean) / model.image_std
        z_peer, _ = peer(v)
        error = float((frozen.invert(z) - x).abs().max())
        contenders: dict[tuple[str, str], Callable[[], object]] = {
            (FROZEN, FORWARD): lambda: frozen(x),
            (FROZEN, INVERSE): lambda: frozen.flow.inverse(z),
            (FROZEN, SAMPLE): lambda: frozen.sample(range(8), 1),
            (PLAIN, FORWARD): lambda: model(x),
            (PLAIN, INVERSE): lambda: model.flow.inverse(z),
            (freia.COMPOSED, FORWARD): lambda: peer(v),
            (freia.COMPOSED, INVERSE): lambda: peer(z_peer, rev=True),
        }
        times = alternate({": ".join(key): run for key, run in contenders.items()}, 1 if quick else 5)
    rows = []
    ratios: dict[str, tuple[float, ...]] = {}
    for name, way in contenders:
        timing: Timing = times[f"{name}: {way}"]
        ratios[f"{name}, {way} / forward"] = timing.ratios(times[f"{name}: {FORWARD}"])
        rows.append((name, way, timing, spread(ratios[f"{name}, {way} / forward"])))
    show("Batch 8: median (lowest to highest)", ("", "", "s", "this / its forward pass"), rows)
    console.print(f"Image, latent, image again: at most {error:.1e} apart in [0, 1]")
    figures = {
        name: Figure(rounds, 1.1 if name == f"{FROZEN}, {SAMPLE} / forward" else None)
        for name, rounds in ratios.items()
        if not name.endswith(f"{FORWARD} / forward")
    }
    return conclude("inverse", quick, {"batch 8": times}, figures, {"largest difference of images": error})


if __name__ == "__main__":
    sys.exit(main())

"""Do counterfactuals have the posterior that they aim at, as 8-bit images?

Takes a trained model and its data::

    python -m benchmarks.counterfactuals runs/mine/model/best DATA

Every image is moved towards its second most probable class and its least probable one, to posteriors of 0.5
and 0.9. The errors are those of the path's end in pixels, of its rounding to 8 bits, and of the image that is
returned, whose place on the path is corrected for the rounding.
"""

import sys

import torch

from benchmarks.common import console, parsed, parser, show, write
from candid import load
from candid._support.progress import TerminalProgress
from candid.data.batches import named_batches
from candid.data.datasets import open_part
from candid.data.images import to_float
from candid.explanations.counterfactual import CLOSE, Counterfactual, counterfactual

TARGETS = (0.5, 0.9)


def main() -> int:
    options = parser("benchmarks.counterfactuals", __doc__)
    options.add_argument("model", help="a generative model")
    options.add_argument("data", help="as for candid evaluate")
    options.add_argument("--images", type=int, default=100)
    chosen = parsed(options)
    model = load(chosen.model)
    preprocessing = model.preprocessing
    split = open_part(chosen.data, model.class_names, None, model.record.config).split.subsample(
        chosen.images
    )
    ready = split.preprocess(preprocessing, True, TerminalProgress(), "images")
    found: list[Counterfactual] = []
    with console.status("moving images"):
        for images, _, _ in named_batches(ready, preprocessing, 1):
            image = images[0]
            posterior = model.posterior(torch.from_numpy(to_float(image[None])))[0].detach()
            ranked = posterior.argsort(descending=True).tolist()
            for y in {ranked[1], ranked[-1]}:
                found += [
                    counterfactual(model, image, y, target) for target in TARGETS if posterior[y] < target
                ]
    errors = {
        "in pixels": torch.tensor([abs(each.in_pixels - each.target) for each in found]),
        "rounded to 8 bits": torch.tensor([abs(each.when_rounded - each.target) for each in found]),
        "corrected, 8 bits": torch.tensor(
            [abs(float(each.posterior[each.y]) - each.target) for each in found]
        ),
    }
    results = {
        name: {
            "largest": error.max().item(),
            "median": error.median().item(),
            "missed": (error > CLOSE).double().mean().item(),
        }
        for name, error in errors.items()
    }
    rows = [
        (name, f"{row['median']:.2g}", f"{row['largest']:.2g}", f"{100 * row['missed']:.1f} %")
        for name, row in results.items()
    ]
    show(
        f"{len(found)} counterfactuals: error of the posterior",
        ("", "median", "largest", f"> {CLOSE:g}"),
        rows,
    )
    write("counterfactuals", chosen.quick, {"counterfactuals": len(found), "errors": results})
    return int(results["corrected, 8 bits"]["largest"] > CLOSE)


if __name__ == "__main__":
    sys.exit(main())

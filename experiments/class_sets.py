"""Compare class sets by ratios of posteriors, which verdicts use, with class sets by posteriors.

``python -m experiments.class_sets``

It needs no images: the held-out scores of the bundled models are divided at random. One half fixes the class
sets at an error level of 5 %, the other half counts the images with one class in their set, how many of these
are right, and how many sets miss the true class. All figures are means over the divisions.
"""

import torch
from torch import Tensor

from candid._support.randomness import generator
from candid.models import checkpoint, zoo
from candid.trust.detectors import p_values
from candid.trust.judge import HeldOut

ERROR, DIVISIONS = 0.05, 300
COLUMNS = ("accepted (%)", "right of accepted (%)", "missed (%)")


def figures(true: Tensor, second: Tensor, right: Tensor, halves: Tensor) -> Tensor:
    """Return the three columns, from values of the true class and of the runner-up, for one division."""
    fixes, counts = halves.chunk(2)
    accepted = p_values(-second[counts], -true[fixes]) <= ERROR
    missed = (p_values(-true[counts], -true[fixes]) <= ERROR) & ~right[counts]
    return torch.stack([each.double().mean() for each in (accepted, right[counts][accepted], missed)])


def compared(held_out: HeldOut) -> list[Tensor]:
    """Return the columns by posteriors and by ratios."""
    known = held_out.statistics
    true, largest, second = (known[f"{which}_posterior"] for which in ("true", "max", "second"))
    right, found = true >= largest, []
    for scale in (torch.ones_like(largest), largest):
        divisions = (torch.randperm(len(right), generator=generator(seed)) for seed in range(DIVISIONS))
        found.append(
            torch.stack([figures(true / scale, second / scale, right, each) for each in divisions]).nanmean(0)
        )
    return found


def main() -> None:
    """Print the table of all bundled models that classify."""
    print(f"| model | {' | '.join(f'{name}, by posterior → by ratio' for name in COLUMNS)} |")
    print("| --- | ---: | ---: | ---: |")
    for name in zoo.names():
        held_out = HeldOut.of(checkpoint.load_any(name))
        if held_out is not None and name != "cifar10-beta0":
            cells = zip(*compared(held_out), strict=True)
            print(f"| {name} | {' | '.join(f'{100 * a:.1f} → {100 * b:.1f}' for a, b in cells)} |")


if __name__ == "__main__":
    main()

"""The options of the corruption and attack benchmarks; no torch, so that help texts load quickly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from candid._support.errors import CandidError
from candid._support.options import MaybeInfinite, Option
from candid._support.text import number
from candid.inference.options import DataOptions
from candid.robustness.corruptions import SEVERITIES, check_severities


@dataclass(frozen=True, kw_only=True)
class CorruptOptions(DataOptions):
    """Which corruptions, how severe, and where to keep the predictions."""

    out: Annotated[Path, Option("Folder for tables, figures and cached predictions.")] = Path("corruption")
    baseline: Annotated[
        str | None,
        Option(
            "The model that corruption errors are relative to.",
            metavar="MODEL",
            default="AlexNet as published, for 1000 classes",
        ),
    ] = None
    score: Annotated[
        str,
        Option("The score whose areas under the ROC curve are in the table; the JSON file has all of them."),
    ] = "two-tailed"
    corruptions: Annotated[
        tuple[str, ...], Option("Names, separated by commas.", metavar="NAME,...", default="all")
    ] = ()
    severities: Annotated[tuple[int, ...], Option("Severities, from 1 to 5.")] = SEVERITIES
    corrupted: Annotated[
        Path | None,
        Option(
            "Read corrupted images instead of making them: CORRUPTION/SEVERITY/CLASS/image, as ImageNet-C.",
            metavar="FOLDER",
        ),
    ] = None
    seed: Annotated[int, Option("Random seed.", least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_severities(self.severities)
        if not self.severities:
            raise CandidError("Choose at least one severity.")


NUMBERS_A_BATCH = 4 * 3 * 224 * 224
"""Numbers in the images that are attacked at once."""
FRESH = 8
"""Noise patterns that the success of 8-bit images is measured with: the search has not seen them."""
STEPS = {"carlini-wagner": 300, "projected-gradient": 40}


@dataclass(frozen=True, kw_only=True)
class AttackOptions(DataOptions):
    """Which attacks, how strong, and where to keep the attacked images."""

    out: Annotated[Path, Option("Folder for tables, figures and cached attacks.")] = Path("attacks")
    images: Annotated[int, Option("Number of images, evenly spread over DATA.", least=1)] = 200
    kappa: Annotated[
        tuple[MaybeInfinite, ...],
        Option("Required lead of the wrong class's logit; 'inf' makes it as large as possible.", least=0),
    ] = (0.01, 1.0, math.inf)
    d: Annotated[
        tuple[float, ...],
        Option("Weights of also fooling the detection; 0 attacks the decision alone.", least=0),
    ] = (0.0, 66.0, 1000.0)
    method: Annotated[Literal["carlini-wagner", "projected-gradient"], Option("The attack.")] = (
        "carlini-wagner"
    )
    radius: Annotated[float, Option("L2 radius of projected gradients.", above=0)] = 0.5
    untargeted: Annotated[bool, Option("Accept any wrong class instead of a random target.")] = False
    as_published: Annotated[
        bool, Option("Use the published attack without our refinement; perturbations are larger.")
    ] = False
    eight_bit: Annotated[
        bool,
        Option(
            "Also attack with 8-bit images, which work as a file and under any noise pattern.",
            flag="--eight-bit/--no-eight-bit",
        ),
    ] = True
    steps: Annotated[
        int | None,
        Option("Most steps of each phase.", least=1, default="300; 40 for projected gradients"),
    ] = None
    c: Annotated[float, Option("Weight of the decision in the loss.", above=0)] = 10.0
    learning_rate: Annotated[float, Option("Adam's learning rate.", above=0, hidden=True)] = 0.01
    patience: Annotated[int, Option("Steps without improvement.", least=1, hidden=True)] = 20
    seed: Annotated[int, Option("Random seed of the wrong classes and of noise patterns.", least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.settings:
            raise CandidError("An attack needs at least one kappa and one d.")

    @property
    def settings(self) -> tuple[tuple[float, float], ...]:
        """The pairs (kappa, d); projected gradients have neither: (0, 0)."""
        if self.method == "projected-gradient":
            return ((0.0, 0.0),)
        return tuple(product(dict.fromkeys(self.kappa), dict.fromkeys(self.d)))

    def arguments(self, kappa: float, d: float, median: float | None) -> dict[str, Any]:
        """Return the arguments of the attack."""
        steps = STEPS[self.method] if self.steps is None else self.steps
        if self.method == "projected-gradient":
            return {"radius": self.radius, "steps": steps}
        return {
            "kappa": kappa,
            "d": d,
            "median": median if d > 0 else None,
            "c": self.c,
            "tighten": not self.as_published,
            "eight_bit": self.eight_bit,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "patience": self.patience,
            "steps": steps,
        }

    def described(self, data: str) -> dict[str, Any]:
        """Return what was asked for, as JSON."""
        common = {"data": data, "method": self.method, "targeted": not self.untargeted, "seed": self.seed}
        own: Mapping[str, Any] = self.arguments(0, 0, None)
        return common | {key: value for key, value in own.items() if key not in ("kappa", "d", "median")}

    def setting_name(self, kappa: float) -> str:
        """Return the heading of a setting."""
        return f"radius {self.radius:g}" if self.method == "projected-gradient" else f"κ = {number(kappa)}"

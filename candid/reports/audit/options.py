"""The options of an audit; no torch, so that help texts load quickly."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from candid._support.options import MaybeInfinite, Option
from candid._support.text import named_pairs
from candid.data import SYNTHETIC
from candid.evaluation.options import Groups, OtherImages, StoredHeldOut, StoredTest
from candid.inference.options import ImageOptions
from candid.robustness.corruptions import SEVERITIES, check_severities
from candid.trust.promises import Delta, RiskLevel

QUICK_IMAGES, QUICK_ATTACKS, ATTACKS = 1000, 20, 200
KAPPAS, WEIGHTS = (0.01, 1.0, math.inf), (0.0, 66.0, 1000.0)
EYE_IMAGES, EYE_ATTACKS, EYE_KAPPAS, EYE_WEIGHTS, EYE_STEPS = 30, 2, (0.01,), (0.0, 66.0), 40
"""Of --quick for models that see through an eye: corrupted and attacked images, kappa, d, steps."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions(ImageOptions):
    """What to audit, and how thoroughly."""

    out: Annotated[
        Path, Option("Folder for the page and cached results: an audit that was stopped continues there.")
    ] = Path("audit")
    held_out: StoredHeldOut = None
    test: StoredTest = None
    by: Groups = None
    ood: OtherImages = ()
    quick: Annotated[
        bool,
        Option(
            f"Use a sample: {QUICK_IMAGES} images of each set and {QUICK_ATTACKS} attacked images; for photo "
            f"models {EYE_ATTACKS}, and {EYE_IMAGES} corrupted ones."
        ),
    ] = False
    corruption_images: Annotated[
        int | None,
        Option(
            "Number of images for each corruption; 0 leaves corruptions out.", least=0, default="--images"
        ),
    ] = None
    attack_images: Annotated[
        int | None,
        Option("Number of attacked images; 0 leaves attacks out.", least=0, default=f"{ATTACKS}"),
    ] = None
    examples: Annotated[int, Option("Number of images that get a page of their own.", least=0)] = 4
    corruptions: Annotated[
        tuple[str, ...], Option("Names, separated by commas.", metavar="NAME,...", default="all")
    ] = ()
    severities: Annotated[tuple[int, ...], Option("Severities, from 1 to 5.")] = SEVERITIES
    kappa: Annotated[
        tuple[MaybeInfinite, ...], Option("Required leads of the wrong class's logit.", hidden=True)
    ] = KAPPAS
    d: Annotated[tuple[float, ...], Option("Weights of also fooling the detection.", hidden=True)] = WEIGHTS
    steps: Annotated[int | None, Option("Most steps of each attack phase.", least=1, default="300")] = None
    ten_crop: Annotated[bool, Option("Also average posteriors over ten crops.")] = False
    risk: RiskLevel = None
    delta: Delta = 0.05
    name: Annotated[
        str | None, Option("With --held-out: what the classifier is called on the page.", metavar="NAME")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_severities(self.severities)
        self.image_sets, self.array_sets  # noqa: B018  a wrong --ood is refused before anything runs
        if self.images is None and self.quick:
            object.__setattr__(self, "images", QUICK_IMAGES)

    def sampled(self, through_eye: bool) -> "AuditOptions":
        """Return the options with sizes for what was left open.

        Args:
            through_eye: whether a model sees through an eye, where each step of an attack takes long.
        """
        attacks = ATTACKS
        if self.quick:
            attacks = EYE_ATTACKS if through_eye else QUICK_ATTACKS
        sampled = replace(self, attack_images=attacks if self.attack_images is None else self.attack_images)
        if not (self.quick and through_eye):
            return sampled
        return replace(
            sampled,
            corruption_images=EYE_IMAGES if self.corruption_images is None else self.corruption_images,
            kappa=EYE_KAPPAS if self.kappa == KAPPAS else self.kappa,
            d=EYE_WEIGHTS if self.d == WEIGHTS else self.d,
            steps=EYE_STEPS if self.steps is None else self.steps,
        )

    @property
    def of_arrays(self) -> tuple[str, ...]:
        """The other sets of stored arrays: without ``held_out`` none, next to a model npz files."""
        return () if self.held_out is None else tuple(other for other in self.ood if other.endswith(".npz"))

    @property
    def of_images(self) -> tuple[str, ...]:
        """The other sets of images."""
        return tuple(other for other in self.ood if other not in self.of_arrays)

    @property
    def image_sets(self) -> dict[str, str]:
        """The other sets of images by name."""
        return named_pairs(self.of_images, "--ood", alone=SYNTHETIC)

    @property
    def array_sets(self) -> dict[str, str]:
        """The other sets of stored arrays by name."""
        return named_pairs(self.of_arrays, "--ood")

"""The options of explanations of a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from candid._support.errors import CandidError, did_you_mean
from candid._support.options import Option
from candid.inference.options import ImageOptions

HeatmapRule = Literal["candid", "paper"]
"""How posterior heatmaps distribute what all classes share over the positions; see the theory page."""
Regions = Literal["candid", "paper"]
"""The regions of a decision space hold 90 % of a class, or 90 % in each direction as the paper's circles."""
CONTRAST = 0.03
"""The contrast of the paper's heatmaps."""
TARGET = 0.5
"""The posterior that a counterfactual should reach."""


def check_contrast(contrast: float) -> None:
    """Raise an error unless the contrast is zero, a positive number or infinity."""
    if not contrast >= 0:
        raise CandidError(f"The contrast of heatmaps must be zero or positive, not {contrast}.")


def check_rule(rule: str) -> None:
    """Raise an error unless there is such a heatmap rule."""
    if rule not in get_args(HeatmapRule):
        raise CandidError(f"There is no heatmap rule '{rule}': {did_you_mean(rule, get_args(HeatmapRule))}")


def check_regions(regions: str) -> None:
    """Raise an error unless there are such regions of a decision space."""
    if regions not in get_args(Regions):
        raise CandidError(f"There are no regions '{regions}': {did_you_mean(regions, get_args(Regions))}")


def check_target(target: float) -> None:
    """Raise an error unless ``target`` is a posterior that can be reached."""
    if not 0 < target < 1:
        raise CandidError(f"The target of a counterfactual is a posterior between 0 and 1, not {target}.")


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ImageOptions):
    """What to look at in a model, and how."""

    data: Annotated[
        str | None,
        Option(
            "Real images, as for 'candid evaluate' but no tar shards: adds receptive fields, interpolations "
            "and measured uncertainties.",
            metavar="DATA",
        ),
    ] = None
    classes: Annotated[
        str | None,
        Option(
            "Look at these classes only: names, numbers or patterns, separated by commas.",
            metavar="CLASSES",
            default="all",
        ),
    ] = None
    groups: Annotated[
        Mapping[str, str], Option("Classes to compare with each other, by name of the group.", hidden=True)
    ] = field(default_factory=dict)
    order: Annotated[
        Literal["clustering", "given"], Option("Order of the classes in the similarity matrix.")
    ] = "clustering"
    pairs: Annotated[int, Option("Number of closest pairs of classes to list.", least=1)] = 10
    images: Annotated[int, Option("Number of images for receptive fields.", least=1)] = 16
    projections: Annotated[
        int | None,
        Option(
            "Number of random projections from which receptive fields are estimated, from 3 on; 0: exact.",
            least=0,
            default="exact up to 512 channels, else 64",
        ),
    ] = None
    temperatures: Annotated[tuple[float, ...], Option("Temperatures of samples.", least=0)] = (0.5, 0.8, 1.0)
    seed: Annotated[int, Option("Seed of samples and projections.", least=0)] = 0

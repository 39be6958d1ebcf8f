"""The options of the corruption benchmark; no torch, so that help texts load quickly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from candid._support.config import Option
from candid._support.errors import CandidError
from candid.inference.options import DataOptions
from candid.robustness.corruptions.registry import SEVERITIES, check_severities


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

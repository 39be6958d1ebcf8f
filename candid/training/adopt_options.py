"""The options of adopting a classifier: one declaration for the command and the Python call."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from candid._support.config import Option, check_fields


@dataclass(frozen=True)
class AdoptOptions:
    """Which images are held out, and how they are read."""

    held_out: Annotated[
        str | None,
        Option(
            "Images to hold out for verdicts; class sets need labels.",
            metavar="DATA",
            default="half of IMAGES",
        ),
    ] = None
    class_names: Annotated[
        Path | None,
        Option("A text file with one class name on each line.", metavar="FILE", default="the classifier's"),
    ] = None
    skip_bad: Annotated[bool, Option("Leave out images that can't be used, instead of stopping.")] = False
    devices: Annotated[
        int | None,
        Option("Number of processes, one on each GPU.", least=1, default="all GPUs, or one CPU process"),
    ] = None
    workers: Annotated[
        int, Option("Processes that load images, for each process that computes.", least=0)
    ] = 2
    __post_init__ = check_fields  # type: ignore[misc]

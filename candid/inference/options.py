"""The options that all studies of models on data share; no torch, so that help texts load quickly."""

from dataclasses import dataclass
from typing import Annotated

from candid._support.options import Option, check_fields
from candid.data import Part

PartName = Annotated[
    Part | None,
    Option("The part of the data set to use.", default="test, or val, or all if there is no such part"),
]
Images = Annotated[
    int | None, Option("Use only this number of images of each set, evenly spread over it.", least=1)
]
SkipBad = Annotated[bool, Option("Leave out images that can't be read, and list them.")]
Workers = Annotated[
    int, Option("Threads (in training: processes) that load images, for each process that computes.", least=0)
]
Devices = Annotated[
    int | None, Option("Processes that compute, on this machine.", least=1, default="all GPUs, or 1 on a CPU")
]

Together = Annotated[
    str | None,
    Option(
        "Held-out images of one object, scene or day: a column of a table with a 'path'. Each name counts "
        "once and is on one side of every division.",
        metavar="FILE.csv:COLUMN",
        default="copies only",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How images are read."""

    skip_bad: SkipBad = False
    workers: Workers = 2

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ImageOptions(ReadOptions):
    """Which images of a data set pass a model."""

    part: PartName = None
    images: Images = None


@dataclass(frozen=True, kw_only=True)
class DataOptions(ImageOptions):
    """Which images of a data set pass a model, and by how many processes."""

    devices: Devices = None


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(DataOptions):
    """Which held-out images are measured."""

    part: Annotated[
        Part | None,
        Option(
            "Part of the data to measure.",
            default="what was kept out of training; else test if present, else val, else all",
        ),
    ] = None
    together: Together = None

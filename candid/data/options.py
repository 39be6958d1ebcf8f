"""Options about images and processes that several commands share."""

from typing import Annotated, Literal

from candid._support.config import Option

Part = Literal["train", "val", "test", "all"]
PartName = Annotated[
    Part | None,
    Option("The part of the data set to use.", default="test, or val, or all if there is no such part"),
]
Images = Annotated[
    int | None, Option("Use only this number of images of each set, evenly spread over it.", least=1)
]
SkipBad = Annotated[bool, Option("Leave out images that can't be read, and list them.")]
Workers = Annotated[int, Option("Processes that load images, for each process that computes.", least=0)]
Devices = Annotated[
    int | None, Option("Processes that compute, on this machine.", least=1, default="all GPUs, or 1 on a CPU")
]
PHOTO_SIDE = 96
"""Images with at least this many pixels a side are photos: they get an eye, and come in all sizes."""

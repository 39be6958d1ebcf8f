"""The options of the study; no torch, so that help and mistakes are quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from candid._support.options import Option, check_fields
from candid.inference.options import Devices, Workers


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Which photos, how many, and by which processes."""

    out: Annotated[Path, Option("Folder of the page.", metavar="DIR")] = Path("imagenet-results")
    held_out: Annotated[
        Path | None,
        Option(
            "Photos to hold out, in class folders; then all of val is evaluated.",
            metavar="FOLDER",
            default="a share of val",
        ),
    ] = None
    held_out_share: Annotated[
        float, Option("Share of the photos of each class to hold out.", above=0, below=1)
    ] = 0.1
    classes: Annotated[
        Path | None,
        Option(
            "Table with the columns index, wnid and name.", metavar="FILE", default="IMAGENET/classes.csv"
        ),
    ] = None
    images: Annotated[
        int | None, Option("Evaluate only this number of photos, for a trial.", least=1, default="all")
    ] = None
    corrupted: Annotated[int, Option("Photos for each corruption and severity.", least=1)] = 5000
    imagenet_c: Annotated[
        Path | None, Option("ImageNet-C, instead of corruptions that are made here.", metavar="FOLDER")
    ] = None
    attacked: Annotated[
        int, Option("Photos to attack, which is slow; the paper has 200, 0 leaves it out.", least=0)
    ] = 0
    photo: Annotated[
        tuple[str, ...],
        Option(
            "Photo for Figures 4 and 6. Repeat for more.",
            metavar="FILE",
            default="four of the evaluated ones",
        ),
    ] = ()
    group: Annotated[
        tuple[str, ...],
        Option(
            "Similar classes for Figure 5. Repeat for more.",
            metavar="NAME=CLASSES",
            default="cats, cars and instruments, of 1000 classes",
        ),
    ] = ()
    devices: Devices = None
    workers: Workers = 2
    launch: Annotated[
        str | None,
        Option(
            "What starts the processes instead, such as 'torchrun --nproc-per-node 6'.", metavar="COMMAND"
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def processes(self) -> list[object]:
        """Arguments that share a command between processes."""
        devices = [] if self.devices is None else ["--devices", self.devices]
        return [*devices, "--workers", self.workers]

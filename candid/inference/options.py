"""The options that all studies of models on data share; no torch, so that help texts load quickly."""

from dataclasses import dataclass

from candid._support.config import check_fields
from candid.data.options import Devices, Images, PartName, SkipBad, Workers


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which images of a data set pass a model, and by how many processes."""

    part: PartName = None
    images: Images = None
    skip_bad: SkipBad = False
    devices: Devices = None
    workers: Workers = 2

    def __post_init__(self) -> None:
        check_fields(self)

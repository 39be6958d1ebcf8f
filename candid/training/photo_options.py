"""The options of training on photos: one declaration for the command, the Python call and config.toml."""

from dataclasses import dataclass
from typing import Annotated, Literal

from candid._support.config import Option, check_fields
from candid.models.eyes.registry import DEFAULT_EYE, EYES

ENOUGH = 1000
"""From this many training photos on, some are held out; of fewer, all are used and scored out of fold."""
SHARE = 0.2


@dataclass(frozen=True)
class PhotoOptions:
    """Everything that decides what a training on photos computes."""

    data: Annotated[str, Option("A folder of photos.", hidden=True)]
    eye: Annotated[str, Option(f"Pretrained network: {', '.join(EYES)}, several joined by +, or a file.")] = (
        DEFAULT_EYE
    )
    priors: Annotated[
        Literal["frequency", "uniform"], Option("How probable classes are before a photo is seen.")
    ] = "frequency"
    holdout: Annotated[
        float | None,
        Option(
            "Held-out share; 0 scores all photos out of fold.",
            least=0,
            below=1,
            default=f"{SHARE} from {ENOUGH} photos on, else 0",
        ),
    ] = None
    val_data: Annotated[str | None, Option("Tar shards to validate on.", metavar="SHARDS")] = None
    split_seed: Annotated[int, Option("Seed of the division into training and held-out images.", least=0)] = 0
    only: Annotated[
        tuple[str, ...], Option("Train only on this class. Repeat for more.", metavar="CLASS")
    ] = ()
    skip_bad: Annotated[bool, Option("Leave out images that can't be read, and list them.")] = False
    thumbnails: Annotated[
        bool,
        Option("Keep small pictures of up to 20 photos of each class, to show the nearest ones."),
    ] = True
    seed: Annotated[int, Option("Seed of the folds.", least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)

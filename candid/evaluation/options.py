"""The options of evaluate and compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from candid._support.options import Option, check_fields
from candid._support.text import named_pairs
from candid.data import SYNTHETIC
from candid.inference.options import DataOptions
from candid.trust.promises import Levels

OtherImages = Annotated[
    tuple[str, ...],
    Option(
        "Other images to detect: a folder or a data set, with a name. 'uniform-noise' and 'constant' need no "
        "name. Of stored arrays, an npz file. Repeat for more.",
        metavar="NAME=PATH",
    ),
]

StoredHeldOut = Annotated[
    Path | None,
    Option(
        "Instead of MODEL and DATA: an npz file with the logits and labels, and if possible features, of "
        "images that the classifier was not trained on. Verdicts are learned from it.",
        metavar="NPZ",
    ),
]
StoredTest = Annotated[
    Path | None, Option("An npz file like that of --held-out, of the images to evaluate.", metavar="NPZ")
]
Groups = Annotated[
    str | None,
    Option(
        "Levels hold within each group of images: by 'class' (the predicted one), by the column 'site' of a "
        "table with a column 'path' ('photos.csv:site'), or by a key of the npz files ('site').",
        metavar="GROUPS",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Levels, DataOptions):
    """What to measure, and where to cache predictions."""

    out: Annotated[
        Path | None, Option("Folder for results and cached predictions.", default="evaluation/MODEL")
    ] = None
    held_out: StoredHeldOut = None
    test: StoredTest = None
    by: Groups = None
    together: Annotated[
        str | None,
        Option(
            "With --held-out: its images of one object, scene or day, by a key of the file ('day') or a "
            "column of a table ('photos.csv:day'). Each name counts once and is on one side of every "
            "division.",
            metavar="SERIES",
            default="copies only",
        ),
    ] = None
    ood: OtherImages = ()
    ensemble: Annotated[
        tuple[str, ...], Option("One more model for WAIC. Repeat for more.", metavar="MODEL")
    ] = ()
    ten_crop: Annotated[bool, Option("Also average posteriors over ten crops.")] = False
    as_published: Annotated[
        bool,
        Option(
            "Also measure an imported model as the paper's authors did: whole photos, resized bilinearly, "
            "with --ten-crop their corners and centres, and no dequantisation noise in classification."
        ),
    ] = False
    temperature: Annotated[bool, Option("Also report the metrics with temperature scaling.")] = False
    name: Annotated[str | None, Option("What the model is called in the results.", metavar="NAME")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.others  # noqa: B018  a wrong --ood is refused before anything runs

    @property
    def others(self) -> dict[str, str]:
        """The other sets by name."""
        return named_pairs(self.ood, "--ood", alone=SYNTHETIC)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Where to write the comparison."""

    out: Annotated[Path, Option("Folder for the table and the figure.")] = Path("comparison")

    def __post_init__(self) -> None:
        check_fields(self)

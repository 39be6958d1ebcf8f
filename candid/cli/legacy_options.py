"""Options of the commands that are not converted yet."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from candid._support.errors import CandidError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a saved model.")]
Devices = Annotated[
    int | None, typer.Option(help="Processes on this machine.", show_default="all GPUs, or 1")
]
Workers = Annotated[int, typer.Option(help="Loading processes for each process.")]
Images = Annotated[int | None, typer.Option(help="Only so many images of each set, evenly spread.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out images that can't be read.")]
PartOption = Annotated[
    Literal["train", "val", "test", "all"] | None,
    typer.Option(help="Which images of DATA.", show_default="as it has: test, val, all"),
]
OtherImages = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="Other images to tell apart: a folder, a data set, 'uniform-noise' or 'constant'. Repeats.",
    ),
]
TestName = Annotated[
    str | None,
    typer.Option(help="The test that verdicts rest on.", show_default="joint; of a ResNet, mahalanobis"),
]
Novelty = Annotated[
    float | None,
    typer.Option(help="Share of usual images that may be called novel.", show_default="0.01"),
]
ErrorLevel = Annotated[
    float | None,
    typer.Option(
        help="Share of usual images whose class may be missing among those named.", show_default="0.05"
    ),
]


def named(values: list[str] | None, option: str, form: str) -> dict[str, str]:
    """``{"mnist": "data/mnist"}`` of ``["mnist=data/mnist"]``."""
    found: dict[str, str] = {}
    for value in values or ():
        name, equals, what = value.partition("=")
        if not name or not equals or not what:
            raise CandidError(f"{option} takes {form}, not '{value}'.")
        if name in found:
            raise CandidError(f"Two {option} have the name '{name}': give each a name of its own.")
        found[name] = what
    return found


def whole_numbers(spec: str) -> tuple[int, ...]:
    """Severities, as an option has them."""
    try:
        return tuple(int(each) for each in spec.split(","))
    except ValueError as error:
        raise CandidError(f"--severities takes numbers with commas between them, not '{spec}'.") from error

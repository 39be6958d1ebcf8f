"""The command that turns a model into a file for other programs."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.errors import CandidError
from candid.cli.evaluate import JsonFlag, ModelFolder


def export(
    model: ModelFolder,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE|DIR",
            help="A file that ends in .onnx or .pt2, or a folder for files.",
            show_default="MODEL.onnx here",
        ),
    ] = Path(),
    format: Annotated[
        Literal["onnx", "torch-export", "both"] | None,
        typer.Option(help="ONNX, or an archive of torch.export.", show_default="of the file, or onnx"),
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="N|dynamic", help="How many images it takes at a time.")
    ] = "dynamic",
    as_json: JsonFlag = False,
) -> None:
    """A model as ONNX or torch.export file: images in [0, 1] to logits, log density and latent.

    Each file is run beside PyTorch before it is written: the largest difference is printed.
    """
    if batch != "dynamic" and not batch.isdecimal():
        raise CandidError(f"--batch takes a number of images or 'dynamic', not '{batch}'.")

    from candid._support.progress import TerminalProgress
    from candid.models.export import TOLERANCE
    from candid.models.export import export as run_export

    chosen: dict[str, tuple[Literal["onnx", "torch-export"], ...]] = {
        "onnx": ("onnx",),
        "torch-export": ("torch-export",),
        "both": ("onnx", "torch-export"),
    }
    images = None if batch == "dynamic" else int(batch)
    with TerminalProgress().console.status("exporting and checking"):
        found = run_export(model, out, None if format is None else chosen[format], images)
    if as_json:
        records = [vars(each) | {"path": str(each.path), "batch": each.batch or "dynamic"} for each in found]
        print(json.dumps(records))
        return
    table = Table(title=f"{escape(str(model))}: difference to PyTorch", title_justify="left")
    for column in ("file", "batch", "MB", *found[0].differences):
        table.add_column(column, justify="left" if column == "file" else "right", overflow="fold")
    for each in found:
        differences = (f"{value:.1e}" for value in each.differences.values())
        table.add_row(
            escape(str(each.path)), str(each.batch or "any"), f"{each.bytes / 1e6:.1f}", *differences
        )
    console = Console()
    console.print(table)
    console.print(
        "The largest over images of max |difference| / max(1, max |value|): relative for log_density; "
        f"at most {TOLERANCE:g} is allowed.",
        highlight=False,
    )

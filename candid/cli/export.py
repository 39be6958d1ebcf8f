"""The commands that take a model elsewhere: into a file for other programs, and to the Hugging Face Hub."""

import json
from pathlib import Path
from typing import Annotated, Literal

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid._support.text import printable
from candid.cli.app import JsonFlag, ModelName, command, safe, show_table
from candid.models import Format


@command
def export(
    model: ModelName,
    /,
    out: Annotated[
        Path,
        Option(
            "A file that ends in .onnx or .pt2, or a folder for the files.",
            metavar="PATH",
            default="MODEL.onnx in this folder",
        ),
    ] = Path(),
    format: Annotated[
        Literal[Format, "both"] | None,
        Option("ONNX, an archive of torch.export, or both.", default="by the ending of the file, or onnx"),
    ] = None,
    batch: Annotated[
        str, Option("Images that the network takes at a time.", metavar="N|dynamic")
    ] = "dynamic",
    as_json: JsonFlag = False,
) -> None:
    """Export a model to ONNX or torch.export: images in [0, 1] to logits, log density and latent.

    The file of a photo model has the eye and the head: images to logits and novelty scores. A JSON file next
    to it has the held-out scores and thresholds, which turn them into verdicts.

    Each file is run and compared with the model before it is written; the largest difference is printed.
    """
    if batch != "dynamic" and not batch.isdecimal():
        raise CandidError(f"--batch takes a number of images or 'dynamic', not '{batch}'.")

    from rich.console import Console
    from rich.table import Table

    from candid.judging.held_out import export as run_export
    from candid.models.export import TOLERANCE

    both: tuple[Format, ...] = ("onnx", "torch-export")
    chosen = None if format is None else tuple(each for each in both if format in (each, "both"))
    with TerminalProgress().console.status("exporting and checking"):
        files = run_export(Path(model), out, chosen, None if batch == "dynamic" else int(batch))
    if as_json:
        records = [vars(each) | {"batch": each.batch or "dynamic"} for each in files]
        print(json.dumps(records, default=str))
        return
    table = Table(title=f"{safe(model)}: difference from the model itself", title_justify="left")
    for column in ("file", "batch", "MB", *files[0].differences):
        table.add_column(column, justify="left" if column == "file" else "right", overflow="fold")
    for each in files:
        differences = (f"{value:.1e}" for value in each.differences.values())
        table.add_row(safe(each.path), str(each.batch or "any"), f"{each.bytes / 1e6:.1f}", *differences)
    console = Console()
    console.print(table)
    console.print(
        "Each number is the largest max |difference| / max(1, max |value|) over images (relative for "
        f"log_density); at most {TOLERANCE:g} is allowed.",
        highlight=False,
    )
    limits = {str(each.verdicts): None for each in files if each.verdicts is not None}
    if limits:
        console.print(f"Thresholds and held-out scores: {', '.join(limits)}", highlight=False)


@command
def push(
    model: ModelName,
    repository: Annotated[
        str, Option("Where to upload it; the repository is made if there is none.", metavar="hf:OWNER/NAME")
    ],
    /,
    *,
    licence: Annotated[
        str | None,
        Option(
            "The licence of the model, as the Hub writes it: apache-2.0, mit, …", default="none is stated"
        ),
    ] = None,
    private: Annotated[bool, Option("Only you see the repository, if it is made now.")] = False,
    yes: Annotated[bool, Option("Upload. Without this, the command only shows what it would do.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload a model to the Hugging Face Hub; without --yes, show what would be uploaded, and send nothing.

    Its folder goes there with a card (README.md) that says what is known of it: classes, accuracy, licence.
    'candid examine hf:OWNER/NAME photo.jpg' uses it then, on any machine.
    """
    from dataclasses import asdict

    from candid.models.saving import push as run

    result = run(model, repository, licence=licence, private=private, upload=yes)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    print(printable(result.card))
    sizes = [(file, f"{size / 1e6:.3f}") for file, size in result.files.items()]
    total = ("all", f"{sum(result.files.values()) / 1e6:.3f}")
    show_table(f"{model} to {repository}", ("file", "MB"), [*sizes, total])
    for line in (f"Licence: {result.licence}.", *result.notes):
        print(printable(line))
    if yes:
        print(f"Uploaded. This name always means it as it is now: {result.name}")
    else:
        print("Nothing was uploaded. To upload it, add --yes.")

"""The command that corrupts images, and shows what models make of them."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.errors import CandidError
from candid.cli.evaluate import Devices, Images, JsonFlag, PartOption, SkipBad, Workers


def corrupt(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL... DATA",
            help="Folders of saved models, then a data set, as for 'candid evaluate'.",
        ),
    ] = None,
    preview: Annotated[
        Path | None,
        typer.Option(metavar="IMAGE", help="Only draw this image with all corruptions and severities."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for tables, figures and kept passes.")] = Path(
        "corruption"
    ),
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="The model that corruption errors are relative to.",
            show_default="of 1000 classes, AlexNet as published",
        ),
    ] = None,
    corruptions: Annotated[
        str | None, typer.Option(help="Names, with commas between them.", show_default="all fifteen")
    ] = None,
    severities: Annotated[str, typer.Option(help="Of 1 to 5, with commas between them.")] = "1,2,3,4,5",
    corrupted: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Corrupted images that exist already, as ImageNet-C: CORRUPTION/SEVERITY/CLASS/image.",
        ),
    ] = None,
    part: PartOption = None,
    images: Images = None,
    size: Annotated[int, typer.Option(help="Of a preview: pixels a side.")] = 224,
    seed: Annotated[int, typer.Option(help="For all that is random.")] = 0,
    skip_bad: SkipBad = False,
    devices: Devices = None,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """Errors, entropy and detection of models on the fifteen corruptions of ImageNet-C, five severities each.

    Every pass is kept in OUT: a sweep that was stopped goes on where it was.
    """
    if preview is not None:
        if targets:
            raise CandidError("--preview draws one image, without models: leave the other names out.")
        _draw_preview(preview, out / "preview.png", size, seed)
        return
    if targets is None or len(targets) < 2:
        raise CandidError("Name one or more models, then the data, or an image with --preview.")

    from candid._support.progress import TerminalProgress
    from candid.robustness.corruptions.apply import CORRUPTIONS
    from candid.robustness.corruptions.benchmark import Request, sweep
    from candid.robustness.corruptions.tables import table, write_tables

    progress = TerminalProgress()
    chosen = CORRUPTIONS if corruptions is None else [name.strip() for name in corruptions.split(",")]
    request = Request(
        models=tuple(map(Path, targets[:-1])),
        data=targets[-1],
        out=out,
        part=part,
        corruptions=tuple(chosen),
        severities=whole_numbers(severities),
        corrupted=corrupted,
        baseline=baseline,
        images=images,
        seed=seed,
        skip_bad=skip_bad,
        devices=devices,
        workers=workers,
    )
    found = sweep(request, progress)
    if found is None:
        return
    files = write_tables(*found, out)
    if as_json:
        print(json.dumps([each.record(found[1]) for each in found[0]]))
        return
    _print_table(*table(*found))
    progress.log(f"Written: {', '.join(map(str, files))}")


def whole_numbers(spec: str) -> tuple[int, ...]:
    """Severities, as an option has them."""
    try:
        return tuple(int(each) for each in spec.split(","))
    except ValueError as error:
        raise CandidError(f"--severities takes numbers with commas between them, not '{spec}'.") from error


def _draw_preview(source: Path, path: Path, size: int, seed: int) -> None:
    import torch

    from candid._support.progress import TerminalProgress
    from candid._support.randomness import generator
    from candid.data.images import BadImageError, centre_box, decode
    from candid.reports.plots import corruptions as corruptions_plots
    from candid.reports.plots import style
    from candid.robustness.corruptions.apply import CORRUPTIONS, SEVERITIES, corrupted

    if size < 8:
        raise CandidError(f"--size {size} is too small to be corrupted: choose 8 or more.")
    progress = TerminalProgress()
    try:
        image = decode(source, 3, (size, size), lambda w, h: centre_box(w, h, (size, size)))
    except BadImageError as error:
        raise CandidError(f"'{source}' can't be used: {error}.") from error
    rows = {
        name: torch.cat([corrupted(image[None], name, s, generator(seed, i)) for s in SEVERITIES])
        for i, name in enumerate(progress.track(CORRUPTIONS, "corrupting", len(CORRUPTIONS)))
    }
    figure = style.save(corruptions_plots.corruption_grid(image, rows, source.name), path, svg=True)
    print(f"Figure: {figure}, as SVG, too.")


def _print_table(head: list[str], rows: list[list[tuple[str, str]]]) -> None:
    """With a line a corruption: fifteen columns do not fit."""
    colours = {"good": "[bold green]{}[/]", "some": "{}", "poor": "[red]{}[/]"}
    table = Table(title="Corruptions: figures, then areas under the ROC curve (%)", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(escape(row[0][0]), justify="right")
    for i, name in enumerate(head[1:], start=1):
        cells = (colours.get(row[i][1], "{}").format(row[i][0]) for row in rows)
        table.add_row(name, *cells)
    Console().print(table)

"""The command that puts everything that is known of models on one page."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid.cli.legacy_options import (
    JsonFlag,
    OtherImages,
    PartOption,
    SkipBad,
    Workers,
    named,
    whole_numbers,
)

QUICK_IMAGES, QUICK_ATTACKS, ATTACKS = 1000, 20, 200


def audit(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Folders of saved models, or bundled ones.")
    ],
    data: Annotated[str, typer.Option(metavar="DATA", help="A data set, as for 'candid evaluate'.")],
    out: Annotated[Path, typer.Option(help="The folder for the page and all that is kept.")] = Path("audit"),
    ood: OtherImages = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"A sample: {QUICK_IMAGES} images of each set, {QUICK_ATTACKS} attacks."
        ),
    ] = False,
    images: Annotated[
        int | None, typer.Option(help="So many of each set, evenly spread.", show_default="all")
    ] = None,
    corruption_images: Annotated[
        int | None,
        typer.Option(help="So many for each corruption; 0: none.", show_default="as many as of the data"),
    ] = None,
    attack_images: Annotated[
        int | None, typer.Option(help="So many are attacked; 0: none.", show_default=str(ATTACKS))
    ] = None,
    examples: Annotated[int, typer.Option(help="So many images have a page of their own.")] = 4,
    corruptions: Annotated[
        str | None, typer.Option(help="Names, with commas between them.", show_default="all fifteen")
    ] = None,
    severities: Annotated[str, typer.Option(help="Of 1 to 5, with commas between them.")] = "1,2,3,4,5",
    steps: Annotated[
        int | None, typer.Option(help="Of attacks, at most, of each phase.", show_default="300")
    ] = None,
    ten_crop: Annotated[
        bool, typer.Option("--ten-crop", help="Accuracy of posteriors averaged over ten crops, too.")
    ] = False,
    part: PartOption = None,
    skip_bad: SkipBad = False,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """Everything about one or more models, side by side, as one HTML page and one JSON file.

    Accuracy, likelihood, calibration, out-of-distribution tests, corruptions, attacks, explanations, and a
    verdict on each in plain words. What is finished is kept in OUT: an audit that was stopped goes on.
    """
    others = named(ood, "--ood", "NAME=PATH")
    chosen = whole_numbers(severities)

    from candid._support.progress import TerminalProgress
    from candid.reports.audit.options import AuditOptions as Request
    from candid.reports.audit.output import write
    from candid.reports.audit.run import audit as run_audit
    from candid.robustness.corruptions.apply import CORRUPTIONS

    progress = TerminalProgress()
    request = Request(
        models=tuple(models),
        data=data,
        out=out,
        part=part,
        ood=others,
        images=QUICK_IMAGES if quick and images is None else images,
        corruption_images=corruption_images,
        attack_images=attack_images if attack_images is not None else QUICK_ATTACKS if quick else ATTACKS,
        examples=examples,
        corruptions=tuple(CORRUPTIONS) if corruptions is None else _names(corruptions),
        severities=chosen,
        steps=steps,
        ten_crop=ten_crop,
        quick=quick,
        skip_bad=skip_bad,
        workers=workers,
    )
    found = run_audit(request, progress)
    with progress.console.status("drawing the page"):
        record, files = write(found)
    if as_json:
        print(json.dumps(record))
        return
    _print_verdicts(record)
    progress.log(f"Written: {', '.join(map(str, files))}")


def _names(spec: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in spec.split(","))


def _print_verdicts(record: dict[str, Any]) -> None:
    colours = {"good": "[green]{}[/]", "fair": "[yellow]{}[/]", "poor": "[red]{}[/]", "unknown": "[dim]{}[/]"}
    table = Table(title="Verdicts", title_justify="left")
    table.add_column("")
    for model in record["models"]:
        table.add_column(escape(model["name"]), overflow="fold")
    for i, finding in enumerate(record["models"][0]["grades"]):
        cells = []
        for own in (model["grades"][i] for model in record["models"]):
            word = "not known" if own["grade"] == "unknown" else f"{own['grade']}: {own['value']}"
            cells.append(colours[own["grade"]].format(word))
        table.add_row(finding["aspect"], *cells)
    Console().print(table)

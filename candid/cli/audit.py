"""The command that puts everything about models on one page."""

import json
from typing import Annotated, Any

from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid.cli.app import JsonFlag, command, is_model, safe
from candid.reports.audit.options import AuditOptions

COLOURS = {"good": "[green]{}[/]", "fair": "[yellow]{}[/]", "poor": "[red]{}[/]", "unknown": "[dim]{}[/]"}


@command
def audit(
    models: Annotated[
        tuple[str, ...], Option("Bundled models, model folders or run folders.", metavar="MODEL...")
    ] = (),
    /,
    *,
    data: Annotated[
        str | None,
        Option(
            "A data set with labels, as for 'candid evaluate'; it may also stand last, after the models.",
            metavar="DATA",
        ),
    ] = None,
    options: AuditOptions,
    as_json: JsonFlag = False,
) -> None:
    """Audit one or more models on one data set: one HTML page and one JSON file.

    The page says on top what each model is fit for and what not, then shows classes, confusions and the worst
    mistakes, then accuracy, calibration, outlier scores, corruptions, attacks and explanations, each with a
    grade. Finished studies are cached in the output folder, so an audit that was stopped continues.

    A classifier of any library is audited from its stored arrays: --held-out and --test name npz files, as
    for 'candid evaluate'. Without MODEL and --data the page has everything that needs no network; with them
    the classifier stands next to the models, on the same test images.
    """
    from candid.reports.audit.page import write
    from candid.reports.audit.run import audit as run

    named = list(models)
    if data is None and len(named) > 1 and not is_model(named[-1]):
        data = named.pop()
    progress = TerminalProgress()
    result = run(named, data, progress, **vars(options))
    with progress.console.status("drawing the page"):
        record, files = write(result)
    if as_json:
        print(json.dumps(record))
        return
    _print_grades(record)
    progress.log(f"Written: {', '.join(map(str, files))}")


def _print_grades(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Grades", title_justify="left")
    table.add_column("")
    for model in record["models"]:
        table.add_column(safe(model["name"]), overflow="fold")
    for row in zip(*(model["grades"] for model in record["models"]), strict=True):
        words = ("not known" if e["grade"] == "unknown" else f"{e['grade']}: {safe(e['value'])}" for e in row)
        cells = [COLOURS[cell["grade"]].format(word) for cell, word in zip(row, words, strict=True)]
        table.add_row(row[0]["aspect"], *cells)
    Console().print(table)

"""The command that shows what Candid does, in a few minutes."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from candid._support.errors import CandidError, lacking
from candid._support.files import replacing
from candid._support.options import Option
from candid._support.progress import Progress, TerminalProgress
from candid._support.text import printable
from candid.cli.app import command

if TYPE_CHECKING:
    from candid.reports.demo.chapters import Chapter
    from candid.reports.demo.digits import DigitsDemo
    from candid.trust.verdict import Examination

EPOCHS = 60
"""Half of what the recipe for digits has: enough to see what the system does."""
MARKER = ".candid-demo"
"""The file in each folder that the demo made, and may therefore replace."""


@command
def demo(
    out: Annotated[Path, Option("Folder for the page, the models and the figures.")] = Path("demo"),
    epochs: Annotated[
        int, Option("Number of training epochs of the classifier of digits.", least=1)
    ] = EPOCHS,
) -> None:
    """Show what Candid does: verdicts on photos, a classifier of your own, a new class, the paper's system.

    Everything ends up on one page, OUT/index.html, with commands to go on with.
    """
    from candid.reports.demo.chapters import bundled_models, clothes, copy_samples, page

    progress = TerminalProgress(stdout=True)
    photos, clothing, digits_run = fresh_folders(out / "photos", out / "clothes", out / "digits")
    samples = copy_samples(photos)
    chapters = bundled_models(samples, program(), progress, _show)
    chapters += clothes(samples, clothing, program(), progress, _show)
    missing = lacking("paper", "The paper's system")
    if missing is not None:
        progress.log(f"\n{missing}")
    else:
        digits = _digits(out, digits_run, progress, epochs)
        if digits is None:
            return
        chapters.append(digits)
    with replacing(out / "index.html") as file:
        file.write_text(page(chapters, _next_steps(out)), encoding="utf-8")
    progress.log(f"\nAll of it on one page: {out / 'index.html'}\nGo on with:")
    for what, line in _next_steps(out):
        progress.log(f"  {line}    # {what}")


def fresh_folders(*folders: Path) -> tuple[Path, ...]:
    """Return the folders, empty but for a marker; refuse all of them if one has files that no demo made."""
    for folder in folders:
        taken = not folder.is_dir() or any(folder.iterdir())
        if folder.exists() and taken and not (folder / MARKER).exists():
            raise CandidError(f"'{folder}' was not made by this demo: choose another folder with --out.")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
    return folders


def program() -> str:
    """Return how this program was started, for a command that users can copy."""
    started = Path(sys.argv[0])
    if started.name == "candid" and started.is_file():
        return shlex.quote(str(started))
    return f"{shlex.quote(sys.executable)} -m candid"


def _next_steps(out: Path) -> list[tuple[str, str]]:
    """Return commands that work as they are printed, each after what it does."""
    photos = out / "photos"
    return [
        ("judge photos in the browser", f"{program()} serve"),
        (
            "draw why, for each photo",
            f"{program()} examine everyday {photos / 'everyday'} --figures {out / 'pages'}",
        ),
        ("the classifier of clothes in the browser", f"{program()} serve {out / 'clothes' / 'with-hats'}"),
        (
            "your own photos, one folder per class",
            f"{program()} train {photos / 'clothes'} --out {out / 'mine'}",
        ),
    ]


def _show(examinations: "Sequence[Examination]") -> None:
    from candid.trust.verdict import heading

    print(heading())
    for examined in examinations:
        print(printable(examined.line()))


def _digits(out: Path, run: Path, progress: Progress, epochs: int) -> "Chapter | None":
    """Train, print and draw; None if the training was stopped."""
    from candid._support.progress import TrainingDisplay
    from candid.reports.demo.digits import chapter, digits_demo

    progress.log("\nThe paper's system on 8 x 8 digits: an invertible network, beta 1.")
    shown = digits_demo(run, TrainingDisplay(stdout=True), epochs)
    if shown is None:
        return None
    for table in _tables(shown):
        Console().print(table)
    return chapter(shown, out, program())


def _tables(shown: "DigitsDemo") -> list[Table]:
    table = Table(title="Test digits", title_justify="left")
    for column in ("accuracy", "bits/dim", "expected calibration error"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{100 * shown.accuracy:.2f} %", f"{shown.bits_per_dim:.3f}", f"{100 * shown.calibration_error:.2f} %"
    )
    title = "Is it a digit? The p-value tells; the posterior alone does not"
    groups = Table(title=title, title_justify="left")
    for column in ("images", "called 'not a digit' (p ≤ 0.05)", "median p-value", "mean confidence"):
        groups.add_column(column, justify="right" if column != "images" else "left")
    for name, opinion in shown.opinions.items():
        groups.add_row(
            name,
            f"{100 * float((opinion.p_value <= 0.05).mean()):.0f} %",
            f"{float(median(opinion.p_value)):.3f}",
            f"{100 * float(opinion.posterior.max(1).mean()):.0f} %",
        )
    return [table, groups]

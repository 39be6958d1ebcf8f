"""The command that shows what Candid does, in a few minutes."""

import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from candid._support.config import Option
from candid._support.progress import Progress, TerminalProgress
from candid.cli.audit import audit
from candid.cli.examine import examine
from candid.cli.options import command

if TYPE_CHECKING:
    from candid.cli.demo_run import DigitsDemo

MODEL = "cifar10-beta1"
ATTACKED = 10
"""Digits that the audit attacks."""


@command
def demo(
    out: Annotated[Path, Option("Folder for the run, the figures and the audit.")] = Path("demo"),
    epochs: Annotated[
        int | None, Option("Number of training epochs.", least=1, default="the recipe's")
    ] = None,
) -> None:
    """Train a classifier of digits, show it images that are not digits, and audit it.

    Then a bundled model examines a few photos.
    """
    progress = TerminalProgress(stdout=True)
    figures = _digits(out, progress, epochs)
    if figures is None:
        return
    progress.log("\nAll results of this model on one page: a quick audit.")
    audit(
        [str(out / "digits")],
        data="digits",
        out=out / "audit",
        ood=("noise=uniform-noise", "plain=constant"),
        quick=True,
        attack_images=ATTACKED,
    )
    progress.log(f"\nThe bundled model {MODEL} examines photos; only cats and deer are among its classes.")
    pages = _sample_pictures(out / "photos")
    progress.log("\nLook at these files:")
    for what, paths in {"figures": figures, "audit": [out / "audit" / "audit.html"], "photos": pages}.items():
        progress.log(f"  {what:<8} {', '.join(map(str, paths))}")
    progress.log(f"Try your own photos: {program()} serve {MODEL}")


def program() -> str:
    """Return how this program was started, for a command that users can copy."""
    started = Path(sys.argv[0])
    if started.name == "candid" and started.is_file():
        return shlex.quote(str(started))
    return f"{shlex.quote(sys.executable)} -m candid"


def _digits(out: Path, progress: Progress, epochs: int | None) -> list[Path] | None:
    """Train, print and draw; return the figures, or None if the training was stopped."""
    from candid.cli.demo_run import digits_demo, round_trip
    from candid.evaluation.calibration_error import all_bins, top_bins
    from candid.reports.plots import demo as demo_plots
    from candid.reports.plots import evaluation as evaluation_plots
    from candid.reports.plots import latent as latent_plots
    from candid.reports.plots import style
    from candid.reports.plots import training as training_plots
    from candid.training.display import TrainingDisplay

    progress.log("Training the digits preset at beta 1 on scikit-learn's digits.")
    shown = digits_demo(
        out / "digits",
        TrainingDisplay(stdout=True),
        epochs,
        lambda folder, rows: style.save(training_plots.curves(rows), folder.path / "curves.png"),
    )
    if shown is None:
        return None
    _print_demo(shown)
    progress.log("Sending a photo through the untrained imagenet network and back.")
    trip = round_trip()
    progress.log(
        f"The network turns a 224 x 224 photo into {len(trip.z):,} latent numbers and back: largest error "
        f"{trip.largest_error:.1e} (white is 1)."
    )
    bins = all_bins(shown.posterior, shown.labels), top_bins(shown.posterior, shown.labels)
    names = [str(i) for i in range(10)]
    return [
        style.save(demo_plots.opinions(shown.opinions), out / "digits.png"),
        style.save(evaluation_plots.calibration(*bins, "test digits"), out / "calibration.png"),
        style.save(latent_plots.counterfactuals(shown.changes, names), out / "counterfactuals.png"),
        style.save(demo_plots.round_trip(trip.image, trip.spread, trip.restored), out / "round_trip.png"),
        out / "digits" / "curves.png",
    ]


def _sample_pictures(folder: Path) -> list[Path]:
    """Copy the sample pictures into ``folder``, examine them, and return the pages that explain them."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in files("candid.cli.samples").iterdir():
        if picture.name.endswith(".jpg"):
            (folder / picture.name).write_bytes(picture.read_bytes())
    examine(MODEL, [str(folder)], figures=folder)
    return sorted(folder.glob("*.page.png"))


def _print_demo(shown: "DigitsDemo") -> None:
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
            f"{100 * float((opinion.p_value <= 0.05).double().mean()):.0f} %",
            f"{float(opinion.p_value.median()):.3f}",
            f"{100 * float(opinion.posterior.max(1).values.mean()):.0f} %",
        )
    for each in (table, groups):
        Console().print(each)

"""The command that demonstrates Candid."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from candid.cli.audit import audit
from candid.cli.examine import examine

MODEL = "cifar10-beta1"
ATTACKED = 10
"""Number of digits in the audit."""


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the run and the figures.")] = Path("demo"),
    epochs: Annotated[int | None, typer.Option(help="Train for fewer or more epochs.")] = None,
) -> None:
    """Train a classifier of digits, show what it says of digits and of images that are none, and audit it.

    Then ask a bundled model about a few photos.
    """
    from candid.training.display import TrainingDisplay

    progress = TrainingDisplay(stdout=True)
    figures = _digits(out, progress, epochs)
    if figures is None:
        return
    progress.log("\nAll that is known of this model, on one page: a quick audit.")
    audit(
        [out / "digits" / "model" / "best"],
        "digits",
        out / "audit",
        ["noise=uniform-noise", "plain=constant"],
        quick=True,
        attack_images=ATTACKED,
    )
    progress.log(
        f"\nWhat the bundled {MODEL} says of photos; of these, only cats and deer are among its classes."
    )
    pages = _sample_pictures(out / "photos")
    progress.log("\nTo look at:")
    for what, paths in {
        "figures": figures,
        "audit": [out / "audit" / "audit.html"],
        "photos": pages,
    }.items():
        progress.log(f"  {what:<8} {', '.join(map(str, paths))}")
    progress.log(f"To try your own photos: candid serve {MODEL}")


def _digits(out: Path, progress: Any, epochs: int | None) -> list[Path] | None:
    """Draw the figures and return them; None if the training was stopped."""
    from candid.cli.demo_run import digits_demo, round_trip
    from candid.evaluation.calibration_error import all_bins, top_bins
    from candid.reports.plots import demo as demo_plots
    from candid.reports.plots import evaluation as evaluation_plots
    from candid.reports.plots import latent as latent_plots
    from candid.reports.plots import style
    from candid.reports.plots import training as training_plots

    progress.log("Training the digits preset at beta 1 on scikit-learn's digits.")
    shown = digits_demo(
        out / "digits",
        progress,
        epochs,
        lambda folder, rows: style.save(training_plots.curves(rows), folder.path / "curves.png"),
    )
    if shown is None:
        return None
    _print_demo(shown)
    bins = all_bins(shown.posterior, shown.labels), top_bins(shown.posterior, shown.labels)
    names = [str(i) for i in range(10)]
    with progress.console.status("sending a photo through the imagenet network (untrained) and back"):
        trip = round_trip()
    progress.log(
        f"The imagenet preset (untrained) sends a 224 x 224 photo to {len(trip.z):,} latent numbers "
        f"and back: largest error {trip.largest_error:.1e} where white is 1."
    )
    return [
        style.save(demo_plots.opinions(shown.opinions), out / "digits.png"),
        style.save(evaluation_plots.calibration(*bins, "test digits"), out / "calibration.png"),
        style.save(latent_plots.counterfactuals(shown.changes, names), out / "counterfactuals.png"),
        style.save(demo_plots.round_trip(trip.image, trip.spread, trip.restored), out / "round_trip.png"),
        out / "digits" / "curves.png",
    ]


def _sample_pictures(folder: Path) -> list[Path]:
    """Copy the sample pictures into ``folder`` and draw pages of what the model says of them."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [item for item in files("candid.cli.samples").iterdir() if item.name.endswith(".jpg")]
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.read_bytes())
    examine(Path(MODEL), [str(folder)], folder)
    return sorted(folder.glob("*.page.png"))


def _print_demo(shown: Any) -> None:
    console = Console()
    table = Table(title="Test digits", title_justify="left")
    for column in ("accuracy", "bits/dim", "expected calibration error"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{100 * shown.accuracy:.2f} %", f"{shown.bits_per_dim:.3f}", f"{100 * shown.calibration_error:.2f} %"
    )
    console.print(table)
    table = Table(
        title="Is it a digit? The p-value says so; the posterior alone does not", title_justify="left"
    )
    for column in ("images", "called 'not a digit' (p ≤ 0.05)", "median p-value", "mean confidence"):
        table.add_column(column, justify="right" if column != "images" else "left")
    for name, opinion in shown.opinions.items():
        table.add_row(
            name,
            f"{100 * float((opinion.p_value <= 0.05).double().mean()):.0f} %",
            f"{float(opinion.p_value.median()):.3f}",
            f"{100 * float(opinion.posterior.max(1).values.mean()):.0f} %",
        )
    console.print(table)

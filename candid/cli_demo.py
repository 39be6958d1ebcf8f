"""The command that shows what all this is about."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the run and the figures.")] = Path("demo"),
    epochs: Annotated[int | None, typer.Option(help="Train for fewer or more epochs.")] = None,
) -> None:
    """Train a classifier of digits, and show what it says of digits and of images that are none."""
    from candid import plots
    from candid.demo import digits_demo, round_trip
    from candid.evaluation import all_bins, top_bins
    from candid.training import Progress

    progress = Progress(Console())
    progress.say("Training the digits preset at beta 1 on scikit-learn's digits.")
    shown = digits_demo(
        out / "run",
        progress,
        epochs,
        lambda folder, rows: plots.save(plots.curves(rows), folder.path / "curves.png"),
    )
    if shown is None:
        return
    _print_demo(shown)
    bins = all_bins(shown.posterior, shown.labels), top_bins(shown.posterior, shown.labels)
    figures = [
        plots.save(plots.opinions(shown), out / "digits.png"),
        plots.save(plots.calibration(*bins, "test digits"), out / "calibration.png"),
        plots.save(
            plots.counterfactuals(shown.changes, [str(i) for i in range(10)]), out / "counterfactuals.png"
        ),
    ]
    with progress.console.status("sending a photo through the imagenet network (untrained) and back"):
        trip = round_trip()
        figures.append(plots.save(plots.round_trip(trip), out / "round_trip.png"))
    progress.say(
        f"The imagenet preset (untrained) sends a 224 x 224 photo to {len(trip.z):,} latent numbers "
        f"and back: largest error {trip.largest_error:.1e} where white is 1."
    )
    progress.say(f"Figures: {', '.join(map(str, figures))}, {out / 'run' / 'curves.png'}")


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

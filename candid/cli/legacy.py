"""The command line: it parses, calls one function and shows the result.

Commands import what they need themselves, after their checks: help and mistakes don't wait for torch.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.exceptions import TyperException

from candid._support.errors import CandidError
from candid._support.progress import is_first_process
from candid.cli import (
    attack as cli_attack,
)
from candid.cli import (
    audit as cli_audit,
)
from candid.cli import (
    corrupt as cli_corrupt,
)
from candid.cli import (
    demo as cli_demo,
)
from candid.cli import (
    evaluate as cli_evaluation,
)
from candid.cli import (
    explain as cli_explain,
)
from candid.cli import (
    export as cli_export,
)
from candid.cli import (
    plane as cli_plane,
)
from candid.cli import (
    serve as cli_serve,
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generative image classifiers that can be trusted.",
)


def run(arguments: list[str]) -> int | None:
    """Run a command that is not converted yet."""
    try:
        return app(arguments, standalone_mode=False)
    except TyperException as error:
        raise CandidError(error.format_message()) from error
    except typer.Abort as error:
        raise CandidError("stopped.") from error


@app.callback()
def _options() -> None:
    pass


@app.command()
def train(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA", help="'digits', a folder of images, idx files or CIFAR-10 batches, or tar shards."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/PRESET")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Only this class of the data, and others named so. Repeats."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A recipe's name or TOML file; flags win over it.", show_default="of the preset"),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="imagenet, tiny, cifar or digits.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the preset, as in blocks=[2,2]."),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Weight of classification: 0, a number or inf.", show_default="1")
    ] = None,
    epochs: Annotated[int | None, typer.Option()] = None,
    batch: Annotated[int | None, typer.Option(help="Images a step, over all processes.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Parts each process cuts its share of a batch into, to save memory.")
    ] = None,
    optimiser: Annotated[Literal["sgd", "adamw"] | None, typer.Option()] = None,
    schedule: Annotated[Literal["one-cycle", "plateau"] | None, typer.Option()] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest one.")] = None,
    burn_in: Annotated[
        float | None,
        typer.Option(help="Of the learning rate: share of the run (one-cycle) or epochs (plateau)."),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of convolution weights.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.")] = None,
    label_smoothing: Annotated[float | None, typer.Option()] = None,
    crop: Annotated[
        Literal["none", "shift", "jitter", "resized"] | None, typer.Option(help="Random crops.")
    ] = None,
    flip: Annotated[bool | None, typer.Option("--flip/--no-flip", help="Random mirror images.")] = None,
    baseline: Annotated[
        bool | None, typer.Option("--baseline", help="Train the ResNet beside the preset instead.")
    ] = None,
    start: Annotated[str | None, typer.Option(metavar="MODEL", help="Start from a trained model.")] = None,
    means_only: Annotated[
        bool | None, typer.Option("--means-only", help="Train only the class means of --start.")
    ] = None,
    precision: Annotated[Literal["32", "bf16"] | None, typer.Option()] = None,
    memory: Annotated[
        Literal["plain", "inverse"] | None,
        typer.Option(help="inverse: recompute activations; memory then doesn't grow with depth."),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile", help="Let torch compile the network first (needs a C++ compiler)."),
    ] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    devices: Annotated[
        int | None, typer.Option(help="Processes on this machine.", show_default="all GPUs, or 1")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Loading processes for each training process.")] = None,
    skip_bad: Annotated[
        bool | None, typer.Option("--skip-bad", help="Leave out images that can't be read, and list them.")
    ] = None,
    val_data: Annotated[str | None, typer.Option(help="Tar shards to validate on.")] = None,
    epoch_images: Annotated[int | None, typer.Option(help="Tar shards: images an epoch.")] = None,
    save_minutes: Annotated[float | None, typer.Option(help="Write a checkpoint this often, too.")] = None,
    tensorboard: Annotated[bool | None, typer.Option("--tensorboard", help="Log for TensorBoard.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train a generative classifier, or a ResNet beside it."""
    flags = {k: v for k, v in locals().items() if k not in ("out", "recipe", "devices", "resume", "model")}
    if model:
        flags["model"] = _changes(model)
    flags["only"] = tuple(only or ()) or None
    if resume and out is None:
        raise CandidError("Name the run to resume with --out.")
    if not resume and data is None:
        raise CandidError("Name the data to train on, such as 'digits' or a folder of images.")

    from candid.reports.plots import style
    from candid.reports.plots import training as training_plots
    from candid.training.display import TrainingDisplay
    from candid.training.loop import train as run_training
    from candid.training.options import load_config, resumed
    from candid.training.run_folder import RunFolder

    if resume and recipe is not None:
        raise CandidError("A resumed run keeps its configuration: leave --recipe out.")
    if resume and out is not None:
        config = resumed(RunFolder(out).config(), flags)
    else:
        config = load_config(recipe, **flags)
        out = out or Path("runs") / config.preset
    outcome = run_training(
        config,
        out,
        resume=resume,
        devices=devices,
        progress=TrainingDisplay(),
        after_epoch=lambda folder, rows: style.save(training_plots.curves(rows), folder.path / "curves.png"),
    )
    if outcome.finished and is_first_process():
        _print_results(out, outcome.results)


def _changes(settings: list[str]) -> dict[str, Any]:
    """``["blocks=[2,2]", "entry=none"]`` as a dictionary; values are TOML, or plain text."""
    import tomllib

    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise CandidError(f"--set takes KEY=VALUE, not '{setting}'.")
        try:
            changes[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key.strip()] = value.strip()
    return changes


def _print_results(out: Path, results: dict[str, Any]) -> None:
    table = Table(title=f"the best model, in {escape(str(out / 'model' / 'best'))}", title_justify="left")
    for column in ("", "accuracy", "cross-entropy (nats)", "bits/dim"):
        table.add_column(column, justify="right" if column else "left")
    for part, name in (("val", "validation"), ("test", "test")):
        if part in results:
            figures = results[part]
            bits = f"{figures['bits_per_dim']:.3f}" if "bits_per_dim" in figures else ""
            table.add_row(name, f"{100 * figures['accuracy']:.2f} %", f"{figures['cross_entropy']:.3f}", bits)
    Console().print(table)


for command in (
    cli_explain.explain,
    cli_plane.plane,
    cli_evaluation.evaluate,
    cli_evaluation.calibrate,
    cli_evaluation.compare,
    cli_corrupt.corrupt,
    cli_attack.attack,
    cli_audit.audit,
    cli_serve.serve,
    cli_export.export,
    cli_demo.demo,
):
    app.command()(command)

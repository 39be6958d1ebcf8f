"""The command that trains a model."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.config import Option
from candid._support.errors import CandidError
from candid._support.progress import is_first_process
from candid.cli.options import Typed, command
from candid.training.options import TrainOptions, check_call


@command
def train(
    data: Annotated[
        str | None,
        Option("'digits', a folder of images, idx files or CIFAR-10 batches, or tar shards.", metavar="DATA"),
    ] = None,
    /,
    *,
    out: Annotated[Path | None, Option("Folder of the run.", metavar="DIR", default="runs/PRESET")] = None,
    recipe: Annotated[
        str | None, Option("Name or TOML file of a recipe; flags override it.", default="the preset's")
    ] = None,
    changes: Annotated[
        tuple[str, ...],
        Option("Change a key of the preset: blocks=[2,2]. Repeats.", metavar="KEY=VALUE", flag="--set"),
    ] = (),
    devices: Annotated[
        int | None, Option("Processes on this machine.", least=1, default="all GPUs, or 1")
    ] = None,
    resume: Annotated[bool, Option("Continue the run in --out.")] = False,
    given: Annotated[dict[str, Any], Typed(TrainOptions)],
) -> None:
    """Train a generative classifier, or the ResNet that matches it.

    The recipe of the preset decides where an option is left out; the defaults below hold where the recipe
    says nothing.
    """
    check_call(data, out, recipe, resume)
    if changes:
        given["model"] = _parsed(changes)

    from candid.reports.plots import style
    from candid.reports.plots.training import curves
    from candid.training.display import TrainingDisplay
    from candid.training.train import train as run_training

    result = run_training(
        data,
        out=out,
        recipe=recipe,
        resume=resume,
        devices=devices,
        progress=TrainingDisplay(),
        after_epoch=lambda folder, rows: style.save(curves(rows), folder.path / "curves.png"),
        **given,
    )
    if result.finished and is_first_process():
        _print_results(result.best, result.results)


def _parsed(settings: tuple[str, ...]) -> dict[str, Any]:
    """Return ``("blocks=[2,2]", "entry=none")`` as a dictionary; values are TOML, or plain text."""
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


def _print_results(best: Path, results: dict[str, Any]) -> None:
    table = Table(title=f"the best model, in {escape(str(best))}", title_justify="left")
    for column in ("", "accuracy", "cross-entropy (nats)", "bits/dim"):
        table.add_column(column, justify="right" if column else "left")
    for part, name in (("val", "validation"), ("test", "test")):
        if part in results:
            metrics = results[part]
            bits = f"{metrics['bits_per_dim']:.3f}" if "bits_per_dim" in metrics else ""
            table.add_row(name, f"{100 * metrics['accuracy']:.2f} %", f"{metrics['cross_entropy']:.3f}", bits)
    Console().print(table)

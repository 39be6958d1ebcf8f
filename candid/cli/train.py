"""The command that trains a model."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from candid._support.config import Option
from candid._support.errors import CandidError
from candid._support.progress import is_first_process
from candid.cli.options import Typed, command
from candid.cli.show import safe
from candid.models.eyes.registry import DEFAULT_EYE, EYES
from candid.training.options import TrainOptions, check_call


@command
def train(
    data: Annotated[
        str | None,
        Option("'digits', a folder of images, idx files or CIFAR-10 batches, or tar shards.", metavar="DATA"),
    ] = None,
    /,
    *,
    out: Annotated[
        Path | None, Option("Folder of the run.", metavar="DIR", default="runs/PRESET, or runs/photos")
    ] = None,
    recipe: Annotated[
        str | None, Option("Name or TOML file of a recipe; flags override it.", default="the preset's")
    ] = None,
    changes: Annotated[
        tuple[str, ...],
        Option(
            "Change a key of the preset: blocks=[2,2]. Repeat for more.", metavar="KEY=VALUE", flag="--set"
        ),
    ] = (),
    devices: Annotated[
        int | None, Option("Processes on this machine.", least=1, default="all GPUs, or 1")
    ] = None,
    resume: Annotated[bool, Option("Continue the run in --out.")] = False,
    eye: Annotated[
        str | None,
        Option(
            f"Pretrained network for photos: {', '.join(EYES)}, several joined by +, or a file.",
            default=f"{DEFAULT_EYE} for photos",
        ),
    ] = None,
    priors: Annotated[
        Literal["frequency", "uniform"] | None,
        Option("Photos: how probable classes are before a photo is seen.", default="frequency"),
    ] = None,
    no_thumbnails: Annotated[
        bool, Option("Photos: keep no small pictures of known photos with the model.")
    ] = False,
    given: Annotated[dict[str, Any], Typed(TrainOptions)],
) -> None:
    """Train a generative classifier, or the ResNet that matches it.

    A folder of photos of 96 pixels and more becomes a photo model in seconds to minutes: a pretrained eye and
    a generative head. Photo models have the options --out, --resume, --devices, --eye, --priors,
    --no-thumbnails, --holdout, --val-data, --split-seed, --only, --skip-bad and --seed; --workers
    changes nothing, since threads load photos. Smaller images train an invertible network on pixels; so do
    --preset, --recipe, --set, --baseline and --start.

    Tar shards can come from a command: DATA or --val-data is then 'pipe:COMMAND'. The option --allow-pipe,
    which every command takes, must be typed on the same command line.

    If an option is not given, the preset's recipe sets it; if the recipe does not, the default below holds.
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
        eye=eye,
        priors=priors,
        thumbnails=False if no_thumbnails else None,
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
    table = Table(title=f"the best model, in {safe(best)}", title_justify="left")
    has_bits = any("bits_per_dim" in results.get(part, {}) for part in ("val", "test"))
    for column in ("", "accuracy", "cross-entropy (nats)", *(["bits/dim"] if has_bits else [])):
        table.add_column(column, justify="right" if column else "left")
    unseen = "out of fold" if results.get("out_of_fold") else "validation"
    for part, name in (("val", unseen), ("test", "test")):
        if part in results:
            metrics = results[part]
            bits = [f"{metrics['bits_per_dim']:.3f}"] if "bits_per_dim" in metrics else []
            table.add_row(
                name, f"{100 * metrics['accuracy']:.2f} %", f"{metrics['cross_entropy']:.3f}", *bits
            )
    Console().print(table)

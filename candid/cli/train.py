"""The command that trains a model."""

import tomllib
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import is_first_process
from candid._support.text import printable
from candid.cli.app import Panel, Typed, command, safe, show_table
from candid.inference.options import Devices
from candid.training.options import PhotoOptions, TrainOptions, VectorOptions, check_call

if TYPE_CHECKING:
    from candid._support.progress import Row
    from candid.training.run_folder import RunFolder

WEAKEST = 5
"""Classes whose results are shown after training; the report has all."""
PHOTOS, NETWORKS, FEATURES = Panel("Photos"), Panel("Networks on pixels"), Panel("Networks on features")


@command
def train(
    data: Annotated[
        str | None,
        Option(
            "'digits', a folder of images, idx files or CIFAR-10 batches, tar shards, or features (.npz).",
            metavar="DATA",
        ),
    ] = None,
    /,
    *,
    out: Annotated[
        Path | None,
        Option("Folder of the run.", metavar="DIR", default="runs/photos, or runs/PRESET"),
        PHOTOS,
    ] = None,
    resume: Annotated[bool, Option("Continue the run in --out."), PHOTOS] = False,
    keep_old: Annotated[
        bool, Option("Keep a photo model that is trained again: --out mine keeps it as mine.1."), PHOTOS
    ] = False,
    devices: Annotated[Devices, PHOTOS] = None,
    photos: Annotated[dict[str, Any], Typed(PhotoOptions), PHOTOS],
    recipe: Annotated[
        str | None,
        Option("Name or TOML file of a recipe; flags override it.", default="the preset's"),
        NETWORKS,
    ] = None,
    changes: Annotated[
        tuple[str, ...],
        Option(
            "Change a key of the preset: blocks=[2,2]. Repeat for more.", metavar="KEY=VALUE", flag="--set"
        ),
        NETWORKS,
    ] = (),
    networks: Annotated[dict[str, Any], Typed(TrainOptions), NETWORKS],
    vectors: Annotated[dict[str, Any], Typed(VectorOptions), FEATURES],
) -> None:
    """Train a generative classifier, or the ResNet that matches it.

    A folder of photos of 96 pixels and more becomes a photo model in seconds to minutes: a pretrained eye and
    a generative head. Smaller images train an invertible network on pixels; so do --preset, --recipe, --set,
    --baseline and --start. Networks take the options of photos, too, except --eye, --priors and --thumbnails.

    --preset vector trains an invertible network on features: of photos seen through --eye, or those of a file
    with the arrays features, labels and class_names. It takes --beta, --epochs (6), --batch (250),
    --learning-rate (0.001), --label-smoothing (0), --holdout (0.2), and the options of its own below.

    If an option of a network is not given, the preset's recipe sets it; if the recipe does not, the default
    below holds.
    """
    check_call(data, out, recipe, resume)
    options = {**photos, **networks, **vectors}
    if changes:
        options["model"] = _parsed(changes)

    from candid._support.progress import TrainingDisplay
    from candid.training.train import train as run_training

    result = run_training(
        data,
        out=out,
        recipe=recipe,
        resume=resume,
        keep_old=keep_old,
        devices=devices,
        progress=TrainingDisplay(),
        after_epoch=_draw_curves,
        **options,
    )
    if result.finished and is_first_process():
        _print_results(result.best, result.results)
        _print_next(result.folder, data)


def _draw_curves(folder: "RunFolder", rows: "list[Row]") -> None:
    from candid.reports.plots import style
    from candid.reports.plots.comparison import curves

    style.save(curves(rows), folder.path / "curves.png")


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


def _print_next(run: Path, data: str | None) -> None:
    """Print the commands that make use of the model in the folder ``run``."""
    if data is None:  # the run was resumed
        data = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["data"]
    model, data = quote(str(run)), quote(data)
    print("next, for example:")
    for line, purpose in (
        (f"candid examine {model} PHOTOS", "judge new photos"),
        (f"candid evaluate {model} {data}", "all figures"),
        (f"candid audit {model} --data {data} --quick", "one page to decide by"),
        (f"candid serve {model}", "a web page of your own"),
    ):
        print(printable(f"  {line}  # {purpose}"))


def _print_results(best: Path, results: dict[str, Any]) -> None:
    table = Table(title=f"the best model, in {safe(best)}", title_justify="left")
    densities = {"bits_per_dim": "bits/dim", "nats_per_feature": "nats/feature"}
    shown = [name for name in densities if name in results.get("val", {})]
    for column in ("", "accuracy", "cross-entropy (nats)", *map(densities.__getitem__, shown)):
        table.add_column(column, justify="right" if column else "left")
    unseen = "out of fold" if results.get("out_of_fold") else "validation"
    for part, name in (("val", unseen), ("test", "test")):
        if part in results:
            metrics = results[part]
            of_density = [f"{metrics[density]:.3f}" for density in shown]
            table.add_row(
                name, f"{100 * metrics['accuracy']:.2f} %", f"{metrics['cross_entropy']:.3f}", *of_density
            )
    Console().print(table)
    if "by_class" in results:
        from candid.judging.by_class import ByClass

        by_class = ByClass.from_dict(results["by_class"])
        show_table(*by_class.for_terminal("By class", WEAKEST), tight=True)

"""The command line: it parses, calls one function and shows the result.

Commands import what they need themselves, after their checks: help and mistakes don't wait for torch.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.exceptions import TyperException

from candid._support.errors import CandidError, did_you_mean
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
    models as cli_models,
)
from candid.cli import (
    plane as cli_plane,
)
from candid.cli import (
    serve as cli_serve,
)
from candid.cli.evaluate import JsonFlag
from candid.models import zoo

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
def info(
    target: Annotated[
        str, typer.Argument(metavar="PRESET|MODEL", help="A preset, a model's folder, or a bundled model.")
    ],
    classes: Annotated[int | None, typer.Option(help="Number of classes, for a preset.")] = None,
    mixing: Annotated[
        Literal["orthogonal", "permutation"] | None, typer.Option(help="Channel mixing, for a preset.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Parameters, cost and sizes by stage, beside a ResNet of the same layout."""
    from candid.models.info import describe

    description = describe(_config(target, classes=classes, mixing=mixing))
    if as_json:
        print(json.dumps(description))
    else:
        _print_description(target, description)


def _config(target: str, **changes: Any) -> Any:
    from candid.models.checkpoint import load_config
    from candid.models.flow.presets import PRESETS, preset

    changes = {key: value for key, value in changes.items() if value is not None}
    if target in PRESETS:
        return preset(target, **changes)
    if not Path(target).exists() and target not in zoo.names():
        known = [*PRESETS, *zoo.names()]
        raise CandidError(f"There is no preset or model '{target}': {did_you_mean(target, known)}")
    if changes:
        raise CandidError(
            f"'{target}' is a finished model: {' and '.join(changes)} can only change a preset."
        )
    return load_config(target)


def _print_description(name: str, description: dict[str, Any]) -> None:
    resnet = description["resnet"]
    console = Console()
    counts = Table(title=f"{escape(name)}: size and cost", title_justify="left")
    counts.add_column("")
    for column in ("generative", "ResNet"):
        counts.add_column(column, justify="right")
    for key, label in (
        ("network_parameters", "network parameters"),
        ("total_parameters", "all parameters (with means / linear layer)"),
    ):
        counts.add_row(label, f"{description[key]:,}", f"{resnet[key]:,}")
    counts.add_row(
        "10⁹ multiply-accumulates an image", f"{description['gmacs']:.4g}", f"{resnet['gmacs']:.4g}"
    )
    console.print(counts)

    stages = Table(title=f"{escape(name)}: by stage, generative / ResNet", title_justify="left")
    for column in ("layer", "blocks", "image size", "channels", "receptive field"):
        stages.add_column(column, justify="left" if column == "layer" else "right")
    for ours, theirs in zip(description["stages"], resnet["stages"], strict=True):
        height, width = ours["size"]
        fields = (
            "∞" if row["receptive_field"] is None else str(row["receptive_field"]) for row in (ours, theirs)
        )
        stages.add_row(
            _joined(ours["layer"], theirs["layer"]),
            str(ours["blocks"] or ""),
            f"{height} x {width}",
            f"{ours['channels']:,} / {theirs['channels']:,}",
            " / ".join(fields),
        )
    console.print(stages)


def _joined(ours: str, theirs: str) -> str:
    """``"Haar pooling", "max pooling"`` to ``"Haar / max pooling"``."""
    if ours == theirs:
        return ours
    return f"{ours.removesuffix(' pooling') if theirs.endswith(' pooling') else ours} / {theirs}"


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A released checkpoint, such as beta_1.avg.pt, or torchvision's weights of a ResNet-50, 101 "
            "or 152, such as resnet50-0676ba61.pth."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write the model to.")],
    class_names: Annotated[Path | None, typer.Option(help="A text file with one class name a line.")] = None,
) -> None:
    """Bring in a checkpoint that the paper's authors released for ImageNet, or torchvision's ResNet."""
    if out.is_file():
        raise CandidError(f"'{out}' is a file: name a folder to write the model to.")
    names = None
    if class_names is not None:
        try:
            names = class_names.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise CandidError(f"'{class_names}' is not a UTF-8 text file: {error}.") from error

    from candid.models.checkpoint import save
    from candid.models.importers.torchvision import import_any

    model = import_any(file, names)
    save(model, out)
    channels, height, width = model.image_shape
    print(f"{out}: {model.config.classes} classes, {channels} x {height} x {width} images")


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
        Literal["none", "shift", "wobble", "resized"] | None, typer.Option(help="Random crops.")
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
    cli_models.models,
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

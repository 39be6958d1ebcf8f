"""The commands that measure trained models: evaluate, calibrate, compare."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.errors import CandidError
from candid._support.text import METRICS, short_name

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a saved model.")]
Devices = Annotated[
    int | None, typer.Option(help="Processes on this machine.", show_default="all GPUs, or 1")
]
Workers = Annotated[int, typer.Option(help="Loading processes for each process.")]
Images = Annotated[int | None, typer.Option(help="Only so many images of each set, evenly spread.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out images that can't be read.")]
PartOption = Annotated[
    Literal["train", "val", "test", "all"] | None,
    typer.Option(help="Which images of DATA.", show_default="as it has: test, val, all"),
]
OtherImages = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="Other images to tell apart: a folder, a data set, 'uniform-noise' or 'constant'. Repeats.",
    ),
]
TestName = Annotated[
    str | None,
    typer.Option(help="The test that verdicts rest on.", show_default="joint; of a ResNet, mahalanobis"),
]
Novelty = Annotated[
    float | None,
    typer.Option(help="Share of usual images that may be called novel.", show_default="0.01"),
]
ErrorLevel = Annotated[
    float | None,
    typer.Option(
        help="Share of usual images whose class may be missing among those named.", show_default="0.05"
    ),
]


def evaluate(
    model: ModelFolder,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="As for 'candid train': a data set, with labels.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The folder for results.", show_default="evaluation/MODEL")
    ] = None,
    part: PartOption = None,
    ood: OtherImages = None,
    ensemble: Annotated[
        list[Path] | None, typer.Option(metavar="MODEL", help="One more model, for WAIC. Repeats.")
    ] = None,
    ten_crop: Annotated[
        bool, typer.Option("--ten-crop", help="Accuracy of posteriors averaged over ten crops, too.")
    ] = False,
    temperature: Annotated[
        bool, typer.Option("--temperature", help="Figures with temperature scaling beside the others.")
    ] = False,
    test: TestName = None,
    novelty: Novelty = None,
    error: ErrorLevel = None,
    images: Images = None,
    skip_bad: SkipBad = False,
    devices: Devices = None,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """Accuracy, likelihood, calibration, out-of-distribution tests and verdicts of a model."""
    others = named(ood, "--ood", "NAME=PATH")
    out = out or Path("evaluation") / short_name(model)

    from candid._support.progress import TerminalProgress
    from candid.evaluation.evaluate import Request
    from candid.evaluation.evaluate import evaluate as run_evaluation
    from candid.evaluation.output import remove_older, write

    progress = TerminalProgress()
    request = Request(
        model=model,
        data=data,
        out=out,
        part=part,
        ood=others,
        ensemble=tuple(ensemble or ()),
        ten_crop=ten_crop,
        temperature=temperature,
        test=test,
        novelty=novelty,
        error=error,
        images=images,
        skip_bad=skip_bad,
        devices=devices,
        workers=workers,
    )
    evaluation = run_evaluation(request, progress)
    if evaluation is None:
        return
    files = write(evaluation, out)
    with progress.console.status("drawing figures"):
        files += _figures(evaluation, out)
    remove_older(out, files)
    if as_json:
        print(json.dumps(evaluation.metrics))
    else:
        _print_metrics(evaluation.metrics)
        names = ", ".join(file.name for file in files)
        progress.log(f"Written to {out}: {names}; figures as SVG, too.")


def named(values: list[str] | None, option: str, form: str) -> dict[str, str]:
    """``{"mnist": "data/mnist"}`` of ``["mnist=data/mnist"]``."""
    found: dict[str, str] = {}
    for value in values or ():
        name, equals, what = value.partition("=")
        if not name or not equals or not what:
            raise CandidError(f"{option} takes {form}, not '{value}'.")
        if name in found:
            raise CandidError(f"Two {option} have the name '{name}': give each a name of its own.")
        found[name] = what
    return found


def _figures(evaluation: Any, out: Path) -> list[Path]:
    from candid.evaluation.calibration_error import all_bins, top_bins
    from candid.reports.plots import evaluation as evaluation_plots
    from candid.reports.plots import style
    from candid.trust.scores import SCORES

    found, scaled = evaluation.predictions, evaluation.scaled
    drawn = {
        "calibration": evaluation_plots.calibration(
            all_bins(found.posterior, found.labels),
            top_bins(found.posterior, found.labels),
            scaled=None if scaled is None else top_bins(scaled.posterior, scaled.labels),
        )
    }
    detection = evaluation.detection
    if detection is not None and "log_density" in detection.inside:
        dimensions = evaluation.model.dimensions
        paper = {
            test.name: test.new_detector().fit(detection.held_out.statistics["log_density"] / dimensions)
            for test in detection.tests
            if test.family == "paper"
        }
        drawn["ood_zones"] = evaluation_plots.ood_zones(
            detection.held_out.statistics["log_density"] / dimensions,
            paper,
            0.1,
            {name: each["log_density"] / dimensions for name, each in detection.outside.items()},
            "log p(x) per dimension (nats)",
        )
    if detection is not None and detection.outside:
        aucs = {
            test: {name: tests[test]["auc"] for name, tests in evaluation.metrics["ood"].items()}
            for test in detection.scores_inside
        }
        by_set = {name: {test: aucs[test][name] for test in aucs} for name in detection.outside}
        kinds = {score.name: score.family for score in SCORES.values()}
        drawn["roc"] = evaluation_plots.roc_curves(detection.curves(), by_set, kinds)
        drawn["auc"] = evaluation_plots.auc_table(aucs, kinds)
    return [style.save(figure, out / f"{name}.png", svg=True) for name, figure in drawn.items()]


def _print_metrics(metrics: dict[str, Any]) -> None:
    console = Console()
    title = f"{metrics['model']} on {metrics['images']:,} images of {metrics['data']} ({metrics['part']})"
    columns = {"": metrics}
    for key, name in (("ten_crop", "ten crops"), ("temperature_scaled", "with temperature")):
        if key in metrics:
            columns[name] = metrics[key]
    table = Table(
        title=escape(title),
        title_justify="left",
        caption="in brackets: 95 % intervals, bootstrapped; of accuracies and OCE exact",
    )
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=not name)
    for key, metric in METRICS.items():
        if key in metrics:
            own, *others = (_shown(each, key) for each in columns.values())
            table.add_row(metric.label, own + _interval(metrics, key), *others)
    console.print(table)
    if metrics.get("ood"):
        _print_ood(console, metrics)
    if "verdicts" in metrics:
        _print_verdicts(console, metrics)


def _shown(figures: dict[str, Any], key: str) -> str:
    value = figures.get(key)
    if value is None:
        return "none so sure" if key == "oce" and key in figures else ""
    return METRICS[key].shown(value)


def _interval(figures: dict[str, Any], key: str) -> str:
    ends = figures["intervals"].get(key)
    return "" if ends is None else f" [dim]({METRICS[key].interval(ends)})[/]"


def _print_ood(console: Console, metrics: dict[str, Any]) -> None:
    sets = metrics["ood"]
    table = Table(
        title="Area under the ROC curve (%) for telling other images from the data's",
        title_justify="left",
        caption=f"last column: share of the data's images with p ≤ 0.05, "
        f"from {metrics['held_out_images']:,} held-out ones",
    )
    table.add_column("test", no_wrap=True)
    for name in (*sets, "false positives"):
        table.add_column(escape(name), justify="right", overflow="fold")
    best = {name: f"{100 * max(each['auc'] for each in tests.values()):.1f}" for name, tests in sets.items()}
    for test, rates in metrics["false_positives"].items():
        aucs = {name: tests[test]["auc"] for name, tests in sets.items()}
        texts = {name: f"{100 * auc:.1f}" for name, auc in aucs.items()}
        cells = (f"[bold]{text}[/]" if text == best[name] else text for name, text in texts.items())
        table.add_row(test, *cells, f"{100 * rates['0.05']:.1f} %")
    console.print(table)


def _print_verdicts(console: Console, metrics: dict[str, Any]) -> None:
    found = metrics["verdicts"]
    table = Table(
        title=f"Verdicts by the test '{found['test']}', novelty {found['novelty']:.2g}, "
        f"error {found['error']:.2g}",
        title_justify="left",
    )
    for column in ("images", "accept", "ambiguous", "novel"):
        table.add_column(column, justify="left" if column == "images" else "right")
    for name, shares in found["sets"].items():
        table.add_row(
            escape(name), *(f"{100 * shares[kind]:.1f} %" for kind in ("accept", "ambiguous", "novel"))
        )
    console.print(table)


def calibrate(
    model: ModelFolder,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="What the model was trained on, or other labelled images.")
    ],
    part: PartOption = None,
    images: Images = None,
    skip_bad: SkipBad = False,
    devices: Devices = None,
    workers: Workers = 2,
) -> None:
    """Let a model carry what held-out images look like to it: p-values and verdicts come from that.

    'candid train' does it at its end. By default the images are those of DATA that were kept out of
    training; of data that the model was not trained on, its test images, else val, else all. Evaluate the
    model on others: with --images, only so many of them are used, and p-values are checked on the rest.
    """
    from candid._support.progress import TerminalProgress
    from candid.trust.calibrate import calibrate as calibrated

    progress = TerminalProgress()
    options = {"part": part, "images": images, "skip_bad": skip_bad, "devices": devices, "workers": workers}
    found = calibrated(model, data, progress, **options)
    if found is not None:
        progress.log(f"{model} now carries the scores of {len(found):,} held-out images.")


def compare(
    evaluations: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders that 'candid evaluate' wrote.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for the table and the figure.")] = Path("comparison"),
    as_json: JsonFlag = False,
) -> None:
    """The trade-off between likelihood and classification over several evaluated models."""
    from candid.evaluation.compare import read_rows, write_table

    rows = read_rows(evaluations)

    from candid.reports.plots import comparison as comparison_plots
    from candid.reports.plots import style

    files = [
        write_table(rows, out),
        style.save(comparison_plots.trade_off(rows), out / "trade_off.png", svg=True),
    ]
    if as_json:
        print(json.dumps([row | {"beta": None if row["beta"] is None else str(row["beta"])} for row in rows]))
        return
    table = Table(title="Trade-off between likelihood and classification", title_justify="left")
    accuracy = "accuracy, ten crops" if rows[0]["crops"] == 10 else "accuracy"
    for column in ("model", "beta", "L_X", "L_Y", "bits/dim", accuracy, "OCE"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        numbers = (
            "–" if row[key] is None else form.format(row[key])
            for key, form in (("L_X", "{:.3f}"), ("L_Y", "{:.3f}"), ("bits_per_dim", "{:.3f}"))
        )
        oce = "–" if row["oce"] is None else f"{row['oce']:.2f}"
        beta = "ResNet" if row["beta"] is None else f"{row['beta']:g}".replace("inf", "∞")
        table.add_row(escape(row["name"]), beta, *numbers, f"{100 * row['accuracy']:.2f} %", oce)
    console = Console()
    console.print(table)
    console.print(f"Written: {', '.join(map(str, files))}", soft_wrap=True, highlight=False, markup=False)

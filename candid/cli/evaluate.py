"""The commands that measure models: evaluate, calibrate, compare."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid._support.text import METRICS, number, percent, printable, short_name, with_interval
from candid.cli.app import MODEL_HELP, JsonFlag, ModelName, command, show_table
from candid.evaluation.options import CompareOptions, EvaluateOptions
from candid.inference.options import CalibrateOptions

if TYPE_CHECKING:
    from candid.evaluation.result import EvaluationResult

DATA_HELP = "A data set with labels, as for 'candid train'; also as --data DATA."
DataName = Annotated[str, Option(DATA_HELP, metavar="DATA")]
ROOM = 2
"""The number of sets of other images up to which a table has room for intervals."""


@command
def evaluate(
    model: Annotated[str | None, Option(MODEL_HELP, metavar="MODEL")] = None,
    data: Annotated[str | None, Option(DATA_HELP, metavar="DATA")] = None,
    /,
    *,
    options: EvaluateOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure accuracy, likelihood, calibration error, detection and verdicts of a model.

    A classifier of any library is evaluated from its stored arrays, without MODEL and DATA: --held-out and
    --test name npz files with the keys logits, labels and, if there are any, features, paths, class_names.
    """
    from candid.evaluation.evaluate import evaluate as run
    from candid.evaluation.result import remove_older, write

    out = options.out or Path("evaluation") / short_name(Path(model or options.name or "classifier"))
    progress = TerminalProgress()
    result = run(model, data, progress, **vars(replace(options, out=out)))
    if result is None:
        return
    files = write(result, out)
    with progress.console.status("drawing figures"):
        files += _figures(result, out)
    remove_older(out, files)
    for note in result.notes:
        progress.log(note.text)
    if as_json:
        print(json.dumps(result.metrics))
        return
    _show(result.metrics)
    progress.log(f"Written to {out}: {', '.join(file.name for file in files)}; figures also as SVG.")


def _figures(result: "EvaluationResult", out: Path) -> list[Path]:
    from candid.evaluation.calibration_error import all_bins, top_bins
    from candid.models.protocol import density_dimensions
    from candid.reports.plots import evaluation as plots
    from candid.reports.plots.style import save
    from candid.trust.ranking import new_detector
    from candid.trust.scores import SCORES

    predictions, scaled, detection = result.predictions, result.scaled, result.detection
    drawn = {
        "calibration": plots.calibration(
            all_bins(predictions.posterior, predictions.labels),
            top_bins(predictions.posterior, predictions.labels),
            scaled=None if scaled is None else top_bins(scaled.posterior, scaled.labels),
        ),
        "risk_coverage": plots.risk_coverage(result.metrics["selective"]),
    }
    if detection is not None and result.model is not None and "log_density" in detection.held_out:
        dimensions = density_dimensions(result.model)
        held_out = detection.held_out["log_density"] / dimensions
        scores = [score for score in detection.scores if score.family == "paper"]
        paper = {score.name: new_detector(score).fit(held_out) for score in scores}
        others = {name: columns["log_density"] / dimensions for name, columns in detection.outside.items()}
        drawn["ood_zones"] = plots.ood_zones(held_out, paper, 0.1, others, "log p(x) per dimension (nats)")
    if detection is not None and detection.outside:
        by_set = {
            name: {score: metrics["auc"] for score, metrics in scores.items()}
            for name, scores in result.metrics["ood"].items()
        }
        aucs = {score: {name: by_set[name][score] for name in by_set} for score in detection.values_inside}
        families = {score.name: score.family for score in SCORES.values()}
        drawn["roc"] = plots.roc_curves(detection.curves(), by_set, families)
        drawn["auc"] = plots.auc_table(aucs, families)
    return [save(figure, out / f"{name}.png", svg=True) for name, figure in drawn.items()]


def _show(metrics: dict[str, Any]) -> None:
    title = f"{metrics['model']} on {metrics['images']:,} images of {metrics['data']} ({metrics['part']})"
    published = metrics.get("as_published", {})
    versions = {
        "as published": published,
        "ten crops": published.get("ten_crop") or metrics.get("ten_crop"),
        "with temperature": metrics.get("temperature_scaled"),
    }
    present = {name: values for name, values in versions.items() if values}
    rows = []
    for key in METRICS:
        if key in metrics:
            cells = (_value(values, key) for values in present.values())
            rows.append((METRICS[key].label, _value(metrics, key) + _interval(metrics, key), *cells))
    show_table(title, ("", "(95 % interval)", *present), rows)
    if metrics.get("ood"):
        _show_detection(metrics["ood"], metrics["false_positives"])
    if "verdicts" in metrics:
        _show_verdicts(metrics["verdicts"])
    _show_classes(metrics["by_class"])
    if "groups" in metrics:
        from candid.evaluation.compare import group_table, group_title

        caption = group_title(metrics["groups"])
        show_table(caption[0].upper() + caption[1:], *group_table(metrics["groups"]), tight=True)
    if "verdicts" in metrics["selective"]:
        _show_selective(metrics["selective"], metrics["part"])


def _show_classes(stored: dict[str, Any]) -> None:
    from candid.judging.by_class import ByClass

    table = ByClass.from_dict(stored)
    show_table(*table.for_terminal("By class"), tight=True)
    for sentence in table.sentences():
        print(printable(sentence, breaks=False))


def _show_detection(sets: dict[str, Any], rates: dict[str, Any]) -> None:
    room = len(sets) <= ROOM
    rows = [
        (
            score,
            *(
                with_interval(scores[score]["auc"], scores[score]["intervals"]["auc"] if room else None)
                for scores in sets.values()
            ),
            f"{100 * rate['0.05']:.1f} %",
        )
        for score, rate in rates.items()
    ]
    intervals = "95 % interval" if room else "95 % intervals are in ood.csv"
    title = f"Area under the ROC curve (%; {intervals}); share of the data's images with p ≤ 0.05"
    show_table(title, ("score", *sets, "false positives"), rows, tight=True)


def _show_verdicts(verdicts: dict[str, Any]) -> None:
    from candid.trust.verdict import KINDS

    levels = f"novelty {verdicts['novelty']:.2g}, error {verdicts['error']:.2g}"
    title = f"Verdicts by the score '{verdicts['score']}', {levels}"
    rows = [
        (name, *(f"{100 * shares[kind]:.1f} %" for kind in KINDS))
        for name, shares in verdicts["sets"].items()
    ]
    show_table(title, ("images", *KINDS), rows)
    for sentence in verdicts["sentences"]:
        print(printable(sentence))


def _show_selective(metrics: dict[str, Any], part: str) -> None:
    from candid.evaluation.selective import RULES, sentences, table

    title = f"What is accepted of {metrics['images']:,} images (%; 95 % interval)"
    show_table(title, ("", *RULES.values()), table(metrics, part), tight=True)
    for sentence in sentences(metrics):
        print(printable(sentence))


def _value(metrics: dict[str, Any], key: str) -> str:
    if metrics.get(key) is None:
        return "none above 99.7 %" if key == "oce" and key in metrics else ""
    return METRICS[key].shown(metrics[key])


def _interval(metrics: dict[str, Any], key: str) -> str:
    ends = metrics["intervals"].get(key)
    return "" if ends is None else f" ({METRICS[key].interval(ends)})"


@command
def calibrate(model: ModelName, data: DataName, /, options: CalibrateOptions) -> None:
    """Calibrate a model: measure held-out images and store their scores with it.

    P-values and verdicts need these scores. 'candid train' does it at its end. By default the images are
    those of DATA that were kept out of training; of data that the model was not trained on, its test images,
    else val, else all. Evaluate the model on other images: with --images, only this number of them is used,
    and p-values are checked on the rest.
    """
    from candid.judging.calibrate import calibrate as run

    progress = TerminalProgress()
    held_out = run(model, data, progress, **vars(options))
    if held_out is not None:
        progress.log(f"{model} now carries the scores of {len(held_out):,} held-out images.")


@command
def refit(
    model: ModelName,
    data: DataName,
    /,
    *,
    out: Annotated[
        Path | None, Option("Folder for the refitted model.", metavar="DIR", default="the model's own folder")
    ] = None,
    options: CalibrateOptions,
) -> None:
    """Refit the class means of a model: held-out images say how far apart they are.

    Posteriors stay the same. Densities, decision spaces and expected uncertainties then describe the images.
    'candid train' does it at its end. DATA is what the model was trained on, or other images of its classes.
    """
    from candid.training.refit import refit as run

    progress = TerminalProgress()
    result = run(model, data, out=out, progress=progress, **vars(options))
    progress.log(f"{model}: {result}")


@command
def compare(
    evaluations: Annotated[
        list[str], Option("Folders that 'candid evaluate' wrote; no models.", metavar="FOLDER...")
    ],
    /,
    options: CompareOptions,
    as_json: JsonFlag = False,
) -> None:
    """Compare evaluated models: the trade-off between likelihood and classification."""
    from candid.evaluation.compare import ACCEPTED, class_results, class_table
    from candid.evaluation.compare import compare as run
    from candid.reports.plots.comparison import trade_off
    from candid.reports.plots.style import save

    rows = run(evaluations, **vars(options))
    figure = save(trade_off(rows), options.out / "trade_off.png", svg=True)
    if as_json:
        print(json.dumps([row | {"beta": None if row["beta"] is None else str(row["beta"])} for row in rows]))
        return
    accuracy = "accuracy, ten crops" if rows[0]["crops"] == 10 else "accuracy"
    shown = [
        (
            row["name"],
            "–" if row["beta"] is None else number(row["beta"]),
            *("–" if row[key] is None else f"{row[key]:.3f}" for key in ("L_X", "L_Y", "bits_per_dim")),
            f"{100 * row['accuracy']:.2f} %",
            "–" if row["oce"] is None else f"{row['oce']:.2f}",
        )
        for row in rows
    ]
    columns = ("model", "beta", "L_X", "L_Y", "bits/dim", accuracy, "OCE")
    how = ", measured as published" if rows[0]["as_published"] else ""
    show_table(f"Trade-off between likelihood and classification{how}", columns, shown)
    accepted = [(row["name"], *(percent(row[key], 2, sign=False) for key in ACCEPTED)) for row in rows]
    columns = ("model", "accepted", "right of accepted", "plain threshold", "of ambiguous", "AUGRC", "AURC")
    title = "What verdicts accept, and a plain threshold at equal coverage (%)"
    show_table(title, columns, accepted, tight=True)
    by_class = class_results([Path(folder) for folder in evaluations])
    if by_class:
        show_table("By class; the largest differences first", *class_table(by_class), tight=True)
    files = ", ".join(str(options.out / name) for name in ("comparison.csv", "by_class.csv"))
    print(printable(f"Written: {files}, {figure}"))

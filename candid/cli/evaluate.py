"""The commands that measure models: evaluate, calibrate, compare."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from candid._support.config import Option
from candid._support.progress import TerminalProgress
from candid._support.tables import with_interval
from candid._support.text import METRICS, hundredths, number, printable, short_name
from candid.cli.options import MODEL_HELP, JsonFlag, ModelName, command
from candid.cli.show import show_table
from candid.evaluation.options import CompareOptions, EvaluateOptions
from candid.trust.options import CalibrateOptions

if TYPE_CHECKING:
    from candid.evaluation.result import Evaluation
    from candid.trust.detectors import ScalarDetector

DATA_HELP = "A data set with labels, as for 'candid train'."
DataName = Annotated[str, Option(DATA_HELP, metavar="DATA")]
KINDS = ("accept", "ambiguous", "novel")
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
    from candid.evaluation.output import remove_older, write

    out = options.out or Path("evaluation") / short_name(Path(model or options.name or "classifier"))
    progress = TerminalProgress()
    found = run(model, data, progress, **vars(replace(options, out=out)))
    if found is None:
        return
    files = write(found, out)
    with progress.console.status("drawing figures"):
        files += _figures(found, out)
    remove_older(out, files)
    for note in found.notes:
        progress.log(note.text)
    if as_json:
        print(json.dumps(found.metrics))
        return
    _show(found.metrics)
    progress.log(f"Written to {out}: {', '.join(file.name for file in files)}; figures also as SVG.")


def _figures(found: "Evaluation", out: Path) -> list[Path]:
    from candid.evaluation.calibration_error import all_bins, top_bins
    from candid.models.protocol import density_dimensions
    from candid.reports.plots import evaluation as plots
    from candid.reports.plots.style import save
    from candid.trust.scores import SCORES

    own, scaled, detection = found.predictions, found.scaled, found.detection
    drawn = {
        "calibration": plots.calibration(
            all_bins(own.posterior, own.labels),
            top_bins(own.posterior, own.labels),
            scaled=None if scaled is None else top_bins(scaled.posterior, scaled.labels),
        ),
        "risk_coverage": plots.risk_coverage(found.metrics["selective"]),
    }
    known_densities = detection is not None and "log_density" in detection.held_out.statistics
    if detection is not None and found.model is not None and known_densities:
        dimensions = density_dimensions(found.model)
        known = detection.held_out.statistics["log_density"] / dimensions
        scores = [each for each in detection.scores if each.family == "paper"]
        paper = {each.name: cast("ScalarDetector", each.new_detector().fit(known)) for each in scores}
        others = {name: each["log_density"] / dimensions for name, each in detection.outside.items()}
        drawn["ood_zones"] = plots.ood_zones(known, paper, 0.1, others, "log p(x) per dimension (nats)")
    if detection is not None and detection.outside:
        by_set = {
            name: {score: each["auc"] for score, each in scores.items()}
            for name, scores in found.metrics["ood"].items()
        }
        aucs = {score: {name: by_set[name][score] for name in by_set} for score in detection.values_inside}
        families = {score.name: score.family for score in SCORES.values()}
        drawn["roc"] = plots.roc_curves(detection.curves(), by_set, families)
        drawn["auc"] = plots.auc_table(aucs, families)
    return [save(figure, out / f"{name}.png", svg=True) for name, figure in drawn.items()]


def _show(metrics: dict[str, Any]) -> None:
    title = f"{metrics['model']} on {metrics['images']:,} images of {metrics['data']} ({metrics['part']})"
    published = metrics.get("as_published", {})
    more = {
        "as published": published,
        "ten crops": published.get("ten_crop") or metrics.get("ten_crop"),
        "with temperature": metrics.get("temperature_scaled"),
    }
    present = {name: values for name, values in more.items() if values}
    rows = []
    for key in METRICS:
        if key in metrics:
            own = _value(metrics, key) + _interval(metrics, key)
            rows.append((METRICS[key].label, own, *(_value(each, key) for each in present.values())))
    show_table(title, ("", "(95 % interval)", *present), rows)
    if metrics.get("ood"):
        sets, rates = metrics["ood"], metrics["false_positives"]
        room = len(sets) <= ROOM
        rows = [
            (
                score,
                *(
                    with_interval(each[score]["auc"], each[score]["intervals"]["auc"] if room else None)
                    for each in sets.values()
                ),
                f"{100 * rate['0.05']:.1f} %",
            )
            for score, rate in rates.items()
        ]
        intervals = "95 % interval" if room else "95 % intervals are in ood.csv"
        title = f"Area under the ROC curve (%; {intervals}); share of the data's images with p ≤ 0.05"
        show_table(title, ("score", *sets, "false positives"), rows, tight=True)
    if "verdicts" in metrics:
        found = metrics["verdicts"]
        levels = f"novelty {found['novelty']:.2g}, error {found['error']:.2g}"
        title = f"Verdicts by the score '{found['score']}', {levels}"
        rows = [
            (name, *(f"{100 * shares[kind]:.1f} %" for kind in KINDS))
            for name, shares in found["sets"].items()
        ]
        show_table(title, ("images", *KINDS), rows)
        for sentence in found["sentences"]:
            print(printable(sentence))
    if "groups" in metrics:
        from candid.evaluation import groups

        caption = groups.title(metrics["groups"])
        show_table(caption[0].upper() + caption[1:], *groups.table(metrics["groups"]), tight=True)
    _show_selective(metrics)


def _show_selective(metrics: dict[str, Any]) -> None:
    from candid.evaluation.selective import sentences, table

    found = metrics["selective"]
    if "verdicts" not in found:
        return
    title = f"What is accepted of {found['images']:,} images (%; 95 % interval)"
    show_table(title, ("", "verdicts", "plain threshold"), table(found, metrics["part"]), tight=True)
    for sentence in sentences(found):
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
    from candid.trust.calibrate import calibrate as run

    progress = TerminalProgress()
    found = run(model, data, progress, **vars(options))
    if found is not None:
        progress.log(f"{model} now carries the scores of {len(found):,} held-out images.")


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
    found = run(model, data, out=out, progress=progress, **vars(options))
    progress.log(f"{model}: {found}")


@command
def compare(
    evaluations: Annotated[list[str], Option("Folders that 'candid evaluate' wrote.", metavar="FOLDER...")],
    /,
    options: CompareOptions,
    as_json: JsonFlag = False,
) -> None:
    """Compare evaluated models: the trade-off between likelihood and classification."""
    from candid.evaluation.compare import ACCEPTED
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
    accepted = [(row["name"], *(hundredths(row[key], 2) for key in ACCEPTED)) for row in rows]
    columns = ("model", "accepted", "right of accepted", "plain threshold", "of ambiguous", "AUGRC", "AURC")
    title = "What verdicts accept, and a plain threshold at equal coverage (%)"
    show_table(title, columns, accepted, tight=True)
    print(printable(f"Written: {options.out / 'comparison.csv'}, {figure}"))

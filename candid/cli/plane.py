"""The command that puts a few classes in a plane and draws it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from candid._support.errors import CandidError
from candid._support.progress import is_first_process
from candid.cli.evaluate import Devices, JsonFlag, ModelFolder, SkipBad, Workers


def plane(
    model: ModelFolder,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="As for 'candid train': what the model was trained on.")
    ],
    classes: Annotated[
        str | None,
        typer.Option(help="Two to ten classes: names, numbers or patterns, with commas between them."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/plane"),
    means_only: Annotated[
        bool, typer.Option("--means-only", help="Fine-tune only the means, not the network.")
    ] = False,
    epochs: Annotated[int, typer.Option(help="Of fine-tuning.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="The highest one.")] = 2e-3,
    beta: Annotated[
        float | None, typer.Option(help="Weight of classification.", show_default="the model's")
    ] = None,
    images: Annotated[int | None, typer.Option(help="Only so many test images, evenly spread.")] = None,
    skip_bad: SkipBad = False,
    devices: Devices = None,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """Draw the whole decision space of a few classes: a model of its own, with its means in a plane.

    MODEL is fine-tuned on the images of --classes in DATA; the result, OUT/model/best, is a model like any
    other. If MODEL is such a model already and --classes is left out, it is only drawn.
    """
    from candid.models import checkpoint
    from candid.training.display import TrainingDisplay

    if classes is not None and (out / "config.toml").exists():
        raise CandidError(
            f"'{out}' already has a run: choose another --out, or draw its plane with "
            f"'candid plane {out / 'model' / 'best'} DATA'."
        )
    loaded = checkpoint.load_any(model)
    progress = TrainingDisplay()
    if classes is not None:
        from candid.explanations.plane import fit_plane
        from candid.explanations.similarity import chosen_classes
        from candid.reports.plots import style
        from candid.reports.plots import training as training_plots

        outcome = fit_plane(
            loaded,
            data,
            chosen_classes(loaded.class_names, classes),
            out,
            means_only=means_only,
            epochs=epochs,
            learning_rate=learning_rate,
            beta=beta,
            skip_bad=skip_bad,
            workers=workers,
            devices=devices,
            progress=progress,
            after_epoch=lambda folder, rows: style.save(
                training_plots.curves(rows), folder.path / "curves.png"
            ),
        )
        if not outcome.finished or not is_first_process():
            return
        model = out / "model" / "best"
        loaded = checkpoint.load(model)
    from candid.models.protocol import require_latent

    if not require_latent(loaded, "A decision plane").mixture.planar:
        raise CandidError(f"The means of '{model}' lie in no plane: choose classes with --classes.")
    found = _draw(loaded, data, out, images, skip_bad, workers, progress)
    if as_json:
        print(json.dumps({"model": str(model), "classes": list(loaded.class_names), **found}))
    else:
        print(f"{model}: accuracy {100 * found['accuracy']:.2f} % on {found['images']:,} images")
        progress.log(f"Figure: {found['figure']}, as SVG, too.")


def _draw(
    model: Any, data: str, out: Path, images: int | None, skip_bad: bool, workers: int, progress: Any
) -> dict[str, Any]:
    from candid.data.datasets import open_part
    from candid.explanations.plane import decision_plane, located
    from candid.reports.plots import plane as plane_plots
    from candid.reports.plots import style

    chosen, preprocessing = open_part(data, model.class_names, None, model.record.config), model.preprocessing
    split = chosen.split.subsample(images).preprocess(preprocessing, skip_bad, progress, chosen.part)
    points, labels = located(model, split, preprocessing, workers, progress)
    drawn = decision_plane(model)
    accuracy = float((drawn.logits(points).argmax(1) == labels).double().mean())
    title = f"accuracy {100 * accuracy:.1f} % on {len(labels):,} {chosen.part} images"
    figure = plane_plots.decision_plane(drawn, points, labels, title)
    path = style.save(figure, out / "decision_plane.png", svg=True)
    return {"images": len(labels), "accuracy": accuracy, "figure": str(path)}

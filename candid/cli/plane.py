"""The command that puts a few classes in a plane and draws it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import is_first_process
from candid._support.text import printable
from candid.cli.app import JsonFlag, ModelName, command
from candid.inference.options import Devices
from candid.training.options import PlaneOptions

if TYPE_CHECKING:
    from candid._support.progress import Progress
    from candid.explanations.overview import Places
    from candid.models.decision_plane import DecisionPlane
    from candid.models.protocol import Model


@command
def plane(
    model: ModelName,
    data: Annotated[str, Option("What the model was trained on, as for 'candid train'.", metavar="DATA")],
    /,
    *,
    classes: Annotated[
        str | None,
        Option(
            "Two to ten classes (photo models: three to twelve): names, numbers or patterns, separated by "
            "commas.",
            metavar="CLASSES",
        ),
    ] = None,
    out: Annotated[Path, Option("Folder of the run.", metavar="DIR")] = Path("runs/plane"),
    images: Annotated[int | None, Option("Draw this number of test images, evenly spread.", least=1)] = None,
    devices: Devices = None,
    options: PlaneOptions,
    as_json: JsonFlag = False,
) -> None:
    """Draw the whole decision space of a few classes, with a model whose class means lie in a plane.

    MODEL is fine-tuned on the images of --classes in DATA, with its class means on a circle; the result,
    OUT/model/best, is a model like any other. If MODEL is such a model already and --classes is left out, it
    is only drawn. A photo model is not trained: a plane of three to twelve classes is fitted to training
    photos of DATA, and its other photos are drawn.
    """
    if classes is not None and (out / "config.toml").exists():
        raise CandidError(
            f"'{out}' already has a run: choose another --out, or draw its plane with "
            f"'candid plane {out / 'model' / 'best'} DATA'."
        )
    from candid._support.progress import TrainingDisplay
    from candid.models import checkpoint
    from candid.models.protocol import can

    loaded = checkpoint.load(model)
    display = TrainingDisplay()
    if not can(loaded, "invert"):
        record = _draw_photos(loaded, data, classes, out, images, options, display)
        _report(model, record, as_json, display)
        return
    full, numbers = None, None
    if classes is not None:
        from candid.explanations.similarity import chosen_classes
        from candid.reports.plots import style
        from candid.reports.plots.comparison import curves
        from candid.training.train import fit_plane

        full, numbers = loaded, chosen_classes(loaded.class_names, classes)
        result = fit_plane(
            loaded,
            data,
            numbers,
            out,
            options,
            devices,
            display,
            lambda folder, rows: style.save(curves(rows), folder.path / "curves.png"),
        )
        if not result.finished or not is_first_process():
            return
        model, loaded = str(result.best), result.model()
    if not can(loaded, "invert") or not loaded.geometry.planar:
        raise CandidError(f"The means of '{model}' lie in no plane: choose classes with --classes.")
    record = _draw(loaded, data, out, images, options, display, full, numbers)
    _report(model, record, as_json, display)


def _report(model: str, record: dict[str, Any], as_json: bool, display: "Progress") -> None:
    if as_json:
        print(json.dumps({"model": model, **record}))
        return
    print(f"{printable(model)}: accuracy {100 * record['accuracy']:.2f} % on {record['images']:,} images")
    if record["full_accuracy"] is not None:
        print(f"without the plane, choosing among the same classes: {100 * record['full_accuracy']:.2f} %")
    print(f"in the region that holds 90 % of the mixture: {100 * record['inside']:.1f} % of the images")
    display.log(f"Figure: {record['figure']}, also as SVG.")


def _draw(
    model: "Model",
    data: str,
    out: Path,
    images: int | None,
    options: PlaneOptions,
    progress: "Progress",
    full: "Model | None",
    numbers: Sequence[int] | None,
) -> dict[str, Any]:
    """Draw the plane of a planar model; ``full`` is the one it was made from, with these class numbers."""
    from candid.explanations.overview import open_images, project
    from candid.models.decision_plane import decision_plane

    plane = decision_plane(model)
    split, part = open_images(model, data, None, images, options.skip_bad, progress)
    places = project(model, split, plane, options.workers, progress)
    if full is not None:
        chosen = project(full, split, plane, options.workers, progress, numbers).predicted
        places = places._replace(predicted=chosen)
    return _drawn(plane, places, f"{part} images", out, full is not None)


def _draw_photos(
    model: "Model",
    data: str,
    classes: str | None,
    out: Path,
    images: int | None,
    options: PlaneOptions,
    progress: "Progress",
) -> dict[str, Any]:
    """Fit the plane of some classes of a photo model, which is not trained, and draw it."""
    from candid.explanations.overview import plane_of_photos
    from candid.explanations.similarity import chosen_classes

    names = model.class_names
    numbers = list(range(len(names)) if classes is None else chosen_classes(names, classes))
    plane, places, part = plane_of_photos(
        model, data, numbers, images, options.skip_bad, options.workers, progress
    )
    return _drawn(plane, places, f"{part} photos", out, True)


def _drawn(plane: "DecisionPlane", places: "Places", images: str, out: Path, full: bool) -> dict[str, Any]:
    """Draw images in a plane, and return the record of it."""
    from candid.reports.plots import style
    from candid.reports.plots.latent import decision_plane as draw

    points, labels = places.points, places.labels
    accuracy = float((plane.logits(points).argmax(1) == labels).mean())
    title = f"accuracy {100 * accuracy:.1f} % on {len(labels):,} {images}"
    path = style.save(draw(plane, points, labels, title), out / "decision_plane.png", svg=True)
    return {
        "classes": list(plane.class_names),
        "images": len(labels),
        "accuracy": accuracy,
        "full_accuracy": float((places.predicted == labels).mean()) if full else None,
        "inside": float(plane.inside(points).mean()),
        "figure": str(path),
    }

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
from candid.training.options import PlaneOptions

if TYPE_CHECKING:
    from candid._support.numbers import Array
    from candid._support.progress import Progress
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
        Option("Two to ten classes: names, numbers or patterns, separated by commas.", metavar="CLASSES"),
    ] = None,
    out: Annotated[Path, Option("Folder of the run.", metavar="DIR")] = Path("runs/plane"),
    images: Annotated[int | None, Option("Draw this number of test images, evenly spread.", least=1)] = None,
    devices: Annotated[
        int | None, Option("Processes on this machine.", least=1, default="all GPUs, or 1")
    ] = None,
    options: PlaneOptions,
    as_json: JsonFlag = False,
) -> None:
    """Draw the whole decision space of a few classes, with a model whose class means lie in a plane.

    MODEL is fine-tuned on the images of --classes in DATA; the result, OUT/model/best, is a model like any
    other. If MODEL is such a model already and --classes is left out, it is only drawn. A photo model is not
    fine-tuned: the plane is that of three of its classes.
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
    if loaded.density_of == "features":
        chosen = classes if classes is not None or len(loaded.class_names) != 3 else range(3)
        record = _draw_photos(loaded, data, chosen, out, images, options, display)
        _report(model, record, as_json, display)
        return
    if classes is not None:
        from candid.explanations.similarity import chosen_classes
        from candid.reports.plots import style
        from candid.reports.plots.comparison import curves
        from candid.training.train import fit_plane

        result = fit_plane(
            loaded,
            data,
            chosen_classes(loaded.class_names, classes),
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
    _report(model, _draw(loaded, data, out, images, options, display), as_json, display)


def _report(model: str, record: dict[str, Any], as_json: bool, display: "Progress") -> None:
    if as_json:
        print(json.dumps({"model": model, **record}))
    else:
        print(f"{printable(model)}: accuracy {100 * record['accuracy']:.2f} % on {record['images']:,} images")
        display.log(f"Figure: {record['figure']}, also as SVG.")


def _draw(
    model: "Model",
    data: str,
    out: Path,
    images: int | None,
    options: PlaneOptions,
    progress: "Progress",
) -> dict[str, Any]:
    """Draw the plane of a planar model."""
    from candid.explanations.overview import open_images, project
    from candid.models.decision_plane import decision_plane

    plane = decision_plane(model)
    split, part = open_images(model, data, None, images, options.skip_bad, progress)
    points, labels = project(model, split, plane, options.workers, progress)
    return _drawn(plane, points, labels, f"{part} images", out)


def _draw_photos(
    model: "Model",
    data: str,
    classes: str | Sequence[int] | None,
    out: Path,
    images: int | None,
    options: PlaneOptions,
    progress: "Progress",
) -> dict[str, Any]:
    """Draw the plane of three classes of a photo model, which needs no training."""
    import numpy as np

    from candid.explanations.overview import open_images, project
    from candid.explanations.similarity import chosen_classes
    from candid.models.decision_plane import plane_of_three

    names = model.class_names
    numbers = list(range(len(names)) if classes is None else chosen_classes(names, classes))
    plane = plane_of_three(model, numbers)
    split, part = open_images(model, data, None, images, options.skip_bad, progress)
    points, labels = project(model, split, plane, options.workers, progress)
    chosen = np.isin(labels, numbers)
    if not chosen.any():
        raise CandidError(f"'{data}' has no images of {', '.join(plane.class_names)}: name other classes.")
    of_plane = np.array([numbers.index(y) for y in labels[chosen].tolist()])
    return _drawn(plane, points[chosen], of_plane, f"{part} photos", out, " between the three")


def _drawn(
    plane: "DecisionPlane", points: "Array", labels: "Array", images: str, out: Path, among: str = ""
) -> dict[str, Any]:
    """Draw points of images in a plane, and return the record of it."""
    from candid.reports.plots import style
    from candid.reports.plots.latent import decision_plane as draw

    accuracy = float((plane.logits(points).argmax(1) == labels).mean())
    title = f"accuracy {100 * accuracy:.1f} %{among} on {len(labels):,} {images}"
    path = style.save(draw(plane, points, labels, title), out / "decision_plane.png", svg=True)
    return {
        "classes": list(plane.class_names),
        "images": len(labels),
        "accuracy": accuracy,
        "figure": str(path),
    }

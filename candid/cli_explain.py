"""The command that shows what a model has learned."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from candid.cli_evaluation import JsonFlag, ModelFolder, SkipBad, Workers, named, short_name
from candid.errors import CandidError

MEASURED_IMAGES = 2000
"""Of the data, for what the model does to pairs of classes."""
EXACT_CHANNELS = 512
"""Up to so many, the receptive field is computed exactly by default."""
PROJECTIONS = 64
DRAWN_CLASSES = 10


def explain(
    model: ModelFolder,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Real images, as for 'candid evaluate': adds receptive fields, interpolations and measured "
            "uncertainties.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for figures.", show_default="explanation/MODEL")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Only these: names, numbers or patterns, with commas between them.", show_default="all"
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=CLASSES", help="Classes to compare with each other, side by side. Repeats."
        ),
    ] = None,
    order: Annotated[
        Literal["clustering", "given"], typer.Option(help="Of the classes in the similarity matrix.")
    ] = "clustering",
    pairs: Annotated[int, typer.Option(help="How many of the closest pairs to list.")] = 10,
    beside: Annotated[
        list[Path] | None,
        typer.Option(metavar="MODEL", help="Another model, or a ResNet, for its receptive field. Repeats."),
    ] = None,
    images: Annotated[int, typer.Option(help="Images for the receptive field.")] = 16,
    projections: Annotated[
        int | None,
        typer.Option(
            help="Estimate receptive fields from so many random projections; 0: exact.",
            show_default=f"exact up to {EXACT_CHANNELS} channels, else {PROJECTIONS}",
        ),
    ] = None,
    temperatures: Annotated[
        str, typer.Option(help="Of the samples, with commas between them.")
    ] = "0.5,0.8,1",
    seed: Annotated[int, typer.Option(help="Of samples and projections.")] = 0,
    skip_bad: SkipBad = False,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """What a model has learned: similar classes, coefficients that matter, samples, receptive field."""
    groups = dict(named(each, "--group", "NAME=CLASSES") for each in group or [])
    heats = _numbers(temperatures)
    out = out or Path("explanation") / short_name(model)

    from candid import checkpoint, plots
    from candid.classifier import GenerativeClassifier
    from candid.explain.coefficients import dct_basis, mean_spread
    from candid.explain.counterfactual import samples
    from candid.explain.similarity import similarity
    from candid.training import Progress

    loaded = checkpoint.load_any(model)
    if not isinstance(loaded, GenerativeClassifier):
        raise CandidError(
            f"'{model}' is a ResNet, without class means: name a generative model, this with --beside."
        )
    progress = Progress()
    all_similar = similarity(loaded, classes, order)
    compared = {name: similarity(loaded, spec, order) for name, spec in groups.items()}
    spread = mean_spread(loaded)
    chosen = sorted(all_similar.classes)[:DRAWN_CLASSES]
    drawn = samples(loaded, chosen, heats, 2, seed)
    figures = {
        "similarity": plots.similarity(all_similar),
        **({"similarity_groups": plots.similarity_groups(compared)} if compared else {}),
        "dct_basis": plots.dct_basis(dct_basis(*spread.shape)),
        "mean_spread": plots.mean_spread(spread),
        "samples": plots.samples(drawn, [loaded.class_names[y] for y in chosen], heats),
    }
    listed = all_similar.closest_pairs(pairs)
    found: dict[str, Any] = {"model": str(model), "mean_spread": spread.tolist()}
    measured: Sequence[float | None] = [None] * len(listed)
    if data is not None:
        from candid.explain.similarity import measured_uncertainty

        shown = _Shown(loaded, data, skip_bad, workers, progress)
        measured = measured_uncertainty(shown.predictions.posterior, shown.predictions.labels, listed)
        others = {short_name(path): checkpoint.load_any(path) for path in beside or ()}
        fields = shown.receptive_fields({short_name(model): loaded, **others}, images, projections, seed)
        found["receptive_fields"] = {name: _field(field) for name, field in fields.items()}
        figures |= {"receptive_fields": plots.receptive_fields(fields), **shown.figures()}
    elif beside:
        raise CandidError("--beside compares receptive fields on real images: name some with --data.")
    elif loaded.config.planar:
        from candid.explain.plane import decision_plane

        figures["decision_plane"] = plots.decision_plane(decision_plane(loaded))
    found["closest_pairs"] = [
        {
            "classes": [loaded.class_names[pair.first], loaded.class_names[pair.second]],
            "distance": pair.distance,
            "expected_uncertainty": pair.uncertainty,
            "measured_uncertainty": each,
        }
        for pair, each in zip(listed, measured, strict=True)
    ]
    files = [
        plots.save(figure, out / f"{name}.png", svg=name != "samples") for name, figure in figures.items()
    ]
    found["figures"] = [str(file) for file in files]
    with checkpoint.replacing(out / "explanation.json") as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found))
    else:
        _print_explanation(found, files)


def _numbers(spec: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(each) for each in spec.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise CandidError(f"--temperatures takes numbers from 0 on with commas between them, not '{spec}'.")
    return numbers


def _field(field: Any) -> dict[str, Any]:
    return {
        "width_at_half_maximum_pixels": field.width_at_half_maximum,
        "images": field.images,
        "projections": field.projections,
    }


class _Shown:
    """Real images, and what is made of them."""

    def __init__(self, model: Any, data: str, skip_bad: bool, workers: int, progress: Any) -> None:
        from candid.data.parts import open_part, thinned
        from candid.evaluation.evaluate import prepare, training_of, view_of
        from candid.evaluation.passes import Passes

        chosen = open_part(data, model.class_names, None, training_of(model))
        self.model, self.view, self.progress, self.workers = model, view_of(model), progress, workers
        self.split = prepare(
            thinned(chosen.split, MEASURED_IMAGES),
            self.view,
            chosen.part,
            skip_bad,
            progress.track,
            progress.say,
        )
        passes = Passes(model, None, None, workers, progress.track, progress.say)
        predictions = passes.predictions(self.split, self.view, chosen.part)
        assert predictions is not None
        self.predictions = predictions

    def images(self, count: int) -> Any:
        """So many of them, evenly spread."""
        from candid.data.loader import named_batches
        from candid.data.parts import thinned

        batches = named_batches(thinned(self.split, count), self.view, count)
        return next(iter(batches))[0]

    def receptive_fields(
        self, models: dict[str, Any], images: int, projections: int | None, seed: int
    ) -> dict[str, Any]:
        from candid.explain.receptive_field import receptive_field

        shown = self.images(images)
        fields = {}
        for name, model in models.items():
            if model.image_shape != self.model.image_shape:
                raise CandidError(f"'{name}' takes images of another size: compare models of the same.")
            wide = model.feature_maps(shown[:1] / 255).shape[1] > EXACT_CHANNELS
            count = PROJECTIONS if projections is None and wide else projections or None
            fields[name] = receptive_field(model, shown, count, seed=seed, track=self.progress.track)
        return fields

    def figures(self) -> dict[str, Any]:
        from candid import plots
        from candid.explain.counterfactual import interpolate
        from candid.explain.plane import decision_plane, located

        ends = self.images(6)
        ways = (
            [interpolate(self.model, ends[i], ends[i + 3]) for i in range(len(ends) // 2)]
            if len(ends) > 5
            else []
        )
        figures = {"interpolation": plots.interpolation(ways, self.model.class_names)} if ways else {}
        if self.model.config.planar:
            points, labels = located(self.model, self.split, self.view, self.workers, self.progress.track)
            figures["decision_plane"] = plots.decision_plane(decision_plane(self.model), points, labels)
        return figures


def _print_explanation(found: dict[str, Any], files: Sequence[Path]) -> None:
    console = Console()
    table = Table(title="Closest classes", title_justify="left")
    for column in ("", "", "distance of means (σ)", "expected uncertainty", "measured"):
        table.add_column(column, justify="right" if column else "left")
    for pair in found["closest_pairs"]:
        expected, measured = pair["expected_uncertainty"], pair["measured_uncertainty"]
        table.add_row(
            *pair["classes"],
            f"{pair['distance']:.2f}",
            f"{100 * expected:.3g} %",
            "–" if measured is None else f"{100 * measured:.3g} %",
        )
    console.print(table)
    if "receptive_fields" in found:
        table = Table(title="Effective receptive field", title_justify="left")
        for column in ("model", "full width at half maximum (pixels)"):
            table.add_column(column, justify="left" if column == "model" else "right")
        for name, field in found["receptive_fields"].items():
            width = field["width_at_half_maximum_pixels"]
            table.add_row(name, "wider than the image" if width is None else f"{width:.1f}")
        console.print(table)
    console.print(f"Written: {', '.join(map(str, files))}", soft_wrap=True, highlight=False)

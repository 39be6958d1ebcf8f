"""The command that shows what a model has learned."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.errors import CandidError
from candid._support.text import short_name
from candid.cli.evaluate import JsonFlag, ModelFolder, PartOption, SkipBad, Workers, named


def explain(
    model: ModelFolder,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Real images, as for 'candid evaluate' but no tar shards: adds receptive fields, "
            "interpolations and measured uncertainties.",
        ),
    ] = None,
    part: PartOption = None,
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
        Literal["clustering", "given"],
        typer.Option(help="How the similarity matrix is ordered."),
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
            show_default="exact up to 512 channels, else 64",
        ),
    ] = None,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures of samples, with commas between them.")
    ] = "0.5,0.8,1",
    seed: Annotated[int, typer.Option(help="For samples and projections.")] = 0,
    skip_bad: SkipBad = False,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """What a model has learned: similar classes, coefficients that matter, samples, receptive field."""
    groups = named(group, "--group", "NAME=CLASSES")
    heats = _numbers(temperatures)
    out = out or Path("explanation") / short_name(model)

    from candid._support.files import replacing
    from candid._support.progress import TerminalProgress
    from candid.explanations.overview import Request, overview

    progress = TerminalProgress()
    request = Request(
        model=model,
        data=data,
        part=part,
        classes=classes,
        groups=groups,
        order=order,
        pairs=pairs,
        beside=tuple(beside or ()),
        images=images,
        projections=projections,
        temperatures=heats,
        seed=seed,
        skip_bad=skip_bad,
        workers=workers,
    )
    found = overview(request, progress)
    files = _draw(found, heats, out)
    record = {"model": str(model), **found.record(), "figures": [str(file) for file in files]}
    with replacing(out / "explanation.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(record))
    else:
        _print_explanation(record, files)


def _numbers(spec: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(each) for each in spec.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number < math.inf for number in numbers):
        raise CandidError(f"--temperatures takes numbers from 0 on with commas between them, not '{spec}'.")
    return numbers


def _draw(found: Any, temperatures: Sequence[float], out: Path) -> list[Path]:
    from candid.explanations.coefficients import dct_basis
    from candid.reports.plots import coefficients as coefficients_plots
    from candid.reports.plots import latent as latent_plots
    from candid.reports.plots import plane as plane_plots
    from candid.reports.plots import receptive_field as receptive_field_plots
    from candid.reports.plots import similarity as similarity_plots
    from candid.reports.plots import style

    names = found.class_names
    figures = {
        "similarity": similarity_plots.similarity(found.similarity),
        "dct_basis": coefficients_plots.dct_basis(dct_basis(*found.spread.shape)),
        "mean_spread": coefficients_plots.mean_spread(found.spread),
        "samples": latent_plots.samples(found.samples, [names[y] for y in found.sampled], temperatures),
    }
    if found.groups:
        figures["similarity_groups"] = similarity_plots.similarity_groups(found.groups)
    if found.fields:
        figures["receptive_fields"] = receptive_field_plots.receptive_fields(found.fields)
    if found.interpolations:
        figures["interpolation"] = latent_plots.interpolation(found.interpolations, names)
    if found.plane is not None:
        figures["decision_plane"] = plane_plots.decision_plane(found.plane, found.points, found.labels)
    return [style.save(figure, out / f"{name}.png", svg=True) for name, figure in figures.items()]


def _print_explanation(found: dict[str, Any], files: Sequence[Path]) -> None:
    console = Console()
    table = Table(title="Closest classes", title_justify="left")
    for column in ("", "", "distance of means (σ)", "expected uncertainty", "measured"):
        table.add_column(column, justify="right" if column else "left")
    for pair in found["closest_pairs"]:
        expected, measured = pair["expected_uncertainty"], pair["measured_uncertainty"]
        table.add_row(
            *map(escape, pair["classes"]),
            f"{pair['distance']:.2f}",
            f"{100 * expected:.3g} %",
            "–" if measured is None else f"{100 * measured:.3g} %",
        )
    console.print(table)
    if found["receptive_fields"]:
        table = Table(title="Effective receptive field", title_justify="left")
        for column in ("model", "full width at half maximum (pixels)"):
            table.add_column(column, justify="left" if column == "model" else "right")
        for name, field in found["receptive_fields"].items():
            width = field["width_at_half_maximum_pixels"]
            table.add_row(escape(name), "not within the image" if width is None else f"{width:.1f}")
        console.print(table)
    console.print(f"Written: {', '.join(map(str, files))}", soft_wrap=True, highlight=False, markup=False)

"""The command that shows what a model has learned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.text import short_name
from candid.cli.app import JsonFlag, ModelName, Typed, command, safe
from candid.explanations.options import ExplainOptions

if TYPE_CHECKING:
    from candid.explanations.overview import Overview


@command
def explain(
    model: ModelName,
    /,
    *,
    out: Annotated[
        Path | None, Option("Folder for figures.", metavar="DIR", default="explanation/MODEL")
    ] = None,
    group: Annotated[
        tuple[str, ...],
        Option("Classes to compare with each other, side by side. Repeat for more.", metavar="NAME=CLASSES"),
    ] = (),
    compare_with: Annotated[
        tuple[str, ...],
        Option("A further model or ResNet, for its receptive field. Repeat for more.", metavar="MODEL"),
    ] = (),
    given: Annotated[dict[str, Any], Typed(ExplainOptions)],
    as_json: JsonFlag = False,
) -> None:
    """Show what a model has learned: similar classes, samples, and with images its receptive field.

    Of a photo model: similar classes, and the known photos of each.
    """
    options = {**given, "groups": _groups(group)}
    out = out or Path("explanation") / short_name(Path(model))

    from candid._support.files import replacing
    from candid._support.progress import TerminalProgress
    from candid.explanations.overview import explain as look_at

    overview = look_at(model, compare_with=compare_with, progress=TerminalProgress(), **options)
    files = _draw(overview, given.get("temperatures", ExplainOptions().temperatures), out)
    record = {"model": model, **overview.to_dict(), "figures": [str(file) for file in files]}
    with replacing(out / "explanation.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(record))
    else:
        _print_explanation(record, files)


def _groups(values: Sequence[str]) -> dict[str, str]:
    """Return ``{"cats": "3,5"}`` for ``["cats=3,5"]``."""
    groups: dict[str, str] = {}
    for value in values:
        name, _, classes = value.partition("=")
        if not name or not classes or name in groups:
            raise CandidError(f"--group takes NAME=CLASSES, each name once, not '{value}'.")
        groups[name] = classes
    return groups


def _draw(found: "Overview", temperatures: Sequence[float], out: Path) -> list[Path]:
    from candid.explanations.similarity import dct_basis
    from candid.reports.plots import explanations as explanation_plots
    from candid.reports.plots import latent as latent_plots
    from candid.reports.plots import style

    names = found.class_names
    figures = {"similarity": explanation_plots.similarity(found.similarity)}
    if found.spread is not None:
        figures["dct_basis"] = explanation_plots.dct_basis(dct_basis(*found.spread.shape))
        figures["mean_spread"] = explanation_plots.mean_spread(found.spread)
    if found.samples is not None:
        shown = [names[y] for y in found.sampled]
        figures["samples"] = latent_plots.samples(found.samples, shown, temperatures)
    if found.known:
        figures["known_photos"] = latent_plots.known_photos(found.known, names)
    if found.groups:
        figures["similarity_groups"] = explanation_plots.similarity_groups(found.groups)
    if found.fields:
        figures["receptive_fields"] = explanation_plots.receptive_fields(found.fields)
    if found.interpolations:
        figures["interpolation"] = latent_plots.interpolation(found.interpolations, names)
    if found.plane is not None:
        figures["decision_plane"] = latent_plots.decision_plane(found.plane, found.points, found.labels)
    return [style.save(figure, out / f"{name}.png", svg=True) for name, figure in figures.items()]


def _print_explanation(explanation: Mapping[str, Any], files: Sequence[Path]) -> None:
    console = Console()
    table = Table(title="Closest classes", title_justify="left")
    for column in ("", "", "distance (σ)", "expected uncertainty", "measured"):
        table.add_column(column, justify="right" if column else "left")
    for pair in explanation["closest_pairs"]:
        expected, measured = pair["expected_uncertainty"], pair["measured_uncertainty"]
        table.add_row(
            *map(safe, pair["classes"]),
            f"{pair['distance']:.2f}",
            f"{100 * expected:.3g} %",
            "–" if measured is None else f"{100 * measured:.3g} %{' *' if pair['differs'] else '  '}",
        )
    console.print(table)
    if explanation["measured_on"] is not None:
        console.print(
            f"Measured on {safe(explanation['measured_on'])}; * differs from the expected one by more than a "
            "factor of 1.5.",
            soft_wrap=True,
            highlight=False,
        )
    if explanation["distances_of_means"] and explanation["mean_spread"] is not None:
        console.print(
            "Distances are those of the class means, of which much decides little: run 'candid calibrate' to "
            "measure them on held-out images, or name images with --data.",
            soft_wrap=True,
            highlight=False,
        )
    if explanation["missing"] is not None:
        console.print(explanation["missing"], soft_wrap=True, highlight=False, markup=False)
    if explanation["receptive_fields"]:
        table = Table(title="Effective receptive field", title_justify="left")
        for column in ("model", "full width at half maximum (pixels)"):
            table.add_column(column, justify="left" if column == "model" else "right")
        for name, field in explanation["receptive_fields"].items():
            width = field["width_at_half_maximum_pixels"]
            table.add_row(safe(name), "not within the image" if width is None else f"{width:.1f}")
        console.print(table)
    console.print(f"Written: {', '.join(map(safe, files))}", soft_wrap=True, highlight=False)

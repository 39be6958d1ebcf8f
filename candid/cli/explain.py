"""The command that shows what a model has learned."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from candid._support.options import Option
from candid._support.text import named_pairs, printable, short_name, show_table
from candid.cli.app import JsonFlag, ModelName, Typed, command
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
    options = {**given, "groups": named_pairs(group, "--group", "NAME=CLASSES")}
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


def _draw(overview: "Overview", temperatures: Sequence[float], out: Path) -> list[Path]:
    from candid.explanations.similarity import dct_basis
    from candid.reports.plots import explanations as explanation_plots
    from candid.reports.plots import latent as latent_plots
    from candid.reports.plots import style

    names = overview.class_names
    figures = {"similarity": explanation_plots.similarity(overview.similarity)}
    if overview.spread is not None:
        figures["dct_basis"] = explanation_plots.dct_basis(dct_basis(*overview.spread.shape))
        figures["mean_spread"] = explanation_plots.mean_spread(overview.spread)
    if overview.samples is not None:
        shown = [names[y] for y in overview.sampled]
        figures["samples"] = latent_plots.samples(overview.samples, shown, temperatures)
    if overview.known:
        figures["known_photos"] = latent_plots.known_photos(overview.known, names)
    if overview.groups:
        figures["similarity_groups"] = explanation_plots.similarity_groups(overview.groups)
    if overview.fields:
        figures["receptive_fields"] = explanation_plots.receptive_fields(overview.fields)
    if overview.interpolations:
        figures["interpolation"] = latent_plots.interpolation(overview.interpolations, names)
    if overview.plane is not None:
        figures["decision_plane"] = latent_plots.decision_plane(
            overview.plane, overview.points, overview.labels
        )
    return [style.save(figure, out / f"{name}.png", svg=True) for name, figure in figures.items()]


def _print_explanation(explanation: Mapping[str, Any], files: Sequence[Path]) -> None:
    rows = [
        (
            *pair["classes"],
            f"{pair['distance']:.2f}",
            f"{100 * pair['expected_uncertainty']:.3g} %",
            "–" if measured is None else f"{100 * measured:.3g} %{' *' if pair['differs'] else '  '}",
        )
        for pair in explanation["closest_pairs"]
        for measured in [pair["measured_uncertainty"]]
    ]
    show_table("Closest classes", ("", "", "distance (σ)", "expected uncertainty", "measured"), rows, left=2)
    if explanation["measured_on"] is not None:
        on = printable(explanation["measured_on"])
        print(f"Measured on {on}; * differs from the expected one by more than a factor of 1.5.")
    if explanation["distances_of_means"] and explanation["mean_spread"] is not None:
        print(
            "Distances are those of the class means, of which much decides little: run 'candid calibrate' to "
            "measure them on held-out images, or name images with --data."
        )
    if explanation["missing"] is not None:
        print(explanation["missing"])
    if explanation["receptive_fields"]:
        widths = {
            name: field["width_at_half_maximum_pixels"]
            for name, field in explanation["receptive_fields"].items()
        }
        shown = [
            (name, "not within the image" if width is None else f"{width:.1f}")
            for name, width in widths.items()
        ]
        show_table("Effective receptive field", ("model", "full width at half maximum (pixels)"), shown)
    print(printable(f"Written: {', '.join(map(str, files))}"))

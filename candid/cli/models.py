"""The command that lists the models that come with the package."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from candid.cli.evaluate import JsonFlag
from candid.models import zoo


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show the card of this one.", show_default="all")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """The trained models that come with candid: any command takes their names instead of a folder."""
    cards = [zoo.card(each) for each in (zoo.names() if name is None else [name])]
    if as_json:
        print(json.dumps(cards if name is None else cards[0]))
        return
    console = Console()
    if name is not None:
        from rich.markdown import Markdown

        from candid.models.zoo.cards import as_markdown

        console.print(Markdown(as_markdown(cards[0])))
        return
    table = Table(title="Models that come with candid", title_justify="left")
    for column in ("name", "images", "classes", "beta", "accuracy", "bits/dim", "MB"):
        table.add_column(column, justify="left" if column in ("name", "images") else "right", no_wrap=True)
    for card in cards:
        figures = card["figures"]
        bits = figures.get("bits_per_dim")
        table.add_row(
            card["name"],
            card["images"],
            str(len(card["classes"])),
            "–" if card["beta"] is None else f"{float(card['beta']):g}".replace("inf", "∞"),
            f"{100 * figures['accuracy']:.2f} %" if figures else "",
            "–" if bits is None else f"{bits:.3f}",
            f"{card['bytes'] / 1e6:.1f}",
        )
    console.print(table)
    console.print("candid models NAME shows a card; candid examine NAME IMAGE asks a model.", highlight=False)

"""The command line: it parses, calls one function and shows the result.

Commands import what they need themselves, after their checks: help and mistakes don't wait for torch.
"""

import typer
from typer.exceptions import TyperException

from candid._support.errors import CandidError
from candid.cli import (
    audit as cli_audit,
)
from candid.cli import (
    demo as cli_demo,
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generative image classifiers that can be trusted.",
)


def run(arguments: list[str]) -> int | None:
    """Run a command that is not converted yet."""
    try:
        return app(arguments, standalone_mode=False)
    except TyperException as error:
        raise CandidError(error.format_message()) from error
    except typer.Abort as error:
        raise CandidError("stopped.") from error


@app.callback()
def _options() -> None:
    pass


for command in (
    cli_audit.audit,
    cli_demo.demo,
):
    app.command()(command)

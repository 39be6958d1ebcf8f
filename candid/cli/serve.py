"""The command that serves a model as a web page and a JSON API."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from candid._support.errors import CandidError, did_you_mean
from candid._support.options import Option, build, fields
from candid._support.processes import leaving_on_signals, started_ahead
from candid.cli.app import MODEL_HELP, Typed, command
from candid.models.zoo import DEFAULT
from candid.serve import Limits, ServeOptions

Models = Annotated[
    list[str] | None, Option(f"{MODEL_HELP} Several are served together.", metavar="MODEL", default=DEFAULT)
]
Config = Annotated[
    Path | None,
    Option(
        "TOML file with the options below, such as 'port = 8080', and with 'models'. Variables such as "
        "CANDID_SERVE_PORT do the same and come before it; what is typed comes first.",
        metavar="FILE",
    ),
]
PREFIX = "CANDID_SERVE_"
FIELDS = {field.name: field for options in (ServeOptions, Limits) for field in fields(options)}
"""Every option of the server by its name."""


@command
def serve(
    models: Models = None,
    /,
    *,
    config: Config = None,
    options: Annotated[dict[str, Any], Typed(ServeOptions)],
    limits: Annotated[dict[str, Any], Typed(Limits)],
) -> None:
    """Serve models as a web page that judges and explains images, and a JSON API for programs.

    Only this machine can connect unless --host says otherwise. The server sends nothing anywhere and stores
    no image unless --store says so. It watches the images that it judges for drift. SIGTERM or Ctrl-C ends it
    after it has answered every accepted request.
    """
    given = {**read_config(config), **read_environment(os.environ), **options, **limits}
    names = models or given.pop("models", None) or [DEFAULT]
    limited = build(Limits, {name: given.pop(name) for name in Limits.__annotations__ if name in given})
    chosen = build(ServeOptions, given)
    with leaving_on_signals(), started_ahead("candid.serve.worker", "work", chosen.workers != 0) as ahead:
        try:  # the process that was started imports its packages meanwhile
            import python_multipart  # noqa: F401
            import uvicorn  # noqa: F401
            from fastapi import FastAPI  # noqa: F401
        except ImportError as error:
            raise CandidError(
                "The server needs packages that are missing: pip install 'candid-vision[web]'."
            ) from error

        from candid.serve.server import serve as run

        run(names, chosen, limited, lambda line: print(line, flush=True), ahead)


def read_config(file: Path | None) -> dict[str, Any]:
    """Return the options in a TOML file; hyphens and underscores in their names are the same."""
    if file is None:
        return {}
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CandidError(f"Can't read '{file}' ({error}): it must be a TOML file.") from error
    found = {name.replace("-", "_"): value for name, value in read.items()}
    for name in found:
        if name not in {*FIELDS, "models"}:
            raise CandidError(
                f"There is no option '{name}' in '{file}': {did_you_mean(name, [*FIELDS, 'models'])}"
            )
    models = found.get("models", [])
    if not isinstance(models, list) or not all(isinstance(each, str) for each in models):
        raise CandidError(f"'models' in '{file}' must be a list of names.")
    return found


def read_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the options in variables such as CANDID_SERVE_MAX_QUEUE; CANDID_TOKEN is the token, too.

    >>> read_environment({"CANDID_SERVE_PORT": "80", "CANDID_SERVE_ALLOW_HOST": "a.example,b.example"})
    {'port': 80, 'allow_host': ('a.example', 'b.example')}
    """
    found: dict[str, Any] = {"token": variables["CANDID_TOKEN"]} if "CANDID_TOKEN" in variables else {}
    known = {PREFIX + name.upper(): name for name in FIELDS}
    for variable in [each for each in variables if each.startswith(PREFIX)]:
        if variable not in known:
            raise CandidError(f"There is no option for '{variable}': {did_you_mean(variable, known)}")
        field, text = FIELDS[known[variable]], variables[variable]
        if field.entry is not None:
            found[field.name] = tuple(word.strip() for word in text.split(",") if word.strip())
            continue
        try:
            found[field.name] = field.plain(text) if field.plain in (int, float) else text
        except ValueError:
            raise CandidError(f"{variable} takes a number, not '{text}'.") from None
    return found

"""The command that serves a model as a web page and a JSON API."""

import os
from dataclasses import replace
from typing import Annotated

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.processes import started_ahead
from candid.cli.app import MODEL_HELP, command
from candid.models.zoo import DEFAULT
from candid.serve import Limits, ServeOptions

Models = Annotated[
    list[str] | None, Option(f"{MODEL_HELP} Several are served together.", metavar="MODEL", default=DEFAULT)
]


@command
def serve(models: Models = None, /, *, options: ServeOptions, limits: Limits) -> None:
    """Serve models as a web page that judges and explains images, and a JSON API for programs.

    Only this machine can connect unless --host says otherwise. The server sends nothing anywhere and stores
    no image unless --store says so. It watches the images that it judges for drift. SIGTERM or Ctrl-C ends it
    after it has answered every accepted request.
    """
    token = options.token if options.token is not None else os.environ.get("CANDID_TOKEN")
    with started_ahead(
        "candid.serve.worker", "work", options.workers != 0
    ) as ahead:  # while this one imports
        try:
            import python_multipart  # noqa: F401
            import uvicorn  # noqa: F401
            from fastapi import FastAPI  # noqa: F401
        except ImportError as error:
            raise CandidError(
                "The server needs packages that are missing: pip install 'candid-vision[web]'."
            ) from error

        from candid.serve.server import serve as run

        chosen = replace(options, token=token)
        run(models or [DEFAULT], chosen, limits, lambda line: print(line, flush=True), ahead)

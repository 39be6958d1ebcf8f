"""The command that makes a model a web page and a JSON API."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from candid._support.errors import CandidError


def serve(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The folder of a saved model, or a bundled model.")
    ] = Path("cifar10-beta1"),
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in: set a token then.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CANDID_TOKEN",
            help="Who asks must know it; better set as CANDID_TOKEN, which other users can't see.",
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that wait; one more is told to come later.")] = 64,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Images that pass the network together, at most.",
            show_default="64, fewer if they are large",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that have a network each; 0: it runs in the server's own.",
            show_default="one a core, at most 4, for images up to 64 x 64, else 0",
        ),
    ] = None,
    max_megabytes: Annotated[float, typer.Option(help="Of a request.")] = 16,
    max_pixels: Annotated[int, typer.Option(help="Of an image.")] = 25_000_000,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.")] = 30,
) -> None:
    """A web page where images are judged and explained, and a JSON API for programs.

    It answers this machine alone unless --host says otherwise, sends nothing anywhere and keeps no image.
    SIGTERM or Ctrl-C ends it once everything that was accepted is answered.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise CandidError("The token must be printable ASCII characters without a space at its ends.")
    try:
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
        from fastapi import FastAPI  # noqa: F401
    except ImportError as error:
        raise CandidError(
            "The server needs packages that are missing: pip install 'candid-vision[web]'."
        ) from error

    from candid._support.text import short_name
    from candid.models import checkpoint, zoo
    from candid.serve.limits import Limits
    from candid.serve.server import address_of, is_local, listening
    from candid.serve.server import serve as run
    from candid.serve.service import Service
    from candid.serve.worker import working

    limits = Limits(max_queue, 64 if batch is None else batch, max_megabytes, max_pixels, timeout)
    with listening(host, port) as sock:
        loaded = checkpoint.load_any(model)
        summary = None if model.exists() else zoo.card(str(model))["summary"]
        service = Service(loaded, short_name(model), summary)
        if batch is None:
            limits = replace(limits, batch=service.batch)
        if token is None and not is_local(sock):
            print("Without a token, whoever reaches this machine can ask: set CANDID_TOKEN.", file=sys.stderr)
        wanted = service.workers if workers is None else workers
        with working(loaded, service.name, wanted, 2 * limits.timeout) as processes:
            print(f"{service.name} answers at {address_of(sock)}; Ctrl-C ends it", flush=True)
            run(service, limits, sock, token, processes)

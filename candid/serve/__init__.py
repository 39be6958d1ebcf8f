"""The options of a server: where it listens, and what it refuses before it looks any closer."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from candid._support.errors import CandidError
from candid._support.options import Option, check_fields

FILES = 16
"""Files in one request, at most."""
HELD = 1_000_000_000
"""Bytes of all requests together, at most, if none is larger alone."""
PIXELS = 89_478_485
"""The largest image that is read anywhere: ``candid.data.images.LARGEST``."""


@dataclass(frozen=True)
class Limits:
    """What one server accepts."""

    max_queue: Annotated[int, Option("Longest queue of requests; more get HTTP 429.", least=1)] = 64
    batch: Annotated[
        int | None,
        Option("Most images that pass the network together.", least=1, default="64, fewer if they are large"),
    ] = None
    max_megabytes: Annotated[float, Option("Largest request, in MB.", above=0, below=1e6)] = 32
    max_pixels: Annotated[
        int, Option("Largest image; decoding takes up to 21 bytes per pixel.", least=1, most=PIXELS)
    ] = 52_000_000
    timeout: Annotated[float, Option("Seconds until a request must be answered.", above=0, below=1e6)] = 30
    allow_host: Annotated[
        tuple[str, ...],
        Option(
            "Host names that clients may use without a token, besides the addresses and the name of this "
            "machine.",
            metavar="NAME,...",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.allow_host:
            if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", name):
                raise CandidError(
                    f"'{name}' is no host name: give --allow-host a name such as photos.example, without "
                    "http:// and port."
                )

    @property
    def max_bytes(self) -> int:
        """The largest request in bytes."""
        return int(self.max_megabytes * 1_000_000)

    @property
    def held_bytes(self) -> int:
        """The largest size of all requests together that are being read, waiting or answered."""
        return min(self.max_queue * self.max_bytes, max(HELD, self.max_bytes))


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, and how its network runs."""

    host: Annotated[str, Option("Address; 0.0.0.0 lets other machines in: set a token then.")] = "127.0.0.1"
    port: Annotated[int, Option("Port; 0 takes any free one.", least=0, most=65535)] = 8000
    token: Annotated[
        str | None,
        Option("Token that clients must send. Prefer CANDID_TOKEN: other users can read your command line."),
    ] = None
    workers: Annotated[
        int | None,
        Option(
            "Processes that hold a network each; 0 runs it in the server's own process.",
            least=0,
            default="one per core, at most 4, for images up to 64 x 64, else 1",
        ),
    ] = None

    log: Annotated[
        Literal["text", "json"],
        Option(
            "What goes to standard error: text, only what an operator must know; json, one JSON object a "
            "line, also for each request, with its X-Request-ID."
        ),
    ] = "text"
    state: Annotated[
        Path | None,
        Option("Folder for the state of the watch for drift, which then survives a restart.", metavar="DIR"),
    ] = None
    store: Annotated[
        Path | None,
        Option(
            "Store judged images and results in this folder; by default nothing is stored.", metavar="DIR"
        ),
    ] = None
    store_megabytes: Annotated[
        float, Option("Most MB of stored images; the oldest are removed first.", above=0, below=1e9)
    ] = 1000

    def __post_init__(self) -> None:
        check_fields(self)
        token = self.token
        if token is not None and not (
            token.isascii() and token.isprintable() and token.strip() == token != ""
        ):
            raise CandidError("The token must be printable ASCII characters without a space at its ends.")

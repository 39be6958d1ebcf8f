"""What a server takes, and what it refuses before it looks any closer."""

from dataclasses import dataclass

from candid._support.errors import CandidError
from candid.data.images import LARGEST

FILES = 16
"""In one request."""


@dataclass(frozen=True)
class Limits:
    """Of one server."""

    max_queue: int = 64
    """Requests that are read, wait or are answered at a time; one more is refused."""
    batch: int = 64
    """Images that pass the network together, at most; a request is not divided."""
    max_megabytes: float = 16
    """Of a request."""
    max_pixels: int = 25_000_000
    """Of an image; while it is decoded, it takes up to 24 bytes a pixel, a JPEG much less."""
    timeout: float = 30
    """Seconds from the first byte of a request to its answer."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "batch", "max_pixels"):
            if getattr(self, name) < 1:
                raise CandidError(f"--{name.replace('_', '-')} is a number from 1 on: raise it.")
        for name in ("max_megabytes", "timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise CandidError(f"--{name.replace('_', '-')} lies between 0 and a million: change it.")
        if self.max_pixels > LARGEST:
            raise CandidError(f"--max-pixels is at most {LARGEST:,}: lower it.")

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 1_000_000)

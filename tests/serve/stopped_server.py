"""``candid serve`` whose network takes half a second a batch: for a test that stops it meanwhile."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import typer

from candid.cli_serve import serve
from candid.serve.service import Asked, Service

if __name__ == "__main__":
    torch.set_num_threads(1)
    examine = Service.examine

    def slow(self: Service, requests: Sequence[Sequence[Asked]]) -> list[Any]:
        time.sleep(0.5)
        return examine(self, requests)

    Service.examine = slow  # type: ignore[method-assign]
    typer.run(serve)

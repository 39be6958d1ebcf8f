"""``candid serve`` whose networks answer nothing while a file exists: for tests that stop it then.

Connections may be silent for longer than usual, since the test may be slow to use them. A network that
imports something for a request complains.
"""

import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from candid.cli.app import run
from candid.serve import server
from candid.serve.schemas import ImageRequest
from candid.serve.server import Server
from candid.serve.service import Service

examine, warm_up, handle_exit = Service.examine, Service.warm_up, Server.handle_exit
warm: list[Service] = []


def held_up(self: Service, requests: Sequence[Sequence[ImageRequest]]) -> list[Any]:
    while Path(os.environ["CANDID_HELD_UP"]).exists():
        time.sleep(0.01)
    before = set(sys.modules)
    found = examine(self, requests)
    late = {name for name in set(sys.modules) - before if not name.startswith("PIL.")}  # kinds of images
    if late and warm:
        print("imported for a request:", *sorted(late), file=sys.stderr, flush=True)
    return found


def warmed_up(self: Service) -> None:
    warm_up(self)
    warm.append(self)


def counted(self: Server, sig: int, frame: FrameType | None) -> None:
    """Print how many layers of networks the server's own process holds, then stop as usual."""
    torch = sys.modules.get("torch")
    layers = (issubclass(type(each), torch.nn.Module) for each in gc.get_objects()) if torch else ()
    print(sum(layers), flush=True)
    handle_exit(self, sig, frame)


if "CANDID_HELD_UP" in os.environ:  # in the server's own process and in its workers, which import this, too
    Service.examine = held_up  # type: ignore[method-assign]
    Service.warm_up = warmed_up  # type: ignore[method-assign]
    Server.handle_exit = counted  # type: ignore[method-assign]
    server.SILENT = 600.0
if __name__ == "__main__":
    run(["serve", *sys.argv[1:]])

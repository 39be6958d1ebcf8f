"""``candid serve`` whose networks answer nothing while a file is there: for a test that stops it then."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from candid.cli.app import run
from candid.serve.schemas import ImageRequest
from candid.serve.service import Service

examine = Service.examine


def held_up(self: Service, requests: Sequence[Sequence[ImageRequest]]) -> list[Any]:
    while Path(os.environ["CANDID_HELD_UP"]).exists():
        time.sleep(0.01)
    return examine(self, requests)


if "CANDID_HELD_UP" in os.environ:  # in the server's own process and in its workers, which import this, too
    Service.examine = held_up  # type: ignore[method-assign]
if __name__ == "__main__":
    torch.set_num_threads(1)
    run(["serve", *sys.argv[1:]])

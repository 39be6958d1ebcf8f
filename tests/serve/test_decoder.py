"""Whatever an image does to its decoder costs that image, and nothing else."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from candid.data import uploads
from candid.data.images import BadImageError, Preprocessing
from candid.data.uploads import decode_upload
from candid.serve.service import Service
from candid.serve.worker import Decoder
from tests.serve.helpers import picture, running, until

SEEN = Preprocessing(3, 16, 16)
TOO_LONG = "it takes too long to decode"


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(1_000_000, patience=60.0)
    yield decoder
    decoder.end()


def process_of(decoder: Decoder) -> int:
    assert decoder._remote is not None
    return int(decoder._remote.process.pid)


def check_next(decoder: Decoder) -> None:
    """The next image is decoded as in this process."""
    seen = decoder(decode_upload, picture(), SEEN, 10_000)
    assert np.array_equal(seen, decode_upload(picture(), SEEN, 10_000))


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (signal.raise_signal, (signal.SIGSEGV,), "it makes its decoder crash"),
        (os.abort, (), "it makes its decoder crash"),
        (sum, (range(10**12),), TOO_LONG),  # never comes back to Python
        (bytes, (10**10,), "it takes too much memory to decode"),
    ],
    ids=["segmentation fault", "abort", "endless loop", "memory"],
)
def test_what_ends_a_decoder_costs_one_image(
    decoder: Decoder, function: Callable[..., Any], arguments: tuple[Any, ...], reason: str
) -> None:
    check_next(decoder)
    with pytest.raises(BadImageError) as caught:
        decoder(function, *arguments)
    assert str(caught.value) == reason
    check_next(decoder)


def test_a_decoder_that_does_nothing_is_cut_at_its_deadline(decoder: Decoder) -> None:
    check_next(decoder)
    first = process_of(decoder)
    decoder._patience = 0.2
    with pytest.raises(BadImageError, match=TOO_LONG):
        decoder(time.sleep, 600)
    decoder._patience = 60.0
    check_next(decoder)
    assert process_of(decoder) != first
    until(lambda: not Path(f"/proc/{first}").exists())


KILLED_ONCE = """
import os, pathlib
once = pathlib.Path({!r})
if once.exists():
    once.unlink()
    os.kill(os.getpid(), 9)
"""


def test_an_image_whose_decoder_was_killed_from_outside_is_tried_again(
    decoder: Decoder, tmp_path: Path
) -> None:
    (tmp_path / "once").touch()
    check_next(decoder)
    first = process_of(decoder)
    assert decoder(exec, KILLED_ONCE.format(str(tmp_path / "once"))) is None
    assert process_of(decoder) != first and not (tmp_path / "once").exists()


def test_limits_are_those_of_one_call(decoder: Decoder) -> None:
    limit, most = decoder(resource.getrlimit, resource.RLIMIT_AS)
    assert 0 < limit < 2_000_000_000 and most == resource.getrlimit(resource.RLIMIT_AS)[1]
    assert 0 < decoder(signal.getitimer, signal.ITIMER_PROF)[0] < 2 * uploads.SECONDS
    with pytest.raises(BadImageError, match="memory"):
        decoder(bytes, 10**10)
    assert decoder(resource.getrlimit, resource.RLIMIT_AS)[0] < 1.1 * limit  # it does not grow with each call
    assert len(decoder(bytes, uploads.BYTES_PER_PIXEL * 1_000_000)) == 21_000_000


def test_a_limit_of_the_whole_server_is_not_the_fault_of_an_image() -> None:
    command = (
        "import resource\nfrom candid.serve.worker import Decoder\nif __name__ == '__main__':\n"
        "    decoder = Decoder(10**9, 60.0)\n    decoder(len, b'')\n"
        "    resource.prlimit(decoder._remote.process.pid, resource.RLIMIT_AS, (2 * 10**9, 2 * 10**9))\n"
        "    try:\n        decoder(bytes, 10**10)\n    except MemoryError:\n        print('memory')\n"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout == "memory\n", done.stderr


def test_a_crash_a_hang_and_a_bomb_cost_one_image_each(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a whole server, whose decoders do other things than decoding for some images."""
    odd: dict[bytes, tuple[Any, ...]] = {
        picture(1): (signal.raise_signal, signal.SIGSEGV),
        picture(2): (time.sleep, 600),
        picture(3): (bytes, 10**10),
    }
    call = Decoder.__call__

    def led_astray(self: Decoder, function: Any, content: bytes, *arguments: Any) -> Any:
        return call(self, *odd.get(content, (function, content, *arguments)))

    monkeypatch.setattr(Decoder, "__call__", led_astray)
    with running(service, timeout=12) as server:
        for content, reason in zip(odd, ("decoder crash", "too long", "too much memory"), strict=True):
            results = server.examine(picture(), content, picture(4)).json()["results"]
            assert [each["status"] for each in results] == ["judged", "unusable", "judged"]
            assert reason in results[1]["error"]
        assert server.client.get("/healthz").status_code == 200

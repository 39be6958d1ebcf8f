"""Small servers, and files to send them."""

import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from candid import GenerativeClassifier
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit
from candid.inference.runner import Runner
from candid.judging.calibrate import measure
from candid.serve import Limits
from candid.serve.app import guarded_app
from candid.serve.guard import Guard
from candid.serve.sensor import Sensor
from candid.serve.served import Served
from candid.serve.server import Server, address_of, listening
from candid.serve.service import Service
from tests.explanations.mixtures import decided_classifier

NAMES = ("cat", "dog", "a fish, or a bird")


def calibrated_model() -> GenerativeClassifier:
    """Three classes, 16 x 16, with the scores of random images."""
    model = decided_classifier()
    model.class_names = NAMES
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (150, 3, 16, 16), generator=random, dtype=torch.uint8)
    found = measure(
        Runner(model),
        None,
        ArraySplit(images.numpy(), model.predict(images / 255).numpy()),
        Preprocessing(3, 16, 16),
    )
    assert found is not None
    found.attach(model)
    return model


def picture(seed: int = 0, size: tuple[int, int] = (16, 16), kind: str = "PNG") -> bytes:
    """A file with a random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def huge_png(side: int = 20_000) -> bytes:
    """A small file of side x side black pixels, whole and right."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    rows = b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()])
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def multipart(content: bytes) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request with one file."""
    head = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="0.png"\r\n\r\n'
    return head + content + b"\r\n--edge--\r\n", {"content-type": "multipart/form-data; boundary=edge"}


def without_rounding(answer: Any) -> Any:
    """To compare what the same image got in different batches."""
    if isinstance(answer, dict):
        return {key: without_rounding(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [without_rounding(value) for value in answer]
    return pytest.approx(answer, rel=1e-4, abs=1e-4) if isinstance(answer, float) else answer


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, at most a minute or two."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, guard: Guard, url: str, client: httpx.Client) -> None:
        self.guard, self.url, self.client = guard, url, client

    def examine(self, *files: bytes, explain: bool = False) -> httpx.Response:
        named = [("file", (f"{i}.png", content)) for i, content in enumerate(files)]
        return self.client.post("/v1/examine", files=named, params={"explain": explain})

    def metric(self, line: str) -> float:
        """The value of a line of the metrics; 0 if there is none."""
        text = self.client.get("/metrics").text
        found = [each for each in text.splitlines() if each.startswith(f"{line} ")]
        return float(found[0].split()[-1]) if found else 0.0


def guarded(
    *services: Service,
    token: str | None = None,
    sensor: Sensor | None = None,
    source: str | None = None,
    **limits: Any,
) -> Guard:
    """The application as a server runs it."""
    sensor, checked = sensor or Sensor(), Limits(**limits)
    served = [Served([each], checked, sensor.drift(each.description), source=source) for each in services]
    return guarded_app(served, checked, token, sensor)


@contextmanager
def running(
    service: Service,
    token: str | None = None,
    host: str = "127.0.0.1",
    sensor: Sensor | None = None,
    source: str | None = None,
    others: Sequence[Service] = (),
    **limits: Any,
) -> Iterator[Running]:
    """A real server on a free port; ``source`` is the folder that the model was loaded from."""
    guard = guarded(service, *others, token=token, sensor=sensor, source=source, **limits)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with listening(host, 0) as sock:
        url = address_of(sock)
        thread = threading.Thread(target=Server(guard).run, args=([sock],))
        thread.start()
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
                yield Running(guard, url, client)
        finally:
            guard.stopping = True
            thread.join()

"""Counts of a server in the text format of Prometheus."""

import threading
from collections import Counter
from collections.abc import Iterator

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the histogram of latencies."""


class Metrics:
    """Since the start of the server; any thread may count.

    >>> metrics = Metrics()
    >>> metrics.answered("/v1/examine", 200, 0.04)
    >>> metrics.judged("accept")
    >>> print(metrics.as_text().splitlines()[2])
    candid_requests_total{path="/v1/examine",status="200"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._images: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._by_seconds = [0] * (len(SECONDS) + 1)
        self._seconds = 0.0
        self.accepted = 0
        """Requests that are read, wait or are answered now."""

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        with self._lock:
            self._requests[path, status] += 1
            self._by_seconds[sum(seconds > end for end in SECONDS)] += 1
            self._seconds += seconds

    def judged(self, kind: str) -> None:
        """Count an image by its verdict, or as ``unusable`` or ``no verdict``."""
        with self._lock:
            self._images[kind] += 1

    def refused(self, reason: str) -> None:
        """Count a request that was refused before anything was computed."""
        with self._lock:
            self._refusals[reason] += 1

    def as_text(self) -> str:
        """For a scraper."""
        with self._lock:
            return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests that were answered.")
        for (path, status), count in sorted(self._requests.items()):
            yield f'candid_requests_total{{path="{path}",status="{status}"}} {count}'
        yield from _head("images_total", "counter", "Images by verdict.")
        for kind, count in sorted(self._images.items()):
            yield f'candid_images_total{{verdict="{kind}"}} {count}'
        yield from _head("refusals_total", "counter", "Requests that were refused, by reason.")
        for reason, count in sorted(self._refusals.items()):
            yield f'candid_refusals_total{{reason="{reason}"}} {count}'
        yield from _head("queue_length", "gauge", "Requests that are read, wait or are answered now.")
        yield f"candid_queue_length {self.accepted}"
        yield from _head("request_seconds", "histogram", "From the first byte of a request to its answer.")
        total = 0
        for end, count in zip((*map(str, SECONDS), "+Inf"), self._by_seconds, strict=True):
            total += count
            yield f'candid_request_seconds_bucket{{le="{end}"}} {total}'
        yield f"candid_request_seconds_sum {self._seconds:.6f}"
        yield f"candid_request_seconds_count {total}"


def _head(name: str, kind: str, what: str) -> tuple[str, str]:
    return f"# HELP candid_{name} {what}", f"# TYPE candid_{name} {kind}"

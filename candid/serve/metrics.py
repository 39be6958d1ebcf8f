"""Counts and latencies of a server in the text format of Prometheus."""

from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from candid.serve.drift import Drift

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the buckets of latencies."""
prometheus_client.disable_created_metrics()


class Metrics:
    """Counts what happened since the start of the server; any thread may count.

    >>> metrics = Metrics()
    >>> metrics.answered("/v1/examine", 200, 0.04)
    >>> metrics.judged("accept")
    >>> print(metrics.as_text().splitlines()[2])
    candid_requests_total{path="/v1/examine",status="200"} 1.0
    """

    def __init__(self) -> None:
        self.accepted = 0
        """Requests that are waiting or being answered."""
        self._registry = own = CollectorRegistry()
        self._requests = Counter("candid_requests", "Answered requests.", ("path", "status"), registry=own)
        self._images = Counter("candid_images", "Images by verdict.", ("verdict",), registry=own)
        self._refusals = Counter("candid_refusals", "Refused requests by reason.", ("reason",), registry=own)
        queue = Gauge("candid_queue_length", "Requests waiting or being answered.", registry=own)
        queue.set_function(lambda: self.accepted)
        self._seconds = Histogram(
            "candid_request_seconds",
            "Seconds from the first byte of a request to its answer.",
            buckets=SECONDS,
            registry=own,
        )

    def watch(self, drift: "Drift") -> None:
        """Show what a watch for drift has found."""
        for name, text, value in (
            (
                "candid_drift_evidence",
                "Evidence that images changed; it rings at 100.",
                lambda: drift.evidence,
            ),
            ("candid_drift_alarm", "1 if the alarm has rung.", lambda: float(drift.alarm)),
            ("candid_drift_images", "Images that were watched.", lambda: float(drift.images)),
        ):
            Gauge(name, text, registry=self._registry).set_function(value)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(path, status).inc()
        self._seconds.observe(seconds)

    def judged(self, kind: str) -> None:
        """Count an image by its verdict, or as ``unusable`` or ``no verdict``."""
        self._images.labels(kind).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was refused before anything was computed."""
        self._refusals.labels(reason).inc()

    def as_text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()

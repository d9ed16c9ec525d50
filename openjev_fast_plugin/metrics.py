"""What a backend has done, for Prometheus: one registry for each model, so that several in a process stay apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from openjev_fast_plugin.exchange import CLIENT_CLOSED_REQUEST, ClientGone, Exchange, Unavailable

_SECONDS = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

# What Open-Jev answers 422; anything else that fails is its 500.
_BAD_REQUEST = (ValueError, KeyError, TypeError)


class Metrics:
    """Counters and histograms of one model, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"openjev_fast_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"openjev_fast_{name}", text, buckets=buckets, registry=self.registry)

        self._exchanges = counter(
            "http_requests", "HTTP requests of any kind, by status; 0 ended without an answer", "status"
        )
        self._requests = counter("requests", "Requests that reached the model, by HTTP status", "status")
        self._refused = counter("refused", "Requests refused because the queue was full")
        self._dropped = counter("dropped", "Requests dropped because their client hung up while they waited")
        self._rows_asked = counter("rows_asked", "Tokens of all prompts of all requests")
        self._rows_computed = counter("rows_computed", "Packed rows of all forwards")
        self._forwards = counter("forwards", "Forwards, by whether a captured graph was replayed", "replayed")
        self._again = counter(
            "requests_run_again", "Requests whose shared forward failed, run again alone, by reason", "reason"
        )
        self._sizes = histogram("forward_requests", "Requests that shared a forward", _REQUESTS)
        self._rows = histogram("forward_rows", "Packed rows of a forward", _ROWS)
        # Looked up once, not for every request.
        self._answered = self._requests.labels("200")
        self._by_replay = {True: self._forwards.labels("yes"), False: self._forwards.labels("no")}
        self._queue = histogram(
            "queue_seconds",
            "Time from tokenized to the start of the forward, for each part of a request",
            _SECONDS,
        )
        self._seconds = histogram(
            "forward_seconds", "Time from the start of a forward to its scores", _SECONDS
        )

    def exchanged(self, about: Exchange) -> None:
        """Counts one HTTP request, whether it reached the model or not."""
        self._exchanges.labels(str(about.status)).inc()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request by the status Open-Jev gives what happens inside."""
        try:
            yield
        except BaseException as error:
            self._requests.labels(_status(error)).inc()
            raise
        self._answered.inc()

    def refused(self) -> None:
        self._refused.inc()

    def dropped(self) -> None:
        self._dropped.inc()

    def asked(self, rows: int) -> None:
        self._rows_asked.inc(rows)

    def waited(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def forward(self, requests: int, rows: int, replayed: bool, seconds: float) -> None:
        self._by_replay[replayed].inc()
        self._rows_computed.inc(rows)
        self._sizes.observe(requests)
        self._rows.observe(rows)
        self._seconds.observe(seconds)

    def ran_again(self, reason: str, requests: int) -> None:
        self._again.labels(reason).inc(requests)

    def watch(self, read: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]) -> None:
        """Also export what `read` returns when asked: counters and gauges by name, without the common prefix."""
        self.registry.register(_Reader(read))

    def render(self) -> tuple[bytes, str]:
        """The text Prometheus scrapes, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _Reader(Collector):
    def __init__(self, read: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]):
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counters, gauges = self._read()
        for name, value in counters.items():
            yield CounterMetricFamily(f"openjev_fast_{name}", name.replace("_", " ").capitalize(), value)
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"openjev_fast_{name}", name.replace("_", " ").capitalize(), value)


def _status(error: BaseException) -> str:
    if isinstance(error, _BAD_REQUEST):
        return "422"
    if isinstance(error, Unavailable):
        return "503"
    return str(CLIENT_CLOSED_REQUEST) if isinstance(error, ClientGone) else "500"

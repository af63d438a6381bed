"""What a server measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from h2o_stream.serve.replies import Seen

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "awake_conversations": "Conversations in memory",
    "kept_conversations": "Conversations on disk and in memory",
    "cache_bytes": "Bytes of the caches in memory",
    "disk_bytes": "Bytes of conversations on disk",
    "disk_limit_bytes": "Bytes that conversations may take on disk; the least recently used go first",
    "disk_free_bytes": "Bytes that are free on this disk",
    "running_replies": "Replies being made",
    "waiting_replies": "Replies that wait until they are begun",
}


class Metrics:
    """The counters of one server, and those of its process: memory, processor time, files."""

    def __init__(self) -> None:
        disable_created_metrics()
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._opened = Counter("h2o_turns", "Turns begun", ["origin"], registry=registry)
        self._tokens = Counter(
            "h2o_tokens",
            "Tokens of finished replies: read from prompts, replied, cached (sent again, and not read again), evicted",
            ["kind"],
            registry=registry,
        )
        self._requests = Counter("h2o_requests", "Requests answered", ["path", "status"], registry=registry)
        self._seconds = {
            name: Histogram(f"h2o_{name}_seconds", text, buckets=_SECONDS, registry=registry)
            for name, text in (
                ("queue", "Time from a request until its reply is begun"),
                ("first_token", "Time from a request until the first token of its reply"),
                ("reply", "Time from a request until the last token of its reply"),
                ("step", "Time of a step: a token of each reply"),
            )
        }
        self._rows = Histogram("h2o_step_streams", "Streams in a step", buckets=_ROWS, registry=registry)
        self._gauges = {name: Gauge(f"h2o_{name}", text, registry=registry) for name, text in _GAUGES.items()}

    def opened(self, origin: str, waited_s: float) -> None:
        """A turn has begun."""
        self._opened.labels(origin).inc()
        self._seconds["queue"].observe(waited_s)

    def stepped(self, rows: int, seconds: float) -> None:
        """A step has taken tokens of so many streams."""
        self._seconds["step"].observe(seconds)
        self._rows.observe(rows)

    def first_token(self, seconds: float) -> None:
        """A reply has its first token, so long after its request."""
        self._seconds["first_token"].observe(seconds)

    def replied(self, seen: Seen, evicted: int, seconds: float) -> None:
        """A reply has ended, so long after its request; `evicted` tokens left the cache meanwhile."""
        counts = {"prompt": seen.read, "reply": seen.replied, "cached": seen.before, "evicted": evicted}
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        self._seconds["reply"].observe(seconds)

    def answered(self, path: str, status: int) -> None:
        """A request was answered."""
        self._requests.labels(path, str(status)).inc()

    def text(self, **values: float) -> bytes:
        """Everything in the form of Prometheus, with the current values of gauges."""
        for name, value in values.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)

"""Counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from h2o_stream.serve.replies import Seen

_ROWS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._opened = Counter("h2o_turns", "Turns begun", ["origin"], registry=self._registry)
        self._tokens = Counter("h2o_tokens", "Tokens of finished replies", ["kind"], registry=self._registry)
        self._requests = Counter("h2o_requests", "Requests answered", ["path", "status"], registry=self._registry)
        self._steps = Histogram(
            "h2o_step_seconds", "Time of a step: a token of each reply, and parts of prompts", registry=self._registry
        )
        self._rows = Histogram(
            "h2o_step_streams",
            "Streams in a step, with those whose prompts are read",
            buckets=_ROWS,
            registry=self._registry,
        )
        self._gauges = {
            name: Gauge(f"h2o_{name}", text, registry=self._registry)
            for name, text in (
                ("awake_conversations", "Conversations in memory"),
                ("kept_conversations", "Conversations on disk and in memory"),
                ("disk_bytes", "Bytes of conversations on disk"),
                ("active_requests", "Replies being made or waited for"),
            )
        }

    def opened(self, origin: str) -> None:
        """A turn has begun."""
        self._opened.labels(origin).inc()

    def stepped(self, rows: int, seconds: float) -> None:
        """A step has taken tokens of so many streams."""
        self._steps.observe(seconds)
        self._rows.observe(rows)

    def replied(self, seen: Seen) -> None:
        """A reply has ended."""
        self._tokens.labels("prompt").inc(seen.read)
        self._tokens.labels("reply").inc(seen.replied)

    def answered(self, path: str, status: int) -> None:
        """A request was answered."""
        self._requests.labels(path, str(status)).inc()

    def text(self, **values: float) -> bytes:
        """Everything in the form of Prometheus, with the current values of gauges."""
        for name, value in values.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)

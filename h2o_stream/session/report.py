"""Statistics of a whole run: speed and memory by tokens seen, peak memory, and why replies ended."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from h2o_stream.base.memory import peak_bytes
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.turn import Timings, Turn

MAX_ROWS = 12
"""Rows of the speed table. Thousands of tokens are grouped to fit."""

_COUNT_INTERVAL_S = 0.1
"""Between two updates of the counts while tokens arrive, as counting takes time from the model."""

MAX_ENTRIES = 512
"""Beyond this, neighbours are merged: finer than any terminal shows."""


@dataclass
class Timeline:
    """What stretches of equal length took, by tokens seen."""

    width: int = 16
    seen: int = 0
    _entries: dict[int, Timings] = field(default_factory=dict)

    def add(self, seen: int, timings: Timings) -> None:
        """Append what happened up to the token `seen`."""
        self.seen = max(seen, self.seen)
        self._at(max(seen - 1, 0) // self.width).add(timings)
        while len(self._entries) > MAX_ENTRIES:
            merged, self._entries, self.width = self._entries, {}, 2 * self.width
            for number, old in sorted(merged.items()):
                self._at(number // 2).add(old)

    def columns(self, end: int, count: int) -> list[Timings | None]:
        """The stream from 0 to `end` in `count` parts; None where nothing was measured."""
        parts: dict[int, Timings] = {}
        for number, timings in sorted(self._entries.items()):
            first = min(number * self.width * count // max(end, 1), count - 1)
            beyond = min((number + 1) * self.width, self.seen) * count // max(end, 1)
            for column in range(first, max(min(beyond, count), first + 1)):
                parts.setdefault(column, Timings()).add(timings)
        return [parts.get(column) for column in range(count)]

    def _at(self, number: int) -> Timings:
        return self._entries.setdefault(number, Timings())


class RunReport:
    """Collects the statistics of a run from its events. Keeps one entry per thousand tokens."""

    def __init__(self) -> None:
        self.turns = 0
        self.finishes: Counter[str] = Counter()
        self.total = Timings()
        self.cache_bytes = 0
        self.seen = 0
        self.evicted = 0
        self.beyond_context = False
        self.timeline = Timeline()
        self._by_thousand: dict[int, Timings] = {}
        self._counted_at = 0.0
        self._previous: PrefillProgress | Token | None = None

    def add_event(self, event: Recalled | PrefillProgress | Token | Turn) -> None:
        """Add an event of `Conversation.say`."""
        if isinstance(event, Recalled):
            return
        if not isinstance(event, Token) or time.monotonic() - self._counted_at >= _COUNT_INTERVAL_S:
            counts = event.counts
            self.seen, self.evicted, self.cache_bytes = counts.seen, counts.evicted, counts.nbytes
            self._counted_at = time.monotonic()
        if isinstance(event, Turn):
            self.turns += 1
            self.finishes[event.finish] += 1
            self.beyond_context = self.beyond_context or event.beyond_context
            self.end_turn()
            return
        same_kind = type(self._previous) is type(event)
        elapsed_s = event.elapsed_s - (self._previous.elapsed_s if same_kind and self._previous else 0.0)
        if isinstance(event, PrefillProgress):
            done = self._previous.done if isinstance(self._previous, PrefillProgress) else 0
            timings = Timings(event.done - done, elapsed_s, cache_bytes=self.cache_bytes)
        else:
            passes = event.passes - (self._previous.passes if isinstance(self._previous, Token) else 0)
            timings = Timings(0, 0.0, 1, elapsed_s, passes, self.cache_bytes)
        self._previous = event
        self.total.add(timings)
        self.seen = event.seen if isinstance(event, Token) else event.counts.seen
        self._by_thousand.setdefault(max(self.seen - 1, 0) // 1000, Timings()).add(timings)
        self.timeline.add(self.seen, timings)

    def end_turn(self) -> None:
        """The next event begins another turn; a `Turn` says so by itself."""
        self._previous = None

    def by_length(self) -> list[tuple[int, int, Timings]]:
        """(from, to, timings) by tokens seen, in at most `MAX_ROWS` rows of equal width."""
        if not self._by_thousand:
            return []
        width = -(-(max(self._by_thousand) + 1) // MAX_ROWS)
        rows: dict[int, Timings] = {}
        for thousand, timings in sorted(self._by_thousand.items()):
            rows.setdefault(thousand // width, Timings()).add(timings)
        return [(row * width * 1000, (row + 1) * width * 1000, timings) for row, timings in rows.items()]

    def record(self) -> dict[str, Any]:
        """The last ``--jsonl`` record of a run."""
        return {
            "type": "summary",
            "turns": self.turns,
            "seen_tokens": self.seen,
            "evicted_tokens": self.evicted,
            "prefill_tok_s": round(self.total.prefill_tok_s, 2),
            "decode_tok_s": round(self.total.decode_tok_s, 2),
            "tokens_per_pass": round(self.total.tokens_per_pass, 2),
            "cache_bytes": self.cache_bytes,
            "peak_rss_bytes": peak_bytes(),
            "beyond_context": self.beyond_context,
            "finish": dict(self.finishes),
            "speed": [
                {
                    "from_tokens": start,
                    "to_tokens": end,
                    "prefill_tok_s": round(timings.prefill_tok_s, 2),
                    "decode_tok_s": round(timings.decode_tok_s, 2),
                }
                for start, end, timings in self.by_length()
            ],
        }

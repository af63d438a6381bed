"""Figures of a whole run: speed by tokens seen, peak memory, how the replies ended."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.memory import peak_bytes
from h2o_stream.session.turn import Turn
from h2o_stream.session.work import Work

MAX_ROWS = 12
"""Rows of the speed table; the thousands of tokens are grouped to fit."""


_LOOK_S = 0.1
"""Between two looks at memory and counts while tokens come, which cost time that the model could use."""


class RunReport:
    """Watches a run go by. Keeps one entry per thousand tokens, whatever the length."""

    def __init__(self) -> None:
        self.turns = 0
        self.finishes: Counter[str] = Counter()
        self.total = Work()
        self.cache_bytes = 0
        self.seen = 0
        self.evicted = 0
        self.beyond_context = False
        self._thousands: dict[int, Work] = {}
        self._looked_at = 0.0
        self._before: PrefillProgress | Token | None = None

    def observe(self, event: PrefillProgress | Token | Turn) -> None:
        """Take in an event of `Conversation.say`."""
        if not isinstance(event, Token) or time.monotonic() - self._looked_at >= _LOOK_S:
            self._look(event.counts)
        if isinstance(event, Turn):
            self.turns += 1
            self.finishes[event.finish] += 1
            self.beyond_context = self.beyond_context or event.beyond_context
            self._before = None
            return
        same_kind = type(self._before) is type(event)
        elapsed_s = event.elapsed_s - (self._before.elapsed_s if same_kind and self._before else 0.0)
        if isinstance(event, PrefillProgress):
            done = self._before.done if isinstance(self._before, PrefillProgress) else 0
            work = Work(prompt_tokens=event.done - done, prefill_s=elapsed_s)
        else:
            work = Work(new_tokens=1, decode_s=elapsed_s)
        self._before = event
        self.total.add(work)
        self.seen = event.seen if isinstance(event, Token) else event.counts.seen
        self._thousands.setdefault(max(self.seen - 1, 0) // 1000, Work()).add(work)

    def _look(self, counts: CacheCounts) -> None:
        self.seen, self.evicted, self.cache_bytes = counts.seen, counts.evicted, counts.nbytes
        self._looked_at = time.monotonic()

    @property
    def peak_rss_bytes(self) -> int:
        """The system's own high-water mark of this process, from its start."""
        return peak_bytes()

    def by_length(self) -> list[tuple[int, int, Work]]:
        """(from, to, work) by tokens seen, in at most `MAX_ROWS` rows of equal width."""
        if not self._thousands:
            return []
        width = -(-(max(self._thousands) + 1) // MAX_ROWS)
        rows: dict[int, Work] = {}
        for thousand, work in sorted(self._thousands.items()):
            rows.setdefault(thousand // width, Work()).add(work)
        return [(row * width * 1000, (row + 1) * width * 1000, work) for row, work in rows.items()]

    def record(self) -> dict[str, Any]:
        """The run as the last record of ``--jsonl``."""
        return {
            "type": "summary",
            "turns": self.turns,
            "seen_tokens": self.seen,
            "evicted_tokens": self.evicted,
            "prefill_tok_s": round(self.total.prefill_tok_s, 2),
            "decode_tok_s": round(self.total.decode_tok_s, 2),
            "cache_bytes": self.cache_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "beyond_context": self.beyond_context,
            "finish": dict(self.finishes),
            "speed": [
                {
                    "from_tokens": start,
                    "to_tokens": end,
                    "prefill_tok_s": round(work.prefill_tok_s, 2),
                    "decode_tok_s": round(work.decode_tok_s, 2),
                }
                for start, end, work in self.by_length()
            ],
        }

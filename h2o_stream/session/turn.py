"""A turn of a conversation, complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.engine.events import Finish
from h2o_stream.session.work import Work


@dataclass(frozen=True)
class Turn:
    """One turn, complete: what was said and what it took.

    Attributes:
        number: from 1, since the start of the conversation.
        prompt: what the user said.
        text: what the model said.
        work: tokens and seconds it took.
        counts: where the tokens were at the end.
        rss_bytes: resident memory of the process at the end.
        finish: why the reply ended.
        detail: a line for the user when it did not end by itself.
        beyond_context: original positions had passed what the model was trained for.
    """

    number: int
    prompt: str
    text: str
    work: Work
    counts: CacheCounts
    rss_bytes: int
    finish: Finish
    detail: str = ""
    beyond_context: bool = False

    def record(self, question_id: int | str | None = None) -> dict[str, Any]:
        """The turn as a record of ``--jsonl``."""
        return {
            "type": "turn",
            "turn": self.number,
            "question_id": question_id,
            "prompt_tokens": self.work.prompt_tokens,
            "new_tokens": self.work.new_tokens,
            "prefill_s": round(self.work.prefill_s, 4),
            "decode_s": round(self.work.decode_s, 4),
            "prefill_tok_s": round(self.work.prefill_tok_s, 2),
            "decode_tok_s": round(self.work.decode_tok_s, 2),
            "seen_tokens": self.counts.seen,
            "cached_tokens": self.counts.cached,
            "evicted_tokens": self.counts.evicted,
            "cache_bytes": self.counts.nbytes,
            "rss_bytes": self.rss_bytes,
            "beyond_context": self.beyond_context,
            "text": self.text,
            "finish": self.finish,
        }

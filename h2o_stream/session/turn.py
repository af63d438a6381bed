"""One turn of a conversation: while it is in progress, and at its end with the time that it took."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from dataclasses import dataclass
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, TypeVar

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.engine.events import Finish
from h2o_stream.recall.passage import Candidate


@dataclass
class Timings:
    """Tokens and compute time of a turn or of any part of a run. Template and end-of-turn tokens count.

    `passes`: how many times generated tokens went through the model, several at once where some were guessed;
    `cache_bytes`: the size of the cache afterwards, as far as it was measured.
    """

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    new_tokens: int = 0
    decode_s: float = 0.0
    passes: int = 0
    cache_bytes: int = 0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Generated tokens per second."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per pass through the model: above 1 where some were guessed."""
        return self.new_tokens / self.passes if self.passes else 0.0

    def add(self, other: Timings) -> None:
        """Add a later measurement to this one."""
        self.prompt_tokens += other.prompt_tokens
        self.prefill_s += other.prefill_s
        self.new_tokens += other.new_tokens
        self.decode_s += other.decode_s
        self.passes += other.passes
        self.cache_bytes = other.cache_bytes or self.cache_bytes


@dataclass(frozen=True)
class Turn:
    """A finished turn: the texts and what they took.

    Attributes:
        counts: the state of the cache at the end.
        rss_bytes: resident memory of the process at the end.
        detail: a line for the user if the reply was cut short.
        beyond_context: original positions have exceeded the model's trained context.
        thinking_tokens: number of tokens generated for it.
        disk_bytes: read from disk meanwhile: weights that were not in memory, if there are many.
    """

    number: int
    prompt: str
    text: str
    timings: Timings
    counts: CacheCounts
    rss_bytes: int
    finish: Finish
    detail: str = ""
    beyond_context: bool = False
    recalled: tuple[Candidate, ...] = ()
    thinking: str = ""
    thinking_tokens: int = 0
    disk_bytes: int = 0
    cut: bool = False

    def record(self, question_id: int | str | None = None) -> dict[str, Any]:
        """The turn as a ``--jsonl`` record. Only a turn with thinking has fields for it."""
        thinking = {"thinking": self.thinking, "thinking_tokens": self.thinking_tokens} if self.thinking else {}
        return {
            "type": "turn",
            "turn": self.number,
            "question_id": question_id,
            "prompt_tokens": self.timings.prompt_tokens,
            "new_tokens": self.timings.new_tokens,
            "prefill_s": round(self.timings.prefill_s, 4),
            "decode_s": round(self.timings.decode_s, 4),
            "prefill_tok_s": round(self.timings.prefill_tok_s, 2),
            "decode_tok_s": round(self.timings.decode_tok_s, 2),
            "tokens_per_pass": round(self.timings.tokens_per_pass, 2),
            "window": self.counts.window or None,
            "seen_tokens": self.counts.seen,
            "cached_tokens": self.counts.cached,
            "evicted_tokens": self.counts.evicted,
            "cache_bytes": self.counts.nbytes,
            "rss_bytes": self.rss_bytes,
            "beyond_context": self.beyond_context,
            "recalled": [_recall_record(candidate) for candidate in self.recalled],
            "text": self.text,
            **thinking,
            "finish": self.finish,
        }


def _recall_record(candidate: Candidate) -> dict[str, Any]:
    return {
        "turn": candidate.passage.turn,
        "role": candidate.passage.role,
        "text": candidate.excerpt,
        "score": round(candidate.score, 4),
        "tokens": candidate.tokens,
    }


_Events = TypeVar("_Events", bound=Generator[object, None, None])


class ActiveTurn:
    """Holds a generator of events and those that it runs itself, by weak references."""

    def __init__(self) -> None:
        self._nested: list[weakref.ref[Generator[object, None, None]]] = []

    def start(self, events: _Events) -> _Events:
        """Close the current generator and replace it by `events`. If it is running, `events` are part of it."""
        self.close()
        self._nested.append(weakref.ref(events))
        return events

    def close(self) -> None:
        """Close the current generator, as if its caller had done so. One that is running goes on."""
        running = []
        for reference in self._nested:
            events = reference()
            if events is not None and getgeneratorstate(events) == GEN_RUNNING:
                running.append(reference)
            elif events is not None:
                events.close()
        self._nested = running

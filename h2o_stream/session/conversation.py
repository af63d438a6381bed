"""A conversation of any length: says things to the engine and reports what came back, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finish, Finished, PrefillProgress, Token
from h2o_stream.session.template import ChatTemplate, Prompt
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


class Conversation:
    """Turns on one engine. The system prompt is fed once, with the first turn, and never evicted.

    Args:
        engine: with an empty cache.
        system: the system prompt; None leaves it to the model's template.
        stops: strings that end a reply, beside those of the engine's sampling config.

    Raises:
        ConfigError: the system prompt leaves the window too little room.
        UnsupportedModelError: the chat template cannot be used turn by turn.
    """

    def __init__(self, engine: Engine, system: str | None = None, stops: Sequence[str] = ()) -> None:
        self.engine = engine
        self.turns = 0
        self._template = ChatTemplate(engine.tokenizer, system, engine.end_tokens)
        self._stops = stops
        self._process = psutil.Process()
        self._opened = False
        self._ended = False
        engine.pin(self._template.opening("").pinned)

    def reset(self) -> None:
        """Forget everything but the system prompt, which the next turn feeds again."""
        self.engine.reset()
        self._opened = self._ended = False

    def say(self, text: str) -> Iterator[PrefillProgress | Token | Turn]:
        """One turn: feed what the user says, then reply.

        Yields:
            The engine's events as they come, then the finished `Turn`. When the iterator is closed early,
            everything yielded so far is in the cache and the next turn goes on from there.
        """
        text = text.encode("utf-8", "replace").decode()
        prompt = self._template.following(text, self._ended) if self._opened else self._template.opening(text)
        if not self._opened:
            self.engine.pin(prompt.pinned)
        self.turns += 1
        work, pieces = Work(), list[str]()
        for event in self.engine.prefill(prompt.tokens):
            if isinstance(event, Finished):
                if not self._opened:
                    self.engine.reset()
                yield self._turn(text, pieces, work, event)
                return
            work.prompt_tokens, work.prefill_s = event.done, event.elapsed_s
            self._note_fed(prompt, event.done)
            yield event
        for reply in self.engine.decode(self._stops):
            pieces.append(reply.text)
            if isinstance(reply, Finished):
                yield self._turn(text, pieces, work, reply)
                return
            work.new_tokens, work.decode_s = work.new_tokens + 1, reply.elapsed_s
            self._ended = reply.id in self.engine.end_tokens
            yield reply

    def _note_fed(self, prompt: Prompt, fed: int) -> None:
        """Once the pinned tokens are in, the conversation is open, even if the rest is interrupted."""
        self._opened = self._opened or fed > prompt.pinned
        self._ended = False

    def _turn(self, prompt: str, pieces: list[str], work: Work, finished: Finished) -> Turn:
        return Turn(
            number=self.turns,
            prompt=prompt,
            text="".join(pieces),
            work=work,
            counts=self.engine.counts,
            rss_bytes=self._process.memory_info().rss,
            finish=finished.reason,
            detail=finished.detail,
            beyond_context=self.engine.beyond_context,
        )

"""A reply while it is generated: its thinking, its answer, and what it took. It becomes a `Turn`."""

from __future__ import annotations

from dataclasses import replace

import psutil

from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.memory import disk_bytes
from h2o_stream.recall.passage import Candidate
from h2o_stream.session.thinking import Markers, ThinkingSplitter
from h2o_stream.session.turn import Timings, Turn


class GrowingReply:
    """The reply to a message, from the events of the engine.

    `markers` are None for a model that does not think; `thinking` says that the prompt has begun the thinking;
    `recalled` are the passages that were read again before the reply.
    """

    def __init__(
        self, prompt: str, markers: Markers | None, thinking: bool, recalled: tuple[Candidate, ...] = ()
    ) -> None:
        self.answer: list[str] = []
        self._thinking: list[str] = []
        self._num_thinking = 0
        self._splitter = ThinkingSplitter(markers, thinking) if markers else None
        self._prompt, self._recalled, self._timings = prompt, recalled, Timings()
        self._disk_bytes = disk_bytes()

    def thinks_beyond(self, budget: int | None) -> bool:
        """Whether the reply is thinking, and has for so many tokens."""
        within = self._splitter is not None and self._splitter.thinking
        return within and budget is not None and self._num_thinking >= budget

    def add_progress(self, event: PrefillProgress) -> None:
        """Note what reading the prompt took so far."""
        self._timings.prompt_tokens, self._timings.prefill_s = event.done, event.elapsed_s

    def add_token(self, event: Token) -> Token:
        """Append a token. Returns its event with thinking and answer apart."""
        self._timings.new_tokens, self._timings.decode_s = self._timings.new_tokens + 1, event.elapsed_s
        if self._splitter is None:
            self.answer.append(event.text)
            return event
        was_thinking = self._splitter.thinking
        thinking, answer = self._splitter.push(event.text)
        self.answer.append(answer)
        if was_thinking or self._splitter.thinking or thinking:
            self._thinking.append(thinking)
            self._num_thinking += 1
            return replace(event, text=answer, thinking=thinking)
        return replace(event, text=answer)

    def finish(self, number: int, event: Finished, engine: Engine) -> Turn:
        """The turn, which has ended with this event."""
        thinking, answer = "", event.text
        if self._splitter is not None:
            pushed, rest = self._splitter.push(event.text), self._splitter.flush()
            thinking, answer = pushed[0] + rest[0], pushed[1] + rest[1]
        self.answer.append(answer)
        self._thinking.append(thinking)
        return Turn(
            number=number,
            prompt=self._prompt,
            text="".join(self.answer),
            timings=self._timings,
            counts=engine.counts,
            rss_bytes=psutil.Process().memory_info().rss,
            finish=event.reason,
            detail=event.detail,
            beyond_context=engine.beyond_context,
            recalled=self._recalled,
            thinking="".join(self._thinking),
            thinking_tokens=self._num_thinking,
            disk_bytes=disk_bytes() - self._disk_bytes,
            cut=event.cut,
        )

"""A reply while it is generated: its thinking, its answer, and what it took. It becomes a `Turn`."""

from __future__ import annotations

from dataclasses import replace

import psutil

from h2o_stream.base.memory import disk_bytes
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.engine.text import Markers
from h2o_stream.recall.passage import Candidate
from h2o_stream.recall.passages import is_statement
from h2o_stream.session.thinking import ThinkingSplitter
from h2o_stream.session.turn import Timings, Turn


class GrowingReply:
    """The reply to a message, from the events of the engine, in one round or more.

    `markers` are None for a model that does not think; `recalled` are the passages that are read again before the
    reply.
    """

    def __init__(self, prompt: str, markers: Markers | None = None, recalled: tuple[Candidate, ...] = ()) -> None:
        self.answer: list[str] = []
        self._thinking: list[str] = []
        self._num_thinking = 0
        self._markers, self._gap = markers, ""
        self._splitter: ThinkingSplitter | None = None
        self._prompt, self._recalled, self._timings, self._earlier = prompt, recalled, Timings(), Timings()
        self._disk_bytes = disk_bytes()

    def begin_round(self, thinking: bool) -> None:
        """A prompt follows, which begins the `thinking` or not."""
        self._earlier = replace(self._timings)
        self._splitter = ThinkingSplitter(self._markers, thinking) if self._markers else None

    def end_round(self, event: Finished) -> None:
        """A round has ended with this event; what the next one says is a paragraph of its own."""
        self._gap = self._rest(event) + "\n\n"

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._timings.new_tokens

    @property
    def round_tokens(self) -> int:
        """Tokens of this round."""
        return self._timings.new_tokens - self._earlier.new_tokens

    @property
    def ends_sentence(self) -> bool:
        """Whether the answer so far ends with a sentence, not only with the point of a number."""
        end = "".join(self.answer[-2:])
        return is_statement(end) and not end[-2:-1].isdigit()

    def thinks_beyond(self, budget: int | None) -> bool:
        """Whether the reply is thinking, and has for so many tokens."""
        within = self._splitter is not None and self._splitter.thinking
        return within and budget is not None and self._num_thinking >= budget

    def add_progress(self, event: PrefillProgress) -> None:
        """Note what reading the prompt took so far."""
        self._timings.prompt_tokens = self._earlier.prompt_tokens + event.done
        self._timings.prefill_s = self._earlier.prefill_s + event.elapsed_s

    def add_token(self, event: Token) -> Token:
        """Append a token. Returns its event with thinking and answer apart."""
        self._timings.new_tokens += 1
        self._timings.decode_s = self._earlier.decode_s + event.elapsed_s
        self._timings.passes = self._earlier.passes + event.passes
        thinking, answer, was_thinking = "", event.text, False
        if self._splitter is not None:
            was_thinking = self._splitter.thinking
            thinking, answer = self._splitter.push(event.text)
        if answer:
            answer, self._gap = self._gap + answer, ""
        self.answer.append(answer)
        if was_thinking or thinking or (self._splitter is not None and self._splitter.thinking):
            self._thinking.append(thinking)
            self._num_thinking += 1
            return replace(event, text=answer, thinking=thinking)
        return replace(event, text=answer)

    def _rest(self, event: Finished) -> str:
        """What was held back of the answer until the end of the round."""
        thinking, answer = "", event.text
        if self._splitter is not None:
            pushed, rest = self._splitter.push(event.text), self._splitter.flush()
            thinking, answer = pushed[0] + rest[0], pushed[1] + rest[1]
        self._thinking.append(thinking)
        return answer

    def finish(self, number: int, event: Finished, engine: Engine) -> Turn:
        """The turn, which has ended with this event."""
        self.answer.append(self._rest(event))
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

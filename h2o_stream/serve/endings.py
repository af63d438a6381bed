"""Replies that are being made, and how they end: saved, interrupted, or given up. Used by the worker's thread.

Whatever goes wrong here ends one reply, whose client gets one error; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from h2o_stream.errors import H2OStreamError
from h2o_stream.serve.aside import LARGE, LONG
from h2o_stream.serve.conversations import Conversations
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.live import Live, Opened
from h2o_stream.serve.messages import Exchange, as_fed
from h2o_stream.serve.metrics import Metrics
from h2o_stream.serve.replies import Ask, Done, Failed, Piece, Seen
from h2o_stream.serve.schemas import size_of
from h2o_stream.serve.stream import LogprobSampler
from h2o_stream.serve.tools import named
from h2o_stream.serve.turns import Event, corrected_events
from h2o_stream.serve.wording import as_api_error
from h2o_stream.session.messages import question_of, text_of
from h2o_stream.session.transcript import Entry
from h2o_stream.session.turn import Turn

_log = logging.getLogger(__name__)

_MANY = 100
"""Unread turns from which they are not even counted between the steps of others."""


@dataclass(eq=False)
class Job:
    """A reply that is being made.

    Attributes:
        ask: what is asked.
        opened: the conversation.
        events: events of the reply.
        reading: the next event, if it comes from another thread.
        ending: ends the reply when that is there, or all layers are done.
        between_layers: its waiting tokens are being read, and have been taken through some layers.
        corrected: the reply is complete, and the turn is read again as its client has seen it.
    """

    ask: Ask
    opened: Opened
    sampler: LogprobSampler
    events: Iterator[Event]
    deadline: float
    prompt_tokens: int = 0
    seen_before: int = 0
    evicted_before: int = 0
    pieces: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    tokens: int = 0
    thought: int = 0
    reading: Future[Event] | None = None
    ending: Callable[[], None] | None = None
    between_layers: bool = False
    corrected: bool = False

    @property
    def live(self) -> Live:
        """The conversation."""
        return self.opened.live

    @property
    def late(self) -> bool:
        """Whether the reply has taken too long."""
        return not self.corrected and time.monotonic() > self.deadline

    @property
    def is_reading(self) -> bool:
        """Whether its next event is still being made in another thread."""
        return self.reading is not None and not self.reading.done()

    @property
    def may_advance(self) -> bool:
        """Whether its next event can be made now."""
        if self.reading is not None:
            return self.reading.done()
        return not self.live.engine.waiting and not self.awaits_grammar

    @property
    def awaits_grammar(self) -> bool:
        """Whether what may come next is still being found, in another process."""
        grammar = self.live.engine.grammar
        return grammar is not None and not self.live.engine.waiting and not grammar.ready

    @property
    def is_long(self) -> bool:
        """Whether its next step may be long: not between tokens, if much is to be read, or copied for stop strings."""
        conversation = self.live.conversation
        return (self.corrected or not self.tokens) and (
            self.reads_much or bool(conversation.stops and conversation.engine.cache.nbytes > LARGE)
        )

    @cached_property
    def reads_much(self) -> bool:
        """Whether many characters are to be read, or many turns, or searched; asked for before anything is."""
        unread, dialogue = len(self.opened.unread), self.ask.dialogue
        begins = [] if self.live.engine.tokens else [dialogue.system, *self.ask.options.pins, *self.ask.options.tools]
        new = sum(dialogue.parts[len(dialogue.past) - unread :]) + size_of(begins)
        recall, question = self.live.conversation.recall, question_of(dialogue.user)
        return unread >= _MANY or new >= LONG or (not begins and recall.takes_long(question))


class Endings:
    """Ends replies.

    Args:
        jobs: the replies being made; those that end are removed.
        conversations: the server's conversations.
        metrics: are counted here.
        call: does something in the worker's thread.

    Attributes:
        saving: replies whose turns are being saved.
    """

    def __init__(
        self,
        jobs: list[Job],
        conversations: Conversations,
        metrics: Metrics,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self._jobs, self._conversations, self._metrics, self._call = jobs, conversations, metrics, call
        # One thread saves conversations, another those of which much is indexed: more of them would delay replies.
        self._writers, self._long_writers = (ThreadPoolExecutor(1, f"h2o-save{x}") for x in ("", "-long"))
        self.saving = 0

    def close(self) -> None:
        """Wait for the threads that save."""
        for writers in (self._writers, self._long_writers):
            writers.shutdown()

    def end(self, job: Job, turn: Turn) -> None:
        """A reply has ended: save it, and send the end to its client."""
        with self._giving_up(job):
            if turn.finish == "oom" or (turn.finish == "context" and not turn.text):
                raise H2OStreamError(turn.detail)
            text = turn.text[len(job.ask.dialogue.begun) :]
            rest = text[len("".join(job.pieces)) :], turn.thinking[len("".join(job.thinking)) :]
            if any(rest) and not job.corrected:
                job.ask.try_send(Piece(*rest, ()))
            if turn.cut and not job.ask.raw:
                (fed,) = as_fed(job.live.merged, job.ask.dialogue.user)
                job.corrected, job.events = True, corrected_events(job.live, fed.user, turn)
                return
            finish = "length" if turn.finish == "length" else "stop"
            self._save(job, turn.number, (text, turn.thinking), turn.finish, finish)

    def interrupt(self, job: Job, finish: str = "interrupted") -> None:
        """Stop a reply; what was said stays. Before its first token, the conversation goes back to where it was."""
        if job.corrected:
            return
        if job.reading is not None or job.between_layers:
            job.ending = partial(self.interrupt, job, finish)
            return
        with self._giving_up(job):
            close = getattr(job.events, "close", None)
            if close is not None:
                close()
            if not job.tokens or job.live.conversation.torn:
                self.give_up(job, ApiError(408, "the reply took too long") if finish == "length" else None)
                return
            said = "".join(job.pieces), "".join(job.thinking)
            self._save(job, job.live.conversation.metadata.turns, said, "interrupted", finish)

    def give_up(self, job: Job, error: BaseException | None) -> None:
        """End a reply without its turn, and send its client the error, if there is one."""
        if job.reading is not None or job.between_layers:
            job.ending = partial(self.give_up, job, error)
            return
        if job in self._jobs:
            self._jobs.remove(job)
        self.discard(job.live)
        if error is not None:
            job.ask.try_send(Failed(as_api_error(error)))

    def discard(self, live: Live) -> None:
        """Forget what is in memory of a conversation; it goes on from what is on disk."""
        self._release(live)
        try:
            self._conversations.drop(live)
        except BaseException as error:  # noqa: BLE001 - the others go on
            _log.error("a conversation was not closed", exc_info=error)

    @contextmanager
    def _giving_up(self, job: Job) -> Iterator[None]:
        """Give a reply up if anything goes wrong inside."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - one reply must not end the others
            self.give_up(job, error)

    def _save(self, job: Job, turn: int, said: tuple[str, str], kind: str, finish: str) -> None:
        """Save a turn, the answer and thinking, before its end is sent."""
        self._jobs.remove(job)
        live, counts, dialogue = job.live, job.live.engine.counts, job.ask.dialogue
        (fed,) = as_fed(live.merged, dialogue.user)
        entry = Entry(turn, text_of(fed.user), f"{dialogue.begun}{said[0]}", "said", kind, "", said[1])
        reply = live.options.read(entry.text)
        if job.ask.calls:
            reply = replace(reply, calls=named(reply.calls))
        live.add(entry, *live.merged, Exchange(dialogue.user, reply))
        live.merged, live.undone, live.response = (), None, job.ask.response
        kept = live.kept
        seen = Seen(job.seen_before, job.prompt_tokens, job.tokens, job.thought, counts)
        done = Done(
            finish, *said, reply.calls if job.ask.calls else (), seen, kept.id if kept else "",
            len(kept.hashes) - 1 + len(live.exchanges) if kept else 0,
            job.opened.origin, job.opened.known, len(job.opened.unread),
        )  # fmt: skip
        self._metrics.replied(seen, counts.evicted - job.evicted_before, job.ask.seconds)
        if kept is None:
            self.discard(live)
            job.ask.try_send(done)
            return
        writers = self._long_writers if job.reads_much else self._writers
        future = writers.submit(self._conversations.commit, live)
        self.saving += 1
        future.add_done_callback(lambda saved: self._call(lambda: self._saved(job, done, saved.exception())))

    def _saved(self, job: Job, done: Done, error: BaseException | None) -> None:
        self.saving -= 1
        with self._giving_up(job):
            if error is not None:
                _log.warning("a turn was not saved: %s", error)
                reason, _, _ = str(error).partition(";")
                raise ApiError(500, f"the turn was not saved: {reason}", code="not_saved") from error
            self._conversations.committed(job.live)
            self._release(job.live)
            job.ask.try_send(done)

    def _release(self, live: Live) -> None:
        live.engine.end_reply()
        if live.kept is not None:
            self._conversations.busy.discard(live.kept.id)

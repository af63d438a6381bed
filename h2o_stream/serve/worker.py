"""The thread that owns the model: steps all replies at once, and reads prompts in parts beside them.

Conversations join and leave between two steps. Every step takes a token of each reply and about `PROMPT_TOKENS` of
prompts, so that nobody waits for a long one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native import library
from h2o_stream.native.batch import BatchStepper
from h2o_stream.native.stepper import PromptPlan
from h2o_stream.serve.conversations import Conversations, Event, Live, Opened, raw_events, turn_events
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.metrics import Metrics
from h2o_stream.serve.replies import Ask, Done, Failed, Piece, Seen, Started
from h2o_stream.serve.stream import LogprobSampler
from h2o_stream.session.transcript import Entry
from h2o_stream.session.turn import Turn

_log = logging.getLogger(__name__)

PROMPT_TOKENS = 256
"""Prompt tokens that are read in a step."""

_WRITERS = 2
"""Threads that save conversations."""


@dataclass(eq=False)
class Job:
    """A reply that is being made.

    Attributes:
        ask: what is asked.
        opened: the conversation.
        events: of it.
        event: what happened last and was not sent yet.
    """

    ask: Ask
    opened: Opened
    sampler: LogprobSampler
    events: Iterator[Event]
    deadline: float
    event: Event | None = None
    prompt_tokens: int = 0
    seen_before: int = 0
    pieces: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def live(self) -> Live:
        """The conversation."""
        return self.opened.live


class Worker:
    """Serves one model from a thread of its own.

    Args:
        model: of the runtime.
        conversations: of the server; used in this thread only.
        running: replies at once.
        timeout_s: of a reply.
        metrics: are counted here.
    """

    def __init__(
        self, model: LoadedModel, conversations: Conversations, running: int, timeout_s: float, metrics: Metrics
    ) -> None:
        native = library.loaded()
        assert native is not None, "the model is one of the runtime"
        self._conversations, self._running, self._timeout_s, self._metrics = conversations, running, timeout_s, metrics
        self._batch = BatchStepper(native, model.model.description)
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked: deque[Ask] = deque()
        self._jobs: list[Job] = []
        self._saving = 0
        self._stopped = False
        self._writers = ThreadPoolExecutor(_WRITERS, "h2o-save")
        self._thread = threading.Thread(target=self._run, name="h2o-serve")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End all replies, save what was said, and wait for the thread."""
        self.call(self._stop)
        self._thread.join()
        self._writers.shutdown()

    def submit(self, ask: Ask) -> None:
        """Answer a request; see `Ask.send`."""
        self.call(lambda: self._asked.append(ask))

    def cancel(self, ask: Ask) -> None:
        """Stop answering it; what was said stays."""
        self.call(lambda: self._cancel(ask))

    def call(self, action: Callable[[], None]) -> None:
        """Do something in the thread."""
        self._actions.put(action)

    # the thread

    def _run(self) -> None:
        while not (self._stopped and not self._jobs and not self._saving):
            self._take_actions()
            self._start_jobs()
            self._advance([job for job in self._jobs if not job.live.engine.waiting])
            self._forward()
            self._send()

    def _take_actions(self) -> None:
        idle = not self._jobs and not (self._asked and self._saving < self._running)
        while True:
            try:
                action = self._actions.get(block=idle)
            except queue.Empty:
                return
            idle = False
            action()

    def _stop(self) -> None:
        self._stopped = True
        for ask in self._asked:
            ask.send(Failed(ApiError(503, "the server is stopping")))
        self._asked.clear()
        for job in list(self._jobs):
            self._interrupt(job)

    def _start_jobs(self) -> None:
        while self._asked and len(self._jobs) + self._saving < self._running:
            ask = self._asked.popleft()
            try:
                self._start(ask)
            except Exception as error:  # noqa: BLE001 - a request must not end the server
                ask.send(Failed(_as_api_error(error)))

    def _start(self, ask: Ask) -> None:
        conversations = self._conversations
        if ask.raw:
            opened = conversations.open_raw(ask.options)
        elif ask.after is not None:
            opened = conversations.open_after(*ask.after, ask.options)
        else:
            opened = conversations.open(ask.dialogue, ask.options, ask.keep)
        live = opened.live
        if live.kept is not None:
            conversations.busy.add(live.kept.id)
        sampler = live.engine.sample_by(ask.config, ask.logprobs)
        live.engine.grammar = ask.grammar
        read = raw_events if ask.raw else turn_events
        events = read(opened, ask.dialogue.user)
        job = Job(ask, opened, sampler, events, time.monotonic() + self._timeout_s)
        job.seen_before = len(live.engine.tokens)
        self._jobs.append(job)
        self._metrics.opened(opened.origin)
        name = live.kept.id if live.kept else ""
        turns = len(live.kept.hashes) if live.kept else 0
        ask.send(Started(name, turns + len(opened.unread)))
        _log.info(
            "conversation %s %s: %d turns known, %d to read", name, opened.origin, opened.known, len(opened.unread)
        )

    def _advance(self, jobs: Sequence[Job]) -> None:
        """Take each reply to its next event."""
        for job in jobs:
            try:
                if time.monotonic() > job.deadline:
                    self._interrupt(job, "length")
                    continue
                job.event = next(job.events, None)
            except Exception as error:  # noqa: BLE001 - one reply must not end the others
                self._fail(job, error)
                continue
            if isinstance(job.event, PrefillProgress):
                job.prompt_tokens = len(job.live.engine.tokens) - job.seen_before

    def _forward(self) -> None:
        """Take a token of every reply, and some of prompts, through the model."""
        groups: dict[bytes, tuple[list[Job], list[Job], list[PromptPlan]]] = {}
        for job in self._begin_steps():
            groups.setdefault(job.live.engine.rules, ([], [], []))[0].append(job)
        for job, plan in self._begin_prompts():
            steps, reads, plans = groups.setdefault(job.live.engine.rules, ([], [], []))
            if plans and plans[0].chunk != plan.chunk:
                steps, reads, plans = groups.setdefault(job.live.engine.rules + b"%d" % plan.chunk, ([], [], []))
            reads.append(job)
            plans.append(plan)
        for steps, reads, plans in groups.values():
            self._forward_together(steps, reads, plans, shared=len(groups) > 1)

    def _begin_steps(self) -> Iterator[Job]:
        """Choose the replies that take a token."""
        for job in [job for job in self._jobs if job.live.engine.steps]:
            try:
                job.live.engine.begin_step()
            except Exception as error:  # noqa: BLE001 - one reply must not end the others
                self._fail(job, error)
                continue
            yield job

    def _begin_prompts(self) -> Iterator[tuple[Job, PromptPlan]]:
        """Choose parts of prompts, in turn."""
        budget = PROMPT_TOKENS
        for job in [job for job in self._jobs if job.live.engine.reads]:
            if budget <= 0:
                return
            budget -= len(job.live.engine.waiting)
            self._jobs.remove(job)  # to the end
            self._jobs.append(job)
            try:
                plan = job.live.engine.begin_prompt()
            except Exception as error:  # noqa: BLE001 - one prompt must not end the others
                self._fail(job, error)
                continue
            yield job, plan

    def _forward_together(
        self, steps: Sequence[Job], reads: Sequence[Job], plans: Sequence[PromptPlan], shared: bool
    ) -> None:
        started, engines = time.perf_counter(), [job.live.engine for job in (*steps, *reads)]
        steppers = [engine.stepper for engine in engines]
        try:
            if plans:
                tokens = [engine.waiting for engine in engines]
                logits = self._batch.forward(steppers[: len(steps)], steppers[len(steps) :], tokens, plans)
            else:
                logits = self._batch.step(steppers)
            for engine, row in zip(engines, logits, strict=True):
                engine.finish(row.copy() if shared else row)
        except Exception as error:  # noqa: BLE001 - a step must not end the server
            for job in (*steps, *reads):
                self._fail(job, error)
            return
        self._metrics.stepped(len(engines), time.perf_counter() - started)

    def _send(self) -> None:
        """Send what happened."""
        for job in list(self._jobs):
            event, job.event = job.event, None
            if isinstance(event, Token):
                self._send_token(job, event)
            elif isinstance(event, Turn):
                self._end(job, event)

    def _send_token(self, job: Job, event: Token) -> None:
        job.tokens += 1
        job.pieces.append(event.text)
        job.thinking.append(event.thinking or "")
        logprobs = job.sampler.take()
        counts = event.counts if job.ask.slots else None
        if event.text or event.thinking or logprobs or counts:
            job.ask.send(Piece(event.text, event.thinking or "", logprobs, counts))

    def _end(self, job: Job, turn: Turn) -> None:
        """A reply has ended."""
        rest = turn.text[len("".join(job.pieces)) :], turn.thinking[len("".join(job.thinking)) :]
        if any(rest):
            job.ask.send(Piece(*rest, ()))
        if turn.finish == "oom" or (turn.finish == "context" and not turn.text):
            self._fail(job, H2OStreamError(turn.detail))
            return
        entry = Entry(turn.number, job.ask.dialogue.user, turn.text, "said", turn.finish, "", turn.thinking)
        self._save(job, entry, "length" if turn.finish == "length" else "stop")

    def _interrupt(self, job: Job, finish: str = "interrupted") -> None:
        """Stop a reply. Before its first token, the conversation goes back to where it was."""
        close = getattr(job.events, "close", None)
        if close is not None:
            close()
        if not job.tokens or job.live.conversation.torn:
            self._fail(job, ApiError(408, "the reply took too long") if finish == "length" else None)
            return
        number = job.live.conversation.metadata.turns
        text, thinking = "".join(job.pieces), "".join(job.thinking)
        self._save(job, Entry(number, job.ask.dialogue.user, text, "said", "interrupted", "", thinking), finish)

    def _cancel(self, ask: Ask) -> None:
        if ask in self._asked:
            self._asked.remove(ask)
        for job in [job for job in self._jobs if job.ask is ask]:
            self._interrupt(job)

    def _fail(self, job: Job, error: Exception | None) -> None:
        """Give a reply up, and the conversation's turn with it."""
        self._jobs.remove(job)
        self._release(job.live)
        self._conversations.drop(job.live)
        if error is not None:
            job.ask.send(Failed(_as_api_error(error)))

    def _save(self, job: Job, entry: Entry, finish: str) -> None:
        """Save a turn before its end is sent."""
        self._jobs.remove(job)
        live, counts = job.live, job.live.engine.counts
        live.add(entry)
        kept = live.kept
        seen = Seen(job.seen_before, job.prompt_tokens, job.tokens, counts)
        done = Done(
            finish, entry.text, entry.thinking, seen, kept.id if kept else "",
            len(kept.hashes) - 1 + len(live.hashes) if kept else 0,
            job.opened.origin, job.opened.known, len(job.opened.unread),
        )  # fmt: skip
        self._metrics.replied(seen)
        if kept is None:
            self._conversations.drop(live)
            job.ask.send(done)
            return
        self._saving += 1
        future = self._writers.submit(self._conversations.commit, live)
        future.add_done_callback(lambda saved: self.call(lambda: self._saved(job, done, saved.exception())))

    def _saved(self, job: Job, done: Done, error: BaseException | None) -> None:
        self._saving -= 1
        self._release(job.live)
        if error is not None:
            _log.warning("a turn is not saved: %s", error)
            self._conversations.drop(job.live)
            job.ask.send(Failed(ApiError(500, f"the turn was not saved: {error}")))
            return
        self._conversations.committed(job.live)
        job.ask.send(done)

    def _release(self, live: Live) -> None:
        if live.kept is not None:
            self._conversations.busy.discard(live.kept.id)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, H2OStreamError):
        return ApiError(400, str(error))
    _log.error("a reply failed", exc_info=error)
    return ApiError(500, f"unexpected {type(error).__name__}")

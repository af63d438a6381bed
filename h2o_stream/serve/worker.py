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
from functools import partial

from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.memory import trim_heap
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native import library
from h2o_stream.native.batch import BatchStepper
from h2o_stream.native.stepper import PromptPlan
from h2o_stream.serve.aside import Readers
from h2o_stream.serve.conversations import Conversations, Opened, raw_events, turn_events
from h2o_stream.serve.endings import Endings, Job
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.metrics import Metrics
from h2o_stream.serve.replies import Ask, Failed, Piece, Started
from h2o_stream.serve.wording import as_api_error
from h2o_stream.session.turn import Turn

_log = logging.getLogger(__name__)

PROMPT_TOKENS = 256
"""Prompt tokens that are read in a step."""


_GRAMMAR_S = 0.001
"""Seconds after which grammars are looked at again if nothing else is to be done."""

_IDLE_S = 1.0
"""Seconds without replies after which free memory goes back to the system."""


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
        self._stopped = False
        self._endings = Endings(self._jobs, conversations, metrics, self.call)
        self._readers = Readers()
        self._thread = threading.Thread(target=self._run, name="h2o-serve")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End all replies, save what was said, and wait for the thread."""
        self.call(self._stop)
        self._thread.join()
        self._endings.close()

    def submit(self, ask: Ask) -> None:
        """Answer a request; see `Ask.send`."""
        self.call(lambda: self._asked.append(ask))

    def cancel(self, ask: Ask) -> None:
        """Stop answering it; what was said stays."""
        self.call(lambda: self._cancel(ask))

    @property
    def lengths(self) -> tuple[int, int]:
        """How many replies are being made or saved, and how many wait."""
        return len(self._jobs) + self._endings.saving, len(self._asked)

    def call(self, action: Callable[[], None]) -> None:
        """Do something in the thread."""
        self._actions.put(action)

    # the thread

    def _run(self) -> None:
        while not (self._stopped and all(map(_is_reading, self._jobs)) and not self._endings.saving):
            try:
                self._take_actions()
                self._start_jobs()
                self._advance([job for job in self._jobs if _may_advance(job)])
                self._forward()
                if self._jobs and all(map(_awaits_grammar, self._jobs)):
                    time.sleep(_GRAMMAR_S)
                self._send()
            except Exception as error:  # noqa: BLE001 - nothing may end the server
                for job in list(self._jobs):
                    self._endings.give_up(job, error)

    def _take_actions(self) -> None:
        idle = all(map(_is_reading, self._jobs)) and not (self._asked and self._endings.saving < self._running)
        wait_s: float | None = _IDLE_S
        while True:
            try:
                action = self._actions.get(idle, wait_s)
            except queue.Empty:
                if not idle:
                    return
                self._batch.release()
                trim_heap()
                wait_s = None
            else:
                idle = False
                action()

    def _stop(self) -> None:
        self._stopped = True
        for ask in self._asked:
            ask.try_send(Failed(ApiError(503, "the server is stopping")))
        self._asked.clear()
        for job in list(self._jobs):
            self._endings.interrupt(job)

    def _start_jobs(self) -> None:
        while self._asked and len(self._jobs) + self._endings.saving < self._running:
            ask = self._asked.popleft()
            try:
                self._start(ask)
            except Exception as error:  # noqa: BLE001 - a request must not end the server
                ask.try_send(Failed(as_api_error(error)))

    def _start(self, ask: Ask) -> None:
        conversations = self._conversations
        if ask.raw:
            opened = conversations.open_raw(ask.options)
        elif ask.after is not None:
            opened = conversations.open_after(ask.after, ask.options, ask.keep)
        else:
            opened = conversations.open(ask.dialogue, ask.hashes, ask.options, ask.keep)
        try:
            self._begin(ask, opened)
        except Exception:
            self._endings.discard(opened.live)
            raise

    def _begin(self, ask: Ask, opened: Opened) -> None:
        live = opened.live
        if live.kept is not None:
            self._conversations.busy.add(live.kept.id)
        sampler = live.engine.sample_by(ask.config, ask.logprobs)
        live.engine.grammar = ask.grammar
        read = raw_events if ask.raw else turn_events
        job = Job(ask, opened, sampler, read(opened, ask.dialogue), time.monotonic() + self._timeout_s)
        job.seen_before = len(live.engine.tokens)
        job.evicted_before = live.engine.counts.evicted if job.seen_before else 0
        self._metrics.opened(opened.origin, ask.seconds)
        self._jobs.append(job)
        _log.info("a conversation is %s: %d turns known, %d to read", opened.origin, opened.known, len(opened.unread))
        if not ask.try_send(Started()):
            self._endings.interrupt(job)

    def _advance(self, jobs: Sequence[Job]) -> None:
        """Take each reply to its next event."""
        for job in jobs:
            try:
                if job.reading is not None:
                    event, job.reading = job.reading, None
                    job.event = event.result()
                    if job.ending is not None:
                        job.ending()
                        continue
                elif job.late:
                    self._endings.interrupt(job, "length")
                    continue
                elif job.is_long:
                    job.reading = self._readers.submit(partial(next, job.events), partial(self.call, _nothing))
                    continue
                else:
                    job.event = next(job.events)
            except Exception as error:  # noqa: BLE001 - one reply must not end the others
                self._endings.give_up(job, error)
                continue
            if isinstance(job.event, PrefillProgress) and not job.corrected:
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
        for job in [job for job in self._jobs if not job.reading and job.live.engine.steps]:
            try:
                job.live.engine.begin_step()
            except Exception as error:  # noqa: BLE001 - one reply must not end the others
                self._endings.give_up(job, error)
                continue
            yield job

    def _begin_prompts(self) -> Iterator[tuple[Job, PromptPlan]]:
        """Choose parts of prompts, in turn."""
        budget = PROMPT_TOKENS
        for job in [job for job in self._jobs if not job.reading and job.live.engine.reads]:
            if budget <= 0:
                return
            budget -= len(job.live.engine.waiting)
            self._jobs.remove(job)  # to the end
            self._jobs.append(job)
            try:
                plan = job.live.engine.begin_prompt()
            except Exception as error:  # noqa: BLE001 - one prompt must not end the others
                self._endings.give_up(job, error)
                continue
            yield job, plan

    def _forward_together(
        self, steps: Sequence[Job], reads: Sequence[Job], plans: Sequence[PromptPlan], shared: bool
    ) -> None:
        started, jobs = time.perf_counter(), [*steps, *reads]
        engines = [job.live.engine for job in jobs]
        steppers = [engine.stepper for engine in engines]
        try:
            if plans:
                tokens = [engine.waiting for engine in engines]
                logits = self._batch.forward(steppers[: len(steps)], steppers[len(steps) :], tokens, plans)
            else:
                logits = self._batch.step(steppers)
            for job, row in zip(jobs, logits, strict=True):
                job.live.engine.finish(row.copy() if shared or job.is_long else row)
        except Exception as error:  # noqa: BLE001 - a step must not end the server
            for job in jobs:
                self._endings.give_up(job, error)
            return
        self._metrics.stepped(len(engines), time.perf_counter() - started)

    def _send(self) -> None:
        """Send what happened."""
        for job in list(self._jobs):
            event, job.event = job.event, None
            if isinstance(event, Token):
                self._send_token(job, event)
            elif isinstance(event, Turn):
                self._endings.end(job, event)

    def _send_token(self, job: Job, event: Token) -> None:
        if not job.tokens:
            self._metrics.first_token(job.ask.seconds)
        job.tokens, job.thought = job.tokens + 1, job.thought + (event.thinking is not None)
        job.pieces.append(event.text)
        job.thinking.append(event.thinking or "")
        logprobs = job.sampler.take()
        if event.thinking is not None or event.id in job.live.engine.end_tokens:
            logprobs = ()  # they are those of the text
        counts = event.counts if job.ask.slots else None
        if event.text or event.thinking or logprobs or counts:
            sent = job.ask.try_send(Piece(event.text, event.thinking or "", logprobs, counts))
            if not sent:
                self._endings.interrupt(job)

    def _cancel(self, ask: Ask) -> None:
        if ask in self._asked:
            self._asked.remove(ask)
        for job in [job for job in self._jobs if job.ask is ask]:
            self._endings.interrupt(job)


def _is_reading(job: Job) -> bool:
    """Whether its next event is still being made in another thread."""
    return job.reading is not None and not job.reading.done()


def _may_advance(job: Job) -> bool:
    if job.reading is not None:
        return job.reading.done()
    return not job.live.engine.waiting and not _awaits_grammar(job)


def _awaits_grammar(job: Job) -> bool:
    """Whether what may come next is still being found, in another process."""
    grammar = job.live.engine.grammar
    return grammar is not None and not job.live.engine.waiting and not grammar.ready


def _nothing() -> None:
    """Wakes the thread up."""

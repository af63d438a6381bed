"""The thread that owns the model: steps all replies at once, and reads prompts between the steps.

It takes what was asked for, chooses whose tokens are next, takes them through the model, and sends what came of it.
Conversations join and leave between steps. After each, prompts go through as many layers as replies can wait for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from h2o_stream.base.memory import trim_heap
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.engine.logits import Logits
from h2o_stream.engine.served import BatchedSteps
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native.stepper import PromptPlan
from h2o_stream.serve.aside import Threads
from h2o_stream.serve.conversations import Conversations
from h2o_stream.serve.endings import Endings, Job
from h2o_stream.serve.errors import stopping
from h2o_stream.serve.live import Opened
from h2o_stream.serve.metrics import Metrics
from h2o_stream.serve.openings import Openings
from h2o_stream.serve.replies import Ask, Failed, Piece, Started
from h2o_stream.serve.turns import raw_events, turn_events
from h2o_stream.serve.wording import as_api_error
from h2o_stream.session.turn import Turn

_log = logging.getLogger(__name__)

_GRAMMAR_S = 0.001
"""Seconds after which grammars are looked at again if nothing else is to be done."""

_ACTIONS_S = 0.02
"""Seconds after which what else was asked for waits until after a step: many clients may leave together."""

_IDLE_S = 1.0
"""Seconds without replies after which free memory goes back to the system."""


@dataclass
class _Batch:
    """Replies whose tokens go through the model together; for prompts, with their plans."""

    jobs: list[Job] = field(default_factory=list)
    plans: list[PromptPlan] = field(default_factory=list)

    @property
    def steppers(self) -> list[Any]:
        """Those of their caches."""
        return [job.live.engine.stepper for job in self.jobs]


@dataclass(frozen=True)
class _Reading:
    """Prompts that are being read, and what `BatchedSteps.read` yields."""

    jobs: list[Job]
    layers: Iterator[Iterable[Logits] | None]


class Worker:
    """Serves one model from a thread of its own.

    Args:
        model: its model is one of `ManyStreams`.
        conversations: the server's conversations; used in this thread only.
        running: replies at once.
        timeout_s: longest time of a reply.
        metrics: are counted here.
    """

    def __init__(
        self, model: LoadedModel, conversations: Conversations, running: int, timeout_s: float, metrics: Metrics
    ) -> None:
        self._conversations, self._running, self._timeout_s, self._metrics = conversations, running, timeout_s, metrics
        self._batch: BatchedSteps = model.model.make_batch()
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._asked: deque[Ask] = deque()
        self._jobs: list[Job] = []
        self._readings = deque[_Reading]()
        self._stopped = False
        self._endings = Endings(self._jobs, conversations, metrics, self.call)
        self._readers = Threads("h2o-read")
        self._openings = Openings(self._asked, conversations, self.call)
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
        return len(self._jobs) + self._endings.saving, len(self._asked) + self._openings.num_waiting

    def call(self, action: Callable[[], object]) -> None:
        """Do something in the thread."""
        self._actions.put(action)

    def _run(self) -> None:
        while not (self._stopped and all(job.is_reading for job in self._jobs) and not self._endings.saving):
            try:
                self._take_actions()
                started = time.perf_counter()
                self._begin_reply()
                self._step(started)
                if self._jobs and all(job.awaits_grammar for job in self._jobs):
                    time.sleep(_GRAMMAR_S)
            except BaseException as error:  # noqa: BLE001 - nothing may end the server
                for job in list(self._jobs):
                    self._endings.give_up(job, error)

    def _begin_reply(self) -> None:
        """Begin a new reply, if there is a place: its conversation takes some milliseconds, and others wait."""
        if not self._may_begin:
            return
        ask = self._asked.popleft()
        try:
            if opened := self._openings.open(ask):
                self._start(ask, opened)
        except BaseException as error:  # noqa: BLE001 - a request must not end the server
            ask.try_send(Failed(as_api_error(error)))

    @property
    def _may_begin(self) -> bool:
        """Whether a request can be taken now: not too many at once are answered, nor loaded."""
        free = len(self._jobs) + self._endings.saving < self._running and len(self._openings.loading) <= self._running
        return free and bool(self._asked)

    def _step(self, started: float) -> None:
        """Take a token of every reply, and prompts for a while, through the model. Replies wait since it `started`."""
        pace = self._conversations.pace
        for job in list(self._jobs):
            if job.late:
                self._endings.interrupt(job, "length")
            while job in self._jobs and job.may_advance:
                self._advance(job)
        waiting = [job for job in self._jobs if job.live.engine.waiting and not (job.reading or job.between_layers)]
        steps = [job for job in waiting if job.live.engine.steps]
        if len(steps) == 1 and (engine := steps[0].live.engine).can_guess:
            self._forward(steps, lambda: [engine.step_alone()])
        else:
            batches = self._batches(steps)
            for batch in batches:
                self._forward(batch.jobs, partial(self._batch.step, batch.steppers), several=len(batches) > 1)
        pace.replies = any(job.tokens for job in self._jobs)
        until = (now := time.perf_counter()) + pace.seconds(now - started)
        if not self._readings:
            self._begin_prompts([job for job in waiting if job not in steps], until)
        self._read(until)

    def _batches(self, jobs: Iterable[Job]) -> list[_Batch]:
        """What goes through the model together, prepared."""
        batches = dict[tuple[bytes, int], _Batch]()
        for job in jobs:
            engine = job.live.engine
            try:
                plan = engine.begin_waiting()
                batch = batches.setdefault((engine.rules, plan.chunk if plan else 0), _Batch())
            except BaseException as error:  # noqa: BLE001 - one reply must not end the others
                self._endings.give_up(job, error)
                continue
            batch.jobs.append(job)
            batch.plans.extend([plan] if plan else [])
        return list(batches.values())

    def _forward(self, jobs: list[Job], compute: Callable[[], Iterable[Logits]], several: bool = False) -> None:
        """Take tokens through the model, and send what is in the caches then; some replies get their own logits."""
        started = time.perf_counter()
        try:
            logits = compute()
        except BaseException as error:  # noqa: BLE001 - a step must not end the server
            for job in jobs:
                self._endings.give_up(job, error)
            return
        self._metrics.stepped(len(jobs), time.perf_counter() - started)
        for job, scores in zip(jobs, logits, strict=True):
            engine = job.live.engine
            engine.finish(scores.copy() if several or job.is_long or engine.grammar else scores)
            self._advance(job)

    def _begin_prompts(self, prompts: list[Job], until: float) -> None:
        """Begin to read parts of prompts: of the one of which least was read, and of others if there is time."""

        def chosen() -> Iterator[Job]:
            room = self._conversations.pace.tokens
            for number, job in enumerate(sorted(prompts, key=lambda job: job.prompt_tokens)):
                room -= len(job.live.engine.waiting)
                if number and (room < 0 or time.perf_counter() > until):
                    return
                yield job

        for batch in self._batches(chosen()):
            tokens = [job.live.engine.waiting for job in batch.jobs]
            self._readings.append(_Reading(batch.jobs, self._batch.read(batch.steppers, tokens, batch.plans)))
            for job in batch.jobs:
                job.between_layers = True

    def _read(self, until: float) -> None:
        """Take what is being read through as many layers as there is time for."""
        while self._readings and time.perf_counter() <= until:
            reading = self._readings[0]
            try:
                logits = next(reading.layers)
            except BaseException as error:  # noqa: BLE001 - a prompt must not end the server
                for job in self._end_reading():
                    self._endings.give_up(job, error)
                continue
            if logits is not None:
                for job, scores in zip(self._end_reading(), logits, strict=True):
                    job.live.engine.finish(scores)
                    self._advance(job)

    def _end_reading(self) -> list[Job]:
        """Prompts that are not being read any longer."""
        jobs = self._readings.popleft().jobs
        for job in jobs:
            job.between_layers = False
        return jobs

    def _advance(self, job: Job) -> None:
        """Take a reply to its next event, and send it."""
        try:
            reading, job.reading = job.reading, None
            event = reading.result() if reading else None
            if job.ending is not None:
                job.ending()
                return
            if reading is None and job.is_long:
                job.reading = self._readers.submit(partial(next, job.events), partial(self.call, _nothing))
                return
            event = event or next(job.events)
            if isinstance(event, Token):
                self._send_token(job, event)
            elif isinstance(event, Turn):
                self._endings.end(job, event)
            elif isinstance(event, PrefillProgress) and not job.corrected:
                job.prompt_tokens = len(job.live.engine.tokens) - job.seen_before
        except BaseException as error:  # noqa: BLE001 - one reply must not end the others
            self._endings.give_up(job, error)

    def _take_actions(self) -> None:
        idle = all(job.is_reading for job in self._jobs) and not self._may_begin
        wait_s: float | None = _IDLE_S
        started = time.perf_counter()
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
                if time.perf_counter() - started > _ACTIONS_S:
                    return

    def _stop(self) -> None:
        self._stopped = True
        for waiting in (self._asked, *self._openings.loading.values()):
            for ask in waiting:
                self._openings.cancel(ask)
                ask.try_send(Failed(stopping()))
            waiting.clear()
        for job in list(self._jobs):
            self._endings.interrupt(job)

    def _start(self, ask: Ask, opened: Opened) -> None:
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
        piece = Piece(event.text, event.thinking or "", logprobs, counts)
        if any((piece.text, piece.thinking, logprobs, counts)) and not job.ask.try_send(piece):
            self._endings.interrupt(job)

    def _cancel(self, ask: Ask) -> None:
        for waiting in (self._asked, *self._openings.loading.values()):
            if ask in waiting:
                waiting.remove(ask)
        self._openings.cancel(ask)
        for job in [job for job in self._jobs if job.ask is ask]:
            self._endings.interrupt(job)


def _nothing() -> None:
    """Wakes the thread up."""

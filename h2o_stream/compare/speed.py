"""How fast engines read and decode at growing histories, side by side, and how much memory they take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from h2o_stream.compare.contenders import Contender, Memory, Ready, Worker

ROUNDS = 5
"""Times that every contender decodes at a history; the median counts."""

STEPS = 24
"""Tokens decoded in a round."""

_WARM_UP = 3
"""Tokens decoded in each round before the time is taken."""

_BANDWIDTH_BYTES = 600_000_000


@dataclass(frozen=True)
class Doing:
    """What is going on, for people."""

    text: str
    done: int
    total: int


@dataclass(frozen=True)
class Figure:
    """A contender at a history.

    Attributes:
        contender: which.
        ready: what is known of it.
        history: tokens it had seen when it began to decode.
        prefill_tok_s: tokens per second, from the first one up to there.
        decode_tok_s: median over the rounds.
        memory: after them.
    """

    contender: Contender
    ready: Ready
    history: int
    prefill_tok_s: float
    decode_tok_s: float
    memory: Memory

    def floor(self, bandwidth: float) -> float:
        """The most tokens per second there can be when weights and cache are read once for each.

        Args:
            bandwidth: bytes per second.
        """
        return bandwidth / (self.ready.weight_bytes + (self.memory.cache or 0))


def bandwidth(threads: int | None = None) -> float:
    """Bytes per second that this machine reads from memory: the sum of 600 MB, best of five."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    numbers = torch.ones(_BANDWIDTH_BYTES // 4)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - begun)
    torch.set_num_threads(before)
    return _BANDWIDTH_BYTES / min(seconds)


@dataclass
class _Lane:
    """A contender on its way through the text.

    Attributes:
        worker: its process.
        ready: what is known of it.
        seen: tokens so far.
        read: of them read as a prompt.
        read_s: seconds that took.
    """

    worker: Worker
    ready: Ready
    seen: int = 0
    read: int = 0
    read_s: float = 0.0

    def reaches(self, history: int) -> bool:
        """Whether it can decode there."""
        return self.ready.context is None or needed([history]) <= self.ready.context

    def feed(self, tokens: Sequence[int], history: int) -> None:
        """Read on up to a history."""
        self.read_s += self.worker.ask("feed", tokens[self.seen : history])
        self.read += history - self.seen
        self.seen = history

    def decode(self, tokens: Sequence[int]) -> float:
        """Decode for a round. Returns the seconds that `STEPS` tokens took."""
        seconds = 0.0
        for count in (_WARM_UP, STEPS):
            seconds = self.worker.ask("decode", tokens[self.seen : self.seen + count])
            self.seen += count
        return seconds


def race(contenders: Sequence[Contender], histories: Sequence[int], tokens: Sequence[int]) -> Iterator[Doing | Figure]:
    """Let contenders read the same text up to each history and decode there in turn, round by round.

    Args:
        contenders: each gets a process of its own.
        histories: tokens, ascending. Those beyond what a contender can hold are left out for it.
        tokens: the text, see `needed`.

    Yields:
        `Doing` before whatever takes long, and a `Figure` for each contender and history.

    Raises:
        H2OStreamError: an engine is missing or failed.
    """
    total, done = len(contenders) * (1 + len(histories)), 0
    with ExitStack() as stack:
        lanes: list[_Lane] = []
        for contender in contenders:
            yield Doing(f"starting {contender.name}", done, total)
            worker = stack.enter_context(Worker(contender))
            lanes.append(_Lane(worker, worker.ask("ready")))
            worker.ask("prepare")
            done += 1
        for history in histories:
            able = [lane for lane in lanes if lane.reaches(history)]
            done += len(lanes) - len(able)
            for lane in able:
                yield Doing(f"{lane.worker.contender.name} reads up to {history:,}", done, total)
                lane.feed(tokens, history)
            seconds: list[list[float]] = [[] for _ in able]
            for number in range(ROUNDS):
                for lane, taken in zip(able, seconds, strict=True):
                    yield Doing(f"{lane.worker.contender.name} at {history:,}, round {number + 1}", done, total)
                    taken.append(lane.decode(tokens))
            for lane, taken in zip(able, seconds, strict=True):
                done += 1
                yield Figure(
                    contender=lane.worker.contender,
                    ready=lane.ready,
                    history=history,
                    prefill_tok_s=lane.read / lane.read_s,
                    decode_tok_s=STEPS / median(taken),
                    memory=lane.worker.ask("memory"),
                )


def needed(histories: Sequence[int]) -> int:
    """Tokens of text for a race up to the last of these histories."""
    return max(histories) + ROUNDS * (_WARM_UP + STEPS)

"""How fast engines read and decode at growing histories, side by side, and how much memory they take."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from h2o_stream.compare.comparison import Comparison, Doing, Job, Notify, window_of
from h2o_stream.compare.comparisons import SpeedOptions
from h2o_stream.compare.contenders import LLAMA_CPP, NO_LLAMA_CPP, OURS, Contender, Memory, Ready
from h2o_stream.compare.folder import Part, machine
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.compare.random_gguf import check_architecture, write_random_gguf
from h2o_stream.compare.random_weights import precision_of, read_settings
from h2o_stream.compare.worker import Worker
from h2o_stream.config import CacheConfig
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.models.find import files_digest, find, located
from h2o_stream.models.load import load_tokenizer

ROUNDS = 5
"""Times that every contender decodes at a history; the median counts."""

STEPS = 24
"""Tokens decoded in a round."""

_WARM_UP = 3
"""Tokens decoded in each round before the time is taken."""

_BANDWIDTH_BYTES = 600_000_000


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
        steps: what ran them and why, see `H2OCache`; None for a peer.
    """

    contender: Contender
    ready: Ready
    history: int
    prefill_tok_s: float
    decode_tok_s: float
    memory: Memory
    steps: str | None = None

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


class Race:
    """Contenders that read the same text up to each history and decode there in turn, round by round.

    Args:
        contenders: each gets a process of its own, when the first history is asked for.
        tokens: the text, see `needed`.
    """

    def __init__(self, contenders: Sequence[Contender], tokens: Sequence[int]) -> None:
        self._contenders, self._tokens = contenders, tokens
        self._stack, self._lanes = ExitStack(), list[_Lane]()

    def close(self) -> None:
        """End the processes."""
        self._stack.close()

    @property
    def steps(self) -> int:
        """What `Doing.done` comes to at a history."""
        return len(self._contenders) * (2 + ROUNDS)

    def at(self, history: int) -> Iterator[Doing | list[Figure]]:
        """Time all contenders that reach a history; histories come in ascending order.

        Yields:
            `Doing` before whatever takes long, and last the figures.

        Raises:
            H2OStreamError: an engine is missing or failed.
        """
        for contender in self._contenders[len(self._lanes) :]:
            if contender.random_weights and contender.engine == LLAMA_CPP:
                contender = yield from self._with_file(contender, Path(contender.random_weights))
            yield Doing(len(self._lanes), f"starting {contender.name}")
            worker = self._stack.enter_context(Worker(replace(contender, length=len(self._tokens))))
            self._lanes.append(_Lane(worker, worker.ask("ready")))
            worker.ask("prepare")
        able = [lane for lane in self._lanes if lane.reaches(history)]
        done = len(self._lanes)
        for lane in able:
            yield Doing(done, f"{lane.worker.contender.name} reads up to {history:,}")
            lane.feed(self._tokens, history)
            done += 1
        seconds: list[list[float]] = [[] for _ in able]
        for number in range(ROUNDS):
            for lane, taken in zip(able, seconds, strict=True):
                yield Doing(done, f"{lane.worker.contender.name} at {history:,}, round {number + 1}")
                taken.append(lane.decode(self._tokens))
                done += 1
        yield [
            Figure(
                contender=lane.worker.contender,
                ready=lane.ready,
                history=history,
                prefill_tok_s=lane.read / lane.read_s,
                decode_tok_s=STEPS / median(taken),
                memory=lane.worker.ask("memory"),
                steps=lane.worker.ask("steps"),
            )
            for lane, taken in zip(able, seconds, strict=True)
        ]

    def _with_file(self, contender: Contender, settings: Path) -> Generator[Doing, None, Contender]:
        """The same with a GGUF file of random weights, which is there until `close`."""
        precision, folder = precision_of(contender.model), TemporaryDirectory(prefix="h2o-stream-")
        file = Path(self._stack.enter_context(folder)) / f"random-{precision}.gguf"
        for done, total in write_random_gguf(read_settings(settings), precision, file):
            yield Doing(len(self._lanes), f"writing {file.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        return replace(contender, model=replace(contender.model, model=str(file)))


class Speed(Comparison[SpeedOptions]):
    """How fast engines are beside each other, all with the same model."""

    name = "speed"
    alone = True

    def __init__(self, options: SpeedOptions) -> None:
        super().__init__(options)
        self._contenders, self._histories = contenders_of(options), sorted(set(options.histories))
        self._tokens: list[int] = []
        self._digest, self._files = "", list[str]()
        self._race: Race

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Read the text, and measure what the floor is computed from."""
        count = needed(self._histories)
        first = self._contenders[0]
        self._tokens = read_tokens(self.options.text, load_tokenizer(first.model, notify), count)
        if len(self._tokens) < count:
            few = f"--text {self.options.text}: {len(self._tokens)} tokens, {count} are needed"
            raise DataError(f"{few}; lower --histories or give a longer text")
        if first.random_weights:
            self._check_random(Path(first.random_weights))
        self._digest = digest_of(self._tokens)
        self._files = sorted({_weights_of(contender) for contender in self._contenders})
        self._race = Race(self._contenders, self._tokens)
        return {
            "files": self._files,
            "model": first.random_weights or first.model.model,
            "policy": [contender.cache.policy for contender in self._contenders],
            "window": [window_of(contender.cache) for contender in self._contenders],
            "seed": None,
            "text": str(self.options.text),
            "digest": self._digest,
            "histories": self._histories,
            "contenders": [asdict(contender) for contender in self._contenders],
            "machine": machine(),
        }

    def _check_random(self, settings: Path) -> None:
        """Refuse what would fail late, and cut the text's tokens down to the vocabulary."""
        config = read_settings(settings)
        if LLAMA_CPP in {contender.engine for contender in self._contenders}:
            check_architecture(config)
            if find_spec("llama_cpp") is None:
                raise H2OStreamError(NO_LLAMA_CPP)
        self._tokens = [token % config.get_text_config().vocab_size for token in self._tokens]

    def jobs(self) -> list[Job]:
        """One for each history."""
        return [self._job(history) for history in self._histories]

    def _job(self, history: int) -> Job:
        key = {
            "what": self.name,
            "tokens": self._digest,
            "contenders": [asdict(contender) for contender in self._contenders],
            "history": history,
            "files": self._files,
            "machine": machine(),
            "version": version("h2o-stream"),
        }
        return Job(f"at {history:,}", key, self._race.steps, partial(self._timed, history))

    def _timed(self, history: int) -> Iterator[Doing | Part]:
        reads = bandwidth(self._contenders[0].threads)
        for event in self._race.at(history):
            yield event if isinstance(event, Doing) else Part({"records": [_record(own, reads) for own in event]})

    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """One for each contender and history."""
        for part in parts:
            yield from part.figures["records"]

    def close(self) -> None:
        """End the processes."""
        if hasattr(self, "_race"):
            self._race.close()


def contenders_of(options: SpeedOptions) -> list[Contender]:
    """Our engine with every policy, and the peers; each in every precision it can have."""
    random = str(options.random_weights) if options.random_weights else None
    common: dict[str, Any] = {"threads": options.threads, "random_weights": random}
    models = options.models
    found = [Contender(OURS, model, config, options.engine, **common) for model in models for config in options.configs]
    for peer in options.peers:
        if peer == LLAMA_CPP:  # the quantization is that of its file
            peer_models = models if random else models[:1]
        else:
            peer_models = [replace(model, quantize="none") for model in models]
        found += [Contender(peer, model, CacheConfig("full"), **common) for model in dict.fromkeys(peer_models)]
    return found


def _weights_of(contender: Contender) -> str:
    """What tells the files of a contender's weights from others of that name: no process has read them yet."""
    if contender.random_weights:
        return files_digest(Path(contender.random_weights))
    model = contender.model
    return files_digest(located(find(model.model, model.offline), model.offline))


def _record(figure: Figure, reads: float) -> dict[str, Any]:
    own, cache = figure.contender.engine == OURS, figure.contender.cache
    return {
        "type": "speed",
        "engine": figure.contender.engine,
        "name": figure.contender.name,
        "policy": cache.policy if own else "full",
        "window": window_of(cache) if own else None,
        "history": figure.history,
        "prefill_tok_s": round(figure.prefill_tok_s, 2),
        "decode_tok_s": round(figure.decode_tok_s, 2),
        "of_floor": round(figure.decode_tok_s / figure.floor(reads), 3),
        "bandwidth": round(reads),
        "cache_bytes": figure.memory.cache,
        "rss_bytes": figure.memory.process,
        "dtype": figure.ready.dtype,
        "quantize": figure.contender.model.quantize,
        "steps": figure.steps,
        "weight_bytes": figure.ready.weight_bytes,
    }


def needed(histories: Sequence[int]) -> int:
    """Tokens of text for a race up to the last of these histories."""
    return max(histories) + ROUNDS * (_WARM_UP + STEPS)

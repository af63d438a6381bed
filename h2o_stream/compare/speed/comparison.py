"""Speed of prefill and decoding, and memory, of several engines at growing histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from h2o_stream.base.resources import version_of
from h2o_stream.compare.catalog import SpeedOptions
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, window_of
from h2o_stream.compare.folder import JobResult, machine
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.compare.speed.engines import OPENVINO, OURS, TRANSFORMERS, EngineInfo, EngineSpec
from h2o_stream.compare.speed.worker import Worker
from h2o_stream.config import CacheConfig
from h2o_stream.errors import DataError
from h2o_stream.loading.transformers_model import load_tokenizer
from h2o_stream.native.threads import bandwidth

ROUNDS = 5
"""Times that every engine decodes at a history; the median counts."""

STEPS = 24
"""Tokens decoded in a round."""

_WARM_UP = 3
"""Tokens decoded in each round before the timed ones."""


@dataclass
class _EngineRun:
    """An engine and how far it has read the text: tokens `seen`, and of them `prefilled`."""

    worker: Worker
    info: EngineInfo
    seen: int = 0
    prefilled: int = 0
    prefill_s: float = 0.0

    def fits(self, history: int) -> bool:
        """Whether its context is long enough to decode at a history."""
        return self.info.context is None or needed([history]) <= self.info.context

    def feed(self, tokens: Sequence[int], history: int) -> None:
        self.prefill_s += self.worker.call("feed", tokens[self.seen : history])
        self.prefilled += history - self.seen
        self.seen = history

    def decode(self, tokens: Sequence[int]) -> float:
        """Decode one round. Returns the seconds that `STEPS` tokens took."""
        seconds = 0.0
        for count in (_WARM_UP, STEPS):
            seconds = self.worker.call("decode", tokens[self.seen : self.seen + count])
            self.seen += count
        return seconds


class Benchmark:
    """Engines that read the same text (`needed`) up to each history and decode there in turn, round by round.

    Each runs in its own process, started by the first `measure`.
    """

    def __init__(self, specs: Sequence[EngineSpec], tokens: Sequence[int]) -> None:
        self._specs, self._tokens = specs, tokens
        self._stack, self._runs = ExitStack(), list[_EngineRun]()

    def close(self) -> None:
        """End the processes."""
        self._stack.close()

    @property
    def total(self) -> int:
        """Final value of `JobProgress.done` at a history."""
        return len(self._specs) * (2 + ROUNDS)

    def measure(self, history: int, bytes_per_s: float) -> Iterator[JobProgress | list[dict[str, Any]]]:
        """Time all engines whose context fits a history; histories come in ascending order. For `bytes_per_s` see
        `bandwidth`.

        Yields `JobProgress` before each long step, and last a record for each engine.

        Raises:
            H2OStreamError: an engine is missing or failed.
        """
        for spec in self._specs[len(self._runs) :]:
            spec = yield from spec.prepared(len(self._runs), self._stack)
            yield JobProgress(len(self._runs), f"starting {spec.name}")
            worker = self._stack.enter_context(Worker(replace(spec, length=len(self._tokens))))
            self._runs.append(_EngineRun(worker, worker.call("info")))
            worker.call("prepare")
        runs = [run for run in self._runs if run.fits(history)]
        done = len(self._runs)
        for run in runs:
            yield JobProgress(done, f"{run.worker.spec.name} reads up to {history:,}")
            run.feed(self._tokens, history)
            done += 1
        seconds: list[list[float]] = [[] for _ in runs]
        for number in range(ROUNDS):
            for run, round_seconds in zip(runs, seconds, strict=True):
                yield JobProgress(done, f"{run.worker.spec.name} at {history:,}, round {number + 1}")
                round_seconds.append(run.decode(self._tokens))
                done += 1
        yield [
            _record(run, history, STEPS / median(round_seconds), bytes_per_s)
            for run, round_seconds in zip(runs, seconds, strict=True)
        ]


class Speed(Comparison[SpeedOptions]):
    """How fast engines are beside each other, all with the same model."""

    name = "speed"
    exclusive = True

    def __init__(self, options: SpeedOptions) -> None:
        super().__init__(options)
        self._specs, self._histories = self.specs(), sorted(set(options.histories))
        self._tokens: list[int] = []
        self._benchmark = Benchmark(self._specs, [])  # until `begin` has read the text

    def specs(self) -> list[EngineSpec]:
        """The engines."""
        return engine_specs(self.options)

    def read(self, count: int, notify: Notify) -> list[int]:
        """So many tokens of the text."""
        return read_tokens(self.options.text, load_tokenizer(self.options.models[0], notify), count)

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Read the text and find the weights."""
        count = needed(self._histories)
        self._tokens = self.read(count, notify)
        if len(self._tokens) < count:
            message = f"--text {self.options.text}: {len(self._tokens)} tokens, {count} are needed"
            raise DataError(f"{message}; lower --histories or give a longer text")
        self._digest = digest_of(self._tokens)
        self._files = sorted({spec.digest() for spec in self._specs})
        self._benchmark = Benchmark(self._specs, self._tokens)
        return {
            "files": self._files,
            "model": self._specs[0].model.model,
            "policy": [spec.cache.policy for spec in self._specs],
            "window": [window_of(spec.cache) for spec in self._specs],
            "seed": None,
            "text": str(self.options.text),
            "digest": self._digest,
            "histories": self._histories,
            "contenders": [asdict(spec) for spec in self._specs],
            "machine": machine(),
        }

    def jobs(self) -> list[Job]:
        """One for each history."""
        key = {
            "what": self.name,
            "tokens": self._digest,
            "contenders": [asdict(spec) for spec in self._specs],
            "files": self._files,
            "machine": machine(),
            "version": version_of("h2o-stream"),
        }
        return [
            Job(
                f"at {history:,}",
                {**key, "history": history},
                self._benchmark.total,
                partial(self._timed, history),
                history,
            )
            for history in self._histories
        ]

    def leave_out(self, subject: Any) -> None:
        """Drop a history and all longer ones, which the engines have not reached."""
        self._histories = [history for history in self._histories if history < subject]

    def _timed(self, history: int) -> Iterator[JobProgress | JobResult]:
        for event in self._benchmark.measure(history, bandwidth(self._specs[0].threads)):
            yield event if isinstance(event, JobProgress) else JobResult({"records": event})

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each engine and history."""
        for result in results:
            yield from result.figures["records"]

    def close(self) -> None:
        """End the processes."""
        self._benchmark.close()


def engine_specs(
    options: SpeedOptions, make: Callable[..., EngineSpec] = EngineSpec, any_precision: bool = False
) -> list[EngineSpec]:
    """Our engine with every policy, and the peers; each in every precision it can have, as a file has one only."""
    common, models = {"threads": options.threads}, options.models
    engines = [make(OURS, model, config, options.engine, **common) for model in models for config in options.configs]
    for peer in options.peers:
        if peer == TRANSFORMERS:
            peer_models = [replace(model, quantize="none") for model in models]
        else:  # the quantization is that of its file
            peer_models = models if any_precision else models[:1]
        caches = [CacheConfig("full")]
        if peer == OPENVINO:
            caches += [CacheConfig("h2o", window=window) for window in options.windows if isinstance(window, int)]
        engines += [make(peer, model, cache, **common) for model in dict.fromkeys(peer_models) for cache in caches]
    return engines


def _record(run: _EngineRun, history: int, decode_tok_s: float, bytes_per_s: float) -> dict[str, Any]:
    spec, info, memory = run.worker.spec, run.info, run.worker.call("memory")
    ours = spec.engine == OURS
    max_tok_s = bytes_per_s / (info.weight_bytes + (memory.cache or 0))  # every token reads weights and cache once
    return {
        "type": "speed",
        "engine": spec.engine,
        "name": spec.name,
        "policy": spec.cache.policy if ours else "full",
        "window": window_of(spec.cache) if ours else None,
        "history": history,
        "prefill_tok_s": round(run.prefilled / run.prefill_s, 2),
        "decode_tok_s": round(decode_tok_s, 2),
        "of_floor": round(decode_tok_s / max_tok_s, 3),
        "bandwidth": round(bytes_per_s),
        "cache_bytes": memory.cache,
        "rss_bytes": memory.process,
        "dtype": info.dtype,
        "quantize": spec.model.quantize,
        "steps": run.worker.call("steps"),
        "weight_bytes": info.weight_bytes,
    }


def needed(histories: Sequence[int]) -> int:
    """Tokens of text that are needed to decode at these histories."""
    return max(histories) + ROUNDS * (_WARM_UP + STEPS)

"""How near an engine's decode steps are to the exact model: that in float32 on the numbers of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_lab.divergence.options import DivergenceOptions
from h2o_stream.base.progress import ignore
from h2o_stream.base.resources import version_of
from h2o_stream.cache.identity import model_digest
from h2o_stream.compare.catalog import PEERS, require_peer
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify
from h2o_stream.compare.folder import JobResult, machine
from h2o_stream.compare.models import Models
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.compare.speed.engines import OURS, EngineSpec
from h2o_stream.compare.speed.worker import Worker
from h2o_stream.config import CacheConfig
from h2o_stream.engine.served import serve
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.transformers_model import load

Step = Callable[[int], NDArray[numpy.float32]]
"""From a token to the logits [V] after it."""


class Divergence(Comparison[DivergenceOptions]):
    """The KL divergence of every engine's steps from the exact model, on a text that all of them keep in whole."""

    name = "divergence"

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Take the exact model's logits of the text."""
        model, self._engines = self.options.model, [OURS]
        for peer in self.options.peers:
            try:
                require_peer(peer, model.model)
                self._engines.append(peer)
            except H2OStreamError as error:
                notify(f"left out: {error}")
        loaded = load(replace(model, dtype="float32", quantize="none", device="cpu"), notify=notify)
        self._tokens = read_tokens(self.options.text, loaded.tokenizer, self.options.tokens)
        with torch.no_grad():
            logits = loaded.model(torch.tensor([self._tokens[:-1]]), use_cache=False).logits[0]
        self._exact, self._identity = logits.float().log_softmax(-1), model_digest(loaded.model)
        return {"model": loaded.name, "identity": self._identity, "text": digest_of(self._tokens)}

    def jobs(self) -> list[Job]:
        """One for each engine."""
        return [
            Job(engine, self._key(engine), len(self._exact), partial(self._diverge, engine), engine)
            for engine in self._engines
        ]

    def _key(self, engine: str) -> dict[str, Any]:
        return {
            "what": self.name,
            "engine": engine,
            "model": self._identity,
            "dtype": self.options.model.dtype,
            "steps": self.options.engine,
            "tokens": digest_of(self._tokens),
            "machine": machine(),
            "version": version_of(PEERS.get(engine, engine)),
        }

    def _diverge(self, engine: str) -> Iterator[JobProgress | JobResult]:
        count = len(self._exact)
        divergences = numpy.empty((count, 2))
        with ExitStack() as stack:
            step, dtype = self._ours() if engine == OURS else self._peer(engine, count, stack)
            for number, (token, exact) in enumerate(zip(self._tokens, self._exact, strict=False)):
                logits = torch.from_numpy(step(token)).float().log_softmax(-1)
                divergences[number, 0] = divergence(exact, logits)
                divergences[number, 1] = exact.argmax() == logits.argmax()
                yield JobProgress(number + 1)
        yield JobResult({"dtype": dtype}, divergences)

    def _ours(self) -> tuple[Step, str]:
        """Our steps, with a cache that keeps everything; and their dtype."""
        full = CacheConfig("full")
        model, cache = Models(self.options.model, [full], self.options.engine, ignore).of(full)
        served = serve(model, cache, self.options.engine, ignore)
        return (lambda token: served.forward([token])), served.dtype

    def _peer(self, engine: str, count: int, stack: ExitStack) -> tuple[Step, str]:
        """Steps of another engine in its own process, which ends with `stack`; and their dtype."""
        spec = EngineSpec(engine, self.options.model, CacheConfig("full"), length=count + 1)
        worker = stack.enter_context(Worker(spec))
        dtype: str = worker.call("info").dtype
        return partial(worker.call, "next_logits"), dtype

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each engine."""
        for engine, result in zip(self._engines, results, strict=True):
            divergences, same = result.values.T
            yield {
                "type": self.name,
                "engine": engine,
                "dtype": result.figures["dtype"],
                "tokens": len(divergences),
                "kl": float(divergences.mean()),
                "kl_p99": float(numpy.quantile(divergences, 0.99)),
                "kl_first": float(divergences[0]),
                "same_first_choice": float(same.mean()),
            }

    def leave_out(self, subject: Any) -> None:
        """Drop an engine."""
        self._engines = [engine for engine in self._engines if engine != subject]

    def close(self) -> None:
        """Release the exact logits."""
        self._exact = torch.empty(0, 0)


def divergence(exact: Tensor, other: Tensor) -> float:
    """The KL divergence in nats of log-likelihoods [V] from exact ones; tokens that never come add nothing."""
    likely = exact > torch.finfo(torch.float32).min
    exact, other = exact[likely].double(), other[likely].double()
    return float((exact.exp() * (exact - other)).sum().clamp_min(0))

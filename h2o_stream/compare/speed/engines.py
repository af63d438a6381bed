"""The engines that are timed: ours and transformers; other packages bring others."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2o_stream.base.memory import trim_heap
from h2o_stream.base.progress import ignore
from h2o_stream.base.registry import Registry
from h2o_stream.compare.catalog import PEERS
from h2o_stream.compare.comparison import label_of
from h2o_stream.compare.models import Models, cache_bytes, context_of, dtype_of
from h2o_stream.config import CacheConfig, EngineChoice, ModelConfig
from h2o_stream.engine.served import serve
from h2o_stream.models.file_identity import model_identity
from h2o_stream.models.find import find, local_path
from h2o_stream.runtime.model import RuntimeModel

if TYPE_CHECKING:
    from h2o_stream.compare.comparison import JobProgress

OURS = "h2o-stream"
TRANSFORMERS, LLAMA_CPP, IK_LLAMA_CPP, OPENVINO = PEERS

_CHUNK_SIZE = 2048
"""Prompt tokens per forward of a peer."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine (`OURS` or one of `PEERS`) with its settings; `steps`, as of `Models`, are ours only.

    The policy is our engine's; unless it is ``full``, OpenVINO evicts down to its window by a rule of its own. `length`
    is the longest history in tokens, for an engine that allocates its cache before it reads.
    """

    engine: str
    model: ModelConfig
    cache: CacheConfig
    steps: EngineChoice = "auto"
    threads: int | None = None
    length: int = 8192

    @property
    def name(self) -> str:
        """For people: engine, policy, window and precision."""
        full, window = self.cache.policy == "full", self.cache.window
        if self.engine == OPENVINO:
            return self.engine if full else f"{self.engine} evicting, {window}"
        if self.engine != OURS:
            return self.engine
        name = f"{self.engine} {label_of(self.cache)}"
        return f"{name} eager" if self.steps == "eager" else name

    def digest(self) -> str:
        """Identifies the weights."""
        return model_identity(local_path(find(self.model.model, self.model.offline), self.model.offline))

    def prepared(self, done: int, stack: ExitStack) -> Generator[JobProgress, None, EngineSpec]:
        """This with the files that the engine needs, which exist until the stack is closed. `done` is for progress."""
        yield from ()
        return self

    def load(self) -> Any:
        """The model, of transformers."""
        from h2o_stream.loading.transformers_model import load

        return load(self.model).model

    def load_served(self) -> tuple[Any, CacheConfig]:
        """The model as our engine serves it, and the config to serve it with."""
        return Models(self.model, [self.cache], self.steps, ignore).of(self.cache)


@dataclass(frozen=True)
class EngineInfo:
    """An engine with its model: dtype of computations, bytes of weights that a step reads, longest history if any."""

    dtype: str
    weight_bytes: int
    context: int | None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the cache (None if unknown) and of the whole process."""

    cache: int | None
    process: int


class Runner(ABC):
    """An engine with a stream. Its methods are called from another process, see `Worker`."""

    chunk_size: int = _CHUNK_SIZE
    """Prompt tokens per forward."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @abstractmethod
    def info(self) -> EngineInfo:
        """Its properties."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> None:
        """Run a forward over one token or more, as far as the logits of the next."""

    @abstractmethod
    def cache_bytes(self) -> int | None:
        """Bytes of the cache."""

    def steps(self) -> str | None:
        """`H2OCache.engine_note` for our engine; None for a peer."""
        return None

    def prepare(self) -> None:  # noqa: B027 -- most have nothing to prepare
        """Do one-time work that would otherwise be timed."""

    def feed(self, tokens: Sequence[int]) -> float:
        """Prefill tokens. Returns the seconds it took."""
        start_time = time.perf_counter()
        for start in range(0, len(tokens), self.chunk_size):
            self.step(tokens[start : start + self.chunk_size])
        return time.perf_counter() - start_time

    def decode(self, tokens: Sequence[int]) -> float:
        """Decode tokens one by one, as if they had been sampled. Returns the seconds it took."""
        start_time = time.perf_counter()
        for token in tokens:
            self.step([token])
        return time.perf_counter() - start_time

    def memory(self) -> MemoryUse:
        """Current memory use."""
        import psutil

        return MemoryUse(self.cache_bytes(), psutil.Process().memory_info().rss)


class _OurRunner(Runner):
    """Our engine as the chat has it: without torch where that is possible."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        if spec.threads:
            os.environ["OMP_NUM_THREADS"] = str(spec.threads)  # which torch reads, too
        self._model, cache = spec.load_served()
        self._weight_bytes = _weight_bytes(self._model)  # of which less is known once it is attached
        self._served = serve(self._model, cache, spec.steps, ignore)
        self.chunk_size = self._served.prefill_step

    def info(self) -> EngineInfo:
        context = self._served.context if self.spec.cache.policy == "full" else None
        return EngineInfo(self._served.dtype, self._weight_bytes, context)

    def prepare(self) -> None:
        """Run a short stream: the first forward allocates buffers, starts threads and checks the native steps."""
        self.feed([5] * 64)
        self.decode([5, 6])
        self._served.cache.reset()

    def step(self, tokens: Sequence[int]) -> None:
        self._served.forward(tokens)

    def steps(self) -> str:
        return self._served.cache.engine_note

    def feed(self, tokens: Sequence[int]) -> float:
        start_time = time.perf_counter()
        super().feed(tokens)
        trim_heap()
        return time.perf_counter() - start_time

    def cache_bytes(self) -> int:
        return cache_bytes(self._served.cache)


class _TransformersRunner(Runner):
    """A model of transformers with its own full cache."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch
        from transformers import DynamicCache

        super().__init__(spec)
        if spec.threads:
            torch.set_num_threads(spec.threads)
        torch.set_grad_enabled(False)
        self._torch, self._model = torch, spec.load()
        self._cache = DynamicCache(config=self._model.config)

    def info(self) -> EngineInfo:
        return EngineInfo(dtype_of(self._model), _weight_bytes(self._model), context_of(self._model))

    def step(self, tokens: Sequence[int]) -> None:
        ids = self._torch.tensor([list(tokens)], device=self._model.device)
        self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        if self._model.device.type == "cuda":
            self._torch.cuda.synchronize()

    def cache_bytes(self) -> int | None:
        from h2o_stream.cache.full_cache import tensors_of

        return sum(tensor.nbytes for layer in self._cache.layers for tensor in tensors_of(layer).values())


def _weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads."""
    if isinstance(model, RuntimeModel):
        return model.description.nbytes
    from h2o_stream.attachment.describe import weight_bytes

    return weight_bytes(model)


ENGINES: Registry[type[Runner]] = Registry(
    "h2o_stream.peers", {OURS: _OurRunner, TRANSFORMERS: _TransformersRunner}, lambda named: named
)
"""By engine."""

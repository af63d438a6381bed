"""Engines that can be timed against each other: ours, transformers, llama.cpp."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_stream.compare.comparisons import PEERS
from h2o_stream.config import CacheConfig, EngineChoice, ModelConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.memory import give_back_free_memory

OURS = "h2o-stream"
TRANSFORMERS, LLAMA_CPP = PEERS

NO_LLAMA_CPP = "the peer llama.cpp needs llama-cpp-python; pip install 'h2o-stream[bench]'"

_FED = 2048
"""Tokens handed to a peer at once while it reads."""


@dataclass(frozen=True)
class Contender:
    """One engine in one setting.

    Attributes:
        engine: `OURS`, `TRANSFORMERS` or `LLAMA_CPP`.
        model: which model, in which precision.
        cache: the policy; of our own engine only.
        steps: what runs a step of our engine, see `attach`.
        random_weights: path of a config of transformers: that model, with random weights, in place of `model`.
        threads: that compute; None for as many as the engine likes.
        length: tokens of the longest history, for an engine that allocates its cache before it reads.
    """

    engine: str
    model: ModelConfig
    cache: CacheConfig
    steps: EngineChoice = "auto"
    random_weights: str | None = None
    threads: int | None = None
    length: int = 8192

    @property
    def name(self) -> str:
        """For people: engine, policy, window and precision."""
        own = self.cache.policy if self.cache.policy == "full" else f"{self.cache.policy} {self.cache.window}"
        policy = [own] if self.engine == OURS else []
        eager = ["eager"] if self.engine == OURS and self.steps == "eager" else []
        return " ".join([self.engine, *policy, *eager])


@dataclass(frozen=True)
class Ready:
    """What is known of a contender once its model is loaded.

    Attributes:
        dtype: of its computations.
        weight_bytes: read in every step.
        context: the longest history it can have; None for no limit.
    """

    dtype: str
    weight_bytes: int
    context: int | None


@dataclass(frozen=True)
class Memory:
    """Bytes of the cache (None where it is not known), and of the whole process."""

    cache: int | None
    process: int


class Runner(ABC):
    """An engine with a stream. Its methods are called from another process, see `Worker`."""

    at_once: int = _FED
    """Tokens handed to it at once while it reads."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender

    @abstractmethod
    def ready(self) -> Ready:
        """What is known of it."""

    @abstractmethod
    def step(self, tokens: Sequence[int]) -> None:
        """Read tokens, one or many, and know the distribution of the next."""

    @abstractmethod
    def cache_bytes(self) -> int | None:
        """Bytes of the cache."""

    def steps(self) -> str | None:
        """What runs the steps of our engine and why, see `H2OCache`; None for a peer."""
        return None

    def prepare(self) -> None:  # noqa: B027 -- most have nothing to prepare
        """Make what is made once and would otherwise be made while the time is taken."""

    def feed(self, tokens: Sequence[int]) -> float:
        """Read tokens as a prompt. Returns the seconds it took."""
        begun = time.perf_counter()
        for start in range(0, len(tokens), self.at_once):
            self.step(tokens[start : start + self.at_once])
        return time.perf_counter() - begun

    def decode(self, tokens: Sequence[int]) -> float:
        """Read tokens one by one, as if they had been drawn. Returns the seconds it took."""
        begun = time.perf_counter()
        for token in tokens:
            self.step([token])
        return time.perf_counter() - begun

    def memory(self) -> Memory:
        """What is in use now."""
        import psutil

        return Memory(self.cache_bytes(), psutil.Process().memory_info().rss)


class _Torch(Runner):
    """Ours and transformers: a model of transformers, with or without our cache."""

    def __init__(self, contender: Contender) -> None:
        import torch

        super().__init__(contender)
        if contender.threads:
            torch.set_num_threads(contender.threads)
        torch.set_grad_enabled(False)
        self._torch, self._stack = torch, ExitStack()
        self.model = _model_of(contender)
        self.cache: Any = None
        self._start()

    def _start(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)

    def ready(self) -> Ready:
        from h2o_stream.cache.support import context_of

        unlimited = self.contender.engine == OURS and self.contender.cache.policy != "full"
        context = None if unlimited else context_of(self.model.config)
        return Ready(str(self.model.dtype).removeprefix("torch."), weight_bytes(self.model), context)

    def step(self, tokens: Sequence[int]) -> None:
        ids = self._torch.tensor([list(tokens)], device=self.model.device)
        self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self.model.device.type == "cuda":
            self._torch.cuda.synchronize()

    def cache_bytes(self) -> int | None:
        layers = [layer for layer in self.cache.layers if layer.is_initialized]
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers)


class _Ours(_Torch):
    def _start(self) -> None:
        from h2o_stream.cache.attach import attach
        from h2o_stream.engine.engine import prefill_step

        self.at_once = prefill_step(self.model)
        self.cache = self._stack.enter_context(attach(self.model, self.contender.cache, engine=self.contender.steps))

    def prepare(self) -> None:
        """What the first forward alone would do: buffers, threads, and the proof that native steps are right."""
        self.feed([5] * 64)
        self.decode([5, 6])
        self.cache.reset()

    def steps(self) -> str:
        note: str = self.cache.engine_note
        return note

    def feed(self, tokens: Sequence[int]) -> float:
        begun = time.perf_counter()
        super().feed(tokens)
        give_back_free_memory()
        return time.perf_counter() - begun

    def cache_bytes(self) -> int:
        return int(self.cache.nbytes)


class _LlamaCpp(Runner):
    """llama.cpp through llama-cpp-python, with the GGUF file that our model was made of."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        try:
            import llama_cpp
        except ImportError as error:
            raise H2OStreamError(NO_LLAMA_CPP) from error
        from h2o_stream.models.find import gguf_file

        path = gguf_file(contender.model.model)
        if path is None:
            raise ConfigError(
                f"{contender.model.model} is not a GGUF file, which the peer llama.cpp needs; leave it out"
            )
        threads = contender.threads or os.cpu_count()
        try:
            self._llama = llama_cpp.Llama(
                str(path), n_ctx=contender.length, n_threads=threads, n_threads_batch=threads, verbose=False
            )
        except ValueError as error:
            raise H2OStreamError(f"llama.cpp cannot load {path}: {error}") from error
        self._ready = Ready("as in the file", path.stat().st_size, llama_cpp.llama_model_n_ctx_train(self._llama.model))

    def ready(self) -> Ready:
        return self._ready

    def step(self, tokens: Sequence[int]) -> None:
        self._llama.eval(list(tokens))

    def cache_bytes(self) -> None:
        return None


def weight_bytes(model: Any) -> int:
    """Bytes of weights a step reads: each one once, and one row of an embedding that is not the output layer too."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = _largest(embedding)
    tied = head is not None and _largest(head, table).data_ptr() == table.data_ptr()
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tied or tensor is not table]
    total, end = 0 if tied else table.nbytes // embedding.num_embeddings, 0
    for start, stop in sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors):
        total += max(stop - max(start, end), 0)  # views of one tensor are counted once
        end = max(end, stop)
    return total


def _largest(module: Any, *others: Any) -> Any:
    """The weights of a layer, packed or not; the others are for a layer that has none of its own."""
    return max((*module.parameters(), *module.buffers(), *others), key=lambda tensor: tensor.nbytes)


def _model_of(contender: Contender) -> Any:
    if contender.random_weights:
        from h2o_stream.compare.random_weights import random_model

        return random_model(Path(contender.random_weights), contender.model)
    from h2o_stream.models.load import load

    return load(contender.model).model


RUNNERS: dict[str, type[Runner]] = {OURS: _Ours, TRANSFORMERS: _Torch, LLAMA_CPP: _LlamaCpp}
"""By engine."""

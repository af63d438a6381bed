"""A model on a GPU that serves several streams at the same time, each with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy
import torch
from numpy.typing import NDArray

from h2o_stream.attachment import gpu_steps
from h2o_stream.attachment.attach import attach, new_cache
from h2o_stream.attachment.model_facts import context_of, input_device, max_distance_of
from h2o_stream.attachment.retrieval_heads import give_retrieval_heads_more
from h2o_stream.base import memory
from h2o_stream.base.progress import ProgressCallback
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CacheConfig
from h2o_stream.engine.attached import AttachedModel, embeddings_of
from h2o_stream.engine.device_logits import as_logits
from h2o_stream.engine.logits import Logits
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.gpu import available, graphs
from h2o_stream.runtime.heads import NeverChanges
from h2o_stream.runtime.model import measures_heads

if TYPE_CHECKING:
    from h2o_stream.gpu.batch import FusedBatch
    from h2o_stream.gpu.steps import FusedSteps


def is_on_gpu(module: Any) -> bool:
    """Whether a model is on a GPU."""
    return gpu_steps.serves(module)


class GpuModel:
    """A model of transformers whose steps are fused; nobody else uses it. See `runtime.model.RuntimeModel`.

    Args:
        module: the model.
        config: of the first caches; those of others may have another window or policy.
        progress: see `attach`.

    Raises:
        ConfigError: its steps are not fused.
        UnsupportedModelError: see `attach`.
    """

    def __init__(self, module: Any, config: CacheConfig, progress: ProgressCallback) -> None:
        self.module, self.device, self.generation = module, input_device(module), module.generation_config
        self.context, self._max_distance = context_of(module.config), max_distance_of(module.config)
        with attach(module, config, progress=progress) as cache:
            steps, self.engine_note = module.forward.stepper, cache.engine_note
        if not (isinstance(cache, H2OCache) and hasattr(steps, "begin_prompt")):
            raise ConfigError(f"its steps are not fused there ({self.engine_note})")
        self.description, self._kernels = steps.description, cache.kernels
        self._specs = [replace(spec, windows=(HeadWindow(),)) for spec in cache.specs]
        self._is_captured = not graphs.why_not(cache, self.device)

    def serve(self, config: CacheConfig) -> ServedOnGpu:
        """Serve the model with a cache; raises ConfigError if its windows or its policy do not fit."""
        from h2o_stream.gpu import groups, steps

        specs = self._measured_specs if measures_heads(config, self._max_distance) else self._specs
        cache = new_cache(self.module, config, specs, lambda: self.digest)
        reason = next(filter(None, map(groups.why_not, cache.head_groups)), steps.why_not(cache, self.description))
        if reason:
            raise ConfigError(f"this cache is not served on {self.device}: {reason}")
        cache.kernels, cache.engine_note = self._kernels, self.engine_note
        assert cache.kernels
        stepper = steps.FusedSteps(self.description, cache, cache.kernels, NeverChanges(), self._is_captured)
        return ServedOnGpu(self.module, stepper)

    def make_batch(self) -> FusedBatch[Logits]:
        """What steps several of the streams together."""
        from h2o_stream.gpu.batch import FusedBatch

        return FusedBatch(self.description, self._is_captured, as_logits)

    @cached_property
    def digest(self) -> str:
        """Identifies the model when a state is saved or loaded."""
        return model_digest(self.module)

    @property
    def free_bytes(self) -> int:
        """Memory that caches can still take."""
        return memory.free_bytes(self.device)

    def read_embeddings(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
        """Embeddings of tokens [n], [n, hidden] float32."""
        return embeddings_of(self.module, ids)

    @cached_property
    def _measured_specs(self) -> list[LayerSpec]:
        return give_retrieval_heads_more(self.module, self._specs)


class ServedOnGpu(AttachedModel):
    """A stream of a `GpuModel`; see `Served` and `runtime.model.ServedRuntime`.

    Attributes:
        stepper: steps the stream, alone or, by `gpu.batch`, with others.
        lookahead: takes guesses along.
        rules: nothing that streams must have in common.
    """

    rules = b""

    def __init__(self, module: Any, stepper: FusedSteps) -> None:
        self._stack, self.stepper = ExitStack(), stepper
        self._stack.callback(stepper.cache.reset)
        self._serve(module, stepper.cache, stepper)
        self.lookahead = self._passes

    def _logits(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """See `AttachedModel`, without the model's forward."""
        cache = self.cache
        with cache.one_thread, available.on(self._device):
            cache.check_whole()
            ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
            cache.take_back()
            cache.prepare(len(tokens))
            logits = self.stepper.logits({"input_ids": ids, "position_ids": ids, "logits_to_keep": keep})
            if logits is None:
                raise H2OStreamError("these tokens cannot be fed: the cache is not one of fused steps any more")
            return logits[0, -keep:].float()

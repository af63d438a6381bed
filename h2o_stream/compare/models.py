"""The model of a comparison, served as ``h2o-chat`` serves it: without torch for every policy for which that works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from h2o_stream.base.progress import ignore
from h2o_stream.cache.window_rules import WindowRules
from h2o_stream.config import DEFAULT_CHUNK, CacheConfig, CachePlan, EngineChoice, ModelConfig
from h2o_stream.engine.served import StreamCache
from h2o_stream.errors import ConfigError, OutOfMemoryError
from h2o_stream.loading.loading import load_without_torch, serves
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.modelfile import with_modelfile
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.model import RuntimeModel, measures_heads, plan_of, why_not_served

_ENDLESS = 1 << 30
"""A window that no text fills."""


class Models:
    """A model, without torch and, for the policies that need it, as one of transformers. Errors as of `load`.

    Args:
        configs: the configs of the policies that it has to serve.
        engine: ``eager`` computes everything in torch, and tells what `attach` does then.
        notify: gets one-line messages about slow steps and automatic choices.

    Attributes:
        first: the model that serves most policies.
        why_transformers: why that is one of transformers, or nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        configs: Sequence[CacheConfig],
        engine: EngineChoice,
        notify: Callable[[str], None],
    ) -> None:
        self.engine, self._config, self._notify = engine, config, notify
        loaded = self._load(configs)
        self.name, self.tokenizer, self.first = loaded.name, loaded.tokenizer, loaded.model
        self.why_transformers = loaded.why_transformers
        self._loaded, self._transformers = loaded, None if isinstance(self.first, RuntimeModel) else self.first

    def of(self, config: CacheConfig) -> tuple[Any, CacheConfig]:
        """The model for a policy, and the config to serve it with. Errors as of `load`."""
        native = endless(config)
        if self._transformers is not self.first and serves(self._loaded, native):
            return self.first, native
        from h2o_stream.attachment.support import with_default_positions

        if self._transformers is None:
            from h2o_stream.loading.transformers_model import load

            self._transformers = load(self._config, notify=self._notify).model
        return self._transformers, with_default_positions(self._transformers.config, config)

    def _load(self, configs: Sequence[CacheConfig]) -> LoadedModel:
        natively = [one for one in map(endless, configs) if not why_not_served(one, None, ())]
        first = min(natively, key=lambda one: (not measures_heads(one, None), one.window), default=configs[0])
        try:
            loaded = load_without_torch(self._config, first, self.engine, self._notify, ignore)
        except (DescriptionError, OutOfMemoryError, ConfigError) as reason:
            from h2o_stream.loading.transformers_model import load

            loaded = load(self._config, notify=self._notify)
            loaded = replace(loaded, why_transformers=str(reason))
        return with_modelfile(loaded, self._notify)


def endless(config: CacheConfig) -> CacheConfig:
    """How a model without torch keeps everything, in place of ``full``; other configs as they are."""
    if config.policy != "full":
        return config
    chunk = DEFAULT_CHUNK if config.chunk is None else config.chunk
    return CacheConfig("recent", _ENDLESS, sinks=0, positions="absolute", chunk=chunk, device=config.device)


def context_of(model: Any) -> int | None:
    """Positions that a model was trained for, or None when its config names no limit."""
    if isinstance(model, RuntimeModel):
        return model.context
    from h2o_stream.attachment import model_facts

    return model_facts.context_of(model.config)


def plan_for(model: Any, config: CacheConfig) -> CachePlan:
    """What a config means for a model; raises H2OStreamError if the model cannot be served with it."""
    if isinstance(model, RuntimeModel):
        return plan_of(config, model.max_distance)
    from h2o_stream.attachment.support import check_supported

    return check_supported(type(model), model.config, config)


def digest_of_model(model: Any) -> str:
    """Identifies a model, see `cache.identity.model_digest`."""
    if isinstance(model, RuntimeModel):
        return model.digest
    from h2o_stream.cache.identity import model_digest

    return model_digest(model)


def dtype_of(model: Any) -> str:
    """The dtype of a model's activations, such as ``bfloat16``."""
    return model.description.dtype if isinstance(model, RuntimeModel) else str(model.dtype).removeprefix("torch.")


def cache_bytes(cache: StreamCache) -> int:
    """Bytes of a cache; of one that keeps everything those of its tokens, however many it has room for."""
    groups = cache.head_groups if isinstance(cache, WindowRules) else ()
    if cache.plan.window < _ENDLESS or not groups:
        return cache.nbytes
    slots: int = groups[0].num_slots
    return cache.nbytes * cache.seen_tokens // slots

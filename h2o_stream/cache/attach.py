"""Attach a cache to any supported transformers model, and give the model back as it was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from h2o_stream.cache.attention import ATTENTION_NAME
from h2o_stream.cache.full import FullCache
from h2o_stream.cache.reach import shared_out
from h2o_stream.cache.state import model_digest
from h2o_stream.cache.support import check_supported, home_of, layer_specs, learned_positions, reach_of
from h2o_stream.cache.window import H2OCache
from h2o_stream.config import CacheConfig, EngineChoice
from h2o_stream.errors import H2OStreamError


@contextmanager
def attach(
    model: PreTrainedModel, config: CacheConfig | None = None, *, engine: EngineChoice = "auto"
) -> Iterator[H2OCache | FullCache]:
    """Let `model` keep only what `config` says, under ``generate``, pipelines and plain forwards.

    A forward that brings no cache of its own starts a new stream; ``past_key_values=cache`` goes on with the
    old one. Inference only.

    Args:
        model: a causal language model of transformers.
        config: the policy and its budgets; the default is ours.
        engine: what runs a step.

    Yields:
        The cache, with ``kept``, ``nbytes``, ``seen_tokens``, ``counts``, ``pin``, ``statistics`` and ``state_dict``.

    Raises:
        UnsupportedModelError: the architecture cannot be served.
        ConfigError: the budgets do not fit the model.
        H2OStreamError: the model is attached already.
    """
    config = config or CacheConfig()
    if getattr(model, "_h2o_cache", None) is not None:
        raise H2OStreamError(f"{type(model).__name__} is attached already; leave that block first")
    cache = build_cache(model, config)
    previous = model.config._attn_implementation
    if isinstance(cache, H2OCache):
        model.set_attn_implementation(ATTENTION_NAME)
    hook = model.register_forward_pre_hook(_Hook(cache, model), with_kwargs=True)
    model._h2o_cache = cache
    try:
        yield cache
    finally:
        del model._h2o_cache
        hook.remove()
        model.set_attn_implementation(previous)


def build_cache(model: PreTrainedModel, config: CacheConfig) -> H2OCache | FullCache:
    """The cache `config` asks for, sized for `model`."""
    plan = check_supported(type(model), model.config, config)
    digest = functools.partial(model_digest, model)
    if plan.policy == "full":
        in_host_memory = config.device == "cpu" and home_of(model).type != "cpu"
        return FullCache(plan, model.config, digest, in_host_memory)
    specs = layer_specs(model, plan)
    if plan.budgets == "measured":
        specs = shared_out(model, specs)
    return H2OCache(config, specs, reach_of(model.config), learned_positions(model.config), digest)


class _Hook:
    """Puts the cache into every forward of the model."""

    def __init__(self, cache: H2OCache | FullCache, model: nn.Module) -> None:
        self.cache = cache
        self.names = list(inspect.signature(model.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given = kwargs.get("past_key_values")
        if given is not self.cache:
            if given is not None and given.get_seq_length() > 0:
                raise H2OStreamError(
                    f"past_key_values holds {given.get_seq_length()} tokens of another cache; "
                    "pass the attached cache, or none to start a new stream"
                )
            self.cache.reset()
            kwargs["past_key_values"] = self.cache
        self.cache.prepare_forward(kwargs)
        return (), kwargs

"""Attach a cache to any supported transformers model, and give the model back as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from h2o_stream.cache.attention import ATTENTION_NAME
from h2o_stream.cache.caches import FullCache, H2OCache
from h2o_stream.cache.rope import RotaryTable, rotary_of
from h2o_stream.config import CacheConfig, CachePlan
from h2o_stream.errors import H2OStreamError, UnsupportedModelError


def context_of(config: Any) -> int | None:
    """Positions a model was trained for, or None when its config names no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def check_supported(model_class: type, config: Any, plan: CachePlan) -> None:
    """Refuse, before any work, what the fixed slots cannot serve exactly.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.
    """
    if plan.policy == "full":
        return
    name, text = model_class.__name__, config.get_text_config()
    if config.is_encoder_decoder or not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not take its attention from transformers' registry; only --policy full can serve it"
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(text, "attn_logit_softcapping", None) or getattr(text, "sliding_window", None):
        reason = ", ".join(sorted(kinds)) or "sliding windows or soft-capping"
        raise UnsupportedModelError(f"{name} uses {reason}, which this version serves with --policy full only")
    if plan.positions != "absolute" and not getattr(text, "rope_parameters", None):
        raise UnsupportedModelError(
            f"{name} has no rotary positions, which {plan.positions} re-assigns; use --positions absolute"
        )


@contextmanager
def attach(model: PreTrainedModel, config: CacheConfig | None = None) -> Iterator[H2OCache | FullCache]:
    """Let `model` keep only what `config` says, under ``generate``, pipelines and plain forwards.

    A forward that brings no cache of its own starts a new stream; ``past_key_values=cache`` goes on with the
    old one. Inference only.

    Args:
        model: a causal language model of transformers.
        config: the policy and its budgets; the default is ours.

    Yields:
        The cache, with ``kept``, ``nbytes``, ``seen_tokens``, ``counts`` and ``pin``.

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
    plan = config.plan(context_of(model.config))
    check_supported(type(model), model.config, plan)
    if plan.policy == "full":
        return FullCache(plan, model.config)
    table = None if plan.positions == "absolute" else RotaryTable(rotary_of(model))
    return H2OCache(plan, model.config.get_text_config().num_hidden_layers, table)


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

"""Whether a model is supported, and what the cache must know of it: from its config and from a probe.

The config gives the context, the sliding windows and whether positions are rotary. Whether the model takes its
attention from us and rotates as `rope` does is tested: `probe` feeds it one token at two positions. The whole model is
checked afterwards, see `verification`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from h2o_stream.attachment.model_facts import (
    LAYER_KINDS,
    WITHOUT_ATTENTION,
    context_of,
    layer_kinds,
    looks_up_positions,
    max_distance_of,
    sliding_window_of,
    sliding_windows,
)
from h2o_stream.attachment.probe import probe
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.rope import PositionsError, tables_of
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, CachePlan
from h2o_stream.errors import UnsupportedModelError


def with_default_positions(config: Any, cache: CacheConfig) -> CacheConfig:
    """`cache`, with absolute positions if it leaves them open and the model has no rotary ones."""
    if cache.policy != "full" and cache.positions is None and looks_up_positions(config.get_text_config()):
        return replace(cache, positions="absolute")
    return cache


def check_supported(model_class: type, config: Any, cache: CacheConfig) -> CachePlan:
    """Refuse, before any work, models that the cache cannot support exactly.

    Returns:
        The plan of `cache` for this model; if it depends on the first prompt, for one of `DEFAULT_WINDOW` tokens.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.
        ConfigError: window or positions do not fit the model.
    """
    plan = with_default_positions(config, cache).for_prompt(DEFAULT_WINDOW).plan(max_distance_of(config))
    if plan.policy == "full":
        return plan
    name, text = model_class.__name__, config.get_text_config()
    if reason := _why_not(model_class, config):
        raise UnsupportedModelError(f"{name} {reason}; only --policy full can serve it")
    if plan.positions != "absolute" and looks_up_positions(text):
        raise PositionsError(f"{name} has no rotary positions, which {plan.positions} re-assigns")
    return plan


def _why_not(model_class: type, config: Any) -> str:
    """Why the cache cannot support a model of this class, or nothing."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if strange := kinds - LAYER_KINDS:
        return f"has {', '.join(sorted(strange))} layers"
    if getattr(model_class, "_is_stateful", False) and not kinds:
        return "keeps states that are no keys and values"
    if kinds and kinds <= WITHOUT_ATTENTION | {"chunked_attention"}:
        return "has no layer whose memory would grow"
    if config.is_encoder_decoder:
        return "is half of an encoder and a decoder"
    asks = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not asks and not getattr(model_class, "_supports_attention_backend", False):
        return "does not take its attention from transformers' registry"
    if looks_up_positions(text) and context_of(config) is None:
        return "has positions, and its config does not say how many"
    return ""


def layer_specs(model: PreTrainedModel, plan: CachePlan) -> list[LayerSpec]:
    """What the cache must know of every layer of a model, tested by a probe. Errors as of `tables_of` and `probe`."""
    text = model.config.get_text_config()
    kinds, uniform = layer_kinds(text), None not in sliding_windows(text)
    moves = plan.positions != "absolute"
    probed = probe(model, kinds, tables_of(model, set(kinds) - WITHOUT_ATTENTION) if moves else {}, moves)
    return [_spec(model, plan, kind, spec, uniform) for kind, spec in zip(kinds, probed, strict=True)]


def _spec(model: PreTrainedModel, plan: CachePlan, kind: str, probed: LayerSpec, uniform: bool) -> LayerSpec:
    """The spec of one layer; if all that have attention slide (`uniform`), they follow the plan."""
    if probed.shape is None:
        return probed
    window, chunked = sliding_window_of(model.config.get_text_config(), kind), kind == "chunked_attention"
    return replace(
        probed,
        sliding=None if uniform and not chunked else window,
        chunked=chunked,
        hidden_from=window if plan.positions == "absolute" else None,
        shard=_shard(model, probed.shape.kv_heads),
    )


def _shard(model: PreTrainedModel, heads: int) -> range | None:
    """The KV heads of a layer that are in this process, which has `heads` of them."""
    processes = getattr(model, "tp_size", None) or 1
    if processes == 1 or heads >= model.config.get_text_config().num_key_value_heads:
        return None
    rank = torch.distributed.get_rank() % processes
    return range(rank * heads, (rank + 1) * heads)

"""What a model is like, as far as the cache must know: by its config, before weights are read, and by asking it.

A config tells the context, the sliding windows and whether positions are rotary. Whether the model really hands its
attention to us, and rotates as `rope` does, is not require_tensor on trust: `probe` feeds it one token at two positions. That
the whole model computes what it should is proved afterwards, see `proof`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from h2o_stream.cache.attention_interface import ATTENTION_NAME
from h2o_stream.cache.endless import EndlessLayer
from h2o_stream.cache.rope import PositionsError, RotaryTable, rotary_of, rotate_back, table_for
from h2o_stream.cache.h2o_cache import LayerSpec
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, CachePlan
from h2o_stream.errors import H2OStreamError, UnsupportedModelError, means_out_of_memory

_LAYER_KINDS = {"full_attention", "sliding_attention"}


def home_of(model: Any) -> torch.device:
    """Where a model takes its tokens: its device, also while its weights are on disk."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(device for device in devices if device is not None))


def size_of(model: Any) -> int:
    """Numbers that a model's weights have; of packed ones bytes."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def context_of(config: Any) -> int | None:
    """Positions a model was trained for, or None when its config names no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit and limit > 0 else None


def max_distance_of(config: Any) -> int | None:
    """The distances a model was trained for: its context, less where all layers slide or RoPE changes with length."""
    text = config.get_text_config()
    limits = [
        context_of(config),
        (_rope(text) or {}).get("original_max_position_embeddings") if _longrope(text) else None,
    ]
    windows = sliding_windows(config)
    if None not in windows:
        limits.append(min(windows))  # type: ignore[type-var]
    return min((limit for limit in limits if limit), default=None)


def learned_positions(config: Any) -> int | None:
    """How many positions a model has learned one by one, or None if it computes them."""
    return None if _rope(config.get_text_config()) else context_of(config)


def sliding_windows(config: Any) -> list[int | None]:
    """The sliding window of every layer; None where a layer sees everything."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds[: text.num_hidden_layers]]


def _rope(text: Any) -> dict[str, Any] | None:
    return getattr(text, "rope_parameters", None) or None


def _longrope(text: Any) -> bool:
    return (_rope(text) or {}).get("rope_type") == "longrope"


def check_supported(model_class: type, config: Any, cache: CacheConfig) -> CachePlan:
    """Refuse, before any work, what the fixed slots cannot serve exactly.

    Returns:
        The plan of `cache` for this model; where it depends on the first prompt, for one of `DEFAULT_WINDOW` tokens.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.
        ConfigError: the budgets do not fit the model.
    """
    plan = cache.for_prompt(DEFAULT_WINDOW).plan(max_distance_of(config))
    if plan.policy == "full":
        return plan
    name, text = model_class.__name__, config.get_text_config()
    if reason := _not_served(model_class, config):
        raise UnsupportedModelError(f"{name} {reason}; only --policy full can serve it")
    if plan.positions != "absolute" and not _rope(text):
        raise PositionsError(f"{name} has no rotary positions, which {plan.positions} re-assigns")
    return plan


def _not_served(model_class: type, config: Any) -> str:
    """What a model of this class is or does that the fixed slots cannot serve, or nothing."""
    strange = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _LAYER_KINDS
    if strange:
        return f"has {', '.join(sorted(strange))} layers"
    if getattr(model_class, "_is_stateful", False):
        return "keeps states that are no keys and values"
    if config.is_encoder_decoder:
        return "is half of an encoder and a decoder"
    if not getattr(model_class, "_supports_attention_backend", False):
        if hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
            return "does not declare that its attention can be replaced"
        return "does not take its attention from transformers' registry"
    return ""


def layer_specs(model: PreTrainedModel, plan: CachePlan) -> list[LayerSpec]:
    """What the cache must know of every layer of a model, and proof that it is so.

    Raises:
        UnsupportedModelError: see `rotary_of` and `probe`.
    """
    text, windows = model.config.get_text_config(), sliding_windows(model.config)
    kinds = (getattr(text, "layer_types", None) or ["full_attention"] * len(windows))[: len(windows)]
    tables: dict[str, RotaryTable] = {}
    if plan.positions != "absolute":
        rotary = rotary_of(model)
        tables = {kind: table_for(rotary, kind) for kind in set(kinds)}
    uniform = None not in windows
    keys = probe(model, [tables.get(kind) for kind in kinds])
    return [
        LayerSpec(
            table=tables.get(kind),
            sliding=None if uniform else window,
            hidden_from=window if plan.positions == "absolute" else None,
            device=key.device,
            shard=_shard(model, key.shape[1]),
        )
        for kind, window, key in zip(kinds, windows, keys, strict=True)
    ]


def _shard(model: PreTrainedModel, heads: int) -> range | None:
    """Which KV heads of a layer are in this process, that has so many of them."""
    processes = getattr(model, "tp_size", None) or 1
    if processes == 1 or heads >= model.config.get_text_config().num_key_value_heads:
        return None
    rank = torch.distributed.get_rank() % processes
    return range(rank * heads, (rank + 1) * heads)


class _AttentionProbe(EndlessLayer):
    """A layer that keeps nothing but the queries and keys it was shown."""

    seen: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def get_seq_length(self) -> int:
        """Nothing is kept."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        """A token that is alone attends to itself, wherever it stands."""
        self.seen = (query, key)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()


class _Probes(Cache):
    padding = place = None


def attention_of(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """Where each part of a model takes its attention from, by its config: parts need not agree."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [
        (config, config._attn_implementation) for config in configs.values() if isinstance(config, PreTrainedConfig)
    ]


@contextmanager
def attention_set(model: PreTrainedModel, attention: list[tuple[Any, str]]) -> Iterator[None]:
    """Let a model take its attention from where `attention_of` said, and then from where it does now."""
    before = attention_of(model)
    _set_attention(attention)
    try:
        yield
    finally:
        _set_attention(before)


@contextmanager
def attention_of_ours(model: PreTrainedModel) -> Iterator[None]:
    """Let a model take its attention from `h2o_attention`, and then from where it does now."""
    with attention_set(model, attention_of(model)):
        model.set_attn_implementation(ATTENTION_NAME)
        yield


def _set_attention(attention: list[tuple[Any, str]]) -> None:
    for config, name in attention:  # a config hands its own on to those inside it, which come later
        config._attn_implementation = name


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Let a model's own errors be told as the reason why it is refused; `what` failed."""
    try:
        yield
    except H2OStreamError:
        raise
    except Exception as error:
        if means_out_of_memory(error):
            raise
        told = str(error).strip().partition("\n")[0][:200]
        raise UnsupportedModelError(
            f"{what} fails ({type(error).__name__}: {told}); only --policy full can serve it"
        ) from error


@torch.no_grad()
def probe(model: PreTrainedModel, tables: list[RotaryTable | None]) -> list[Tensor]:
    """Feed one token at position 0 and at a later one, and compare: only RoPE may tell the two apart.

    Returns:
        A key [B, Hkv, 1, D] of each layer, as it comes to the cache.

    Raises:
        UnsupportedModelError: a layer does not ask us for its attention, or the model rotates in another way.
    """
    name, position = type(model).__name__, 5
    token = 1 if getattr(model.config.get_text_config(), "pad_token_id", None) != 1 else 2
    probes = _Probes(layers=[_AttentionProbe() for _ in tables])
    with attention_of_ours(model), failing_as(f"{name} with the keywords of this cache"):
        model(
            torch.full((2, 1), token, device=home_of(model)),
            position_ids=torch.tensor([[0], [position if any(tables) else 0]], device=home_of(model)),
            past_key_values=probes,
            h2o_cache=probes,
            use_cache=True,
        )
    asked = sum(layer.seen is not None for layer in probes.layers)
    if asked < len(tables):
        raise UnsupportedModelError(
            f"{asked} of {len(tables)} layers of {name} take their attention from transformers' registry; "
            "only --policy full can serve it"
        )
    for layer, table in zip(probes.layers, tables, strict=True):
        if table is None:
            continue
        for x in layer.seen:
            try:
                turns = table.upto(position + 1, x.device, torch.float32)[position]
            except (KeyError, TypeError, ValueError) as error:
                raise PositionsError(f"{name} has a rotary embedding that gives no cosines and sines") from error
            still, turned = x.float()
            off = (rotate_back(turned, turns) - still).abs().max()
            if not off < still.abs().max() * (1e-3 if x.dtype == torch.float32 else 0.05):
                raise PositionsError(f"{name} applies RoPE in a form that is not reproduced here")
    return [layer.seen[1] for layer in probes.layers]

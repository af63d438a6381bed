"""Whether a model is supported, and what the cache must know of it: from its config and from a probe.

The config gives the context, the sliding windows and whether positions are rotary. Whether the model takes its
attention from us and rotates as `rope` does is tested: `probe` feeds it one token at two positions. The whole model is
checked afterwards, see `verification`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from h2o_stream.cache.attention_interface import ATTENTION_NAME
from h2o_stream.cache.layer import EvictingLayer, LayerSpec
from h2o_stream.cache.rope import PositionsError, RotaryTable, dimension_orders, rotary_of, rotate_back, table_for
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, CachePlan
from h2o_stream.errors import H2OStreamError, UnsupportedModelError, means_out_of_memory

_LAYER_KINDS = {"full_attention", "sliding_attention"}


def home_of(model: Any) -> torch.device:
    """The device of a model's input tokens, also while its weights are on disk."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(device for device in devices if device is not None))


def size_of(model: Any) -> int:
    """Number of elements of a model's weights and buffers; packed weights count bytes."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def context_of(config: Any) -> int | None:
    """Positions a model was trained for, or None when its config names no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit and limit > 0 else None


def max_distance_of(config: Any) -> int | None:
    """Largest distance a model was trained for: its context, or less if all layers slide or RoPE depends on length."""
    text = config.get_text_config()
    limits, rope, windows = [context_of(config)], _rope(text) or {}, sliding_windows(config)
    if rope.get("rope_type") == "longrope":
        limits.append(rope.get("original_max_position_embeddings"))
    if None not in windows:
        limits.append(min(windows))  # type: ignore[type-var]
    return min((limit for limit in limits if limit), default=None)


def learned_positions(config: Any) -> int | None:
    """Number of positions with a learned embedding, or None if positions are computed."""
    return None if _rope(config.get_text_config()) else context_of(config)


def sliding_windows(config: Any) -> list[int | None]:
    """The sliding window of every layer; None where a layer sees everything."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds[: text.num_hidden_layers]]


def _rope(text: Any) -> dict[str, Any] | None:
    return getattr(text, "rope_parameters", None) or None


def check_supported(model_class: type, config: Any, cache: CacheConfig) -> CachePlan:
    """Refuse, before any work, models that the cache cannot support exactly.

    Returns:
        The plan of `cache` for this model; if it depends on the first prompt, for one of `DEFAULT_WINDOW` tokens.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.
        ConfigError: the budgets do not fit the model.
    """
    plan = cache.for_prompt(DEFAULT_WINDOW).plan(max_distance_of(config))
    if plan.policy == "full":
        return plan
    name, text = model_class.__name__, config.get_text_config()
    if reason := _unsupported_because(model_class, config):
        raise UnsupportedModelError(f"{name} {reason}; only --policy full can serve it")
    if plan.positions != "absolute" and not _rope(text):
        raise PositionsError(f"{name} has no rotary positions, which {plan.positions} re-assigns")
    return plan


def _unsupported_because(model_class: type, config: Any) -> str:
    """Why the cache cannot support a model of this class, or nothing."""
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
    """What the cache must know of every layer of a model, tested by a probe.

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
    probed = probe(model, [tables.get(kind) for kind in kinds])
    return [
        LayerSpec(
            table=form.table,
            order=form.order,
            sliding=None if uniform else window,
            hidden_from=window if plan.positions == "absolute" else None,
            device=form.key.device,
            shard=_shard(model, form.key.shape[1]),
            key=form.key[0, :, 0].to("meta"),
        )
        for window, form in zip(windows, probed, strict=True)
    ]


def _shard(model: PreTrainedModel, heads: int) -> range | None:
    """The KV heads of a layer that are in this process, which has `heads` of them."""
    processes = getattr(model, "tp_size", None) or 1
    if processes == 1 or heads >= model.config.get_text_config().num_key_value_heads:
        return None
    rank = torch.distributed.get_rank() % processes
    return range(rank * heads, (rank + 1) * heads)


class _AttentionProbe(EvictingLayer):
    """A layer that keeps nothing but the queries and keys it gets."""

    seen: tuple[Tensor, Tensor] | None = None

    def get_seq_length(self) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        """A single token attends to itself, at any position."""
        self.seen = (query, key)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()


class ProbeCache(Cache):
    """Layers for a forward that looks at attention, with what `h2o_attention` reads from a cache."""

    padding = storage_device = None


def attention_of(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """The attention implementation of each config of a model; submodels may differ."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [
        (config, config._attn_implementation) for config in configs.values() if isinstance(config, PreTrainedConfig)
    ]


@contextmanager
def attention_set(model: PreTrainedModel, attention: list[tuple[Any, str]]) -> Iterator[None]:
    """Set the attention implementations that `attention_of` gave, and restore the present ones afterwards."""
    before = attention_of(model)
    _set_attention(attention)
    try:
        yield
    finally:
        _set_attention(before)


@contextmanager
def attention_of_ours(model: PreTrainedModel) -> Iterator[None]:
    """Set `h2o_attention` as the attention implementation, and restore the present one afterwards."""
    with attention_set(model, attention_of(model)):
        model.set_attn_implementation(ATTENTION_NAME)
        yield


def _set_attention(attention: list[tuple[Any, str]]) -> None:
    for config, name in attention:  # setting a config also sets those inside it, which come later
        config._attn_implementation = name


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn a model's own errors into the reason why it is refused; `what` failed."""
    try:
        yield
    except H2OStreamError:
        raise
    except Exception as error:
        if means_out_of_memory(error):
            raise
        message = str(error).strip().partition("\n")[0][:200]
        raise UnsupportedModelError(
            f"{what} fails ({type(error).__name__}: {message}); only --policy full can serve it"
        ) from error


class ProbedLayer(NamedTuple):
    """What a probe finds out about a layer.

    Attributes:
        key: [B, Hkv, 1, D], as the cache gets it.
        table: its rotations; None if the model does not rotate there, or by itself.
        order: see `LayerSpec`.
    """

    key: Tensor
    table: RotaryTable | None = None
    order: Tensor | None = None


@torch.no_grad()
def probe(model: PreTrainedModel, tables: list[RotaryTable | None]) -> list[ProbedLayer]:
    """Feed one token at position 0 and at a later one, and compare: they may differ only by RoPE, in a known form.

    Raises:
        UnsupportedModelError: a layer does not take its attention from us, or the model rotates in another way.
    """
    name, position = type(model).__name__, 5
    token = 1 if getattr(model.config.get_text_config(), "pad_token_id", None) != 1 else 2
    probes = ProbeCache(layers=[_AttentionProbe(()) for _ in tables])
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
    return [
        ProbedLayer(layer.seen[1]) if table is None else _probed(name, layer.seen, table, position)
        for layer, table in zip(probes.layers, tables, strict=True)
    ]


def _probed(name: str, seen: tuple[Tensor, Tensor], table: RotaryTable, position: int) -> ProbedLayer:
    """The form of RoPE in which queries and keys [2, H, 1, D] are those of one token at 0 and at `position`."""
    if all(_alike(*x) for x in seen):
        return ProbedLayer(seen[1])
    try:
        rotation = table.upto(position + 1, seen[1].device, torch.float32)[position]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PositionsError(f"{name} has a rotary embedding that gives no cosines and sines") from error
    for number, order in enumerate(dimension_orders(seen[1].shape[-1], rotation.shape[-1])):
        ordered = [x[..., order.to(x.device)] for x in seen]
        if all(_alike(unrotated, rotate_back(rotated.float(), rotation)) for unrotated, rotated in ordered):
            return ProbedLayer(seen[1], table, order.to(seen[1].device) if number else None)
    raise PositionsError(f"{name} applies RoPE in a form that is not reproduced here")


def _alike(x: Tensor, other: Tensor) -> bool:
    """Whether they differ only by rounding, that of the dtype of x."""
    off = (other.float() - x.float()).abs().max()
    return bool(off < x.float().abs().max() * (1e-3 if x.dtype == torch.float32 else 0.05))

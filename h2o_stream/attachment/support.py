"""Whether a model is supported, and what the cache must know of it: from its config and from a probe.

The config gives the context, the sliding windows and whether positions are rotary. Whether the model takes its
attention from us and rotates as `rope` does is tested: `probe` feeds it one token at two positions. The whole model is
checked afterwards, see `verification`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from h2o_stream.attachment.attention_interface import ATTENTION_NAME
from h2o_stream.cache.layer import DecoderLayer, EvictingLayer, EvictingRecurrentLayer, LayeredCache, LayerSpec
from h2o_stream.cache.recurrent import RecurrentLayer, accepted_by, states_of
from h2o_stream.cache.rope import PositionsError, RotaryTable, dimension_orders, rotate_back, tables_of
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, CachePlan
from h2o_stream.errors import H2OStreamError, UnsupportedModelError, means_out_of_memory

_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}
_SLIDING = {"sliding_attention", "hybrid_sliding"}
_LAYER_KINDS = {"full_attention", "chunked_attention"} | _RECURRENT | _WITHOUT_ATTENTION | _SLIDING
"""Kinds of layers in transformers' ``layer_types``; recurrent ones have states of constant size."""


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
    limits, rope, windows = [context_of(config)], _rope(text) or {}, set(_sliding_windows(text))
    if rope.get("rope_type") == "longrope":
        limits.append(rope.get("original_max_position_embeddings"))
    if None not in windows:
        limits.append(min(windows, default=None))  # type: ignore[type-var]
    return min((limit for limit in limits if limit), default=None)


def learned_positions(config: Any) -> int | None:
    """Number of positions with a learned embedding, or None if positions are computed, or only states carry order."""
    return context_of(config) if _looks_up_positions(config.get_text_config()) else None


def _looks_up_positions(text: Any) -> bool:
    """Whether positions have embeddings: there is no RoPE, and no recurrent layer that carries the order of tokens."""
    return not _rope(text) and not _RECURRENT.intersection(_kinds(text))


def _kinds(text: Any) -> list[str]:
    """The kind of every layer."""
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return list(kinds[: text.num_hidden_layers])


def _sliding_window(text: Any, kind: str) -> int | None:
    """The window of a kind of layer; None if it sees everything."""
    if kind == "chunked_attention":
        return int(text.attention_chunk_size)
    window: int | None = getattr(text, "sliding_window", None)
    return window if kind in _SLIDING else None


def _sliding_windows(text: Any) -> list[int | None]:
    """The windows of the layers with attention."""
    return [_sliding_window(text, kind) for kind in _kinds(text) if kind not in _WITHOUT_ATTENTION]


def _rope(text: Any) -> dict[str, Any] | None:
    return getattr(text, "rope_parameters", None) or None


def with_default_positions(config: Any, cache: CacheConfig) -> CacheConfig:
    """`cache`, with absolute positions if it leaves them open and the model has no rotary ones."""
    if cache.policy != "full" and cache.positions is None and _looks_up_positions(config.get_text_config()):
        return replace(cache, positions="absolute")
    return cache


def check_supported(model_class: type, config: Any, cache: CacheConfig) -> CachePlan:
    """Refuse, before any work, models that the cache cannot support exactly.

    Returns:
        The plan of `cache` for this model; if it depends on the first prompt, for one of `DEFAULT_WINDOW` tokens.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.
        ConfigError: the budgets do not fit the model.
    """
    plan = with_default_positions(config, cache).for_prompt(DEFAULT_WINDOW).plan(max_distance_of(config))
    if plan.policy == "full":
        return plan
    name, text = model_class.__name__, config.get_text_config()
    if reason := _unsupported_because(model_class, config):
        raise UnsupportedModelError(f"{name} {reason}; only --policy full can serve it")
    if plan.positions != "absolute" and _looks_up_positions(text):
        raise PositionsError(f"{name} has no rotary positions, which {plan.positions} re-assigns")
    return plan


def _unsupported_because(model_class: type, config: Any) -> str:
    """Why the cache cannot support a model of this class, or nothing."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if strange := kinds - _LAYER_KINDS:
        return f"has {', '.join(sorted(strange))} layers"
    if getattr(model_class, "_is_stateful", False) and not kinds:
        return "keeps states that are no keys and values"
    if kinds and kinds <= _WITHOUT_ATTENTION | {"chunked_attention"}:
        return "has no layer whose memory would grow"
    if config.is_encoder_decoder:
        return "is half of an encoder and a decoder"
    asks = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not asks and not getattr(model_class, "_supports_attention_backend", False):
        return "does not take its attention from transformers' registry"
    if _looks_up_positions(text) and context_of(config) is None:
        return "has positions, and its config does not say how many"
    return ""


def layer_specs(model: PreTrainedModel, plan: CachePlan) -> list[LayerSpec]:
    """What the cache must know of every layer of a model, tested by a probe.

    Raises:
        UnsupportedModelError: see `tables_of` and `probe`.
    """
    text = model.config.get_text_config()
    kinds, uniform = _kinds(text), None not in _sliding_windows(text)
    moves = plan.positions != "absolute"
    probed = probe(model, kinds, tables_of(model, set(kinds) - _WITHOUT_ATTENTION) if moves else {}, moves)
    return [_spec(model, plan, kind, form, uniform) for kind, form in zip(kinds, probed, strict=True)]


def _spec(model: PreTrainedModel, plan: CachePlan, kind: str, form: ProbedLayer, uniform: bool) -> LayerSpec:
    """The spec of one layer; if all that have attention slide (`uniform`), they follow the plan."""
    if form.key is None:
        return LayerSpec(attends=False, states=form.states, state_bytes=form.state_bytes)
    window, chunked = _sliding_window(model.config.get_text_config(), kind), kind == "chunked_attention"
    return LayerSpec(
        table=form.table,
        order=form.order,
        states=form.states,
        state_bytes=form.state_bytes,
        sliding=None if uniform and not chunked else window,
        chunked=chunked,
        hidden_from=window if plan.positions == "absolute" else None,
        device=form.key.device,
        shard=_shard(model, form.key.shape[1]),
        key=form.key[0, :, 0].to("meta"),
    )


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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        """A single token attends to itself, at any position."""
        self.seen = (query, key)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()


class _HybridProbe(EvictingRecurrentLayer, _AttentionProbe):
    """The same, for a layer that also has states."""


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
        key: [B, Hkv, 1, D], as the cache gets it; None if it has no attention.
        table: its rotations; None if the model does not rotate there, or by itself.
        order: see `LayerSpec`.
        states: see `LayerSpec`.
        state_bytes: see `LayerSpec`.
    """

    key: Tensor | None = None
    table: RotaryTable | None = None
    order: Tensor | None = None
    states: int = 0
    state_bytes: int = 0


@torch.no_grad()
def probe(
    model: PreTrainedModel, kinds: Sequence[str], tables: Mapping[str, Sequence[RotaryTable]], moves: bool
) -> list[ProbedLayer]:
    """Feed one token at position 0 and at a later one, and compare: they may differ only by RoPE, in a known form.

    Args:
        model: whose layers are probed.
        kinds: of the layers.
        tables: see `tables_of`.
        moves: whether the cache assigns positions, so that they must show in nothing but RoPE.

    Raises:
        UnsupportedModelError: a layer does not take its attention from us, or keeps states elsewhere, or the model
            rotates in another way.
    """
    name, position, text = type(model).__name__, 5 * moves, model.config.get_text_config()
    token = 1 if getattr(text, "pad_token_id", None) != 1 else 2
    states = getattr(text, "number_of_conv_states", 1)
    probes = accepted_by(model, LayeredCache(layers=[_probing_layer(kind, states) for kind in kinds]))
    with attention_of_ours(model), failing_as(f"{name} with the keywords of this cache"):
        model(
            torch.full((2, 1), token, device=home_of(model)),
            position_ids=torch.tensor([[0], [position]], device=home_of(model)),
            past_key_values=probes,
            h2o_cache=probes,
            use_cache=True,
        )
    attending = [layer for layer, kind in zip(probes.layers, kinds, strict=True) if kind not in _WITHOUT_ATTENTION]
    asked = sum(layer.seen is not None for layer in attending)
    if asked < len(attending):
        raise UnsupportedModelError(
            f"{asked} of {len(attending)} layers of {name} take their attention from transformers' registry; "
            "only --policy full can serve it"
        )
    found = []
    for kind, layer in zip(kinds, probes.layers, strict=True):
        kept = states_of(layer)
        if kind in _RECURRENT and not kept:
            raise UnsupportedModelError(f"{name} keeps states outside of its cache; only --policy full can serve it")
        form = ProbedLayer()
        if kind not in _WITHOUT_ATTENTION:
            form = _probed(name, layer.seen, tables.get(kind, ()), position)
        size = sum(state[0].nbytes for state in kept.values())
        found.append(form._replace(states=states if kind in _RECURRENT else 0, state_bytes=size))
    return found


def _probing_layer(kind: str, states: int) -> DecoderLayer:
    if kind not in _RECURRENT:
        return EvictingLayer(()) if kind in _WITHOUT_ATTENTION else _AttentionProbe(())
    return RecurrentLayer(states) if kind in _WITHOUT_ATTENTION else _HybridProbe(states, ())


def _probed(name: str, seen: tuple[Tensor, Tensor], tables: Sequence[RotaryTable], position: int) -> ProbedLayer:
    """The form of RoPE in which queries and keys [2, H, 1, D] are those of one token at 0 and at `position`."""
    key, off = seen[1], [_difference(*x) for x in seen]
    limit = 1e-3 if key.dtype == torch.float32 else 0.05
    if max(off) < limit:
        return ProbedLayer(key)
    if not tables:
        raise PositionsError(f"{name} has no rotary embedding that is known here")
    forms = []
    for table in tables:
        try:
            rotation = table.upto(position + 1, key.device, torch.float32)[position]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PositionsError(f"{name} has a rotary embedding that gives no cosines and sines") from error
        for number, order in enumerate(dimension_orders(key.shape[-1], rotation.shape[-1])):
            ordered = [x[..., order.to(x.device)] for x in seen]
            off = [_difference(unrotated, rotate_back(rotated.float(), rotation)) for unrotated, rotated in ordered]
            forms.append((max(off), ProbedLayer(key, table, order.to(key.device) if number else None)))
    smallest, form = min(forms, key=lambda found: found[0])
    if not smallest < limit:
        raise PositionsError(f"{name} applies RoPE in a form that is not reproduced here")
    return form


def _difference(x: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number of x."""
    largest = x.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((other.float() - x.float()).abs().max() / largest)

"""Finds out by one token at two positions how the layers of a model attend, rotate and keep states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2o_stream.attachment.attention_interface import using_h2o_attention
from h2o_stream.attachment.model_facts import RECURRENT, WITHOUT_ATTENTION, input_device
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.layer import DecoderLayer, EvictingLayer, EvictingRecurrentLayer, LayeredCache, LayerSpec
from h2o_stream.cache.recurrent import RecurrentLayer, as_class_for, states_of
from h2o_stream.cache.rope import PositionsError, RotaryTable, dimension_orders, rotate_back
from h2o_stream.errors import H2OStreamError, UnsupportedModelError, means_out_of_memory

_EXACT, _ROUNDED = 1e-3, 0.02
"""Limits of `_difference`, in float32 and in fewer bits: another form of RoPE is off by more than 0.1."""


class _AttentionProbe(EvictingLayer):
    """A layer that keeps nothing but the queries and keys it gets, and their shape."""

    seen: tuple[Tensor, Tensor] | None = None
    shape: HeadShape | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        """A single token attends to itself, at any position."""
        self.seen = (query, key)
        self.shape = HeadShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1])
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()


class _HybridProbe(EvictingRecurrentLayer, _AttentionProbe):
    """An `_AttentionProbe` for a layer that also has states."""


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


@torch.no_grad()
def probe(
    model: PreTrainedModel, kinds: Sequence[str], tables: Mapping[str, Sequence[RotaryTable]], moves: bool
) -> list[LayerSpec]:
    """Feed one token at position 0 and at a later one, and compare: they may differ only by RoPE, in a known form.

    Args:
        model: called once.
        kinds: kind of each layer, see `layer_kinds`.
        tables: rotations that may apply to each kind, see `tables_of`.
        moves: whether the cache assigns positions, so that they must show in nothing but RoPE.

    Returns:
        What shows of each layer: rotations, device, keys and states.

    Raises:
        UnsupportedModelError: a layer does not take its attention from us, or keeps states elsewhere, or the model
            rotates in another way.
    """
    name, position, text = type(model).__name__, 5 * moves, model.config.get_text_config()
    token = 1 if getattr(text, "pad_token_id", None) != 1 else 2
    states = getattr(text, "number_of_conv_states", 1)
    probes = as_class_for(model, LayeredCache(layers=[_probing_layer(kind, states) for kind in kinds]))
    with using_h2o_attention(model), failing_as(f"{name} with the keywords of this cache"):
        model(
            torch.full((2, 1), token, device=input_device(model)),
            position_ids=torch.tensor([[0], [position]], device=input_device(model)),
            past_key_values=probes,
            h2o_cache=probes,
            use_cache=True,
        )
    attending = [layer for layer, kind in zip(probes.layers, kinds, strict=True) if kind not in WITHOUT_ATTENTION]
    asked = sum(layer.seen is not None for layer in attending)
    if asked < len(attending):
        raise UnsupportedModelError(
            f"{asked} of {len(attending)} layers of {name} take their attention from transformers' registry; "
            "only --policy full can serve it"
        )
    specs = []
    for kind, layer in zip(kinds, probes.layers, strict=True):
        kept = states_of(layer)
        if kind in RECURRENT and not kept:
            raise UnsupportedModelError(f"{name} keeps states outside of its cache; only --policy full can serve it")
        spec = LayerSpec(attends=False)
        if kind not in WITHOUT_ATTENTION:
            spec = replace(_probed(name, layer.seen, tables.get(kind, ()), position), shape=layer.shape)
        shapes = {name: tuple(state.shape[1:]) for name, state in kept.items()}
        dtypes = {name: state.dtype for name, state in kept.items()}
        count = states if kind in RECURRENT else 0
        specs.append(replace(spec, states=count, state_shapes=shapes, state_dtypes=dtypes))
    return specs


def _probing_layer(kind: str, states: int) -> DecoderLayer:
    if kind not in RECURRENT:
        return EvictingLayer(()) if kind in WITHOUT_ATTENTION else _AttentionProbe(())
    return RecurrentLayer(states) if kind in WITHOUT_ATTENTION else _HybridProbe(states, ())


def _probed(name: str, seen: tuple[Tensor, Tensor], tables: Sequence[RotaryTable], position: int) -> LayerSpec:
    """The form of RoPE in which queries and keys [2, H, 1, D] are those of one token at 0 and at `position`."""
    key = seen[1]
    spec = LayerSpec(dtype=key.dtype, device=key.device)
    limit = _EXACT if key.dtype == torch.float32 else _ROUNDED
    if max(_difference(x[0], x[1], x.abs().sum(0)) for x in seen) < limit:
        return spec
    if not tables:
        raise PositionsError(f"{name} has no rotary embedding that is known here")
    forms = []
    for table in tables:
        try:
            rotation = table.upto(position + 1, key.device, torch.float32)[position]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PositionsError(f"{name} has a rotary embedding that gives no cosines and sines") from error
        for number, order in enumerate(dimension_orders(key.shape[-1], rotation.shape[-1])):
            ordered = [x[..., order.to(x.device)].float() for x in seen]
            off = [
                _difference(unrotated, rotate_back(rotated, rotation), _lengths(unrotated, rotation.shape[-1]))
                for unrotated, rotated in ordered
            ]
            forms.append((max(off), replace(spec, table=table, order=order.to(key.device) if number else None)))
    smallest, spec = min(forms, key=lambda form: form[0])
    if not smallest < limit:
        raise PositionsError(f"{name} applies RoPE in a form that is not reproduced here")
    return spec


def _difference(x: Tensor, other: Tensor, lengths: Tensor) -> float:
    """Root mean square of x - other, each relative to what it was rounded with: one dimension may hide all others."""
    shares = (other.float() - x.float()) / lengths.float().clamp_min(torch.finfo(torch.float32).tiny)
    return float(shares.square().mean().sqrt())


def _lengths(x: Tensor, rotary: int) -> Tensor:
    """Of the pairs that RoPE turns, elements 0 and `rotary` / 2 of x [..., D] and so on; of the rest of single ones."""
    first, second, rest = x.tensor_split((rotary // 2, rotary), -1)
    pairs = torch.hypot(first, second)
    return torch.cat((pairs, pairs, rest.abs()), -1)

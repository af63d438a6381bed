"""Layers with states of constant size: linear attention, state-space and convolution layers.

transformers or native code updates the states, from which nothing is evicted. They are reordered, saved and loaded with
the slots. Native code has them in float32; before transformers goes on with them they get its dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.errors import H2OStreamError

CacheType = TypeVar("CacheType", bound=Cache)

_KINDS = ("conv", "recurrent")
"""Kinds of states: the last inputs of a convolution, and what a recurrence carries on."""


class RecurrentLayer(LinearAttentionLayer):
    """The states of a layer, each [B, ...].

    Attributes:
        own_dtypes: what transformers gives each of them, by name.
    """

    head_groups: tuple[HeadGroup, ...] = ()
    own_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(state.nbytes for state in states_of(self).values())

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store a state, also in a layer that has no convolution."""
        updated: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.has_previous_state[state_idx] = True
        return updated

    def reset(self) -> None:
        """Forget the states and release them: the next stream may have another number of rows."""
        release_states(self)

    @torch.inference_mode(False)
    def begin(self, shapes: Mapping[str, tuple[int, ...]], rows: int, device: torch.device) -> None:
        """Hold states of B rows, zero where there are none yet, which kernels update in place."""
        for name in shapes.keys() - states_of(self).keys():
            _set_state(self, name, torch.zeros(rows, *shapes[name], dtype=self.own_dtypes[name], device=device))

    @torch.inference_mode(False)
    def in_float32(self, shapes: Mapping[str, tuple[int, ...]], rows: int) -> list[Tensor]:
        """The states of B rows as native code updates them in place, zero where there are none yet.

        Returns:
            [B, ...] float32 of each name, contiguous; held from now on.

        Raises:
            H2OStreamError: the states that are held have other shapes.
        """
        states, converted = states_of(self), []
        for name, shape in shapes.items():
            state = states.get(name)
            if state is None:
                state = torch.zeros(rows, *shape, dtype=torch.float32, device="cpu")
            if state.shape != (rows, *shape):
                raise H2OStreamError(f"the state {name} is {list(state.shape)}, {[rows, *shape]} is needed")
            converted.append(state.float().contiguous())
            if converted[-1] is not states.get(name):
                _set_state(self, name, converted[-1])
        return converted

    @torch.inference_mode(False)
    def use_own_dtypes(self) -> None:
        """Hold the states in the dtypes that transformers gives them, before it goes on with them."""
        for name, state in states_of(self).items():
            _set_state(self, name, state.to(self.own_dtypes.get(name, state.dtype)))

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i]; in place if there are as many, so that addresses stay valid."""
        for name, state in states_of(self).items():
            chosen = state.index_select(0, rows.to(state.device))
            if len(chosen) == len(state):
                state.copy_(chosen)
            else:
                _set_state(self, name, chosen)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a state does not lose its last tokens."""
        raise H2OStreamError("a recurrent state cannot take tokens back; generate without an assistant model")


class _LinearStates:
    """What MiniMax asks of its own class of caches, kept in recurrent states."""

    def get_linear_cache(self: Any, layer_idx: int) -> Tensor | None:
        """The state of a layer; None before the first token."""
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self: Any, layer_idx: int, linear_cache: Tensor) -> None:
        """Store the state of a layer."""
        self.torn = True
        _set_state(self.layers[layer_idx], "recurrent.0", linear_cache)

    def __len__(self: Any) -> int:
        return len(self.layers)


def as_class_for(model: Any, cache: CacheType) -> CacheType:
    """The same cache; for MiniMax, which takes no other, also as an instance of its own class."""
    required = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if required is not None:
        cache.__class__ = type(type(cache).__name__, (type(cache), _LinearStates, required), {})
    return cache


def states_of(layer: Any) -> dict[str, Tensor]:
    """The states of a layer by name, "conv.0" for example; none of a layer that has only attention."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    states = {f"{kind}.{number}": x for kind in _KINDS for number, x in getattr(layer, f"{kind}_states").items()}
    return {name: state for name, state in states.items() if state is not None}


def release_states(layer: Any) -> None:
    """Forget the states of a layer, if it has any, and their sizes."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)


def load_states(
    layer: Any,
    saved: Mapping[str, Tensor],
    rows: int,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device | None = None,
) -> None:
    """Continue from states of `rows` rows, by name as `states_of` gives them; the layer holds none yet.

    Their shapes, without the row, are compared as far as they are known. Without a device they stay where they are.

    Raises:
        H2OStreamError: they are not those of such a layer.
    """
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return
    names = {f"{kind}.{number}" for kind in _KINDS for number in range(layer.number_of_states)}
    chosen = {name: saved[name] for name in sorted(names & saved.keys())}
    for name, state in chosen.items():
        wanted = shapes.get(name, tuple(state.shape[1:]))
        if state.dim() < 2 or state.shape != (rows, *wanted):
            raise H2OStreamError(f"the state does not fit: {name} is {list(state.shape)}, {[rows, *wanted]} is needed")
    if layer.number_of_states and not chosen:
        raise H2OStreamError("the state is incomplete: a layer has no recurrent state")
    if lost := sorted(shapes.keys() - chosen.keys()):
        raise H2OStreamError(f"the state is incomplete: {lost[0]} is missing")
    for name, state in chosen.items():
        _set_state(layer, name, state.to(device or state.device, copy=True))


def _set_state(layer: LinearAttentionLayer, name: str, state: Tensor) -> None:
    kind, _, digits = name.partition(".")
    number = int(digits)
    getattr(layer, f"{kind}_states")[number] = state
    getattr(layer, f"is_{kind}_states_initialized")[number] = layer.has_previous_state[number] = True
    if kind == "conv":
        layer.conv_kernel_size[number] = state.shape[-1]
        layer.device, layer.dtype = state.device, state.dtype


class HeldRows:
    """The states of rows that have no token in the next forward, which changes them nevertheless."""

    def __init__(self, layers: Sequence[RecurrentLayer], rows: Sequence[int]) -> None:
        self._layers, self._rows = layers if rows else (), list(rows)
        self._states = [{name: x[self._rows] for name, x in states_of(layer).items()} for layer in self._layers]

    def restore(self) -> None:
        """Set them as they were: to zero if there were none."""
        for layer, before in zip(self._layers, self._states, strict=True):
            for name, state in states_of(layer).items():
                state[self._rows] = before.get(name, torch.zeros_like(state[self._rows])).to(state.dtype)

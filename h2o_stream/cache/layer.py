"""A decoder layer of the cache, as transformers sees it: a list of head groups; and what it is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from h2o_stream.cache.attend import attend
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.layer_rules import LayerRules
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.recurrent import RecurrentLayer
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError


class EvictingLayer(CacheLayerMixin):
    """Splits queries, keys and values by head group. Keys are stored in `attend`, once their attention is known.

    Args:
        head_groups: together all KV heads of the layer; none if it has no attention.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, head_groups: Sequence[HeadGroup], order: Tensor | None = None) -> None:
        super().__init__()
        self.head_groups, self.order = tuple(head_groups), order

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        padding: Padding | None = None,
        kernels: Kernels | None = None,
    ) -> Tensor:
        """[B, Q, Hq, D]; see `attend` for the arguments."""
        if self.order is not None:
            query, key = (x.index_select(-1, self.order.to(x.device)) for x in (query, key))
        if len(self.head_groups) == 1:
            return attend(self.head_groups[0], query, key, value, transform, padding, kernels)
        batch, query_heads, new, _ = query.shape
        query = query.unflatten(1, (key.shape[1], -1))
        output = value.new_empty(batch, new, *query.shape[1:3], value.shape[-1], dtype=query.dtype)
        for group in self.head_groups:
            queries = query[:, group.heads].flatten(1, 2)
            assert group.heads is not None
            of_group = transform.of_heads(group.heads, key.shape[1])
            keys, values = key[:, group.heads], value[:, group.heads]
            attended = attend(group, queries, keys, values, of_group, padding, kernels)
            output[:, :, group.heads] = attended.unflatten(2, (len(group.heads), -1))
        return output.view(batch, new, query_heads, -1)

    # transformers' interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `attend` allocates the slots."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Pass the new keys and values through to the attention function."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen, evicted ones and padding included: what `generate` counts with."""
        return self.head_groups[0].tokens.columns if self.head_groups else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of a mask, which nobody uses: `attend` makes its own."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        for group in self.head_groups:
            group.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted for the removed tokens does not come back."""
        raise H2OStreamError("a cache that evicts cannot take tokens back; generate without an assistant model")


class EvictingRecurrentLayer(RecurrentLayer, EvictingLayer):
    """A layer with attention and states side by side, or with a convolution of its queries and keys."""

    is_compileable = False

    def __init__(self, states: int, head_groups: Sequence[HeadGroup], order: Tensor | None = None) -> None:
        EvictingLayer.__init__(self, head_groups, order)
        LinearAttentionLayer.__init__(self, states)

    def reset(self) -> None:
        """Forget the stream, and release slots and states."""
        EvictingLayer.reset(self)
        RecurrentLayer.reset(self)


DecoderLayer: TypeAlias = EvictingLayer | RecurrentLayer


class LayeredCache(Cache):
    """A cache in which `h2o_attention` finds the layer that a module belongs to.

    Attributes:
        padding: padding of the forward that is running, or None.
        storage_device: device of all keys and values and of attention; None for that of each layer.
        kernels: used instead of the eager ones, where they can be; None for nowhere.
    """

    padding: Padding | None = None
    storage_device: torch.device | None = None
    kernels: Kernels | None = None
    _arrived: tuple[int, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Remember which layer these keys are of: Zamba's layers share one attention module."""
        self._arrived = layer_idx, key_states
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated

    def layer_of(self, module: Any, key: Tensor) -> EvictingLayer:
        """The layer of the attention module that is called with these keys."""
        arrived, self._arrived = self._arrived, None
        number = arrived[0] if arrived and arrived[1] is key else module.layer_idx
        layer: EvictingLayer = self.layers[number]
        return layer


@dataclass(frozen=True)
class LayerSpec(LayerRules):
    """What a cache of tensors must know of a decoder layer.

    Attributes:
        order: [D] int64, the dimensions of queries and keys in which the table rotates halves; None for as they are.
        states: how many states of constant size it has, see `RecurrentLayer`.
        state_dtypes: what transformers gives them.
        device: device of the layer; None for the CPU.
        on_disk: whether keys and values are in mapped files.
        shard: the KV heads that are in this process, where several share the layer (tensor parallel), as `shape` has
            them; None for all.
    """

    order: Tensor | None = None
    states: int = 0
    state_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    device: torch.device | None = None
    on_disk: bool = False
    shard: range | None = None

    @property
    def local_windows(self) -> tuple[HeadWindow | None, ...]:
        """See `LayerRules`; counted from the first head here."""
        if self.shard is None:
            return self.windows
        start, shard = self.shard.start, self.shard
        heads = [tuple(head - start for head in window.heads if head in shard) for window in self.windows]
        return tuple(
            replace(window, heads=local) if local or not window.heads else None
            for window, local in zip(self.windows, heads, strict=True)
        )

    def make_layer(
        self, plan: CachePlan, number: int, tokens: TokenCount | None = None, revision: Revision | None = None
    ) -> DecoderLayer:
        """An empty layer, the `number`-th of its model."""
        groups = tuple(self.make_groups(plan, number, tokens, revision))
        if not self.states:
            return EvictingLayer(groups, self.order)
        if self.attends:
            layer: RecurrentLayer = EvictingRecurrentLayer(self.states, groups, self.order)
        else:
            layer = RecurrentLayer(self.states)
        layer.own_dtypes = self.state_dtypes
        return layer

    def _group(self, plan: CachePlan, heads: tuple[int, ...], **rules: Any) -> HeadGroup:
        chosen = torch.tensor(heads, device=self.device) if heads else None
        return HeadGroup(plan, self.device, heads=chosen, on_disk=self.on_disk, **rules)


def kept_by(groups: Sequence[HeadGroup]) -> Tensor:
    """[B, Hkv, n] int64: indices of the tokens that the head groups of a layer hold, see `H2OCache.kept`."""
    indices = [group.kept() for group in groups]
    if not indices:
        return torch.empty(0, 0, 0, dtype=torch.int64, device="cpu")
    if len(indices) == 1:
        return indices[0]
    n = max(kept.shape[-1] for kept in indices)
    result = indices[0].new_full((len(indices[0]), sum(group.weight for group in groups), n), -1)
    for group, kept in zip(groups, indices, strict=True):
        if n:
            result[:, group.heads, n - kept.shape[-1] :] = kept
    return result

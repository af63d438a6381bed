"""What attention in torch does with a memory: it finds tokens there, and appends those that a chunk has evicted.

Every key is compared, on the CPU, where segments are mapped. Tokens at the largest distance need no rotation of their
own: the query is rotated for them, once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream import config
from h2o_stream.cache.attention import Found, QueryChunk, rotated_query
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.memory_codes import HEADER
from h2o_stream.cache.rope import rotate_back

_CPU = torch.device("cpu")
_LEVELS = 127
"""Of 8 bits with a sign."""


class ChunkMemory:
    """The memory of a head group, for one chunk of new tokens."""

    def __init__(self, group: HeadGroup, chunk: QueryChunk) -> None:
        assert group.memory
        self._group, self._chunk, self._part = group, chunk, group.memory
        self._memory, self._kv_heads = group.memory.memory, chunk.key.shape[1]

    @cached_property
    def _table(self) -> Tensor | None:
        """[N, Drot], cosines and sines up to the largest distance, on the CPU; None without RoPE."""
        table, limit = self._group.table, config.MEMORY_DISTANCE + 1
        return None if table is None else table.upto(limit, self._chunk.query.device, torch.float32).to(_CPU)

    @cached_property
    def _queries(self) -> tuple[Tensor, Tensor]:
        """Queries [B, Hkv, G * Q, D] float32, rotated for keys at their distances, and for keys at the largest one."""
        chunk = replace(self._chunk, query=self._chunk.query.to(_CPU, torch.float32))
        query = far = chunk.query
        if self._table is not None:
            query = rotated_query(chunk, self._table)
            cos, sin = self._table[config.MEMORY_DISTANCE].chunk(2)
            far = rotate_back(query, torch.cat((cos, -sin)))
        near, far = (x.unflatten(1, (self._kv_heads, -1)).flatten(2, 3).contiguous() for x in (query, far))
        return near, far

    def find(self) -> Found | None:
        """What the queries attend to; None if there is nothing in memory that is searched."""
        if not (self._memory.searched and self._memory.tokens):
            return None
        shape = *self._queries[0].shape[:3], config.MEMORY_MATCHES
        logits = torch.full(shape, -torch.inf, device=_CPU)
        values = torch.zeros(*shape, self._chunk.value.shape[-1], device=_CPU)
        for row, head in product(*map(range, shape[:2])):
            if self._chunk.counts[row]:
                self._search(row, head, logits[row, head], values[row, head])
        device, queries = self._chunk.query.device, (-1, self._chunk.new)
        return Found(*(x.unflatten(2, queries).to(device) for x in (logits, values)))

    def _search(self, row: int, head: int, logits: Tensor, values: Tensor) -> None:
        """Write what the queries of a KV head find: logits [G * Q, M] and values [G * Q, M, Dv]."""
        query, far = (x[row, head] for x in self._queries)
        stream, count, size = self._memory.rows[row], self._chunk.counts[row], query.shape[-1]
        records = torch.from_numpy(stream.records(self._part.first + head))
        index = records[:, :4].contiguous().view(torch.int32)[:, 0]
        key_scale, value_scale = records[:, 4:HEADER].contiguous().view(torch.float16).float().T
        keys = records[:, HEADER : HEADER + size].view(torch.int8).float()
        products = far @ keys.T
        if self._table is not None:
            distance = (self._chunk.lengths[row] + count - 1 - index.long()).clamp_min_(0)  # whatever a state has
            near = (distance < config.MEMORY_DISTANCE).nonzero()[:, 0]
            rotated = rotate_back(keys[near], embedding(distance[near], self._table))
            products[:, near] = query @ rotated.T
        best, places = (products * key_scale).topk(min(config.MEMORY_MATCHES, len(records)))
        matches = places.shape[1]
        logits[:, :matches] = self._chunk.transform.logits(best)
        values[:, :matches] = records[places, HEADER + size :].view(torch.int8).float() * value_scale[places, None]
        stream.set_found(self._part.first + head, places.unflatten(0, (-1, self._chunk.new))[:, count - 1].numpy())

    def append(self, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Append the tokens that the group does not hold any more, but for transient ones.

        Args:
            index: [B, Hkv, K] int32, what it held or was given; -1 for none.
            keys: [B, Hkv, K, D].
            values: [B, Hkv, K, Dv].
        """
        indices = self._group.index.sort(-1).values
        nearest = indices.gather(-1, torch.searchsorted(indices, index).clamp_max_(indices.shape[-1] - 1))
        evicted = (nearest != index) & (index >= 0) & ~self._group.protection.is_transient(index)
        if not evicted.any():
            return
        records = _encode(index[evicted], keys[evicted], values[evicted])
        for number, added in enumerate(records.split(evicted.sum(-1).flatten().tolist())):
            if len(added):
                row, head = divmod(number, self._kv_heads)
                self._memory.append(self._part, row, head, added.numpy(), self._queries[1][row, head].numpy())


def _encode(index: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Records [n, bytes] uint8 on the CPU of tokens [n] with keys [n, D] and values [n, Dv]."""
    parts = []
    for x in (keys.to(_CPU, torch.float32), values.to(_CPU, torch.float32)):
        scale = (x.abs().amax(-1, keepdim=True) / _LEVELS).clamp_max_(torch.finfo(torch.float16).max).half()
        inverse = torch.where(scale > 0, scale.float().reciprocal(), 0)
        parts.append((scale, (x * inverse).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)))
    (key_scale, key), (value_scale, value) = parts
    fields = index.to(_CPU, torch.int32)[:, None], key_scale, value_scale, key, value
    return torch.cat([field.view(torch.uint8) for field in fields], -1)

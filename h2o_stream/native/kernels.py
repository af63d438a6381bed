"""Attention and eviction of one head group in the native library; see `h2o_stream.cache.kernels.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, addressof
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform, QueryChunk
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from h2o_stream.native.abi import TOO_FEW_SLOTS, AttentionLayer
from h2o_stream.native.pointers import dtype_name, pointer
from h2o_stream.native.slots import BoundLayer, why_not
from h2o_stream.native.stepper import raise_failure
from h2o_stream.native.threads import num_threads

_Bound: TypeAlias = tuple[tuple[int, float, float | None], int, BoundLayer]
"""What structures depend on, the new tokens that they have room for, and the structures."""


def make_kernels() -> NativeKernels | None:
    """None if there is no library."""
    native = library.loaded()
    return NativeKernels(native) if native else None


class NativeKernels:
    """Supports float32 and bfloat16 tensors on the CPU, under a built-in policy."""

    def __init__(self, native: CDLL) -> None:
        self._native = native
        self._bound: WeakKeyDictionary[HeadGroup, _Bound] = WeakKeyDictionary()

    def supports(self, group: HeadGroup, query: Tensor, transform: LogitTransform) -> bool:
        """Whether native code can compute this group."""
        if type(query) is not Tensor:
            return False
        return not why_not(group) and query.dtype == group.dtype and query.device == group.device

    def chunk_size(self, group: HeadGroup, new: int) -> int:
        """A chunk."""
        return group.plan.chunk or new

    def decode(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """Attend with the query of one token, update the scores and evict."""
        bound = self._bind(group, chunk, 0)
        bound.slots["evictions"][:, 0] = [group.schedule.num_evictions(length) for length in chunk.lengths]
        tensors = [x.contiguous() for x in (chunk.query, chunk.key, chunk.value)]
        output = chunk.query.new_empty(len(chunk.query), 1, chunk.query.shape[1], chunk.value.shape[-1])
        failed = self._native.h2o_decode(
            addressof(bound.attention),
            bound.slots.ctypes.data,
            1,
            len(output),
            *(pointer(x, dtype_name(group.dtype), x.numel()) for x in (*tensors, output)),
            num_threads(),
        )
        raise_failure(failed, f"a step of {len(output)} rows")
        return output

    def prefill(self, group: HeadGroup, chunk: QueryChunk) -> Tensor:
        """See `Kernels.prefill`.

        Raises:
            OutOfMemoryError: there is none for the products of a chunk.
        """
        rows, query_heads, columns, _ = chunk.query.shape
        bound = self._bind(group, chunk, columns)
        tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (chunk.query, chunk.key, chunk.value)]
        strides = _whole_numbers([stride for x in tensors for stride in x.stride()[:3]])
        counts, limits = _whole_numbers(chunk.counts), _whole_numbers(group.limits(chunk))
        output = chunk.query.new_empty(rows, columns, query_heads, chunk.value.shape[-1])
        failed = self._native.h2o_prefill(
            addressof(bound.attention),
            bound.slots.ctypes.data,
            1,
            rows,
            pointer(counts, "int64", rows),
            pointer(limits, "int64", rows),
            columns,
            *(pointer(x, dtype_name(group.dtype), x.numel(), strided=True) for x in tensors),
            pointer(strides, "int64", 9),
            columns,
            group.dtype == torch.bfloat16,
            pointer(output, dtype_name(group.dtype), output.numel()),
            num_threads(),
        )
        if failed == TOO_FEW_SLOTS:
            raise H2OStreamError(f"{group.store.slots} slots are too few to hold {int(limits.max())} tokens")
        raise_failure(failed, f"{columns} tokens at once; lower --chunk")
        group.filled = group.store.slots
        return output

    def _bind(self, group: HeadGroup, chunk: QueryChunk, new_tokens: int) -> BoundLayer:
        """The structures of the group, created anew when something has changed."""
        scaling, softcap, sinks = chunk.transform
        key = group.revision.number, scaling, softcap
        known = self._bound.get(group)
        if known and known[0] == key and known[1] >= new_tokens:
            bound = known[2]
        else:
            attention = AttentionLayer(
                query_heads=chunk.query.shape[1],
                kv_heads=chunk.key.shape[1],
                head_size=chunk.query.shape[-1],
                value_size=chunk.value.shape[-1],
                scaling=scaling,
                softcap=softcap or 0.0,
            )
            bound = BoundLayer([group], attention, new_tokens)
            self._bound[group] = key, new_tokens, bound
        bound.set_sinks(None if sinks is None else sinks.detach().float().contiguous())
        return bound


def _whole_numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")

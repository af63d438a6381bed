"""The tensor work of one layer in the native library; see `h2o_stream.cache.head_group.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, addressof
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.errors import H2OStreamError, OutOfMemoryError
from h2o_stream.native import library
from h2o_stream.native.abi import AttentionLayer, pointer
from h2o_stream.native.slots import BoundLayer, Group, unserved


def make_kernels() -> NativeKernels | None:
    """None where there is no library."""
    native = library.loaded()
    return NativeKernels(native) if native else None


class NativeKernels:
    """Layers whose tensors are on the CPU, in float32 or bfloat16, under a policy of ours."""

    def __init__(self, native: CDLL) -> None:
        self._native = native
        self._bound: WeakKeyDictionary[HeadGroup, tuple[tuple[int, LogitTransform, int], BoundLayer]] = WeakKeyDictionary()

    def serves(self, layer: HeadGroup, query: Tensor) -> bool:
        """See `Kernels.serves`."""
        return not unserved(layer) and query.dtype == layer.dtype and query.device == layer.device

    def decode(
        self,
        layer: HeadGroup,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        evictions: Sequence[int],
    ) -> Tensor:
        """See `Kernels.decode`."""
        bound = self._bind(layer, query, value, transform, layer.store.slots)
        bound.slots["evictions"][:, 0] = evictions
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = query.new_empty(len(query), 1, query.shape[1], value.shape[-1])
        failed = self._native.h2o_decode(
            addressof(bound.attention),
            bound.slots.ctypes.data,
            1,
            len(query),
            *map(pointer, (query, key, value, output)),
            torch.get_num_threads(),
        )
        if failed:
            raise OutOfMemoryError(f"out of memory for a step of {len(query)} rows")
        return output

    def prefill(
        self,
        layer: HeadGroup,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        counts: Sequence[int],
        limits: Sequence[int],
    ) -> Tensor:
        """See `Kernels.prefill`.

        Raises:
            OutOfMemoryError: there is none for the transform of a chunk.
        """
        rows, query_heads, new, _ = query.shape
        bound = self._bind(layer, query, value, transform, layer.store.slots + new)
        tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
        strides = torch.tensor([x.stride()[:3] for x in tensors])
        counted, windows = torch.tensor(counts), torch.tensor(limits)
        output = query.new_empty(rows, new, query_heads, value.shape[-1])
        failed = self._native.h2o_prefill(
            addressof(bound.attention),
            bound.slots.ctypes.data,
            1,
            rows,
            pointer(counted),
            pointer(windows),
            new,
            *(x.data_ptr() for x in tensors),
            pointer(strides),
            new,
            query.dtype == torch.bfloat16,
            pointer(output),
            torch.get_num_threads(),
        )
        if failed == _NO_MEMORY:
            raise OutOfMemoryError(f"out of memory for {new} tokens at once; lower --chunk")
        if failed:
            raise H2OStreamError(f"{layer.store.slots} slots are too few to hold {max(limits)} tokens")
        layer.filled = layer.store.slots
        return output

    def _bind(self, layer: HeadGroup, query: Tensor, value: Tensor, transform: LogitTransform, places: int) -> BoundLayer:
        """The layer's structures, made anew when something has changed."""
        most = layer.reach(places)
        found = self._bound.get(layer)
        if found:
            (version, before, reached), bound = found
            if version == layer.revision.version and before == transform and reached >= most:
                return bound
        heads = layer.index.shape[1]
        attention = AttentionLayer(
            query_heads=query.shape[1],
            kv_heads=heads,
            head_size=query.shape[-1],
            value_size=value.shape[-1],
            scaling=transform.scaling,
            softcap=transform.softcap or 0.0,
        )
        bound = BoundLayer([Group(layer, torch.arange(heads, dtype=torch.int32))], attention, most)
        self._bound[layer] = (layer.revision.version, transform, most), bound
        return bound


_NO_MEMORY = 2
"""What `h2o_prefill` returns then."""

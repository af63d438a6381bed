"""How many bytes the cache of one stream takes, and the weights that a step reads."""

from __future__ import annotations

from typing import Any

import torch

from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.native.describe import describe
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.experts import Experts


def allocated_bytes(cache: H2OCache) -> int:
    """Bytes that one stream takes at most, of an empty cache, by allocating without data.

    Heads whose windows grow take what the others have given up, so what all take at first is the most.
    """
    total = 0
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        total += spec.state_bytes
        if not (shape := spec.shape):
            continue
        for group in layer.head_groups:
            heads = shape.kv_heads if group.heads is None else len(group.heads)
            sizes = shape.key_size, shape.value_size
            key, value = (torch.empty(1, heads, 1, size, dtype=spec.dtype, device="meta") for size in sizes)
            group.queries_per_key = shape.query_heads // shape.kv_heads
            group.allocate(key, value, group.schedule.common + group.spare)
            total += group.nbytes
    return total


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: each weight once, and of an untied embedding one row. If the model is
    described natively, of embeddings for each layer one row, too, and of experts the chosen ones.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table = _largest(embedding)
    tied = head is not None and _largest(head, table).data_ptr() == table.data_ptr()
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tied or tensor is not table]
    total, end = 0 if tied else table.nbytes // embedding.num_embeddings, 0
    for start, stop in sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors):
        total += max(stop - max(start, end), 0)  # views of one tensor are counted once
        end = max(end, stop)
    return total - _unread_bytes(model)


def _unread_bytes(model: Any) -> int:
    """Bytes of the experts that a token does not go through, and of other tokens' embeddings for each layer."""
    try:
        description = describe(model)
    except DescriptionError:
        return 0
    mlps = [layer.mlp for layer in description.layers]
    whole = [(mlp, sum(matrix.weights.nbytes for matrix in mlp.matrices)) for mlp in mlps if isinstance(mlp, Experts)]
    unread = sum(nbytes - mlp.nbytes for mlp, nbytes in whole)
    if own := description.layer_embeddings:
        unread += own.embedding.weights.nbytes * (own.embedding.rows - 1) // own.embedding.rows
    return int(unread)


def _largest(module: Any, *others: Any) -> Any:
    """The largest tensor of a layer, packed or not; `others` for a layer without tensors of its own."""
    return max((*module.parameters(), *module.buffers(), *others), key=lambda tensor: tensor.nbytes)

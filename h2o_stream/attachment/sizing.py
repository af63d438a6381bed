"""How many bytes of weights a step reads."""

from __future__ import annotations

from typing import Any

from h2o_stream.attachment.describe import describe
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.experts import Experts


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

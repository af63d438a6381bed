"""How many bytes of weights a step reads."""

from __future__ import annotations

from typing import Any

from h2o_stream.attachment.describe import describe
from h2o_stream.native.description import DescriptionError


def weight_bytes(model: Any) -> int:
    """Bytes of matrices that a step reads; of a model that is not described, all weights but an untied embedding."""
    try:
        return describe(model).nbytes
    except DescriptionError:
        table, head = _sizes(model.get_input_embeddings()), _sizes(model.get_output_embeddings())
        unread = 0 if not head or table.keys() & head.keys() else sum(table.values())
        return sum(_sizes(model).values()) - unread


def _sizes(module: Any) -> dict[int, int]:
    """Bytes of all tensors, by address: what is shared counts once."""
    tensors = () if module is None else (*module.parameters(), *module.buffers())
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}

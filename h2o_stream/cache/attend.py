"""Feeds new tokens to a head group, chunk by chunk, through the kernels that support it."""

from __future__ import annotations

from operator import add

import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform, QueryChunk
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.padding import Padding

_EAGER = EagerKernels()


@torch.inference_mode(False)  # slots are written in place, later perhaps outside of it
@torch.no_grad()
def attend(
    group: HeadGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transform: LogitTransform,
    padding: Padding | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Attend with Q new tokens and keep as many of all tokens as the schedule says.

    The caller counts the tokens when all layers have taken them.

    Args:
        group: its slots are written in place.
        query: [B, Hq, Q, D], un-rotated like the keys (already rotated with ``absolute``).
        key: [B, Hkv, Q, D].
        value: [B, Hkv, Q, D].
        transform: what the model does with query times key.
        padding: columns that are padding, neither attended to nor kept; None for no column.
        kernels: used instead of the eager ones where they support the group and nobody watches; None for never.

    Returns:
        [B, Q, Hq, D] in the query's dtype; undefined where there is padding.
    """
    group.queries_per_key = query.shape[1] // key.shape[1]
    if not group.is_initialized:
        group.allocate_like(key, value, group.schedule.common + group.spare)
    key, value = key.to(group.dtype), value.to(group.dtype)  # other ones come under autocast
    if padding is not None:
        query, key, value = padding.pack(query), padding.pack(key), padding.pack(value)
    if kernels is None or group.watch or not kernels.supports(group, query, transform):
        kernels = _EAGER
    size = kernels.chunk_size(group, key.shape[2])
    lengths = group.tokens.lengths or (0,) * len(key)
    outputs = []
    chunks = zip(query.split(size, 2), key.split(size, 2), value.split(size, 2), strict=True)
    for number, (q, k, v) in enumerate(chunks):
        new = k.shape[2]
        counts = (new,) * len(lengths) if padding is None else padding.chunk(number * size, new)
        chunk = QueryChunk(q, k, v, transform, lengths, counts)
        after = tuple(map(add, lengths, counts))
        group.fit((*lengths, *after))
        if new == 1 == min(counts):
            outputs.append(kernels.decode(group, chunk))
            group.filled = min(group.filled + 1, group.store.slots)
        else:
            outputs.append(kernels.prefill(group, chunk))
        lengths = after
        group.fit(lengths)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return output if padding is None else padding.unpack(output)

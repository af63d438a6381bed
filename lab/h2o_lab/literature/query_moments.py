"""What policies keep of the queries of a head, and how queries to come see the keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream.cache.policies.base import Candidates, NewQueries, Policy
from h2o_stream.cache.rope import rotate_back


class QueryMoments(Policy):
    """Keeps the mean and the mean square of all queries of every query head, before RoPE: 2 D floats each.

    With ``absolute`` positions queries and keys come rotated by token index, and what is said of a query to come holds
    for models without RoPE only.
    """

    needs_attention = False
    needs_keys = True

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """Two tensors [G, D]; see `Policy.head_state`."""
        return {
            name: torch.zeros(queries_per_key, key_size, dtype=torch.float32, device="cpu")
            for name in ("query_mean", "query_square")
        }

    def update_head_state(self, head_state: Mapping[str, Tensor], new: NewQueries) -> dict[str, Tensor]:
        """Running means over all tokens seen; see `Policy.update_head_state`."""
        count, total = new.count[..., None], (new.before + new.count).clamp_min(1)[..., None]
        moments = {"query_mean": new.queries, "query_square": new.queries.square()}
        return {name: head_state[name] + (x.sum(3) - count * head_state[name]) / total for name, x in moments.items()}


def rotary_dims(candidates: Candidates) -> int:
    """Dimensions of keys that RoPE rotates, in pairs of one from each half of them."""
    return 0 if candidates.rotations is None else candidates.rotations.table.shape[-1]


def keys_ahead(candidates: Candidates, steps: Tensor) -> Tensor:
    """Keys as queries to come see them on average.

    Args:
        candidates: the K tokens of a policy that needs keys.
        steps: [n] float32, how many tokens ahead of the newest these queries are.

    Returns:
        [B, Hkv, K, D] float32: products with it and with un-rotated queries are means over the steps.
    """
    assert candidates.keys is not None
    keys, rotations = candidates.keys.float(), candidates.rotations
    if rotations is None:
        return keys
    table, half = rotations.table, rotary_dims(candidates) // 2
    angle = steps[:, None] * torch.atan2(table[1, half:], table[1, :half])
    mean = torch.cat((angle.cos().mean(0), angle.sin().mean(0)))
    return rotate_back(rotate_back(keys, embedding(rotations.distance, table)), mean)

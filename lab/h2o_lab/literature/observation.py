"""What the newest queries of a head attend to, for the policies that judge by a window of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding

from h2o_stream.cache.policies.base import Candidates, NewQueries, Policy
from h2o_stream.cache.rope import rotate_back


@dataclass(eq=False)
class Observation(Policy):
    """Keeps the newest n queries of every query head in a ring, before RoPE: n D floats each.

    The query of token t is at place t % n of the ring. No query is older than the recent budget, so that all tokens
    after it are held.

    Args:
        observation: n, or as many as there are recent tokens, if these are fewer.

    Attributes:
        observed: n.
    """

    observation: int = 32
    observed: int = field(default=0, init=False)

    needs_attention = False
    needs_keys = True

    def __post_init__(self) -> None:
        self.observed = min(self.observation, self.plan.recent)

    def head_state(self, queries_per_key: int, key_size: int, value_size: int) -> dict[str, Tensor]:
        """One tensor [G, n, D]; see `Policy.head_state`."""
        return {
            "newest_queries": torch.zeros(queries_per_key, self.observed, key_size, dtype=torch.float32, device="cpu")
        }

    def update_head_state(self, head_state: Mapping[str, Tensor], new: NewQueries) -> dict[str, Tensor]:
        """The new queries in the places of the oldest; see `Policy.update_head_state`."""
        newest = head_state["newest_queries"]
        column = (self.query_indices(new.before + new.count) - new.before)[:, :, None, :, None]
        written = new.queries.gather(3, column.clamp_min(0).expand_as(newest))
        return {"newest_queries": written.where(column >= 0, newest)}

    def query_indices(self, seen: Tensor) -> Tensor:
        """Token indices of the queries in the ring, [B, 1, n] int64; negative where there is none; `seen` [B, 1, 1]."""
        last = seen - 1
        return last - (last - torch.arange(self.observed, device=seen.device)) % self.observed

    def attention(self, candidates: Candidates) -> Tensor:
        """What each query of the window pays to the tokens that are held now, at the positions they have now.

        A soft-capping of the model's products is left out.

        Returns:
            [B, Hkv, G, n, K] float32, 0 for tokens newer than the query and for queries that there are not yet.
        """
        assert candidates.keys is not None
        keys, queries = candidates.keys.float(), candidates.head_state["newest_queries"]
        index = self.query_indices(candidates.seen)
        if candidates.rotations is not None:
            table, distance = candidates.rotations
            keys = rotate_back(keys, embedding(distance, table))
            queries = rotate_back(queries, embedding(candidates.seen - 1 - index, table).unsqueeze(2))
        hidden = (candidates.index < 0).unsqueeze(2) | (candidates.index.unsqueeze(2) > index.unsqueeze(-1))
        logits = (queries @ keys.unsqueeze(2).mT).masked_fill(hidden.unsqueeze(2), -torch.inf)
        return logits.softmax(-1).nan_to_num()

"""The KV heads of a layer that share a window size: their slots, and the rules by which these are filled and seen.

A head group knows nothing of the model and computes no attention: `attend` does.

Slots are allocated for the most tokens that the group holds and one more, and stay in place. Between forwards at least
one of them is empty: `free`, the slot of the next token. A group whose window changes (`windows`) moves its tokens into
more or fewer slots at the end of each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add

import torch
from torch import Tensor

from h2o_stream.cache.attention import QueryChunk, key_rotations
from h2o_stream.cache.policies import Candidates, Policy
from h2o_stream.cache.rope import RopeLookup, RotaryTable
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.slots import Slots
from h2o_stream.config import CachePlan

Watch = Callable[[Tensor, Tensor], None]
"""Gets the attention probabilities [B, Hkv, G, Q, K] of a chunk, and which of K are tokens [B, Hkv, K]."""


class HeadGroup(Slots):
    """Slots, and the rules for them.

    Args:
        plan: window, what is protected, and positions.
        policy: scores and priorities.
        table: rotations for keys that come un-rotated; None if the model rotates by itself (``absolute``).
        sliding: keys of this age and older are hidden, as in the model's own sliding windows.
        chunked: the text is cut into pieces of `sliding` tokens instead, and no token sees another piece.
        heads: [n] int64, the KV heads of the layer in this group, on its device; None for all.
        on_disk: whether keys and values are in mapped files.
        device: see `Slots`.
        tokens: counts the tokens of the cache.
        revision: grows when tensors are allocated or rules change.
    """

    table: RotaryTable | None

    def __init__(
        self,
        plan: CachePlan,
        policy: Policy,
        table: RotaryTable | None,
        sliding: int | None = None,
        *,
        chunked: bool = False,
        heads: Tensor | None = None,
        on_disk: bool = False,
        device: torch.device | None = None,
        tokens: TokenCount | None = None,
        revision: Revision | None = None,
    ) -> None:
        super().__init__(plan, policy, on_disk, device, tokens, revision)
        self.table, self.sliding, self.chunked, self.heads = table, sliding, chunked, heads
        self._watch: Watch | None = None

    @property
    def watch(self) -> Watch | None:
        """Gets the attention of each chunk without padding. Native code shows none, so it does not run meanwhile."""
        return self._watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._watch = watch
        self.revision.bump()

    def show(self, probs: Tensor, index: Tensor) -> None:
        """Show the watch, if there is one, probabilities [B, Hkv, G, Q, K] and to which token indices [B, Hkv, K]."""
        if self._watch is not None:
            self._watch(probs, index >= 0)

    def rotations(self, candidates: Candidates, dtype: torch.dtype) -> RopeLookup | None:
        """Where RoPE sees the keys of the candidates; None if they are rotated already."""
        if self.table is None:
            return None
        table = self.table.upto(self.max_distance(candidates.index.shape[-1]), self.device, dtype)
        return key_rotations(candidates, self.plan.positions, self.span, self.protection, table)

    def update_head_state(self, chunk: QueryChunk) -> None:
        """Let the policy see the new queries, if it keeps anything of a head."""
        if state := vars(self.head_state):
            for name, x in self.policy.update_head_state(state, chunk.new_queries).items():
                state[name].copy_(x)

    # what is held

    def limits(self, chunk: QueryChunk) -> list[int]:
        """Tokens held per head after a chunk, of each row."""
        return [self.schedule.held(length) for length in map(add, chunk.lengths, chunk.counts)]

    def kept(self) -> Tensor:
        """[B, Hkv, held] int64 token indices, oldest first; shorter rows have -1 in front."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.int64, device="cpu")
        return self.index.sort(-1).values[..., self.store.slots - self.held :].long()

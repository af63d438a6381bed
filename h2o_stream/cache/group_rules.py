"""How many tokens the KV heads that share a window size hold, and which of them are protected.

The slots themselves are in `slots.Slots`, and in `head_group.HeadGroup` as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from h2o_stream.cache.protection import Protection
from h2o_stream.cache.rotations import Rotations
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import POLICIES, CachePlan


class HeadShape(NamedTuple):
    """The heads of a layer."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int


class GroupRules:
    """The rules of one head group.

    Args:
        plan: window, what is protected, and positions.
        layer: index of the decoder layer, which random policies draw by.
        heads: [n] integers, the KV heads of the layer in this group; None for all.
        sliding: keys of this age and older are hidden, as in the model's own sliding windows; None for no key.
        chunked: the text is cut into pieces of `sliding` tokens instead, and no token sees another piece.
        table: rotations for keys that come un-rotated; None if the model rotates by itself (``absolute``).
        tokens: counts the tokens of the cache.
        revision: grows when slots are allocated or rules change.

    Attributes:
        rule: ``module:class`` of the policy.
        has_long_term: whether slots have long-term scores.
        watch: gets the attention of each chunk; see `HeadGroup`.
        schedule: how many tokens the group holds, by how many it has seen; see `Slots.set_schedule`.
        span: with ``gap``, the distance up to which distances are true.
        protection: what must not be evicted.
    """

    watch: Any = None

    def __init__(
        self,
        plan: CachePlan,
        *,
        layer: int = 0,
        heads: Any = None,
        sliding: int | None = None,
        chunked: bool = False,
        table: Rotations | None = None,
        tokens: TokenCount | None = None,
        revision: Revision | None = None,
    ) -> None:
        self.layer, self.heads, self.sliding, self.chunked, self.table = layer, heads, sliding, chunked, table
        self.tokens, self.revision = tokens or TokenCount(), revision or Revision()
        self.schedule, self.span = Schedule.equal(plan.window), plan.span
        self.protection = Protection(plan.sinks, (), plan.recent)
        self.follow(plan)

    def follow(self, plan: CachePlan) -> None:
        """Keep tokens by another plan from now on, with keys and values stored as before."""
        self.plan, self.rule = plan, plan.rule
        self.has_long_term = plan.long_term > 0 and plan.rule == POLICIES["h2o"].rule

    # what is held

    @property
    def weight(self) -> int:
        """Weight of the group in means over heads: its KV heads; 1 for a whole layer, because all are then alike."""
        return 1 if self.heads is None else len(self.heads)

    @property
    def held(self) -> int:
        """Tokens held per head, of the row that holds most."""
        return max(map(self.schedule.held, self.tokens.lengths), default=0)

    def max_distance(self, keys: int) -> int:
        """More than the largest distance at which RoPE sees that many keys, the new ones included, as long as the
        revision stays the same: what the rules allow, and at most twice the tokens of the stream.
        """
        distance = keys + self.span if self.plan.positions == "gap" else keys
        return min(distance, self.tokens.reach)

    # how many slots there are

    @property
    def exact(self) -> int:
        """Slots before the first one that eviction may free."""
        return self.plan.exact_sinks + self.plan.residual

    @property
    def spare(self) -> int:
        """Slots beside those of held tokens: the next token's, and with few bits its slot in the ring."""
        return 1 if self.plan.kv_bits == 16 else 2

    def slots_needed(self, lengths: Sequence[int]) -> int:
        """Slots for rows of so many tokens, with the empty one."""
        return max(map(self.schedule.max_held_in_stage, lengths)) + self.spare

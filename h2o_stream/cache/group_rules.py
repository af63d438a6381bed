"""How many tokens the KV heads that share a window size hold, and which of them are protected.

Slots come in two kinds, of torch (`slots.Slots`) and of numpy (`runtime.slots`); the rules are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.protection import Protection
from h2o_stream.cache.shared_state import Revision, TokenCount, doubled
from h2o_stream.cache.state import require_array
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError

_ENTRIES, _ENCODED = ("scores", "index", "rank", "long_term_scores"), ("key_codes", "value_codes", "value_grid")
"""Tensors with an entry for each slot, and for each slot that eviction may free."""


class Table(Protocol):
    """Rotations by distance."""

    def on_cpu(self, limit: int) -> Any:
        """[N, rotary_dims] float32 on the CPU, N at least `limit`: cosines, then as many sines."""


class HeadShape(NamedTuple):
    """The heads of a layer.

    Attributes:
        query_heads: of the layer.
        kv_heads: of the layer.
        key_size: D of queries and keys.
        value_size: D of values.
    """

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int


class MemoryPart(NamedTuple):
    """The part of a memory that belongs to a group of heads.

    Attributes:
        memory: a `TokenMemory`.
        first: index of its first head.
        codebook: index of the first number of its codebooks.
        found: index of the first place that its queries have found.
        scan: where it begins in a segment, in bytes, for what is scanned.
        data: the same for the rest.
        shape: of the heads of its layer.
    """

    memory: Any
    first: int
    codebook: int
    found: int
    scan: int
    data: int
    shape: HeadShape


class GroupRules(ABC):
    """The rules of one head group.

    Args:
        plan: window, what is protected, and positions.
        tokens: counts the tokens of the cache.
        revision: grows when slots are allocated or rules change.

    Attributes:
        heads: [n] integers, the KV heads of the layer in this group; None for all.
        layer: index of the decoder layer, which random policies draw by.
        sliding: keys of this age and older are hidden, as in the model's own sliding windows; None for no key.
        chunked: the text is cut into pieces of `sliding` tokens instead, and no token sees another piece.
        table: rotations for keys that come un-rotated; None if the model rotates by itself (``absolute``).
        rule: ``module:class`` of the policy.
        has_long_term: whether slots have long-term scores.
        dtype: of keys and values in full precision, once allocated.
        device: of the slots, once allocated.
        watch: gets the attention of each chunk; see `HeadGroup`.
        memory: where it keeps what it evicts; None for nowhere.
        schedule: how many tokens the group holds, by how many it has seen; see `set_schedule`.
        span: with ``gap``, the distance up to which distances are true.
        protection: what must not be evicted.
        is_initialized: whether slots are allocated.
        filled: slots from this index on are empty. Undefined if keys and values are in few bits.
        queries_per_key: query heads per KV head; 0 before the first token.
    """

    heads: Any = None
    layer: int = 0
    sliding: int | None = None
    chunked: bool = False
    table: Table | None = None
    rule: str
    has_long_term: bool
    dtype: Any
    device: Any = "cpu"
    watch: Any = None
    memory: MemoryPart | None = None

    def __init__(self, plan: CachePlan, tokens: TokenCount | None = None, revision: Revision | None = None) -> None:
        self.plan = plan
        self.tokens, self.revision = tokens or TokenCount(), revision or Revision()
        self.schedule, self.span = Schedule.equal(plan.window), plan.span
        self.protection = Protection(plan.sinks, (), plan.recent)
        self.is_initialized = False
        self.filled = self.queries_per_key = 0

    # slots, which are of torch or numpy

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Slots of each head."""

    @abstractmethod
    def tensors(self) -> dict[str, Any]:
        """Everything allocated, by name: tensors or arrays, which native code writes in place."""

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    @abstractmethod
    def token_indices(self) -> NDArray[numpy.int32]:
        """[B, Hkv, S] int32 on the CPU, the token in each slot, -1 where it is empty."""

    @abstractmethod
    def allocate_on_cpu(self, shape: HeadShape, dtype: str, rows: int, slots: int) -> None:
        """Allocate every slot, empty.

        Args:
            shape: of the layer's heads.
            dtype: of keys and values, such as ``bfloat16``.
            rows: B.
            slots: S.
        """

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[Any]]:
        """A copy of everything in use, by name; bfloat16 numbers are uint16. Empty slots at the end are left out."""

    @abstractmethod
    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue with the arrays of a state, by the names of `arrays`, whose tokens are counted already.

        Raises:
            H2OStreamError: they do not fit.
        """

    @abstractmethod
    def resize(self, slots: int, filled: int) -> None:
        """Move to an allocation of that many slots: in token order, except for slots with a fixed purpose.

        Args:
            slots: S from now on.
            filled: tokens held by the head that holds most.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget the stream and release the slots."""

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
        revision stays the same: what the rules allow, and not much more than the stream has tokens.
        """
        most = keys + self.span if self.plan.positions == "gap" else keys
        return min(most, 2 * doubled(max(self.tokens.lengths, default=0) + keys))

    @property
    def used_slots(self) -> int:
        """Slots from this index on are empty."""
        return int(numpy.flatnonzero((self.token_indices >= 0).any((0, 1))).max(initial=-1)) + 1

    def first_slots(self, slots: int) -> dict[str, Any]:
        """Views of `tensors` with so many slots."""
        entries, encoded = dict.fromkeys(_ENTRIES, slots), dict.fromkeys(_ENCODED, max(slots - self.exact, 0))
        counts = {**entries, **encoded, "keys": self.exact or slots, "values": self.exact or slots}
        return {name: x[:, :, : counts[name]] if name in counts else x for name, x in self.tensors().items()}

    # how many slots there are

    @property
    def exact_sinks(self) -> int:
        """First tokens with slots of their own, in full precision; see `QuantizedStore`."""
        return 0 if self.plan.kv_bits == 16 else self.plan.exact_sinks

    @property
    def residual(self) -> int:
        """Newest tokens with slots of their own, the next one included."""
        return 0 if self.plan.kv_bits == 16 else self.plan.residual

    @property
    def exact(self) -> int:
        """Slots before the first one that eviction may free."""
        return self.exact_sinks + self.residual

    @property
    def spare(self) -> int:
        """Slots beside those of held tokens: the next token's, and with few bits its slot in the ring."""
        return 1 if self.plan.kv_bits == 16 else 2

    def follow(self, plan: CachePlan) -> None:
        """Keep tokens by another plan from now on, with keys and values stored as before."""
        self.plan = plan

    def set_schedule(self, schedule: Schedule) -> None:
        """Hold as many tokens as `schedule` says from now on, which are those held now and later ones."""
        self.schedule = schedule
        if self.is_initialized:
            self.fit(self.tokens.lengths)
        self.revision.bump()

    def fit(self, lengths: Sequence[int]) -> None:
        """Allocate what rows of so many tokens need in their stages."""
        if (slots := self.slots_needed(lengths)) != self.num_slots:
            self.resize(slots, max(map(self.schedule.held, lengths)))

    def slots_of(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Slots for a state, whose tokens are counted already.

        Raises:
            H2OStreamError: it has too many.
        """
        slots: int = require_array(arrays, "index").shape[-1]
        minimum = self.slots_needed(self.tokens.lengths)
        if slots > self.plan.window + self.schedule.max_held + self.spare:
            raise H2OStreamError(f"the state does not fit: it has {slots} slots, {minimum} are needed")
        return max(slots, minimum)

    def slots_needed(self, lengths: Sequence[int]) -> int:
        """Slots for rows of so many tokens, with the empty one."""
        return max(map(self.schedule.max_held_in_stage, lengths)) + self.spare

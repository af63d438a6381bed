"""The KV heads of a layer that share a window size, in tensors: what torch does with their slots.

A head group knows nothing of the model and computes no attention: `attend` does. On a CPU its tensors are views of the
arrays. All are written in place, because native code knows their addresses.

Slots are allocated for the most tokens that the group holds and one more, and stay in place. Between forwards at least
one of them is empty: `free`, the slot of the next token. A group whose window changes (`windows`) moves its tokens into
more or fewer slots at the end of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.arrays import to_array, to_tensor
from h2o_stream.cache.attention import QueryChunk, key_rotations
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.policies import Candidates, Policy, make_policy
from h2o_stream.cache.quantized_store import QuantizedStore
from h2o_stream.cache.rope import RopeLookup, RotaryTable
from h2o_stream.cache.slots import Slots
from h2o_stream.cache.state import Array, require_array
from h2o_stream.cache.store import Store
from h2o_stream.config import CachePlan

Watch = Callable[[Tensor, Tensor], None]
"""Gets the attention probabilities [B, Hkv, G, Q, K] of a chunk, and which of K are tokens [B, Hkv, K]."""


class HeadGroup(Slots):
    """Slots in tensors.

    Args:
        plan: window, what is protected, and positions.
        device: device of the slots of a loaded state; None for the CPU. Others are where their first keys are.
        further: see `Slots`; `heads` are on the device of the layer.

    Attributes:
        policy: scores and priorities.
        store: keys and values.
        scores, long_term_scores, index, rank, free, seen: see `Slots.layout`.
        head_state: [B, Hkv, *] tensors by name, what the policy keeps of each head; see `Policy.head_state`.
    """

    table: RotaryTable | None
    policy: Policy
    store: Store
    scores: Tensor
    long_term_scores: Tensor
    index: Tensor
    rank: Tensor
    free: Tensor
    seen: Tensor
    head_state: SimpleNamespace
    device: torch.device
    _watch: Watch | None = None

    def __init__(self, plan: CachePlan, device: torch.device | None = None, **further: Any) -> None:
        super().__init__(plan, **further)
        self.device = device or torch.device("cpu")

    def follow(self, plan: CachePlan) -> None:
        """See `Slots`."""
        self.plan, self.policy = plan, make_policy(plan, self.layer)
        self.rule, self.has_long_term = self.policy.rule, self.policy.long_term

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

    @property
    def candidates(self) -> Candidates:
        """The slots, as policies see them."""
        long_term = self.long_term_scores if self.policy.long_term else None
        return Candidates(self.scores, self.index, self.rank, self.seen, long_term)

    def limits(self, chunk: QueryChunk) -> list[int]:
        """Tokens held per head after a chunk, of each row."""
        return [self.schedule.held(length) for length in map(add, chunk.lengths, chunk.counts)]

    def kept(self) -> Tensor:
        """[B, Hkv, held] int64 token indices, oldest first; shorter rows have -1 in front."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.int64, device="cpu")
        return self.index.sort(-1).values[..., self.store.slots - self.held :].long()

    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by name: tensors or arrays, which native code writes in place."""
        return {**self._arrays, **vars(self.head_state)} if self.is_initialized else {}

    def _as_array(self, tensor: Tensor) -> Array:
        return to_array(tensor)

    # entries

    def _empty_entries(self) -> dict[str, float]:
        """The bookkeeping of an empty slot."""
        empty = {"scores": -torch.inf, "index": -1, "rank": self.store.slots}
        return empty | {"long_term_scores": 0.0} if self.policy.long_term else empty

    def add_newest(self, slot: Tensor) -> None:
        """Enter the next token of each row at `slot` [B, Hkv, 1]."""
        self.index.scatter_(2, slot, self.seen.int().expand(slot.shape))
        self.scores.scatter_(2, slot, 0.0)
        if self.policy.long_term:
            self.long_term_scores.scatter_(2, slot, 0.0)
        self.rank += 1
        self.rank.scatter_(2, slot, 0)
        self.seen += 1

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move the entries at `source` [B, Hkv, 1] to the empty slots `target`."""
        for name in self._empty_entries():
            tensor = getattr(self, name)
            tensor.scatter_(2, target, tensor.gather(2, source))
        self.clear(source)

    def clear(self, slot: Tensor) -> None:
        """Enter `slot` [B, Hkv, 1] as empty. Its long-term score stays until a token overwrites it."""
        self.rank.scatter_(2, slot, self.store.slots)
        self.index.scatter_(2, slot, -1)
        self.scores.scatter_(2, slot, -torch.inf)

    def fill(self, slot: Tensor, entries: Mapping[str, Tensor]) -> None:
        """Empty all slots, then enter n tokens.

        Args:
            slot: [B, Hkv, n] int64, the slot of each token; S where there is none.
            entries: [B, Hkv, n], by the names of the bookkeeping.
        """
        for name, empty in self._empty_entries().items():
            x = entries[name]
            placed = x.new_full((*x.shape[:2], self.store.slots + 1), empty).scatter_(2, slot, x)
            getattr(self, name).copy_(placed[..., :-1])

    # allocation

    def allocate_like(self, key: Tensor, value: Tensor, slots: int) -> None:
        """Allocate every slot for keys and values like [B, Hkv, Q, D], where keys are, in a dtype that holds both."""
        self.device, (rows, heads) = key.device, key.shape[:2]
        shape = HeadShape(heads * self.queries_per_key, heads, key.shape[-1], value.shape[-1])
        self.allocate(shape, str(torch.promote_types(key.dtype, value.dtype)), rows, slots)

    def allocate(self, shape: HeadShape, dtype: str, rows: int, slots: int) -> None:
        """Allocate every slot, empty; the rest as in `layout`."""
        super().allocate(shape, dtype, rows, slots)
        self._begin_head_state()

    def bytes_of(self, shape: HeadShape, dtype: Any) -> int:
        """Bytes that one row takes at most."""
        heads = shape.kv_heads if self.heads is None else len(self.heads)
        return super().bytes_of(shape, dtype) + heads * sum(x.nbytes for x in self._head_state_of(shape).values())

    def _head_state_of(self, shape: HeadShape) -> dict[str, Tensor]:
        return self.policy.head_state(shape.query_heads // shape.kv_heads, shape.key_size, shape.value_size)

    def _begin_head_state(self) -> None:
        assert self.shape is not None
        start, heads = self._head_state_of(self.shape), self.index.shape[:2]
        self.head_state = SimpleNamespace(
            **{name: x.to(self.device).expand(*heads, *x.shape).clone() for name, x in start.items()}
        )

    def _hold(self, arrays: dict[str, Array]) -> None:
        tensors = {name: to_tensor(array).to(self.device) for name, array in arrays.items()}
        super()._hold(tensors)
        self.dtype = tensors["keys"].dtype
        for name in ("scores", "long_term_scores", "index", "rank", "free", "seen"):
            if name in tensors:
                setattr(self, name, tensors[name])
        quantized = self.plan.kv_bits < 16
        self.store = QuantizedStore(tensors, self.plan.kv_bits, self.plan.exact_sinks) if quantized else Store(tensors)

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Continue with the arrays of a state, by the names of `arrays`, whose tokens are counted already."""
        super().load(arrays)
        self._begin_head_state()
        for name, x in vars(self.head_state).items():
            x.copy_(to_tensor(require_array(arrays, name, like=to_array(x))))

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        for name in ("store", "scores", "long_term_scores", "index", "rank", "free", "seen", "head_state"):
            self.__dict__.pop(name, None)
        super().reset()

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i]; in place if there are as many, so that addresses stay valid."""
        if not self.is_initialized:
            return
        rows = rows.to(self.device)
        if len(rows) == len(self.seen):
            for x in self.tensors().values():
                x.copy_(x.index_select(0, rows))
            return
        before, state, chosen = self._in_numpy(), vars(self.head_state), rows.tolist()
        selected = self._empty(len(chosen), self.store.slots)
        for name, array in selected.items():
            array[:] = before[name][chosen]
        self._hold(selected)
        self.head_state = SimpleNamespace(**{name: x.index_select(0, rows) for name, x in state.items()})

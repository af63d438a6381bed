"""The slots of the KV heads of a layer that share a window size, and the bookkeeping of their tokens.

A policy says what a token is worth: pure functions of tensors. A head group owns the bookkeeping: the score, token
index and rank of every slot, and which slot is free. A store owns keys and values. `eviction` applies the policy to
the slots, and `Kernels` compute the attention, in torch or in native code. A head group knows nothing of the model: it
takes queries, keys and values, and returns the output of attention.

Slots are allocated for the most tokens that the group holds and one more, and stay in place. Between forwards at least
one of them is empty: `free`, the slot of the next token. A group whose window changes (`budgets`) moves its tokens into
more or fewer slots at the end of each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.cache.attention import LogitTransform, QueryChunk, key_rotations
from h2o_stream.cache.eager import EAGER, probabilities
from h2o_stream.cache.eviction import rank_dtype
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.mapped_store import make_store
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Budget, Candidates, Policy
from h2o_stream.cache.rope import RopeLookup, RotaryTable
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.statistics import SparsityMeter
from h2o_stream.cache.store import Store
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import CachePlan

Watch = Callable[[Tensor, Tensor, int], None]
"""Gets attention probabilities [B, Hkv, G, Q, K], which of K are tokens [B, Hkv, K], and the tokens seen."""


class HeadGroup:
    """Slots and their bookkeeping.

    Args:
        plan: budgets and rules.
        policy: scores and priorities.
        table: rotations for keys that come un-rotated; None if the model rotates by itself (``absolute``).
        sliding: keys of this age and older are hidden, as in the model's own sliding windows.
        chunked: the text is cut into pieces of `sliding` tokens instead, and no token sees another piece.
        heads: [n] int64, the KV heads of the layer in this group, on its device; None for all.
        tokens: counts the tokens of the cache.
        revision: grows when tensors are allocated or rules change.

    Attributes:
        schedule: how many tokens the group holds, by how many it has seen; see `set_schedule`.
        span: with ``gap``, the distance up to which distances are true.
        budget: what must not be evicted.
        store: keys and values of S slots, un-rotated, or rotated by token index with ``absolute``.
        scores: [B, Hkv, S] float32, -inf where empty.
        long_term_scores: [B, Hkv, S] float32, only with a policy that has them.
        index: [B, Hkv, S] int32 token index in its row, -1 where empty.
        rank: [B, Hkv, S] `rank_dtype`, number of newer tokens in the group; where empty, at least as many as it holds.
        free: [B, Hkv, 1] int64, an empty slot for the next token.
        seen: [B, 1, 1] int64, tokens of each row that this group has taken: the device's copy of `tokens.lengths`.
        head_state: [B, Hkv, *] tensors by name, what the policy keeps of each head; see `Policy.head_state`.
        filled: slots from this index on are empty. Undefined for a `QuantizedStore`.
        kernels: used instead of the eager ones where they support the group; None for never.
        queries_per_key: query heads per KV head; 0 before the first token.
    """

    store: Store
    scores: Tensor
    long_term_scores: Tensor
    index: Tensor
    rank: Tensor
    free: Tensor
    seen: Tensor
    head_state: SimpleNamespace
    dtype: torch.dtype
    device: torch.device

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
        tokens: TokenCount | None = None,
        revision: Revision | None = None,
    ) -> None:
        self.plan, self.policy, self.table, self.sliding, self.heads = plan, policy, table, sliding, heads
        self.chunked, self.on_disk = chunked, on_disk
        self.tokens, self.revision = tokens or TokenCount(), revision or Revision()
        self.schedule = Schedule.equal(plan.window)
        self.span = plan.span
        self.budget = Budget(plan.sinks, (), plan.recent)
        self.kernels: Kernels | None = None
        self.is_initialized = False
        self.filled = self.queries_per_key = 0
        self._watch: Watch = SparsityMeter()

    @torch.inference_mode(False)  # slots are written in place, later perhaps outside of it
    @torch.no_grad()
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, transform: LogitTransform, padding: Padding | None = None
    ) -> Tensor:
        """Attend with Q new tokens and keep as many of all tokens as the schedule says, chunk by chunk.

        The caller counts the tokens when all layers have taken them.

        Args:
            query: [B, Hq, Q, D], un-rotated like the keys (already rotated with ``absolute``).
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, D].
            transform: what the model does with query times key.
            padding: which columns are padding, neither attended to nor kept; None for no column.

        Returns:
            [B, Q, Hq, D] in the query's dtype; undefined where there is padding.
        """
        self.queries_per_key = query.shape[1] // key.shape[1]
        if not self.is_initialized:
            self.allocate(key, value, self.schedule.common + self.spare)
        key, value = key.to(self.dtype), value.to(self.dtype)  # other ones come under autocast
        if padding is not None:
            query, key, value = padding.pack(query), padding.pack(key), padding.pack(value)
        usable = self.kernels and not self.watched and self.kernels.supports(self, query, transform)
        native = self.kernels if usable else None
        kernels, size = native or EAGER, self.plan.chunk or key.shape[2]
        before = lengths = self.tokens.lengths or (0,) * len(key)
        outputs = []
        chunks = zip(query.split(size, 2), key.split(size, 2), value.split(size, 2), strict=True)
        for number, (q, k, v) in enumerate(chunks):
            new = k.shape[2]
            counts = (new,) * len(lengths) if padding is None else padding.chunk(number * size, new)
            chunk = QueryChunk(q, k, v, transform, lengths, counts)
            after = tuple(map(add, lengths, counts))
            self.fit((*lengths, *after))
            if new == 1 == min(counts):
                outputs.append(kernels.decode(self, chunk))
                self.filled = min(self.filled + 1, self.store.slots)
            else:
                outputs.append(kernels.prefill(self, chunk))
            lengths = after
            self.fit(lengths)
        meter = self._watch
        if native and padding is None and isinstance(meter, SparsityMeter) and meter.wants(before[0], lengths[0]):
            q, k, v = (x[:, :, -1:] for x in (query, key, value))
            newest = QueryChunk(q, k, v, transform, lengths, (1,) * len(lengths))
            meter.add(probabilities(self, newest), self.index >= 0)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output if padding is None else padding.unpack(output)

    def max_distance(self, keys: int) -> int:
        """More than the largest distance at which RoPE sees that many keys."""
        return keys + self.span if self.plan.positions == "gap" else keys

    def rotations(self, candidates: Candidates, dtype: torch.dtype) -> RopeLookup | None:
        """Where RoPE sees the keys of the candidates; None if they are rotated already."""
        if self.table is None:
            return None
        table = self.table.upto(self.max_distance(candidates.index.shape[-1]), self.device, dtype)
        return key_rotations(candidates, self.plan.positions, self.span, self.budget, table)

    @property
    def watch(self) -> Watch:
        """Gets the attention of each chunk without padding; see `SparsityMeter`."""
        return self._watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self._watch = watch
        self.revision.bump()

    @property
    def watched(self) -> bool:
        """Whether all probabilities are asked for, which native code never has."""
        return not isinstance(self._watch, SparsityMeter)

    # bookkeeping

    @property
    def candidates(self) -> Candidates:
        """The slots, as policies see them."""
        long_term = self.long_term_scores if self.policy.long_term else None
        return Candidates(self.scores, self.index, self.rank, self.seen, long_term)

    def update_head_state(self, chunk: QueryChunk) -> None:
        """Let the policy see the new queries, if it keeps anything of a head."""
        if state := vars(self.head_state):
            self.set_head_state(self.policy.update_head_state(state, chunk.new_queries))

    def set_head_state(self, updated: Mapping[str, Tensor]) -> None:
        """Write the tensors of the head state, by name."""
        for name, x in updated.items():
            getattr(self.head_state, name).copy_(x)

    def empty_values(self, slots: int) -> dict[str, float]:
        """The bookkeeping of an empty slot, one of `slots`."""
        empty = {"scores": -torch.inf, "index": -1, "rank": slots}
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
        for name in self.empty_values(self.store.slots):
            tensor = getattr(self, name)
            tensor.scatter_(2, target, tensor.gather(2, source))
        self.clear(source)

    def clear(self, slot: Tensor) -> None:
        """Enter `slot` [B, Hkv, 1] as empty. Its long-term score stays until a token overwrites it."""
        self.rank.scatter_(2, slot, self.store.slots)
        self.index.scatter_(2, slot, -1)
        self.scores.scatter_(2, slot, -torch.inf)

    # what is held

    @property
    def held(self) -> int:
        """Tokens held per head, of the row that holds most."""
        return max(map(self.schedule.held, self.tokens.lengths), default=0)

    def limits(self, chunk: QueryChunk) -> list[int]:
        """Tokens held per head after a chunk, of each row."""
        return [self.schedule.held(length) for length in map(add, chunk.lengths, chunk.counts)]

    @property
    def num_evictions(self) -> list[int]:
        """Number of evictions caused by the next token, of each row."""
        return [self.schedule.num_evictions(length) for length in self.tokens.lengths]

    @property
    def num_heads(self) -> int:
        """Number of KV heads; 1 if the group is the whole layer, because all layers are then alike."""
        return 1 if self.heads is None else len(self.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated for this group."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def kept(self) -> Tensor:
        """[B, Hkv, held] int64 token indices, oldest first; shorter rows have -1 in front."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.int64, device="cpu")
        return self.index.sort(-1).values[..., self.store.slots - self.held :].long()

    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by name."""
        return {name: getattr(owner, name) for owner, name in self.attributes()}

    def attributes(self) -> Iterator[tuple[Store | HeadGroup | SimpleNamespace, str]]:
        """Whose attribute each tensor is, and its name."""
        if self.is_initialized:
            yield from ((self.store, name) for name in self.store.names)
            yield from ((self, name) for name in (*self.empty_values(0), "free", "seen"))
            yield from ((self.head_state, name) for name in vars(self.head_state))

    # allocation

    @property
    def spare(self) -> int:
        """Slots beside those of held tokens: the next token's, and with a quantized store its slot in the ring."""
        return 1 if self.plan.kv_bits == 16 else 2

    def allocate(self, key: Tensor, value: Tensor, slots: int) -> None:
        """Allocate every slot, on the device of keys like [B, Hkv, Q, D], in the dtype that holds keys and values."""
        rows, plan = key.shape[:2], self.plan
        self.dtype, self.device = torch.promote_types(key.dtype, value.dtype), key.device
        key, value = key[:, :, :0].to(self.dtype), value[:, :, :0].to(self.dtype)
        self.store = make_store(plan, key, value, slots, self.on_disk)
        for name, empty in self.empty_values(slots).items():
            dtype = {"index": torch.int32, "rank": rank_dtype(slots)}.get(name, torch.float32)
            setattr(self, name, torch.full((*rows, slots), empty, dtype=dtype, device=self.device))
        self.free = torch.full((*rows, 1), self.store.exact, dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(rows[0], 1, 1, dtype=torch.int64, device=self.device)
        start = self.policy.head_state(self.queries_per_key, key.shape[-1], value.shape[-1])
        copies = {name: x.to(self.device).expand(*rows, *x.shape).clone() for name, x in start.items()}
        self.head_state = SimpleNamespace(**copies)
        self.is_initialized = True
        self.filled = 0
        self.revision.bump()

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        for name in ("store", *self.empty_values(0), "free", "seen", "head_state"):
            self.__dict__.pop(name, None)
        self.is_initialized = False
        self.watch = SparsityMeter()

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i]."""
        if not self.is_initialized:
            return
        rows, in_place = rows.to(self.device), len(rows) == len(self.seen)
        for owner, name in self.attributes():
            chosen = getattr(owner, name).index_select(0, rows)
            if in_place:
                getattr(owner, name).copy_(chosen)
            else:
                setattr(owner, name, chosen)
        if not in_place:
            self.revision.bump()

    def set_schedule(self, schedule: Schedule) -> None:
        """Hold as many tokens as `schedule` says from now on; only while every row is within the common window."""
        self.schedule = schedule
        if self.is_initialized:
            self.fit(self.tokens.lengths)
        self.revision.bump()

    def fit(self, lengths: Sequence[int]) -> None:
        """Allocate what rows of so many tokens need in their stages."""
        if (slots := self.slots_needed(lengths)) != self.store.slots:
            self._resize(slots, lengths)

    def slots_needed(self, lengths: Sequence[int]) -> int:
        """Slots for rows of so many tokens, with the empty one."""
        return max(map(self.schedule.max_held_in_stage, lengths)) + self.spare

    def _resize(self, slots: int, lengths: Sequence[int]) -> None:
        """Move to an allocation of that many slots: in token order, except for slots with a fixed purpose."""
        exact, index = self.store.exact, self.index[..., self.store.exact :]
        is_token = index >= 0
        order = index.masked_fill(~is_token, torch.iinfo(index.dtype).max).argsort(-1)[..., : slots - exact]
        self.free.copy_(is_token.sum(-1, keepdim=True) + exact)
        self.store.rearrange(order, slots)
        for name, empty in self.empty_values(slots).items():
            tensor = getattr(self, name)
            moved = torch.cat((tensor[..., :exact], tensor[..., exact:].gather(-1, order)), -1)
            setattr(self, name, pad(moved, (0, slots - moved.shape[-1]), value=empty))
        self.rank = self.rank.to(rank_dtype(slots)).masked_fill_(self.index < 0, slots)
        self.filled = max(map(self.schedule.held, lengths))
        self.revision.bump()

"""One decoder layer of the fixed-window cache: W + 1 slots that are written in place.

Owns scores, token indices and ranks of a layer, and the attention over its slots. Knows nothing of the model
around it: it is handed queries, keys and values and gives back the attention's output.

At rest at most W slots are held and `free` names one that is not. A decode step writes the new token there,
attends, updates the scores and evicts one slot, which is the next free one; nothing is copied or grown.
A prefill takes the prompt in chunks: attend to what is held and to the chunk, then keep W of both.
The two are the same rule, "append, attend, keep", and give the same result token by token. A layer whose window is
less than the common one (`cache.budgets`) takes the second way once, to allocate anew: when it has come to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.budgets import Schedule
from h2o_stream.cache.endless import EndlessLayer
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Attention, Budget, Held, Policy, select
from h2o_stream.cache.rope import RotaryTable
from h2o_stream.cache.state import taken
from h2o_stream.cache.statistics import LayerStatistics, SparsityMeter, power_law
from h2o_stream.cache.store import QuantizedStore, Store
from h2o_stream.cache.weigh import Arrivals, Products, hide, rotate, weigh
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError

_SHRINKING = 3
"""Evictions in the steps of most layers that shrink, so that they can share a graph."""

_BOOKS = ("scores", "index", "rank", "free", "seen")

Reader = Callable[["SlotLayer", Tensor, Tensor, Tensor, Products], Tensor | None]
"""Gives the attention's output for queries, keys and values, or None where it has not touched anything."""


class SlotLayer(EndlessLayer):
    """Fixed slots of one layer.

    Args:
        plan: budgets and rules.
        policy: scores and priorities.
        table: rotations for keys that come un-rotated; None when the model rotates by itself (``absolute``).
        sliding: keys of this age and older are hidden, as in the model's own sliding windows.

    Attributes:
        schedule: how many tokens the layer holds, by how many it has seen; the plan's window unless told otherwise.
        span: with ``gap``, the distance up to which distances are true.
        store: keys and values of S slots, one more than are held, un-rotated, or rotated at token indices with
            ``absolute``.
        scores: [B, Hkv, S] float32, -inf where empty.
        lasting: [B, Hkv, S] float32 long-term scores, of a policy that has them.
        index: [B, Hkv, S] int32 token index in the row, -1 where empty.
        rank: [B, Hkv, S] int32, held keys newer than this one; where empty, no less than are held.
        free: [B, Hkv, 1] int64, an empty slot for the next token to be kept.
        seen: [B, 1, 1] int64, tokens of each row since the last reset; padding is none.
        lengths: the same numbers, known without asking the device.
        filled: no slot behind this number holds a token, where keys and values are kept as they are.
        columns: columns fed since the last reset, padding included.
        budget: what eviction may not touch.
        reader: takes whole chunks of one stream through `read`, if it can; see `h2o_stream.graphs`.
        groups: query heads per KV head; 0 before the first token.
        weigh: computes the attention, see `weigh`.
        watch: is shown the attention of each part that has no padding; see `SparsityMeter`.
    """

    def __init__(self, plan: CachePlan, policy: Policy, table: RotaryTable | None, sliding: int | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.policy = policy
        self.table = table
        self.sliding = sliding
        self.schedule = Schedule.equal(plan.window)
        self.span: int | Tensor = plan.span
        self.budget = Budget(plan.sinks, (), plan.recent)
        self.columns = 0
        self.filled = 0
        self.lengths: tuple[int, ...] = ()
        self.reader: Reader | None = None
        self.groups = 0
        self.weigh = weigh
        self.watch: Callable[[Tensor, Tensor, int], None] = SparsityMeter()

    # transformers' interface

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate every slot, in the dtype and on the device of the first keys [B, Hkv, Q, D]."""
        self._allocate(key_states, value_states, self.schedule.most + self._spare)

    def _allocate(self, key_states: Tensor, value_states: Tensor, slots: int) -> None:
        rows, plan = key_states.shape[:2], self.plan
        self.dtype, self.device = key_states.dtype, key_states.device
        if plan.kv_bits == 16:
            self.store: Store | QuantizedStore = Store.empty(key_states, value_states, slots)
        else:
            self.store = QuantizedStore(key_states, value_states, slots, plan.kv_bits, plan.exact_sinks, plan.residual)
        self.scores = torch.empty(*rows, slots, dtype=torch.float32, device=self.device)
        if self.policy.long_term:
            self.lasting = torch.empty_like(self.scores)
        self.index = torch.empty(*rows, slots, dtype=torch.int32, device=self.device)
        self.rank = torch.empty_like(self.index)
        self.free = torch.empty(*rows, 1, dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(rows[0], 1, 1, dtype=torch.int64, device=self.device)
        self.lengths = (0,) * rows[0]
        self.is_initialized = True
        self.filled = 0
        self._vacate()

    def get_seq_length(self) -> int:
        """Columns seen, evicted ones and padding included: what `generate` counts with."""
        return self.columns

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        self.columns, self.lengths = 0, ()
        self.watch = SparsityMeter()
        self.is_initialized = False
        for name in ("store", *self._books):
            setattr(self, name, None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i], scores and ranks included."""
        if self.is_initialized:
            for owner, name in self._tensors():
                setattr(owner, name, getattr(owner, name).index_select(0, beam_idx.to(self.device)))
            self.lengths = tuple(self.lengths[row] for row in beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        self.reorder_cache(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`."""
        self.reorder_cache(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted for the removed tokens does not come back."""
        raise H2OStreamError("a cache that evicts cannot take tokens back; generate without an assistant model")

    # what is held

    @property
    def held(self) -> int:
        """Tokens held per head, of the row that holds most."""
        return max(self._limits, default=0)

    @property
    def _limits(self) -> list[int]:
        """Tokens held per head, of each row."""
        return [self.schedule.held(length) for length in self.lengths]

    @property
    def _spare(self) -> int:
        """Slots beside those of held tokens: the next token's, and with a ring of new tokens its seat there."""
        return 1 if self.plan.kv_bits == 16 else 2

    def reach(self, places: int) -> int | Tensor:
        """More than the largest distance between two of so many tokens."""
        return places + self.span if self.plan.positions == "gap" else places

    @property
    def due(self) -> int | None:
        """Tokens that the next one evicts; None where rows differ in that or something has to be allocated."""
        schedule = self.schedule
        if len(self.lengths) == 1 and self.lengths[0] >= schedule.settled:
            return 1
        after = [length + 1 for length in self.lengths]
        if not self._fits(after):
            return None
        evicted = [before + 1 - schedule.held(now) for before, now in zip(self._limits, after, strict=True)]
        return None if len(set(evicted)) > 1 and not schedule.fixed else evicted[0]

    @property
    def at_once(self) -> int:
        """The most tokens that a compiled step evicts: a window that shrinks evicts more than one now and then."""
        most = self.schedule.at_once
        return max(most, _SHRINKING) if most > 1 and min(self.lengths) < self.schedule.settled else 1

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated for this layer."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def kept(self) -> Tensor:
        """[B, Hkv, held] int64 token indices, oldest first; shorter rows have -1 in front."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.index.sort(-1).values[..., self.store.slots - self.held :].long()

    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by name."""
        return {name: getattr(owner, name) for owner, name in self._tensors()}

    def statistics(self, number: int) -> LayerStatistics:
        """What the attention of this layer, called `number`, looks like."""
        measured = self.watch.value if isinstance(self.watch, SparsityMeter) else math.nan
        paid = self.policy.total(self.seen) if self.is_initialized and self.policy.observes else None
        if paid is None or not self.groups:
            return LayerStatistics(number, measured, torch.empty(0), math.nan, math.nan)
        scores = self.scores.masked_fill(self.index < 0, 0.0)
        mass = float((scores.double().sum(-1, keepdim=True) / (paid * self.groups)).mean())
        ordered = scores.sort(-1, descending=True).values[..., : self.held].mean((0, 1))
        return LayerStatistics(number, measured, ordered, power_law(ordered), mass)

    def load(self, tensors: Mapping[str, Tensor], columns: int, device: torch.device | None) -> None:
        """Go on from the tensors of another layer of the same plan.

        Raises:
            H2OStreamError: tensors are missing or do not fit.
        """
        keys, values = (taken(tensors, name)[:, :, :1].to(device or "cpu") for name in ("keys", "values"))
        slots = taken(tensors, "index").shape[-1]
        if slots > self.schedule.most + self._spare:
            raise H2OStreamError(f"the state does not fit: {slots} slots, at most {self.schedule.most} tokens are held")
        self._allocate(keys, values, slots)
        for owner, name in self._tensors():
            setattr(owner, name, taken(tensors, name, like=getattr(owner, name)))
        self.columns, self.lengths = columns, tuple(self.seen.flatten().tolist())
        self.filled = slots

    def _tensors(self) -> list[tuple[Any, str]]:
        if not self.is_initialized:
            return []
        return [(self.store, name) for name in self.store.names] + [(self, name) for name in self._books]

    @property
    def _books(self) -> tuple[str, ...]:
        return (*_BOOKS, "lasting") if self.policy.long_term else _BOOKS

    @property
    def _held(self) -> Held:
        """The slots, as policies see them."""
        return Held(self.scores, self.index, self.rank, self.seen, self.lasting if self.policy.long_term else None)

    # attention

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        products: Products,
        padding: Padding | None = None,
    ) -> Tensor:
        """Attend with Q new tokens, then hold at most `window` of all.

        Args:
            query: [B, Hq, Q, D], un-rotated like the keys (rotated already with ``absolute``).
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, D].
            products: what the model does with query times key.
            padding: which columns are padding: they are neither attended to nor held. None for no column.

        Returns:
            [B, Q, Hq, D], in the query's dtype; of no account where there is padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self.groups = query.shape[1] // key.shape[1]
        self.columns += key.shape[2]
        if padding is not None:
            query, key, value = padding.pack(query), padding.pack(key), padding.pack(value)
        chunk = self.plan.chunk or key.shape[2]
        outputs = []
        parts = zip(query.split(chunk, 2), key.split(chunk, 2), value.split(chunk, 2), strict=True)
        for number, (q, k, v) in enumerate(parts):
            new = k.shape[2]
            counts = (new,) * len(self.lengths) if padding is None else padding.chunk(number * chunk, new)
            arrivals = Arrivals(counts, new, k.device)
            if new == 1 == min(counts) and self.due is not None:
                outputs.append(self._decode(q, k, v, arrivals, products))
                continue
            read = self.reader(self, q, k, v, products) if self.reader and padding is None else None
            outputs.append(self._prefill(q, k, v, arrivals, products) if read is None else read)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output if padding is None else padding.unpack(output)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, arrivals: Arrivals, products: Products) -> Tensor:
        vacant, evicted = min(self._limits) + 1 < self.store.slots, self.due or 0
        self.count_token()
        return self.step(query, key, value, products, vacant, evicted)

    def count_token(self) -> None:
        """Count a token of each row that is about to go through `step`."""
        self.filled = min(self.filled + 1, self.store.slots)
        self.lengths = tuple([length + 1 for length in self.lengths])

    def count_chunk(self, new: int) -> int | None:
        """Count `new` tokens of the one row that are about to go through a compiled `read`.

        Returns:
            How many tokens are held then; None, and nothing is counted, where something has to be allocated.
        """
        after = [length + new for length in self.lengths]
        if not self._fits(after):
            return None
        self.filled, self.lengths = self.store.slots, tuple(after)
        return self.held

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, products: Products, vacant: bool, evicted: int | Tensor
    ) -> Tensor:
        """A token's way through the slots: written, attended with, scored; then the next token's slot is made free.

        Nothing here looks at a number of this stream on the host, so that it can be compiled (`h2o_stream.graphs`).

        Args:
            query: [B, Hq, 1, D].
            key: [B, Hkv, 1, D].
            value: [B, Hkv, 1, D].
            products: what the model does with query times key.
            vacant: whether slots may be empty besides the token's own.
            evicted: how many tokens lose their slots; at most `at_once` if it is a tensor.

        Returns:
            [B, 1, Hq, D].
        """
        slot = self._ring(self.seen).expand_as(self.free) if self.store.exact else self.free
        self.store.write(slot, key, value)
        self.index.scatter_(2, slot, self.seen.int().expand(slot.shape))
        self.scores.scatter_(2, slot, 0.0)
        if self.policy.long_term:
            self.lasting.scatter_(2, slot, 0.0)
        self.rank += 1
        self.rank.scatter_(2, slot, 0)
        self.seen += 1

        keys, values = self.store.read()
        arrivals = Arrivals((1,), 1, query.device)
        output, probs = self._weigh(query, keys, values, self._held, arrivals, products, vacant)
        self.watch(probs, self.index >= 0, self.lengths[0])
        attention = Attention(probs, probs.new_zeros(1), 1)
        if self.policy.observes:
            self.scores = self.policy.observe(self.scores, attention)
        if self.policy.long_term:
            self.lasting = self.policy.remember(self.lasting, self._held, attention)
        if isinstance(self.store, QuantizedStore):
            self._demote(self.store)
        self._evict(evicted)
        return output

    def _demote(self, store: QuantizedStore) -> None:
        """Vacate the seat of the next token: the oldest of the ring is encoded and moves to the free slot."""
        ring = self._ring(self.seen).expand_as(self.free)
        store.demote(ring, self.free, self.index >= 0)
        if self.policy.long_term:
            self.lasting.scatter_(2, self.free, self.lasting.gather(2, ring))
        for book, empty in ((self.scores, -torch.inf), (self.index, -1), (self.rank, store.slots)):
            book.scatter_(2, self.free, book.gather(2, ring))
            book.scatter_(2, ring, empty)

    def _ring(self, index: Tensor) -> Tensor:
        """Where a token is while it is new, if the newest tokens have a ring: sinks have a slot of their own."""
        sinks = self.store.sinks
        return torch.where((index >= 0) & (index < sinks), index, sinks + (index - sinks) % self.store.residual)

    def _evict(self, count: int | Tensor) -> None:
        """Evict the `count` tokens worth least and make the last one's slot the free slot, or find an empty one.

        Sinks and the ring of new tokens are not asked. In a window of one size an empty slot is always taken first.
        """
        first = self.store.exact
        for done in range(self.at_once if isinstance(count, Tensor) else max(count, 1)):
            worth = self.policy.worth(self._held, self.budget)
            if isinstance(count, Tensor):
                worth = torch.where((self.index < 0) & (count > done), torch.inf, worth)
            elif count and not self.schedule.fixed:
                worth.masked_fill_(self.index < 0, torch.inf)
            least = worth[..., first:].argmin(-1, keepdim=True) + first
            if isinstance(count, Tensor) and done:
                least = torch.where(count > done, least, self.free)
            self.free = least
            self.rank -= (self.rank > self.rank.gather(2, self.free)).int()
            self.rank.scatter_(2, self.free, self.store.slots)
            self.index.scatter_(2, self.free, -1)
            self.scores.scatter_(2, self.free, -torch.inf)

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, arrivals: Arrivals, products: Products) -> Tensor:
        used = self.filled
        self.lengths = tuple(length + more for length, more in zip(self.lengths, arrivals.counts, strict=True))
        limits, slots = self._limits, self._room(self.lengths) + self._spare
        uneven = torch.tensor(limits, device=self.device) if min(limits) < max(limits) else None
        return self.read(query, key, value, arrivals, products, used, slots, max(limits), uneven)

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arrivals: Arrivals,
        products: Products,
        used: int,
        slots: int,
        most: int,
        limits: Tensor | None,
    ) -> Tensor:
        """A chunk's way: attended with together with what is held, scored; then what is worth most of both is held.

        Nothing here looks at a number of this stream on the host, as in `step`.

        Args:
            query: [B, Hq, Q, D].
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, D].
            arrivals: what is new.
            products: what the model does with query times key.
            used: no slot behind this number holds a token.
            slots: how many there are from now on.
            most: tokens to hold of the row that holds most.
            limits: [B] int64, tokens to hold of each row; None if all hold `most`.

        Returns:
            [B, Q, Hq, D].
        """
        keys, values = self.store.read_exactly(used)
        used, count = keys.shape[2], arrivals.count
        there = arrivals.there.expand(*key.shape[:2], -1)
        index = (self.seen + arrivals.place).masked_fill(~there, -1).int()
        rank = arrivals.later.masked_fill(~there, used + arrivals.new).int()
        held = Held(
            scores=torch.cat((self.scores[..., :used], self.scores.new_zeros(there.shape)), 2),
            index=torch.cat((self.index[..., :used], index), 2),
            rank=torch.cat((self.rank[..., :used] + count.int(), rank), 2),
            seen=self.seen + count,
            lasting=torch.cat((self.lasting[..., :used], self.scores.new_zeros(there.shape)), 2)
            if self.policy.long_term
            else None,
        )
        keys, values = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        self.seen = held.seen

        output, probs = self._weigh(query, keys, values, held, arrivals, products)
        if not arrivals.ragged:
            self.watch(probs, held.index >= 0, self.lengths[0])
        attention = arrivals.attention(probs)
        if self.policy.observes:
            held = replace(held, scores=self.policy.observe(held.scores, attention))
        if held.lasting is not None:
            held = replace(held, lasting=self.policy.remember(held.lasting, held, attention))
        keep, index = select(self.policy.worth(held, self.budget), held.index, most, limits)
        self.store.slots, self.filled = slots, most
        self._hold(keep, index, keys, values, held)
        return output

    def _hold(self, keep: Tensor, index: Tensor, keys: Tensor, values: Tensor, held: Held) -> None:
        """Keep the places `keep` [B, Hkv, n], in token order, and no other; none where `index` is -1."""
        n, store, slots = keep.shape[-1], self.store, self.store.slots
        keys, values = (x.gather(2, keep[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))
        order, slot, first = torch.arange(n, device=self.device), None, n
        if isinstance(store, QuantizedStore):
            ring = store.residual - 1
            slot = torch.where(order < n - ring, store.exact - store.sinks + order, self._ring(self.seen - n + order))
            slot = torch.where(index < store.sinks, index, slot).masked_fill(index < 0, slots)
            store.hold(slot, keys, values)
            first = max(n + 1, store.exact)
        else:
            store.hold(keys, values)

        def placed(x: Tensor, empty: float) -> Tensor:
            if slot is None:
                rest = x.new_full((*x.shape[:2], slots - n), empty)
                return torch.cat((x.masked_fill(index < 0, empty), rest), 2)
            return x.new_full((*x.shape[:2], slots + 1), empty).scatter_(2, slot, x)[..., :slots].contiguous()

        self.index = placed(index, -1)
        self.scores = placed(held.scores.gather(2, keep), -torch.inf)
        if held.lasting is not None:
            self.lasting = placed(held.lasting.gather(2, keep), 0.0)
        self.rank = placed((n - 1 - order).int().expand_as(keep), slots)
        self.free.fill_(first)

    def _room(self, lengths: Sequence[int]) -> int:
        """Tokens to have slots for when the rows are so long."""
        return self.schedule.window if min(lengths) >= self.schedule.settled else self.schedule.most

    def _fits(self, lengths: Sequence[int]) -> bool:
        """Whether the slots there are are those to have when the rows are so long."""
        return self.store.slots == self._room(lengths) + self._spare

    def _vacate(self) -> None:
        """Mark every slot as empty."""
        self.index.fill_(-1)
        self.scores.fill_(-torch.inf)
        if self.policy.long_term:
            self.lasting.fill_(0.0)
        self.rank.fill_(self.store.slots)
        self.free.fill_(self.store.exact)

    def _weigh(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        held: Held,
        arrivals: Arrivals,
        products: Products,
        vacant: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """`weigh` over the places given, rotated and hidden as this layer's positions want it."""
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        turns = None
        if self.table is not None:
            positions = self.plan.positions
            table = self.table.upto(self.reach(keys.shape[2]), keys.device, keys.dtype)
            query, turns = rotate(query, held, arrivals, positions, self.span, self.budget, table)
        seeing_all = arrivals.new == 1 and self.sliding is None and not vacant
        hidden = None if seeing_all else hide(held, arrivals, self.sliding)
        return self.weigh(query, keys, values, turns, arrivals, hidden, products)

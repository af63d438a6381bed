"""One decoder layer of the fixed-window cache: slots that are written in place, and the bookkeeping around them.

Owns keys, values, scores, token indices and ranks of a layer. Knows nothing of the model around it: it is handed
queries, keys and values and gives back the attention's output. What is done to the tensors is `Kernels`' part:
`cache.eager` in torch, or native code.

Slots are allocated for the most tokens that the layer will ever hold and one more, and stay where they are. At rest at
least one of them, `free`, is empty: the next token's. A layer whose window ends up smaller than the common one
(`cache.budgets`) moves what it holds into fewer slots once, when its window has come to its final size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.cache.budgets import Schedule
from h2o_stream.cache.eager import EAGER, attention_of_last_query
from h2o_stream.cache.endless import EndlessLayer
from h2o_stream.cache.revision import Revision
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Budget, Candidates, Policy
from h2o_stream.cache.rope import RotaryTable
from h2o_stream.cache.state import require_tensor
from h2o_stream.cache.statistics import LayerStatistics, SparsityMeter, power_law
from h2o_stream.cache.store import QuantizedStore, Store
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError

_BOOKS = ("scores", "index", "rank", "free", "seen")

Watch = Callable[[Tensor, Tensor, int], None]
"""Is shown attention probabilities [B, Hkv, G, Q, K], which places are held [B, Hkv, K], and the tokens seen."""


class Kernels(Protocol):
    """The tensor work of a layer: everything between new keys and the attention's output.

    Both functions write the tensors of the layer in place, `seen` included. Numbers on the host (`lengths`, `columns`)
    are counted by the layer afterwards.
    """

    def serves(self, layer: HeadGroup, query: Tensor) -> bool:
        """Whether `decode` and `prefill` can be called for this layer and query [B, Hq, Q, D]."""

    def decode(
        self,
        layer: HeadGroup,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        evictions: Sequence[int],
    ) -> Tensor:
        """A token of each row: written into the free slot, attended with, scored; then a slot is made free.

        Args:
            layer: the slots.
            query: [B, Hq, 1, D], un-rotated like the keys (rotated already with ``absolute``).
            key: [B, Hkv, 1, D].
            value: [B, Hkv, 1, D].
            transform: what the model does with query times key.
            evictions: how many tokens each row evicts; one that evicts none finds an empty slot.

        Returns:
            [B, 1, Hq, D] in the query's dtype.
        """

    def prefill(
        self,
        layer: HeadGroup,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        counts: Sequence[int],
        limits: Sequence[int],
    ) -> Tensor:
        """A chunk: attended with together with what is held; then what is worth most of both is held.

        Also sets `layer.filled`.

        Args:
            layer: the slots.
            query: [B, Hq, Q, D], as for `decode`.
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, D].
            transform: what the model does with query times key.
            counts: tokens of each row; its columns behind them are padding.
            limits: tokens that each row holds afterwards.

        Returns:
            [B, Q, Hq, D] in the query's dtype; undefined where there is padding.
        """


class HeadGroup(EndlessLayer):
    """Fixed slots of one layer.

    Args:
        plan: budgets and rules.
        policy: scores and priorities.
        table: rotations for keys that come un-rotated; None when the model rotates by itself (``absolute``).
        sliding: keys of this age and older are hidden, as in the model's own sliding windows.
        layout: is told when tensors are allocated; shared by the layers of a cache.

    Attributes:
        schedule: how many tokens the layer holds, by how many it has seen; see `follow`.
        span: with ``gap``, the distance up to which distances are true.
        store: keys and values of S slots, more than are held, un-rotated, or rotated at token indices with
            ``absolute``.
        scores: [B, Hkv, S] float32, -inf where empty.
        long_term_scores: [B, Hkv, S] float32 long-term scores, of a policy that has them.
        index: [B, Hkv, S] int32 token index in the row, -1 where empty.
        rank: [B, Hkv, S] int32, held keys newer than this one; where empty, no less than are held.
        free: [B, Hkv, 1] int64, an empty slot for the next token to be kept.
        seen: [B, 1, 1] int64, tokens of each row since the last reset; padding is none.
        lengths: the same numbers, known without asking the device.
        filled: no slot behind this number holds a token, where keys and values are kept as they are.
        columns: columns fed since the last reset, padding included.
        budget: what eviction may not touch.
        kernels: serve this layer in place of the eager ones where they can; None for nowhere.
        groups: query heads per KV head; 0 before the first token.
    """

    def __init__(
        self,
        plan: CachePlan,
        policy: Policy,
        table: RotaryTable | None,
        sliding: int | None = None,
        layout: Revision | None = None,
    ) -> None:
        super().__init__()
        self.revision = layout or Revision()
        self.plan = plan
        self.policy = policy
        self.table = table
        self.sliding = sliding
        self.schedule = Schedule.equal(plan.window)
        self.span = plan.span
        self.budget = Budget(plan.sinks, (), plan.recent)
        self.columns = 0
        self.filled = 0
        self.lengths: tuple[int, ...] = ()
        self.kernels: Kernels | None = None
        self.groups = 0
        self._watch: Watch = SparsityMeter()

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
            self.long_term_scores = torch.empty_like(self.scores)
        self.index = torch.empty(*rows, slots, dtype=torch.int32, device=self.device)
        self.rank = torch.empty_like(self.index)
        self.free = torch.empty(*rows, 1, dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(rows[0], 1, 1, dtype=torch.int64, device=self.device)
        self.lengths = (0,) * rows[0]
        self.is_initialized = True
        self.filled = 0
        self.index.fill_(-1)
        self.scores.fill_(-torch.inf)
        if self.policy.long_term:
            self.long_term_scores.fill_(0.0)
        self.rank.fill_(slots)
        self.free.fill_(self.store.exact)
        self.revision.changed()

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
        self.revision.changed()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i], scores and ranks included."""
        if not self.is_initialized:
            return
        rows, order = len(self.lengths), beam_idx.to(self.device)
        for owner, name in self._tensors():
            chosen = getattr(owner, name).index_select(0, order)
            if len(order) == rows:
                getattr(owner, name).copy_(chosen)
            else:
                setattr(owner, name, chosen)
        self.lengths = tuple(self.lengths[row] for row in beam_idx.tolist())
        if len(order) != rows:
            self.revision.changed()

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
        return max(self.limits, default=0)

    @property
    def limits(self) -> list[int]:
        """Tokens held per head, of each row."""
        return [self.schedule.held(length) for length in self.lengths]

    @property
    def num_evictions(self) -> list[int]:
        """Number of evictions caused by the next token, of each row."""
        schedule = self.schedule
        return [
            1 if length >= schedule.settled else schedule.held(length) + 1 - schedule.held(length + 1)
            for length in self.lengths
        ]

    @property
    def _spare(self) -> int:
        """Slots beside those of held tokens: the next token's, and with a ring of new tokens its seat there."""
        return 1 if self.plan.kv_bits == 16 else 2

    def reach(self, places: int) -> int:
        """More than the largest distance between two of so many tokens."""
        return places + self.span if self.plan.positions == "gap" else places

    def follow(self, schedule: Schedule) -> None:
        """Hold as many tokens as `schedule` says from now on; only while every row is within the common window."""
        self.schedule = schedule
        if self.is_initialized and self.store.slots < schedule.most + self._spare:
            self._resize(schedule.most + self._spare)
        self.revision.changed()

    @property
    def watch(self) -> Watch:
        """Is shown the attention of each part that has no padding; see `SparsityMeter`."""
        return self._watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self._watch = watch
        self.revision.changed()

    @property
    def watched(self) -> bool:
        """Whether every probability is asked for, which native code never has all of."""
        return not isinstance(self._watch, SparsityMeter)

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated for this layer."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def kept(self) -> Tensor:
        """[B, Hkv, held] int64 token indices, oldest first; shorter rows have -1 in front."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.index.sort(-1).values[..., self.store.slots - self.held :].long()

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Numbers of a key and of a value, once there are any."""
        return self.store.keys.shape[-1], self.store.values.shape[-1]

    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by name."""
        return {name: getattr(owner, name) for owner, name in self._tensors()}

    def statistics(self, number: int) -> LayerStatistics:
        """What the attention of this layer, called `number`, looks like."""
        measured = self.watch.value if isinstance(self.watch, SparsityMeter) else math.nan
        paid = self.policy.total(self.seen) if self.is_initialized and self.policy.needs_attention else None
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
        keys, values = (require_tensor(tensors, name)[:, :, :1].to(device or "cpu") for name in ("keys", "values"))
        self.columns, self.lengths = columns, tuple(require_tensor(tensors, "seen").flatten().tolist())
        slots, settled = require_tensor(tensors, "index").shape[-1], min(self.lengths) >= self.schedule.settled
        least = (self.schedule.window if settled else self.schedule.most) + self._spare
        if not least <= slots <= self.plan.window + self.schedule.most + self._spare:
            raise H2OStreamError(f"the state does not fit: it has {slots} slots, {least} are needed")
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise H2OStreamError(f"the state does not fit: values are {tuple(values.shape)} {values.dtype}")
        lengths = self.lengths
        self._allocate(keys, values, slots)
        self.lengths = lengths
        for owner, name in self._tensors():
            getattr(owner, name).copy_(require_tensor(tensors, name, like=getattr(owner, name)))
        self.filled = slots

    def _tensors(self) -> list[tuple[Any, str]]:
        if not self.is_initialized:
            return []
        return [(self.store, name) for name in self.store.names] + [(self, name) for name in self._books]

    @property
    def _books(self) -> tuple[str, ...]:
        return (*_BOOKS, "long_term_scores") if self.policy.long_term else _BOOKS

    @property
    def places(self) -> Candidates:
        """The slots, as policies see them."""
        return Candidates(self.scores, self.index, self.rank, self.seen, self.long_term_scores if self.policy.long_term else None)

    # attention

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        transform: LogitTransform,
        padding: Padding | None = None,
    ) -> Tensor:
        """Attend with Q new tokens, then hold at most `window` of all.

        Args:
            query: [B, Hq, Q, D], un-rotated like the keys (rotated already with ``absolute``).
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, D].
            transform: what the model does with query times key.
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
        native = self.kernels if self.kernels and not self.watched and self.kernels.serves(self, query) else None
        kernels, before = native or EAGER, self.lengths[0]
        chunk = self.plan.chunk or key.shape[2]
        outputs = []
        parts = zip(query.split(chunk, 2), key.split(chunk, 2), value.split(chunk, 2), strict=True)
        for number, (q, k, v) in enumerate(parts):
            new = k.shape[2]
            counts = (new,) * len(self.lengths) if padding is None else padding.chunk(number * chunk, new)
            after = tuple([length + count for length, count in zip(self.lengths, counts, strict=True)])
            if new == 1 == min(counts):
                outputs.append(kernels.decode(self, q, k, v, transform, self.num_evictions))
                self.filled = min(self.filled + 1, self.store.slots)
            else:
                limits = [self.schedule.held(length) for length in after]
                outputs.append(kernels.prefill(self, q, k, v, transform, counts, limits))
            self.lengths = after
            self.compact()
        meter = self._watch
        if native and padding is None and isinstance(meter, SparsityMeter) and meter.wants(before, self.lengths[0]):
            meter.add(attention_of_last_query(self, query[:, :, -1:], transform), self.index >= 0)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output if padding is None else padding.unpack(output)

    def compact(self) -> None:
        """Move what is held into as few slots as it needs from now on, once the window has shrunk to its final size."""
        slots = self.schedule.window + self._spare
        if self.store.slots > slots and min(self.lengths) >= self.schedule.settled:
            self._resize(slots)

    def _resize(self, slots: int) -> None:
        """Move what is held into an allocation of so many slots: in token order, but for slots with a fixed purpose."""
        exact, empty = self.store.exact, {"scores": -torch.inf, "long_term_scores": 0.0, "index": -1, "rank": slots}
        index = self.index[..., exact:]
        held = index >= 0
        order = index.masked_fill(~held, torch.iinfo(index.dtype).max).argsort(-1)[..., : slots - exact]
        self.free.copy_(held.sum(-1, keepdim=True) + exact)
        self.store.rearrange(order, slots)
        for name in empty.keys() & set(self._books):
            book = getattr(self, name)
            moved = torch.cat((book[..., :exact], book[..., exact:].gather(-1, order)), -1)
            setattr(self, name, pad(moved, (0, slots - moved.shape[-1]), value=empty[name]))
        self.rank.masked_fill_(self.index < 0, slots)
        self.filled = self.held
        self.revision.changed()

    def ring(self, index: Tensor) -> Tensor:
        """Where a token is while it is new, if the newest tokens have a ring: sinks have a slot of their own."""
        sinks = self.store.sinks
        return torch.where((index >= 0) & (index < sinks), index, sinks + (index - sinks) % self.store.residual)

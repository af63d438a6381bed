"""The slots of some KV heads, and the bookkeeping of the tokens in them: score, token index and rank of each.

A store owns keys and values. All tensors are written in place, because native code knows their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from h2o_stream.cache.arrays import to_array, to_tensor
from h2o_stream.cache.group_rules import GroupRules, HeadShape
from h2o_stream.cache.mapped_store import make_store
from h2o_stream.cache.policies import Candidates, Policy, make_policy
from h2o_stream.cache.ranks import rank_dtype
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.state import Array, dtype_of, require_array
from h2o_stream.cache.store import Store
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError


class Slots(GroupRules):
    """S slots of each of Hkv heads, in B rows; nothing is allocated before the first token.

    Args:
        plan: says how keys and values are stored.
        policy: says which scores there are, and what it keeps of each head.
        on_disk: whether keys and values are in mapped files.
        device: where the slots of a loaded state go; None for the CPU. Others are where their first keys are.
        tokens: counts the tokens of the cache.
        revision: grows when tensors are allocated.

    Attributes:
        store: keys and values of S slots, un-rotated, or rotated by token index with ``absolute``.
        scores: [B, Hkv, S] float32, -inf where empty.
        long_term_scores: [B, Hkv, S] float32, only with a policy that has them.
        index: [B, Hkv, S] int32 token index in its row, -1 where empty.
        rank: [B, Hkv, S] `rank_dtype`, number of newer tokens in the slots; where empty, at least as many as they hold.
        free: [B, Hkv, 1] int64, an empty slot for the next token.
        seen: [B, 1, 1] int64, tokens that each row has taken: the device's copy of `tokens.lengths`.
        head_state: [B, Hkv, *] tensors by name, what the policy keeps of each head; see `Policy.head_state`.
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
        on_disk: bool,
        device: torch.device | None,
        tokens: TokenCount | None,
        revision: Revision | None,
    ) -> None:
        super().__init__(plan, tokens, revision)
        self.policy, self.on_disk, self.device = policy, on_disk, device or torch.device("cpu")
        self.layer, self.rule, self.has_long_term = policy.layer, policy.rule, policy.long_term

    def follow(self, plan: CachePlan) -> None:
        """See `GroupRules`."""
        super().follow(plan)
        self.policy = make_policy(plan, self.layer)
        self.rule, self.has_long_term = self.policy.rule, self.policy.long_term

    @property
    def candidates(self) -> Candidates:
        """The slots, as policies see them."""
        long_term = self.long_term_scores if self.policy.long_term else None
        return Candidates(self.scores, self.index, self.rank, self.seen, long_term)

    @property
    def num_slots(self) -> int:
        """See `GroupRules`."""
        return self.store.slots

    @property
    def token_indices(self) -> NDArray[numpy.int32]:
        """See `GroupRules`."""
        return self.index.cpu().numpy()

    def tensors(self) -> dict[str, Tensor]:
        """See `GroupRules`."""
        return {name: getattr(owner, name) for owner, name in self._attributes()}

    def arrays(self) -> dict[str, Array]:
        """See `GroupRules`."""
        return {name: to_array(x).copy() for name, x in self.first_slots(self.used_slots).items()}

    def _attributes(self) -> Iterator[tuple[Store | Slots | SimpleNamespace, str]]:
        """Whose attribute each tensor is, and its name."""
        if self.is_initialized:
            yield from ((self.store, name) for name in self.store.names)
            yield from ((self, name) for name in (*self.empty_values(0), "free", "seen"))
            yield from ((self.head_state, name) for name in vars(self.head_state))

    # entries

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

    def fill(self, slot: Tensor, entries: Mapping[str, Tensor]) -> None:
        """Empty all slots, then enter n tokens.

        Args:
            slot: [B, Hkv, n] int64, the slot of each token; S where there is none.
            entries: [B, Hkv, n], by the names of `empty_values`.
        """
        for name, empty in self.empty_values(self.store.slots).items():
            x = entries[name]
            placed = x.new_full((*x.shape[:2], self.store.slots + 1), empty).scatter_(2, slot, x)
            getattr(self, name).copy_(placed[..., :-1])

    # allocation

    def allocate(self, key: Tensor, value: Tensor, slots: int) -> None:
        """Allocate every slot, on the device of keys like [B, Hkv, Q, D], in the dtype that holds keys and values."""
        rows = key.shape[:2]
        self.dtype, self.device = torch.promote_types(key.dtype, value.dtype), key.device
        key, value = key[:, :, :0].to(self.dtype), value[:, :, :0].to(self.dtype)
        self.store = make_store(self.plan, key, value, slots, self.on_disk)
        for name, empty in self.empty_values(slots).items():
            dtype = {"index": torch.int32, "rank": getattr(torch, rank_dtype(slots))}.get(name, torch.float32)
            setattr(self, name, torch.full((*rows, slots), empty, dtype=dtype, device=self.device))
        self.free = torch.full((*rows, 1), self.store.exact, dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(rows[0], 1, 1, dtype=torch.int64, device=self.device)
        start = self.policy.head_state(self.queries_per_key, key.shape[-1], value.shape[-1])
        copies = {name: x.to(self.device).expand(*rows, *x.shape).clone() for name, x in start.items()}
        self.head_state = SimpleNamespace(**copies)
        self.is_initialized = True
        self.filled = 0
        self.revision.bump()

    def allocate_on_cpu(self, shape: HeadShape, dtype: str, rows: int, slots: int) -> None:
        """See `GroupRules`."""
        heads = shape.kv_heads if self.heads is None else len(self.heads)
        sizes = (shape.key_size, shape.value_size)
        like = [torch.empty(rows, heads, 0, size, dtype=getattr(torch, dtype), device="cpu") for size in sizes]
        self.queries_per_key = shape.query_heads // shape.kv_heads
        key, value = like
        self.allocate(key, value, slots)

    def load(self, arrays: Mapping[str, Array]) -> None:
        """See `GroupRules`."""
        keys, values = (require_array(arrays, name) for name in ("keys", "values"))
        slots = self.slots_of(arrays)
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise H2OStreamError(f"the state does not fit: values are {values.shape} {dtype_of(values)}")
        if self.heads is not None and keys.shape[1] != len(self.heads):
            raise H2OStreamError(f"the state does not fit: {keys.shape[1]} heads of a group of {len(self.heads)}")
        key, value = (to_tensor(x[:, :, :1]).to(self.device) for x in (keys, values))
        self.allocate(key, value, slots)
        for name, tensor in self.first_slots(arrays["index"].shape[-1]).items():
            tensor.copy_(to_tensor(require_array(arrays, name, like=to_array(tensor))))

    def reset(self) -> None:
        """See `GroupRules`."""
        for name in ("store", *self.empty_values(0), "free", "seen", "head_state"):
            self.__dict__.pop(name, None)
        self.is_initialized = False
        self.revision.bump()

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes a copy of row rows[i]."""
        if not self.is_initialized:
            return
        rows, in_place = rows.to(self.device), len(rows) == len(self.seen)
        for owner, name in self._attributes():
            chosen = getattr(owner, name).index_select(0, rows)
            if in_place:
                getattr(owner, name).copy_(chosen)
            else:
                setattr(owner, name, chosen)
        if not in_place:
            self.revision.bump()

    def resize(self, slots: int, filled: int) -> None:
        """See `GroupRules`."""
        exact, index = self.store.exact, self.index[..., self.store.exact :]
        is_token = index >= 0
        order = index.masked_fill(~is_token, torch.iinfo(index.dtype).max).argsort(-1)[..., : slots - exact]
        self.free.copy_(is_token.sum(-1, keepdim=True) + exact)
        self.store.rearrange(order, slots)
        for name, empty in self.empty_values(slots).items():
            tensor = getattr(self, name)
            moved = torch.cat((tensor[..., :exact], tensor[..., exact:].gather(-1, order)), -1)
            setattr(self, name, pad(moved, (0, slots - moved.shape[-1]), value=empty))
        self.rank = self.rank.to(getattr(torch, rank_dtype(slots))).masked_fill_(self.index < 0, slots)
        self.filled = filled
        self.revision.bump()

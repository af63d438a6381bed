"""Eviction: what a policy's priorities and a window mean for the slots of a head group.

`free_slots` evicts after a decode step, `keep_best` selects what stays after a chunk of a prompt. Both follow the same
rule (append, attend, keep the best) and give the same result token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from h2o_stream.cache.arrays import to_tensor
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.policies import Candidates, make_policy, select
from h2o_stream.cache.slots import Slots


def free_slots(group: HeadGroup, evictions: Sequence[int]) -> None:
    """Evict from each row so many tokens of least worth, and make the slot of the last one the free slot.

    Sinks and newest tokens with slots of their own are never candidates. While a window grows or shrinks, an empty slot
    is only taken by a row that evicts nothing; in a window of fixed size it is always taken first.
    """
    start, fixed, rounds = group.store.exact, group.schedule.fixed, max(evictions)
    keys, values = group.store.read() if group.policy.needs_keys else (None, None)
    uneven = None
    if not fixed and min(evictions) < rounds:
        uneven = torch.tensor(evictions, device=group.free.device).view(-1, 1, 1)
    for done in range(max(rounds, 1)):
        shown = _shown(group, group.candidates, keys, values)
        worth = group.policy.worth(shown, group.protection)
        if uneven is not None:
            worth.masked_fill_((group.index < 0) & (uneven > done), torch.inf)
        elif rounds and not fixed:
            worth.masked_fill_(group.index < 0, torch.inf)
        slot = worth[..., start:].argmin(-1, keepdim=True).add_(start)
        if uneven is not None and done:
            slot = torch.where(uneven > done, slot, group.free)
        group.free.copy_(slot)
        group.rank -= (group.rank > group.rank.gather(2, slot)).to(group.rank.dtype)
        group.clear(slot)


def worth_of_slots(group: Slots) -> tuple[Tensor, Tensor]:
    """What the group's tokens are worth apart from protection, [B, Hkv, S] float32, and which of them are protected."""
    if isinstance(group, HeadGroup):
        keys, values = group.store.read() if group.policy.needs_keys else (None, None)
        policy, shown = group.policy, _shown(group, group.candidates, keys, values)
    else:  # of numpy arrays, under a policy that looks at nothing else
        policy = make_policy(group.plan, group.layer)
        tensors = {name: to_tensor(array) for name, array in group.tensors().items()}
        shown = Candidates(
            tensors["scores"], tensors["index"], tensors["rank"], tensors["seen"], tensors.get("long_term_scores")
        )
    unprotected = replace(group.protection, sinks=0, pins=(), recent=0)
    return policy.worth(shown, unprotected), policy.protected(shown, group.protection)


def _shown(group: HeadGroup, candidates: Candidates, keys: Tensor | None, values: Tensor | None) -> Candidates:
    """What the policy needs to see of the K tokens."""
    if group.policy.needs_keys:
        rotations = group.rotations(candidates, torch.float32)
        candidates = replace(candidates, keys=keys, values=values, rotations=rotations)
    return replace(candidates, head_state=vars(group.head_state))


def keep_best(group: HeadGroup, candidates: Candidates, keys: Tensor, values: Tensor, limits: Sequence[int]) -> None:
    """Replace what the group holds by the candidates of most worth, in token order.

    Args:
        group: its tensors are written in place.
        candidates: K cached and new tokens.
        keys: [B, Hkv, K, D].
        values: [B, Hkv, K, D].
        limits: number of tokens that each row keeps.
    """
    uneven = torch.tensor(limits, device=keys.device) if min(limits) < max(limits) else None
    shown = _shown(group, candidates, keys, values)
    keep, index = select(group.policy.worth(shown, group.protection), candidates.index, max(limits), uneven)
    n = keep.shape[-1]
    keys, values = (x.gather(2, keep[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))
    slot, free = group.store.place_prefill(keys, values, index, candidates.seen)
    kept = {
        "index": index,
        "rank": torch.arange(n - 1, -1, -1, dtype=group.rank.dtype, device=keep.device).expand_as(keep),
        "scores": candidates.scores.gather(2, keep),
    }
    if candidates.long_term_scores is not None:
        kept["long_term_scores"] = candidates.long_term_scores.gather(2, keep)
    group.fill(slot, kept)
    group.seen.copy_(candidates.seen)
    group.free.fill_(free)
    group.filled = n

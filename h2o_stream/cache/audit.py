"""Checks the invariants of slots, on tensors: finds bookkeeping that cannot be right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.errors import H2OStreamError


def audit(groups: Sequence[HeadGroup]) -> float:
    """Check the layers of a stream that follow the plan (`H2OCache.evicting_groups`), under a policy that sums scores.

    Returns:
        The largest score there is.

    Raises:
        H2OStreamError: something is wrong, saying what and where.
    """
    largest = 0.0
    for number, group in enumerate(groups):
        num_sinks = group.plan.sinks
        check_slots(group, name := f"slots {number}")
        scores, sinks = group.scores[group.index >= 0], (group.index >= 0) & (group.index < num_sinks)
        _must(group, name, (scores >= 0).all(), "a score is negative or no number")
        expected = group.seen[..., 0].clamp_max(num_sinks)
        _must(group, name, (sinks.sum(-1) == expected).all(), "a sink is not held")
        largest = max(largest, float(scores.max()))
    return largest


def check_slots(group: HeadGroup, name: str) -> None:
    """Check what holds for every policy.

    Args:
        group: holds a stream.
        name: what errors call the group.

    Raises:
        H2OStreamError: something is wrong, saying what and where.
    """
    index, rank, slots = group.index.long(), group.rank.long(), group.store.slots
    is_token, seen, lengths = index >= 0, group.seen, group.tokens.lengths
    limits = torch.tensor([*map(group.schedule.held, lengths)], device=index.device)[:, None]

    def must(holds: bool | Tensor, what: str) -> None:
        _must(group, name, holds, what)

    on_device = tuple(seen.flatten().tolist())
    must(on_device == lengths, f"{list(lengths)} tokens were counted here, {list(on_device)} on the device")
    held = is_token.sum(-1)
    must((held == limits).all(), f"{held.tolist()} tokens are held, {limits[:, 0].tolist()} should be")
    ordered = index.sort(-1).values
    must(((ordered.diff(dim=-1) > 0) | (ordered[..., 1:] < 0)).all(), "a token is held twice")
    must((ordered[..., -1:] == seen - 1).all() and (index >= -1).all(), "the newest token is not held")
    newer = index.argsort(-1, descending=True).argsort(-1)
    must((rank == newer)[is_token].all(), "ranks are not the order of the tokens")
    must(((rank >= limits[..., None]) & (rank <= 2 * slots))[~is_token].all(), "an empty slot has the rank of a token")
    must((group.free >= group.store.exact).all() and (group.free < slots).all(), "the free slot is none of them")
    must((index.gather(-1, group.free) < 0).all(), "the free slot holds a token")
    must(group.scores[is_token].isfinite().all(), "a score is negative or no number")
    must((group.scores[~is_token] == -torch.inf).all(), "an empty slot has a score")
    if group.policy.long_term:
        must(group.long_term_scores[is_token].isfinite().all(), "a long-term score is no number")
    last = int(is_token.any(1).any(0).nonzero()[-1]) if bool(is_token.any()) else -1
    filled = group.filled > last or group.store.exact > 0
    must(group.filled <= slots and filled, "a slot that is in use counts as empty")


def _must(group: HeadGroup, name: str, holds: bool | Tensor, what: str) -> None:
    if not bool(holds):
        raise H2OStreamError(f"after {max(group.tokens.lengths):,} tokens, {name}: {what}")

"""Looks through slots for anything that cannot be: their invariants, checked on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.errors import H2OStreamError

if TYPE_CHECKING:
    from h2o_stream.cache.h2o_cache import H2OCache


def audit(cache: H2OCache) -> float:
    """Check every layer of a stream that follows the plan, under a policy whose scores are sums.

    Returns:
        The largest score there is.

    Raises:
        H2OStreamError: something is wrong, saying what and where.
    """
    largest = 0.0
    for number, layer in enumerate(cache.evicting):
        check_slots(layer, name := f"slots {number}", layer.lengths)
        scores, sinks = layer.scores[layer.index >= 0], (layer.index >= 0) & (layer.index < cache.plan.sinks)
        _must(layer, name, (scores >= 0).all(), "a score is negative or no number")
        _must(
            layer, name, (sinks.sum(-1) == layer.seen[..., 0].clamp_max(cache.plan.sinks)).all(), "a sink is not held"
        )
        largest = max(largest, float(scores.max()))
    return largest


def check_slots(layer: HeadGroup, name: str, lengths: Sequence[int]) -> None:
    """Check what holds whatever the policy.

    Args:
        layer: with a stream.
        name: for people.
        lengths: tokens of each row, of which all layers must know.

    Raises:
        H2OStreamError: something is wrong, saying what and where.
    """
    index, rank, slots = layer.index.long(), layer.rank.long(), layer.store.slots
    there, seen = index >= 0, layer.seen
    limits = torch.tensor(layer.limits, device=index.device)[:, None]

    def must(holds: bool | Tensor, what: str) -> None:
        _must(layer, name, holds, what)

    on_device = tuple(seen.flatten().tolist())
    must(on_device == tuple(lengths), f"{list(lengths)} tokens were counted here, {list(on_device)} on the device")
    must(
        (there.sum(-1) == limits).all(), f"{there.sum(-1).tolist()} tokens are held, {limits[:, 0].tolist()} should be"
    )
    ordered = index.sort(-1).values
    must(((ordered.diff(dim=-1) > 0) | (ordered[..., 1:] < 0)).all(), "a token is held twice")
    must((ordered[..., -1:] == seen - 1).all() and (index >= -1).all(), "the newest token is not held")
    newer = index.argsort(-1, descending=True).argsort(-1)
    must((rank == newer)[there].all(), "ranks are not the order of the tokens")
    must(((rank >= limits[..., None]) & (rank <= 2 * slots))[~there].all(), "an empty slot has the rank of a token")
    must((layer.free >= layer.store.exact).all() and (layer.free < slots).all(), "the free slot is none of them")
    must((index.gather(-1, layer.free) < 0).all(), "the free slot holds a token")
    must(layer.scores[there].isfinite().all(), "a score is negative or no number")
    must((layer.scores[~there] == -torch.inf).all(), "an empty slot has a score")
    if layer.policy.long_term:
        must(layer.long_term_scores[there].isfinite().all(), "a long-term score is no number")
    last = int(there.any(1).any(0).nonzero()[-1]) if bool(there.any()) else -1
    must(
        layer.filled <= slots and (layer.filled > last or layer.store.exact > 0),
        "a slot that is in use counts as empty",
    )


def _must(layer: HeadGroup, name: str, holds: bool | Tensor, what: str) -> None:
    if not bool(holds):
        raise H2OStreamError(f"after {max(layer.lengths):,} tokens, {name}: {what}")

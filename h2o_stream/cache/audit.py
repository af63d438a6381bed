"""Looks through a cache for anything that cannot be: the invariants of the slots, checked on live tensors."""

from __future__ import annotations

import torch

from h2o_stream.cache.slots import SlotLayer
from h2o_stream.cache.window import H2OCache
from h2o_stream.errors import H2OStreamError


def audit(cache: H2OCache) -> float:
    """Check every layer of a stream of one row.

    Returns:
        The largest score there is.

    Raises:
        H2OStreamError: something is wrong, saying what and where.
    """
    largest = 0.0
    for number, layer in enumerate(cache.evicting):
        largest = max(largest, _audited(layer, f"slots {number}", cache.plan.sinks))
    return largest


def _audited(layer: SlotLayer, name: str, sinks: int) -> float:
    index, rank, scores = layer.index[0].long(), layer.rank[0].long(), layer.scores[0]
    held, seen, slots = layer.held, int(layer.seen), index.shape[-1]

    def must(holds: bool | torch.Tensor, what: str) -> None:
        if not bool(holds):
            raise H2OStreamError(f"after {seen:,} tokens, {name}: {what}")

    there = index >= 0
    must((there.sum(-1) == held).all(), f"{there.sum(-1).tolist()} tokens are held, {held} should be")
    must(seen == layer.lengths[0], f"{layer.lengths[0]} tokens were counted here, {seen} on the device")
    ordered = index.sort(-1).values[:, slots - held :]
    must((ordered.diff(dim=-1) > 0).all(), "a token is held twice")
    must((ordered[:, -1] == seen - 1).all(), "the newest token is not held")
    must((ordered[:, : min(sinks, seen)] == torch.arange(min(sinks, seen))).all(), "a sink is not held")
    newer = (index[:, None] > index[..., None]) & there[..., None]
    must((rank[there] == newer.sum(-1)[there]).all(), "ranks are not the order of the tokens")
    must((rank[~there] >= held).all(), "an empty slot has the rank of a token")
    must((index.gather(-1, layer.free[0]) < 0).all(), "the free slot holds a token")
    must(scores[there].isfinite().all() and (scores[there] >= 0).all(), "a score is negative or no number")
    must((scores[~there] == -torch.inf).all(), "an empty slot has a score")
    if layer.policy.long_term:
        must(layer.lasting[0][there].isfinite().all(), "a long-term score is no number")
    return float(scores[there].max())

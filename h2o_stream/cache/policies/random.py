"""``random``: the baseline that any score must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_stream.cache.policies.base import Candidates, Policy


class Random(Policy):
    """Each eviction draws anew and evenly among the unprotected tokens of a head.

    The draw is a hash of seed, token index, layer, head and tokens seen, so that it needs no state: a stream, a row
    of a batch and a resumed session all draw the same.
    """

    needs_attention = False

    def priority(self, candidates: Candidates) -> Tensor:
        """[B, Hkv, K] float32 in [0, 1)."""
        return uniform(candidates.index, candidates.seen + 0x9E3779B9 * self.plan.seed, self.layer)


def uniform(index: Tensor, stream: Tensor | int, layer: int) -> Tensor:
    """A hash of stream, layer, head and token index, spread evenly. `stream` numbers the draws, of all rows or each.

    Returns:
        [B, Hkv, K] float32 in [0, 1), multiples of 2**-24.
    """
    heads = torch.arange(index.shape[1], device=index.device)[:, None]
    drawn = _mix(_mix(_mix(torch.as_tensor(stream, device=index.device)) + 0x10001 * layer + heads) + index)
    return (drawn & 0xFFFFFF).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers held in int64 that spreads every bit (the finalizer of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)

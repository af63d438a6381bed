"""``triattention``: the attention that a mean query would pay over distances to come."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_lab.literature.query_moments import QueryMoments, keys_ahead, rotary_dims
from h2o_stream.cache.policies.base import Candidates
from h2o_stream.config import PolicyDefaults


class TriAttention(QueryMoments):
    """Trigonometric scores from query centres (TriAttention, arXiv 2604.04921).

    Before RoPE, queries concentrate around a centre. The centre's product with a key is, for every pair of rotated
    dimensions, a cosine of the distance; it is averaged over distances that grow by powers of two. To it comes, per
    pair, the key's norm times how much longer queries are than their centre. Among the query heads of a group, each
    standardized over the tokens, the largest score counts.

    Deliberate differences: centres are running means of the stream's own queries, not calibrated ones; the length of
    queries is a root mean square, not a mean; distances go up to the span of ``gap``, or with ``rolling`` to the
    window, beyond which none grow; and a reply evicts token by token.
    """

    defaults = PolicyDefaults(heavy_share=0.5, sinks=4, decay=1.0, positions="gap")

    def priority(self, candidates: Candidates) -> Tensor:
        """Standard deviations from the mean over the tokens of a head."""
        assert candidates.keys is not None
        mean, square = candidates.head_state["query_mean"], candidates.head_state["query_square"]
        keys, index, dims = candidates.keys.float(), candidates.index, rotary_dims(candidates)
        farthest = max(self.plan.span if self.plan.positions == "gap" else self.plan.window, 1)
        steps = 2.0 ** torch.arange(farthest.bit_length(), device=index.device)
        scores = mean @ keys_ahead(candidates, steps).mT
        spread = (_lengths(square, dims).sqrt() - _lengths(mean.square(), dims).sqrt()).clamp_min(0.0)
        scores += spread @ _lengths(keys.square(), dims).sqrt().mT
        is_token = (index >= 0).unsqueeze(2)
        count = is_token.sum(-1, keepdim=True)
        scores -= scores.masked_fill(~is_token, 0.0).sum(-1, keepdim=True) / count
        variance = scores.masked_fill(~is_token, 0.0).square().sum(-1, keepdim=True) / count
        return (scores / variance.sqrt()).amax(2)


def _lengths(squares: Tensor, rotary_dims: int) -> Tensor:
    """Squares [..., D] summed over each pair of rotated dimensions: [..., D - rotary_dims / 2]."""
    half = rotary_dims // 2
    return torch.cat((squares[..., :half] + squares[..., half:rotary_dims], squares[..., rotary_dims:]), dim=-1)

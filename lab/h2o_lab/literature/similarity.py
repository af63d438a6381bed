"""Cosine similarity of the tokens of a head, for the policies that look for redundancy."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize


def unit_vectors(x: Tensor | None, index: Tensor) -> Tensor:
    """Directions of keys or values.

    Args:
        x: [B, Hkv, K, D]; a policy that needs them has them.
        index: [B, Hkv, K] integer, negative where a slot is empty.

    Returns:
        [B, Hkv, K, D] float32, of length 1, and 0 where a slot is empty.
    """
    assert x is not None
    return normalize(x.float(), dim=-1).masked_fill((index < 0)[..., None], 0.0)


def cosines(x: Tensor | None, index: Tensor) -> Tensor:
    """Similarity of every two tokens, [B, Hkv, K, K] float32; 0 with an empty slot. Arguments as above."""
    directions = unit_vectors(x, index)
    return directions @ directions.mT

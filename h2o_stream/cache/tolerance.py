"""How far the logits of two implementations of a model may differ by rounding alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rounding(NamedTuple):
    """What is rounding in some dtype, as root mean squares relative to that of the logits.

    Attributes:
        tolerance: tolerance of a model that does not amplify rounding.
        step: relative perturbation of the embedding, to see whether a model amplifies rounding.
        limit: largest tolerance.
    """

    tolerance: float
    step: float
    limit: float


EXACT, ROUNDED = Rounding(1e-4, 2.0**-22, 0.01), Rounding(0.08, 2.0**-8, 0.5)
"""In float32, where every layer adds some rounding of its own, and in fewer bits."""

ROUNDINGS = 3
"""Results may be off by this many times the effect of a rounded embedding."""

_EXACT_DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}
"""Types whose rounding never matters, even if amplified."""


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the differences, relative to that of `theirs`.

    Logits that stand for "never" (infinite, or near the end of their type) must be equal; infinity where they are not.
    """
    never = theirs.abs() > torch.finfo(theirs.dtype).max / 2
    if not torch.equal(ours[never].float(), theirs[never].float()):
        return float("inf")
    ours, theirs = (x.float().masked_fill(never, 0.0) for x in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp_min(torch.finfo(torch.float32).tiny))


def last_error(ours: Tensor, theirs: Tensor) -> float:
    """`error_of` of logits [1, n, V] and [1, m, V] of the last tokens of both."""
    count = min(ours.shape[1], theirs.shape[1])
    return error_of(ours[:, -count:], theirs[:, -count:])


def rounding_of(model: Any) -> Rounding:
    """`EXACT` or `ROUNDED`, by what a model computes in."""
    exact = torch.get_float32_matmul_precision() == "highest" and _EXACT_DTYPES.issuperset(
        tensor.dtype for tensor in (*model.parameters(), *model.buffers())
    )
    return EXACT if exact else ROUNDED

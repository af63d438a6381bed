"""How far the logits of two implementations of a model may differ by rounding alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 1e-4
"""Root mean square of the differences of logits in float32, as a share of that of the logits."""


ROUNDED_TOLERANCE = 0.08
"""The same for fewer bits, if the model does not amplify rounding."""


_EXACT = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}
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


def tolerance_of(model: Any) -> float:
    """How far logits of a model may be off if it does not amplify rounding, see `error_of`."""
    exact = torch.get_float32_matmul_precision() == "highest" and _EXACT.issuperset(
        tensor.dtype for tensor in (*model.parameters(), *model.buffers())
    )
    return _TOLERANCE if exact else ROUNDED_TOLERANCE

"""Tolerances between two computations of the same numbers.

Sums of products round differently on every machine, in proportion to the summands. Tolerances are therefore relative to
the root mean square of the compared values, never absolute.
"""

from typing import Any

import torch
from torch import Tensor

FLOAT32 = 5e-4
"""Largest float32 difference relative to the RMS; eight times the largest observed on any machine."""

LIKELIHOOD = 3e-5
"""Relative difference of a mean log-likelihood in float32."""


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference relative to the RMS of `wanted`. Infinities must be equal."""
    assert ours.shape == wanted.shape, f"shapes are {list(ours.shape)} and {list(wanted.shape)}"
    infinite = wanted.isinf()
    assert ours[infinite].equal(wanted[infinite]), "infinities differ"
    ours, wanted = ours[~infinite], wanted[~infinite]
    return float((ours.double() - wanted.double()).abs().max() / rms(wanted))


def rms(x: Tensor) -> float:
    """Root mean square; never 0."""
    return max(float(x.double().square().mean().sqrt()), torch.finfo(torch.float32).tiny)


def assert_close(ours: Tensor, wanted: Tensor, share: float = FLOAT32) -> None:
    """Fail if any difference exceeds `share` of the RMS or is NaN."""
    error = relative_error(ours, wanted)
    assert error <= share, f"off by {error:.1e} of the rms, where {share:.0e} is allowed"


def assert_alike(ours: Any, wanted: Any, share: float = FLOAT32) -> None:
    """Assert equal records, with floats compared to a relative difference of `share`."""
    assert type(ours) is type(wanted), f"{ours!r} is not of the kind of {wanted!r}"
    if isinstance(wanted, dict):
        assert ours.keys() == wanted.keys()
        for name in wanted:
            assert_alike(ours[name], wanted[name], share)
    elif isinstance(wanted, list):
        assert len(ours) == len(wanted)
        for one, other in zip(ours, wanted, strict=True):
            assert_alike(one, other, share)
    elif isinstance(wanted, float):
        assert ours == wanted or abs(ours - wanted) <= share * max(abs(ours), abs(wanted)), f"{ours} is not {wanted}"
    else:
        assert ours == wanted

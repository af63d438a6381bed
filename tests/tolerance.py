"""How far two ways of computing the same numbers may be apart.

A sum of products rounds differently on every machine, by a share of what is summed. So tolerances are shares of the
root mean square of what is compared, never absolute numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOAT32 = 5e-4
"""Largest difference of any number in float32, as a share of the rms; eight times what was seen on any machine."""

LIKELIHOOD = 3e-5
"""Relative difference of a mean of log-likelihoods in float32."""


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference of any two numbers, as a share of the rms of what is wanted. Infinities are equal."""
    assert ours.shape == wanted.shape, f"shapes are {list(ours.shape)} and {list(wanted.shape)}"
    infinite = wanted.isinf()
    assert ours[infinite].equal(wanted[infinite]), "infinities differ"
    ours, wanted = ours[~infinite], wanted[~infinite]
    return float((ours.double() - wanted.double()).abs().max() / rms(wanted))


def rms(x: Tensor) -> float:
    """Root mean square; never 0."""
    return max(float(x.double().square().mean().sqrt()), torch.finfo(torch.float32).tiny)


def assert_close(ours: Tensor, wanted: Tensor, share: float = FLOAT32) -> None:
    """Fail where any number is further off than this share of the rms of all of them, or is not a number."""
    error = relative_error(ours, wanted)
    assert error <= share, f"off by {error:.1e} of the rms, where {share:.0e} is allowed"


def assert_alike(ours: Any, wanted: Any, share: float = FLOAT32) -> None:
    """The same records: numbers with a fraction to a relative difference of `share`, all else equal."""
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

"""Finds out what a module computes by evaluating it: one of several candidates must match, and no other nearly as well.

The weights of real models are no test inputs: norms from -0.2 to 1,649, outliers a thousand times the rest. In bfloat16
the difference between two candidates can be smaller than rounding, so modules are evaluated in more bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from h2o_stream.native.matrix import DescriptionError

T = TypeVar("T")

MARGIN = 10.0
"""The second best candidate must be off by this many times as much as the best."""

ROUNDING = 1e-5
"""Limit of `relative_error` in float64: modules compute parts of it in float32 whatever goes in."""

_LEAST = 1e-12
"""Errors below this are equally good."""


def only_match(
    candidates: Iterable[tuple[T, Tensor]], expected: Tensor, name: str, problem: str, limit: float = ROUNDING
) -> T:
    """The one candidate that computes what is expected; no two of them may be the same function.

    `problem` says what the module is if no candidate matches; for `limit` see `relative_error`.

    Raises:
        DescriptionError: none matches, or two do and cannot be told apart.
    """
    ranked = sorted(((relative_error(computed, expected), value) for value, computed in candidates), key=lambda x: x[0])
    if not ranked or not ranked[0][0] < limit:
        raise DescriptionError(f"{name} {problem}")
    if len(ranked) > 1 and not ranked[1][0] >= MARGIN * max(ranked[0][0], _LEAST):
        errors = " and ".join(f"{error:.0e}" for error, _ in ranked[:2])
        raise DescriptionError(f"{name} is one of two things that cannot be told apart: they are off by {errors}")
    return ranked[0][1]


def in_more_bits(module: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A copy of a module in float64 or float32, sharing packed weights; what is no module as it is.

    Raises:
        DescriptionError: it cannot be copied.
    """
    if not isinstance(module, nn.Module):
        return module
    shared = {id(tensor): tensor for tensor in module.buffers() if not tensor.is_floating_point()}
    try:
        return copy.deepcopy(module, shared).to(dtype)
    except (RuntimeError, TypeError) as error:
        raise DescriptionError(f"a {type(module).__name__} cannot be copied: {error}") from error


@torch.no_grad()
def evaluate(function: Any, x: Tensor, name: str) -> Tensor:
    """Evaluate a module on a test input; raises DescriptionError if it cannot be, or does not return one tensor."""
    try:
        y = function(x)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DescriptionError(f"{name}, a {type(function).__name__}, cannot be evaluated: {error}") from error
    if not isinstance(y, Tensor):
        raise DescriptionError(f"{name}, a {type(function).__name__}, does not return one tensor")
    return y if y.dtype == torch.float64 else y.float()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference [..., n] relative to the largest expected one of its n; infinity for NaN."""
    if actual.shape != expected.shape:
        return torch.inf
    largest = expected.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((actual - expected).abs() / largest).max().nan_to_num(torch.inf))

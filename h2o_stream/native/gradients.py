"""Outputs of a cache and of packed weights have no gradient: asking for one is an error, never a wrong number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_stream.errors import H2OStreamError

_OF_A_CACHE = (
    "an attached model is for inference, its cache knows no gradients; "
    "call backward() outside the block, or on a forward with use_cache=False"
)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, reason: str, *origins: Tensor) -> Tensor:
        ctx.reason = reason
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise H2OStreamError(ctx.reason)


def without_gradient(output: Tensor, *origins: Tensor | None, reason: str = _OF_A_CACHE) -> Tensor:
    """The output, computed without a graph from `origins`; `backward` raises `reason` if one needs a gradient."""
    if torch.is_grad_enabled():
        requiring = [origin for origin in origins if origin is not None and origin.requires_grad]
        if requiring:
            return _NoBackward.apply(output, reason, *requiring)  # type: ignore[no-any-return]
    return output

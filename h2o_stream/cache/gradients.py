"""What comes out of a cache has no gradient: asking for one is an error, never a wrong number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_stream.errors import H2OStreamError


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *origins: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise H2OStreamError(
            "an attached model is for inference, its cache knows no gradients; "
            "call backward() outside the block, or on a forward with use_cache=False"
        )


def without_gradient(output: Tensor, *origins: Tensor | None) -> Tensor:
    """The same numbers, whose backward raises where one of the tensors that they come from wants a gradient.

    Args:
        output: computed without a graph.
        origins: what it was computed from.
    """
    if torch.is_grad_enabled():
        wanting = [origin for origin in origins if origin is not None and origin.requires_grad]
        if wanting:
            return _NoBackward.apply(output, *wanting)  # type: ignore[no-any-return]
    return output

"""What a recurrent mixer of transformers computes: names say where weights are, evaluation what is done with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.native.matrix import DescriptionError, Matrix
from h2o_stream.native.mixers import Convolution, Mixer, ShortConvolution
from h2o_stream.native.modules import as_float32, matrix_of, relative_error

_TOKENS = 7
"""Tokens that a mixer is evaluated on."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def mixer_of(module: Any, hidden: int, name: str) -> Mixer:
    """Determine what a recurrent mixer computes; matrices are not copied.

    Args:
        module: takes and gives vectors of `hidden` numbers.
        hidden: size of the residual stream.
        name: of the layer, for messages.

    Raises:
        DescriptionError: it is none of the known ones.
    """
    if _children(module) == {"conv", "in_proj", "out_proj"}:
        return _short_convolution(module, hidden, f"the convolution of {name}")
    raise DescriptionError(f"{name} has a {type(module).__name__}, which is no mixer that is known")


def _children(module: Any) -> set[str]:
    return {key for key, _ in module.named_children()} | {key for key, _ in module.named_parameters(recurse=False)}


def convolution_of(module: Any, name: str) -> Convolution:
    """The weights of a causal convolution of single channels.

    Raises:
        DescriptionError: it is another one.
    """
    if type(module) is not nn.Conv1d or module.padding_mode != "zeros":
        raise DescriptionError(f"{name} is a {type(module).__name__} where a convolution is expected")
    kernel, channels = module.kernel_size[0], module.in_channels
    shape = module.groups, module.out_channels, module.padding[0], module.stride[0], module.dilation[0]
    if shape != (channels, channels, kernel - 1, 1, 1):
        raise DescriptionError(f"{name} is not a causal convolution of {channels} single channels")
    weight = as_float32(module.weight, name)
    assert weight is not None
    return Convolution(weight.view(channels, kernel), as_float32(module.bias, name))


def _short_convolution(module: Any, hidden: int, name: str) -> ShortConvolution:
    mixer = ShortConvolution(
        matrix_of(module.in_proj, f"in_proj of {name}"),
        convolution_of(module.conv, f"conv of {name}"),
        matrix_of(module.out_proj, f"out_proj of {name}"),
    )

    def expected(x: Tensor) -> Tensor:
        b, c, inputs = module.in_proj(x).float().chunk(3, -1)
        return c * convolved(mixer.convolution, b * inputs)

    _check(module, mixer, hidden, expected, name)
    return mixer


def convolved(convolution: Convolution, x: Tensor) -> Tensor:
    """A causal convolution of x [B, Q, channels] float32, from zeros on."""
    padded = functional.pad(x.transpose(1, 2), (convolution.kernel - 1, 0))
    y = functional.conv1d(padded, convolution.weight[:, None], convolution.bias, groups=convolution.channels)
    return y.transpose(1, 2)


@torch.no_grad()
def _check(module: Any, mixer: Mixer, hidden: int, mixed: Any, name: str) -> None:
    """Check that a module computes out(mixed(x)).

    Raises:
        DescriptionError: it does not.
    """
    for matrix in mixer.projections:
        _check_size(matrix.columns, hidden, name)
    _check_size(mixer.out.rows, hidden, name)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    x = torch.randn(1, _TOKENS, hidden, generator=torch.Generator().manual_seed(0), device="cpu").to(dtype)
    try:
        found = module(x)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise DescriptionError(f"{name}, a {type(module).__name__}, cannot be evaluated: {error}") from error
    found = found[0] if isinstance(found, tuple) else found
    expected = module.out_proj(mixed(x).to(dtype))
    if not relative_error(found.float(), expected.float()) < _TOLERANCE.get(dtype, 0.0):
        raise DescriptionError(f"{name} is a {type(module).__name__} that computes something else")


def _check_size(size: int, hidden: int, name: str) -> None:
    if size != hidden:
        raise DescriptionError(f"{name} has projections of {size} instead of {hidden} numbers")

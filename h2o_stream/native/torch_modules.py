"""What modules of torch hold, and whether they compute what their classes do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import OTHER_SENSES, DescriptionError, Matrix
from h2o_stream.native.pointers import dtype_name

DTYPES = {torch.float32: MatrixKind.FLOAT32, torch.bfloat16: MatrixKind.BFLOAT16}
"""Dense weights that need no conversion."""

_HARMLESS_HOOKS = "transformers.utils.output_capturing"
"""Hooks that do nothing unless hidden states are requested; transformers never removes them."""


def text_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules that tokens of text may go through, by name."""
    for name, module in model.named_modules():
        if not OTHER_SENSES.intersection(name.split(".")):
            yield name, module


def check_module(name: str, module: Any) -> None:
    """Check that calling a module runs its class's forward, on weights that are there, and deterministically.

    Raises:
        DescriptionError: it is hooked, patched, offloaded, from an unknown package, or applies dropout.
    """
    kind = type(module).__name__
    if hasattr(module, "_hf_hook"):
        raise DescriptionError(f"{name} has a hook of accelerate")
    if has_active_hooks(module._forward_hooks) or has_active_hooks(module._forward_pre_hooks):
        raise DescriptionError(f"{name} has a forward hook")
    if "forward" in vars(module):
        raise DescriptionError(f"{name} has a patched forward")
    package = type(module).forward.__module__.partition(".")[0]
    if package not in ("torch", "transformers", "h2o_stream"):
        raise DescriptionError(f"{name} is a {kind}, whose forward is from {package}")
    if any(tensor.is_meta for tensor in module.parameters(recurse=False)):
        raise DescriptionError(f"{name} has weights that are not there")
    if module.training and uses_dropout(module):
        raise DescriptionError(f"{name} uses dropout in training mode; call model.eval()")


def has_active_hooks(hooks: Mapping[int, Any]) -> bool:
    """Whether any of these hooks may have an effect."""
    return any(getattr(hook, "__module__", None) != _HARMLESS_HOOKS for hook in hooks.values())


def uses_dropout(module: Any) -> bool:
    """Whether a module applies dropout in training mode."""
    rates = (value for key, value in vars(module).items() if "drop" in key or key == "p")
    return any(isinstance(value, float | int) and value > 0 for value in rates)


def matrix_of(module: Any, name: str) -> Matrix:
    """The weights of a plain `nn.Linear`, or of one that holds packed `tiles` of a `kind`, without copying.

    Raises:
        DescriptionError: it is neither, or its weights are not contiguous float32 or bfloat16.
    """
    if hasattr(module, "tiles"):
        tiles = raw_tensor(module.tiles, name)
        return Matrix(tiles, as_float32(module.bias, name), module.out_features, module.in_features, module.kind)
    if hasattr(module, "blocks"):  # of a file, on a GPU
        return module.matrix()  # type: ignore[no-any-return]
    if type(module) is nn.Linear:
        return dense_matrix(module.weight, module.bias, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where a linear layer is expected")


def embedding_of(module: Any, name: str) -> Matrix:
    """The weights of an embedding, without copying; see `matrix_of`."""
    if hasattr(module, "tiles"):
        return Matrix(raw_tensor(module.tiles, name), None, module.num_embeddings, module.embedding_dim, module.kind)
    if hasattr(module, "blocks"):
        return module.matrix()  # type: ignore[no-any-return]
    if isinstance(module, nn.Embedding):
        return dense_matrix(module.weight, None, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where an embedding is expected")


def dense_matrix(weights: Tensor, bias: Tensor | None, name: str) -> Matrix:
    """Weights [rows, columns] as they are, and biases [rows] in float32.

    Raises:
        DescriptionError: the weights are not contiguous float32 or bfloat16, nor float16 on a GPU.
    """
    kind = DTYPES.get(torch.bfloat16 if weights.is_cuda and weights.dtype == torch.float16 else weights.dtype)
    if kind is None:  # kernels for GPUs go by the tensor's dtype
        raise DescriptionError(f"{name} has weights of {dtype_name(weights.dtype)}")
    rows, columns = weights.shape
    return Matrix(raw_tensor(weights, name), as_float32(bias, name), rows, columns, kind)


def raw_tensor(tensor: Tensor, name: str) -> Tensor:
    """The tensor without its gradient, sharing memory.

    Raises:
        DescriptionError: it is of a tensor subclass, or not contiguous.
    """
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise DescriptionError(f"{name} has weights in a {type(tensor).__name__}")
    if tensor.is_meta or not tensor.is_contiguous():
        raise DescriptionError(f"{name} has weights that are not contiguous")
    return tensor.detach()


def as_float32(tensor: Tensor | None, name: str) -> Tensor | None:
    """A small tensor in float32, copied only if necessary."""
    return None if tensor is None else raw_tensor(tensor, name).float()

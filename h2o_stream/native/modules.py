"""What individual modules compute: linear layers, norms, activations, embeddings, rotary embeddings.

Modules are evaluated on test inputs rather than recognized by class: that distinguishes layer norm from RMS norm, w
from 1 + w, and one GELU from another.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.cache.rope import dimension_orders, rotate_back
from h2o_stream.native.abi import Activation, MatrixKind, NormKind, dtype_name
from h2o_stream.native.description import DescriptionError, Matrix, Norm, Rope
from h2o_stream.native.packing import gather

DTYPES = {torch.float32: MatrixKind.FLOAT32, torch.bfloat16: MatrixKind.BFLOAT16}
"""Dense weights that need no conversion."""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: functional.gelu,
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
}

_EPSILONS = (1e-5, 1e-6)
"""For norms that have no such attribute."""

_FIXED_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional"}
"""RoPE types whose frequencies do not depend on the sequence length."""

_TEST_POSITIONS = (0, 1, 5)


_HARMLESS_HOOKS = "transformers.utils.output_capturing"
"""Hooks that do nothing unless hidden states are requested; transformers never removes them."""


def check_module(name: str, module: Any) -> None:
    """Check that calling a module runs its class's forward, on the CPU and deterministically.

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
    if any(tensor.device.type != "cpu" for tensor in module.parameters(recurse=False)):
        raise DescriptionError(f"{name} has weights that are not on the CPU")
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
    """The weights of a linear layer, without copying.

    Args:
        module: a plain `nn.Linear`, or one that holds packed `tiles` of a `kind`.
        name: for the message.

    Raises:
        DescriptionError: it is neither, or its weights are not contiguous float32 or bfloat16.
    """
    if hasattr(module, "tiles"):
        tiles = raw_tensor(module.tiles, name)
        return Matrix(tiles, as_float32(module.bias, name), module.out_features, module.in_features, module.kind)
    if type(module) is nn.Linear:
        return dense_matrix(module.weight, module.bias, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where a linear layer is expected")


def embedding_of(module: Any, name: str) -> Matrix:
    """The weights of an embedding, without copying; see `matrix_of`."""
    if hasattr(module, "tiles"):
        return Matrix(raw_tensor(module.tiles, name), None, module.num_embeddings, module.embedding_dim, module.kind)
    if isinstance(module, nn.Embedding):
        return dense_matrix(module.weight, None, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where an embedding is expected")


def dense_matrix(weights: Tensor, bias: Tensor | None, name: str) -> Matrix:
    """Weights [rows, columns] as they are, and biases [rows] in float32.

    Raises:
        DescriptionError: the weights are not contiguous float32 or bfloat16.
    """
    if weights.dtype not in DTYPES:
        raise DescriptionError(f"{name} has weights of {dtype_name(weights.dtype)}")
    rows, columns = weights.shape
    return Matrix(raw_tensor(weights, name), as_float32(bias, name), rows, columns, DTYPES[weights.dtype])


def raw_tensor(tensor: Tensor, name: str) -> Tensor:
    """The tensor without its gradient, sharing memory.

    Raises:
        DescriptionError: it is of a tensor subclass, not on the CPU or not contiguous.
    """
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise DescriptionError(f"{name} has weights in a {type(tensor).__name__}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise DescriptionError(f"{name} has weights that are not contiguous on the CPU")
    return tensor.detach()


def as_float32(tensor: Tensor | None, name: str) -> Tensor | None:
    """A small tensor in float32, copied only if necessary."""
    return None if tensor is None else raw_tensor(tensor, name).float()


def norm_of(module: Any, size: int, name: str) -> Norm:
    """Determine what a norm over `size` elements computes.

    Raises:
        DescriptionError: it is neither a layer norm nor an RMS norm of this size.
    """
    weight, bias = as_float32(getattr(module, "weight", None), name), as_float32(getattr(module, "bias", None), name)
    one = torch.ones(size, dtype=torch.float32, device="cpu")
    if any(tensor is not None and tensor.shape != one.shape for tensor in (weight, bias)):
        raise DescriptionError(f"{name} is a {type(module).__name__} that does not normalize {size} elements")
    attributes = (getattr(module, key, None) for key in ("eps", "variance_epsilon", "epsilon"))
    epsilons = [float(value) for value in attributes if value is not None][:1] or _EPSILONS
    dtype = getattr(module, "weight", one).dtype if weight is not None else torch.float32
    values = (torch.arange(size, dtype=torch.float32, device="cpu") * 1.7).cos() + 0.3
    x = torch.stack((values, values * 1e-3)).to(dtype)
    expected = _evaluate(module, x, name)
    best, smallest_error = Norm(), torch.inf
    for kind, epsilon in itertools.product((NormKind.RMS, NormKind.LAYER), epsilons):
        for factor in (one,) if weight is None else (weight, 1 + weight):
            candidate = Norm(kind, factor.contiguous(), bias, epsilon)
            error = relative_error(apply_norm(candidate, x.float()), expected)
            if error < smallest_error:
                best, smallest_error = candidate, error
    if not smallest_error < (1e-4 if dtype == torch.float32 else 3e-2):
        raise DescriptionError(f"{name} is a {type(module).__name__}, neither a layer norm nor an RMS norm")
    return best


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    """Apply a norm to vectors [..., n]."""
    if norm.kind == NormKind.NONE:
        return x
    assert norm.weight is not None
    centered = x - x.mean(-1, keepdim=True) if norm.kind == NormKind.LAYER else x
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    shifted: Tensor = y if norm.bias is None else y + norm.bias
    return shifted


def activation_of(function: Any, name: str) -> Activation:
    """Determine which of the known activations a module or function is.

    Raises:
        DescriptionError: none of them.
    """
    x = torch.linspace(-6, 6, 97, dtype=torch.float32, device="cpu")
    y = _evaluate(function, x, name)
    for activation, known in ACTIVATIONS.items():
        if relative_error(known(x), y) < 1e-6:
            return activation
    raise DescriptionError(f"{name} is {type(function).__name__}, not a supported activation")


def embedding_scale(module: Any, matrix: Matrix, name: str) -> float:
    """The factor that an embedding applies to the rows of `matrix`.

    Raises:
        DescriptionError: it does more than scale its rows.
    """
    scale = getattr(module, "embed_scale", 1.0)
    if isinstance(scale, Tensor):
        scale = scale.to(module.dtype if hasattr(module, "tiles") else module.weight.dtype)
    scale = float(scale)
    ids = torch.tensor([0, matrix.rows - 1], device="cpu")
    if matrix.kind in DTYPES.values():
        rows = matrix.weights[ids].float()
    else:
        rows = gather(matrix.weights, matrix.kind, matrix.rows, matrix.columns, ids, "float32")
    if not relative_error(_evaluate(module, ids, name), rows * scale) < 1e-2:
        raise DescriptionError(f"{name} is a {type(module).__name__} that does more than scale its rows")
    return scale


def rope_of(rotary: Any, layer_type: str | None, attention: Any, size: int, name: str) -> Rope:
    """Frequencies, scale and form of a rotary embedding.

    Args:
        rotary: a rotary embedding of transformers.
        layer_type: type of the layer, if the embedding distinguishes several.
        attention: the module that applies it.
        size: of a head.
        name: of `attention`, for the message.

    Raises:
        DescriptionError: it does not rotate in a known form by fixed angles per position.
    """
    prefix, kind = "", rotary.rope_type
    layer_args: tuple[str, ...] = ()
    if isinstance(kind, dict):
        if layer_type is None or layer_type not in kind:
            raise DescriptionError(f"{name} is in a layer without rotary positions")
        prefix, kind, layer_args = f"{layer_type}_", kind[layer_type], (layer_type,)
    # "original" frequencies stay the same while a long text is processed
    angles = getattr(rotary, f"{prefix}original_inv_freq", getattr(rotary, f"{prefix}inv_freq", None))
    if angles is None or angles.device.type != "cpu":
        raise DescriptionError(f"{type(rotary).__name__} has no angles per position on the CPU")
    scale = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    frequencies = angles.detach().float().contiguous()
    if getattr(attention, "rotary_ndims", 2 * len(frequencies)) != 2 * len(frequencies):
        raise DescriptionError(
            f"{name} rotates {attention.rotary_ndims} elements, its table has {2 * len(frequencies)}"
        )
    if 2 * len(frequencies) > size:
        raise DescriptionError(f"{name} rotates {2 * len(frequencies)} of {size} elements")
    positions = torch.tensor([_TEST_POSITIONS], device="cpu")
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device="cpu"), positions, *layer_args)
    table = torch.outer(positions[0].float(), frequencies)
    rotations = torch.cat((table.cos(), table.sin()), -1)
    if not any(
        pairs(rotations).shape == torch.cat((cos, sin), -1)[0].shape
        and relative_error(pairs(rotations) * scale, torch.cat((cos, sin), -1)[0]) < 1e-5
        for pairs in (_as_halves, _as_neighbours)
    ):
        raise DescriptionError(f"{type(rotary).__name__} computes angles that differ from its frequencies")
    order = _rotated_order(attention, cos, sin, rotations * scale, size)
    if order is None:
        raise DescriptionError(f"{name} does not rotate in a known form")
    return Rope(frequencies, scale, kind in _FIXED_ROPE_TYPES, None if order.diff().eq(1).all() else order.int())


def _as_halves(rotations: Tensor) -> Tensor:
    """Cosines and sines [n, Drot], one for each pair of elements, as a table that repeats them for the second half."""
    return torch.cat([half.repeat(1, 2) for half in rotations.chunk(2, -1)], -1)


def _as_neighbours(rotations: Tensor) -> Tensor:
    """The same as a table that repeats each number at once."""
    return rotations.repeat_interleave(2, -1)


def _rotated_order(attention: Any, cos: Tensor, sin: Tensor, rotations: Tensor, size: int) -> Tensor | None:
    """The order [size] int64 in which `apply_rotary_pos_emb` in an attention's module rotates halves, None for none."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return None
    inverse = rotations * torch.tensor([1.0, -1.0]).repeat_interleave(rotations.shape[-1] // 2)
    for count in dict.fromkeys((size, rotations.shape[-1])):  # attentions may cut heads before
        x = (torch.arange(len(rotations) * count, dtype=torch.float32, device="cpu") * 0.9).sin().view(1, 1, -1, count)
        try:
            query, key = apply(x, x, cos, sin)
        except (TypeError, ValueError, RuntimeError, IndexError):
            continue
        for order in dimension_orders(count, rotations.shape[-1]):
            expected = rotate_back(x[..., order], inverse)
            if all(relative_error(y[..., order], expected) < 1e-5 for y in (query, key) if y.shape == x.shape):
                return torch.cat((order, torch.arange(count, size)))
    return None


@torch.no_grad()
def _evaluate(function: Any, x: Tensor, name: str) -> Tensor:
    """Evaluate a module on a test input, in float32."""
    try:
        y = function(x)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DescriptionError(f"{name}, a {type(function).__name__}, cannot be evaluated: {error}") from error
    if not isinstance(y, Tensor):
        raise DescriptionError(f"{name}, a {type(function).__name__}, does not return one tensor")
    return y.float()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference relative to the largest expected magnitude."""
    if actual.shape != expected.shape:
        return torch.inf
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))

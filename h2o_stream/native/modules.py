"""What single modules of a model compute: linear layers, norms, activations, embeddings, rotary embeddings.

Where classes differ in name only, a module is asked rather than looked up: it is given a few numbers, and what it makes
of them tells a layer norm from an RMS norm, w from 1 + w, and one GELU from another.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.native.abi import Activation, MatrixKind, NormKind
from h2o_stream.native.description import DescriptionError, Matrix, Norm, Rope
from h2o_stream.native.packing import gather

DTYPES = {torch.float32: MatrixKind.FLOAT32, torch.bfloat16: MatrixKind.BFLOAT16}
"""Weights that are used as they are."""

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: functional.gelu,
    Activation.RELU: functional.relu,
}

_EPSILONS = (1e-5, 1e-6)
"""Of norms that do not say."""

_FIXED_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Kinds of RoPE whose frequencies do not change with the length of the text."""

_FEW_POSITIONS = (0, 1, 5)


_HARMLESS_HOOKS = "transformers.utils.output_capturing"
"""Hooks that do nothing unless hidden states are asked for; transformers never takes them off."""


def check_module(name: str, module: Any) -> None:
    """Whether calling a module is calling the forward of its class, on the CPU and without chance.

    Raises:
        DescriptionError: it is hooked, patched, offloaded, not of a library, or drops at random.
    """
    kind = type(module).__name__
    if hasattr(module, "_hf_hook"):
        raise DescriptionError(f"{name} has a hook of accelerate")
    if has_active_hooks(module._forward_hooks) or has_active_hooks(module._forward_pre_hooks):
        raise DescriptionError(f"{name} has a forward hook")
    if "forward" in vars(module):
        raise DescriptionError(f"{name} has a forward put in place of its class's")
    home = type(module).forward.__module__.partition(".")[0]
    if home not in ("torch", "transformers", "h2o_stream"):
        raise DescriptionError(f"{name} is a {kind}, whose forward is of {home}")
    if any(tensor.device.type != "cpu" for tensor in module.parameters(recurse=False)):
        raise DescriptionError(f"{name} has weights that are not on the CPU")
    if module.training and uses_dropout(module):
        raise DescriptionError(f"{name} drops at random in training mode; call model.eval()")


def has_active_hooks(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks among these that may do something."""
    return any(getattr(hook, "__module__", None) != _HARMLESS_HOOKS for hook in hooks.values())


def uses_dropout(module: Any) -> bool:
    """Whether a module drops at random in training mode."""
    dropping = (value for key, value in vars(module).items() if "drop" in key or key == "p")
    return any(isinstance(value, float | int) and value > 0 for value in dropping)


def matrix_of(module: Any, name: str) -> Matrix:
    """The weights of a linear layer, where they lie.

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
        return _dense(module.weight, module.bias, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where a linear layer is expected")


def embedding_of(module: Any, name: str) -> Matrix:
    """The rows of an embedding, where they lie: one for each token.

    Args:
        module: an `nn.Embedding`, or one that holds packed `tiles` of a `kind`.
        name: for the message.

    Raises:
        DescriptionError: it is neither, or its weights are not contiguous float32 or bfloat16.
    """
    if hasattr(module, "tiles"):
        return Matrix(raw_tensor(module.tiles, name), None, module.num_embeddings, module.embedding_dim, module.kind)
    if isinstance(module, nn.Embedding):
        return _dense(module.weight, None, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where an embedding is expected")


def _dense(weights: Tensor, bias: Tensor | None, name: str) -> Matrix:
    if weights.dtype not in DTYPES:
        raise DescriptionError(f"{name} has weights of {str(weights.dtype).removeprefix('torch.')}")
    rows, columns = weights.shape
    return Matrix(raw_tensor(weights, name), as_float32(bias, name), rows, columns, DTYPES[weights.dtype])


def raw_tensor(tensor: Tensor, name: str) -> Tensor:
    """The same memory as a tensor without gradient.

    Raises:
        DescriptionError: it is of a subclass, elsewhere than on the CPU or not contiguous.
    """
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise DescriptionError(f"{name} has weights in a {type(tensor).__name__}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise DescriptionError(f"{name} has weights that are not contiguous on the CPU")
    return tensor.detach()


def as_float32(tensor: Tensor | None, name: str) -> Tensor | None:
    """A small tensor in float32: itself, or a copy."""
    return None if tensor is None else raw_tensor(tensor, name).float()


def norm_of(module: Any, size: int, name: str) -> Norm:
    """What a norm over `size` numbers computes.

    Raises:
        DescriptionError: neither a layer norm nor an RMS norm, of this size.
    """
    weight, bias = as_float32(getattr(module, "weight", None), name), as_float32(getattr(module, "bias", None), name)
    one = torch.ones(size)
    if any(tensor is not None and tensor.shape != one.shape for tensor in (weight, bias)):
        raise DescriptionError(f"{name} is a {type(module).__name__} that does not norm {size} numbers")
    found = (getattr(module, key, None) for key in ("eps", "variance_epsilon", "epsilon"))
    epsilons = [float(value) for value in found if value is not None][:1] or _EPSILONS
    dtype = getattr(module, "weight", one).dtype if weight is not None else torch.float32
    wave = (torch.arange(size) * 1.7).cos() + 0.3
    x = torch.stack((wave, wave * 1e-3)).to(dtype)
    expected = _asked(module, x, name)
    best, least = Norm(), torch.tensor(torch.inf)
    for kind, epsilon in itertools.product((NormKind.RMS, NormKind.LAYER), epsilons):
        for factor in (one,) if weight is None else (weight, 1 + weight):
            candidate = Norm(kind, factor.contiguous(), bias, epsilon)
            error = _distance(apply_norm(candidate, x.float()), expected)
            if error < least:
                best, least = candidate, error
    if not least < (1e-4 if dtype == torch.float32 else 3e-2):
        raise DescriptionError(f"{name} is a {type(module).__name__}, neither a layer norm nor an RMS norm")
    return best


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    """The norm of vectors [..., n]."""
    if norm.kind == NormKind.NONE:
        return x
    assert norm.weight is not None
    centered = x - x.mean(-1, keepdim=True) if norm.kind == NormKind.LAYER else x
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    return y if norm.bias is None else y + norm.bias


def apply_activation(activation: Activation, x: Tensor) -> Tensor:
    """An activation of numbers."""
    return _ACTIVATIONS[activation](x)


def activation_of(function: Any, name: str) -> Activation:
    """Which of the known activations a module or function is.

    Raises:
        DescriptionError: none of them.
    """
    x = torch.linspace(-6, 6, 97)
    y = _asked(function, x, name)
    for activation, known in _ACTIVATIONS.items():
        if _distance(known(x), y) < 1e-6:
            return activation
    raise DescriptionError(f"{name} is {type(function).__name__}, not an activation that is known here")


def embedding_scale(module: Any, matrix: Matrix, name: str) -> float:
    """The factor by which an embedding multiplies its rows, those of `matrix`.

    Raises:
        DescriptionError: it does something else to them.
    """
    scale = getattr(module, "embed_scale", 1.0)
    if isinstance(scale, Tensor):
        scale = scale.to(module.dtype if hasattr(module, "tiles") else module.weight.dtype)
    scale = float(scale)
    ids = torch.tensor([0, matrix.rows - 1])
    if matrix.kind in DTYPES.values():
        rows = matrix.weights[ids].float()
    else:
        rows = gather(matrix.weights, matrix.kind, matrix.columns, ids, torch.float32)
    if not _distance(_asked(module, ids, name), rows * scale) < 1e-2:
        raise DescriptionError(f"{name} is a {type(module).__name__} that does more than scale its rows")
    return scale


def rope_of(rotary: Any, layer_type: str | None, attention: Any, name: str) -> Rope:
    """Angles and scale of a rotary embedding.

    Args:
        rotary: of transformers.
        layer_type: of the layer, where the embedding has several kinds of layers.
        attention: the module that applies it.
        name: of `attention`, for the message.

    Raises:
        DescriptionError: it does not rotate in the rotate-half form by fixed angles per position.
    """
    prefix, kind = "", rotary.rope_type
    which: tuple[str, ...] = ()
    if isinstance(kind, dict):
        if layer_type is None or layer_type not in kind:
            raise DescriptionError(f"{name} is in a layer without rotary positions")
        prefix, kind, which = f"{layer_type}_", kind[layer_type], (layer_type,)
    # What is called original is not exchanged while a long text is fed.
    angles = getattr(rotary, f"{prefix}original_inv_freq", getattr(rotary, f"{prefix}inv_freq", None))
    if angles is None or angles.device.type != "cpu":
        raise DescriptionError(f"{type(rotary).__name__} has no angles per position on the CPU")
    scale = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    frequencies = angles.detach().float().contiguous()
    if getattr(attention, "rotary_ndims", 2 * len(frequencies)) != 2 * len(frequencies):
        raise DescriptionError(f"{name} rotates {attention.rotary_ndims} numbers, its table has {2 * len(frequencies)}")
    positions = torch.tensor([_FEW_POSITIONS])
    cos, sin = rotary(torch.zeros(1), positions, *which)
    turned = torch.outer(torch.tensor(_FEW_POSITIONS, dtype=torch.float32), frequencies).repeat(1, 2)
    if cos.shape[1:] != turned.shape or not (
        _distance(turned.cos() * scale, cos[0]) < 1e-5 and _distance(turned.sin() * scale, sin[0]) < 1e-5
    ):
        raise DescriptionError(f"{type(rotary).__name__} gives other angles than its frequencies say")
    if not _rotates_halves(attention, cos, sin):
        raise DescriptionError(f"{name} does not rotate in the rotate-half form")
    return Rope(frequencies, scale, kind in _FIXED_ROPE)


def _rotates_halves(attention: Any, cos: Tensor, sin: Tensor) -> bool:
    """Whether the function that applies rotations beside an attention's class does it half by half."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    x = (torch.arange(cos[0].numel()) * 0.9).sin().view(1, 1, *cos.shape[1:])
    half = x.shape[-1] // 2
    expected = x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
    try:
        query, key = apply(x, x, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return all(y.shape == x.shape and bool(_distance(expected, y) < 1e-5) for y in (query, key))


@torch.no_grad()
def _asked(function: Any, x: Tensor, name: str) -> Tensor:
    """What a module makes of some numbers, in float32."""
    try:
        y = function(x)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DescriptionError(f"{name}, a {type(function).__name__}, cannot be tried: {error}") from error
    if not isinstance(y, Tensor):
        raise DescriptionError(f"{name}, a {type(function).__name__}, does not give one tensor")
    return y.float()


def _distance(given: Tensor, expected: Tensor) -> Tensor:
    """Largest difference of any number, relative to the largest number."""
    if given.shape != expected.shape:
        return torch.tensor(torch.inf)
    return (given - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)

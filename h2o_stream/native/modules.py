"""What individual modules compute: linear layers, norms, activations, embeddings.

Modules are evaluated on test inputs rather than recognized by class: that distinguishes layer norm from RMS norm, w
from 1 + w, and one GELU from another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.native.abi import Activation, MatrixKind, NormKind
from h2o_stream.native.description import DescriptionError, Matrix, Norm
from h2o_stream.native.pointers import dtype_name
from h2o_stream.native.probing import evaluate, in_more_bits, only_match

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

_HARMLESS_HOOKS = "transformers.utils.output_capturing"
"""Hooks that do nothing unless hidden states are requested; transformers never removes them."""


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
    linear = _linear_in(module)
    if linear is not None:
        return dense_matrix(linear.weight, linear.bias, name)
    raise DescriptionError(f"{name} is a {type(module).__name__} where a linear layer is expected")


def _linear_in(module: Any) -> nn.Linear | None:
    """A plain linear layer, or that in a module that does nothing else."""
    if type(module) is nn.Linear:
        return module
    children = [*module.children()]
    if len(children) != 1 or type(children[0]) is not nn.Linear or any(module.parameters(recurse=False)):
        return None
    linear = children[0]
    x = torch.linspace(-1, 1, linear.in_features, dtype=linear.weight.dtype, device="cpu")[None]
    return linear if evaluate(module, x, "a linear layer").equal(evaluate(linear, x, "a linear layer")) else None


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
        DescriptionError: the weights are not contiguous float32 or bfloat16.
    """
    if weights.dtype not in DTYPES:
        raise DescriptionError(f"{name} has weights of {dtype_name(weights.dtype)}")
    rows, columns = weights.shape
    return Matrix(raw_tensor(weights, name), as_float32(bias, name), rows, columns, DTYPES[weights.dtype])


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


def norm_of(module: Any, size: int, name: str) -> Norm:
    """Determine what a norm over `size` elements computes.

    Raises:
        DescriptionError: it is neither a layer norm nor an RMS norm of this size.
    """
    weight, bias = as_float32(getattr(module, "weight", None), name), as_float32(getattr(module, "bias", None), name)
    device = "cpu" if weight is None else weight.device
    one = torch.ones(size, dtype=torch.float32, device=device)
    if any(tensor is not None and tensor.shape != one.shape for tensor in (weight, bias)):
        raise DescriptionError(f"{name} is a {type(module).__name__} that does not normalize {size} elements")
    attributes = (getattr(module, key, None) for key in ("eps", "variance_epsilon", "epsilon"))
    epsilons = [float(value) for value in attributes if value is not None][:1] or _EPSILONS
    values = (torch.arange(size, dtype=torch.float64, device=device) * 1.7).cos() + 0.3
    x = torch.stack((values, values * 1e-3))
    factors = (one,) if weight is None else (weight, 1 + weight)
    candidates = [
        Norm(kind, factor.contiguous(), bias, epsilon)
        for kind, epsilon, factor in itertools.product((NormKind.RMS, NormKind.LAYER), epsilons, factors)
    ]
    return only_match(
        ((candidate, apply_norm(candidate, x)) for candidate in candidates),
        evaluate(in_more_bits(module), x, name),
        name,
        f"is a {type(module).__name__}, neither a layer norm nor an RMS norm",
    )


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    """Apply a norm to vectors [..., n]."""
    if norm.kind == NormKind.NONE:
        return x
    assert norm.weight is not None
    centered = x - x.mean(-1, keepdim=True) if norm.kind == NormKind.LAYER else x
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight
    shifted: Tensor = y if norm.bias is None else y + norm.bias
    return shifted


def activation_of(function: Any, name: str) -> tuple[Activation, tuple[float, ...]]:
    """Which activation a module or function is, and its parameters; raises DescriptionError if it is unknown."""
    x = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
    y, problem = evaluate(in_more_bits(function), x, name), f"is {type(function).__name__}, not a supported activation"
    if all(hasattr(function, key) for key in ("alpha_p", "alpha_n", "beta", "eps")):
        alphas = [functional.softplus(x.detach().float()) for x in (function.alpha_p, function.alpha_n)]
        beta, most = float(function.beta), float(function.eps)
        parameters = float(alphas[0]), float(alphas[1]) + beta, beta, most
        return Activation.XIELU, only_match([(parameters, xielu(parameters, x))], y, name, problem)
    return only_match(((kind, known(x)) for kind, known in ACTIVATIONS.items()), y, name, problem), ()


def xielu(parameters: Sequence[float], x: Tensor) -> Tensor:
    """XIELU with the parameters that `Activation` in `abi.h` lists."""
    positive, negative, slope, most = parameters
    below = (torch.expm1(x.clamp_max(most)) - x) * negative
    return torch.where(x > 0, positive * x * x, below) + slope * x


def gated(activation: Activation, parameters: Sequence[float], gate: Tensor, up: Tensor) -> Tensor:
    """The input of an MLP's `down`."""
    if activation == Activation.CLAMPED_SWIGLU:
        slope, limit, offset = parameters
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
        return gate * (gate * slope).sigmoid() * (up + offset)
    return (xielu(parameters, gate) if activation == Activation.XIELU else ACTIVATIONS[activation](gate)) * up


def gate_deviations(sparsity: float) -> float | None:
    """Standard deviations above their mean that this share of normally distributed gates is below; None for no gate."""
    normal = torch.distributions.Normal(0.0, 1.0)
    return float(normal.icdf(torch.tensor(sparsity, dtype=torch.float32, device="cpu"))) if sparsity > 0 else None


def clamped_gates_of(module: Any) -> tuple[Activation, tuple[float, ...]] | None:
    """The activation of clamped gates and its parameters, see `abi.h`, if a module says them; None if it says none."""
    slope, limit = (
        next((float(getattr(module, key)) for key in keys if isinstance(getattr(module, key, None), int | float)), 0.0)
        for keys in (("alpha", "swiglu_alpha"), ("limit", "swiglu_limit"))
    )
    return (Activation.CLAMPED_SWIGLU, (slope, limit, 1.0)) if slope and limit else None


def embedding_scale(module: Any) -> float:
    """The factor that an embedding applies to its rows."""
    scale = getattr(module, "embed_scale", 1.0)
    if isinstance(scale, Tensor):
        scale = scale.to(module.dtype if hasattr(module, "tiles") else module.weight.dtype)
    return float(scale)

"""What individual modules compute: norms, activations, embeddings.

Modules are evaluated on test inputs rather than recognized by class: that distinguishes layer norm from RMS norm, w
from 1 + w, and one GELU from another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream.native.abi import Activation, NormKind
from h2o_stream.native.description import DescriptionError, Norm
from h2o_stream.native.probing import evaluate, in_more_bits, only_match
from h2o_stream.native.torch_modules import as_float32

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: functional.gelu,
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
}

_EPSILONS = (1e-5, 1e-6)
"""For norms that have no such attribute."""


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

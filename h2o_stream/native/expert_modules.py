"""What a block of experts computes.

As for other modules (`modules`), names say where weights are; what they are used for is found out by evaluating the
block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.native import layouts
from h2o_stream.native.abi import Activation, GateLayout, MatrixKind
from h2o_stream.native.description import DescriptionError, Matrix, Mlp
from h2o_stream.native.experts import BesideMlp, Experts, Router, halves_of
from h2o_stream.native.modules import activation_of, clamped_gates_of, gated
from h2o_stream.native.probing import only_match
from h2o_stream.native.router_modules import (
    RouterModule,
    expert_weights,
    first_output,
    inputs_of,
    named_tensors,
    router_of,
    tolerance_of,
)
from h2o_stream.native.torch_modules import as_float32, dense_matrix, matrix_of, raw_tensor

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_SPLIT, _FUSED = ("gate_proj", "up_proj", "down_proj"), "gate_up_proj"
_STACKED = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))
_SHARED_GATE = "shared_expert_gate"

_FED = [*range(4), *range(-4, 0)]
"""The random inputs that are fed to a whole block: some with large logits, and some with small ones."""

_COLUMNS = {
    MatrixKind.FLOAT32: MatrixKind.FLOAT32_COLUMNS,
    MatrixKind.BFLOAT16: MatrixKind.BFLOAT16_COLUMNS,
}


def has_experts(module: Any) -> bool:
    """Whether a module is a block of experts, of a kind that `experts_of` may know."""
    experts = getattr(module, "experts", None)
    stacked = any(all(isinstance(getattr(experts, key, None), nn.Parameter) for key in names) for names in _STACKED)
    return stacked or _is_split(experts)


def _is_split(experts: Any) -> bool:
    """Whether experts are packed linear layers, see `models.packed_experts`."""
    return hasattr(getattr(experts, _SPLIT[-1], None), "tiles")


@torch.no_grad()
def experts_of(module: Any, name: str, mlp_of: Callable[[Any], Mlp], beside: Any = None) -> Experts:
    """Determine what a block of experts computes; weights are not copied.

    `mlp_of` describes a shared expert; `beside` is one that is not in the module, whose output is added to its.

    Raises:
        DescriptionError: it computes something else, or has other weights.
    """
    experts, router = module.experts, RouterModule(module, f"the router of {name}")
    shared = _part(module, _SHARED)
    shared_gate = getattr(module, _SHARED_GATE, None)
    dtype = router.weight.dtype if _is_split(experts) else experts.down_proj.dtype
    described = _described(experts, router_of(router, dtype), name)
    described = replace(
        described,
        shared=None if shared is None and beside is None else mlp_of(beside if shared is None else shared),
        shared_gate=None if shared_gate is None else matrix_of(shared_gate, f"{_SHARED_GATE} of {name}"),
    )
    within = (shared, shared_gate, experts, getattr(module, layouts.AFTER_EXPERTS, None))
    read = {id(tensor) for part in within if part is not None for _, tensor in named_tensors(part)}
    read |= {id(tensor) for tensor in (router.weight, router.bias, router.choice_bias)}
    if unknown := next((key for key, tensor in named_tensors(module) if id(tensor) not in read), None):
        raise DescriptionError(f"{name} has the parameter {unknown} in its {type(module).__name__}")
    x = inputs_of(described.router, dtype)[_FED]
    candidates = _candidates(described, float(getattr(module, "routed_scaling_factor", None) or 1.0), x)
    problem = f"has a {type(module).__name__} that computes something else than known experts"

    def computed(candidate: Experts) -> Tensor:
        y = _apply(candidate, module, x, shared)
        norm = getattr(module, layouts.AFTER_EXPERTS, None)
        return y if norm is None else norm(y.to(dtype)).float()

    pairs = ((candidate, computed(candidate)) for candidate in candidates)
    return only_match(pairs, first_output(module, x, name), name, problem, tolerance_of(dtype))


def _candidates(experts: Experts, scale: float, x: Tensor) -> Iterator[Experts]:
    """What a block may do with the weights of its router for inputs x [n, hidden].

    It may scale them, and not the router; and apply them to what goes into experts, if they are not all 1.
    """
    weights = expert_weights(experts.router, x)
    can_weigh = experts.gate is not None and experts.gate.bias is None and bool((weights[weights != 0] != 1).any())
    for factor, weighed in itertools.product(dict.fromkeys((1.0, scale)), (False, True) if can_weigh else (False,)):
        router = replace(experts.router, scale=experts.router.scale * factor, weighs_inputs=weighed)
        yield replace(experts, router=router)


@torch.no_grad()
def experts_beside(layer: Any, name: str, norms: BesideMlp, mlp: Mlp) -> Experts:
    """The same for experts beside the MLP of a layer, see `layouts.BESIDE`; the router's norm has no scale."""
    experts, router = layer.experts, RouterModule(layer, f"the router of {name}")
    scale = as_float32(layer.router.scale, name)
    assert scale is not None
    assert norms.router.weight is not None
    weight = norms.router.weight * scale * float(layer.router.scalar_root_size)
    norms = replace(norms, router=replace(norms.router, weight=weight.contiguous()))
    dtype = router.weight.dtype if _is_split(experts) else experts.down_proj.dtype
    described = _described(experts, router_of(router, dtype, norms.router), name)
    weights = {"proj.weight", "scale", "per_expert_scale", "norm.weight"}
    if unknown := next((key for key, _ in named_tensors(layer.router) if key not in weights), None):
        raise DescriptionError(f"{name} has the parameter {unknown} in its {type(layer.router).__name__}")
    return replace(described, shared=mlp, beside=norms)


def _described(experts: Any, router: Router, name: str) -> Experts:
    """Experts without shared ones."""
    count = router.matrix.rows
    if hasattr(experts, "act_fn"):
        activation, parameters = activation_of(experts.act_fn, f"act_fn of {name}")
    elif found := clamped_gates_of(experts):
        activation, parameters = found
    else:
        raise DescriptionError(f"{name} has gates of an unknown kind in its {type(experts).__name__}")
    if _is_split(experts):
        fused = hasattr(experts, _FUSED)
        keys = [_FUSED, _SPLIT[-1]] if fused else [key for key in _SPLIT if hasattr(experts, key)]
        *gates, up, down = (matrix_of(getattr(experts, key), f"{key} of {name}") for key in keys)
        if fused:
            halves, inner = halves_of(up, down.columns), down.columns
            return Experts(router, *halves, down, inner, 2 * inner, activation, parameters=parameters)
        gate, inner = gates[0] if gates else None, down.columns
        return Experts(router, gate, up, down, inner, inner, activation, parameters=parameters)
    if not hasattr(experts, "gate_up_proj"):
        up, down = (dense_matrix(getattr(experts, key).flatten(0, 1), None, f"{key} of {name}") for key in _STACKED[1])
        return Experts(router, None, up, down, down.columns, down.columns, activation, parameters=parameters)
    biases = [getattr(experts, f"{key}_bias", None) for key in ("gate_up_proj", "down_proj")]
    flat = [None if bias is None else as_float32(bias.flatten(), name) for bias in biases]
    hidden, transposed = router.matrix.columns, getattr(experts, "is_transposed", False)
    if transposed or experts.down_proj.shape[1:] != (hidden, experts.gate_up_proj.shape[1] // 2):
        both = _columns(experts.gate_up_proj, flat[0], f"gate_up_proj of {name}")
        down = _columns(experts.down_proj, flat[1], f"down_proj of {name}")
        inner = down.columns
        layout = GateLayout.HALVES if _concatenated(experts) else GateLayout.IN_TURNS
        return Experts(
            router, both, None, down, inner, 2 * inner, activation, parameters=parameters, gate_layout=layout
        )
    both = dense_matrix(experts.gate_up_proj.flatten(0, 1), flat[0], f"gate_up_proj of {name}")
    down = dense_matrix(experts.down_proj.flatten(0, 1), flat[1], f"down_proj of {name}")
    inner = down.columns
    if both.rows != 2 * inner * count:
        raise DescriptionError(f"{name} has {count} experts with {both.rows} rows for {inner} columns")
    return Experts(router, *halves_of(both, inner), down, inner, 2 * inner, activation, parameters=parameters)


def _columns(weights: Tensor, bias: Tensor | None, name: str) -> Matrix:
    """Stacked matrices [experts, columns, rows] as one whose columns follow one another within each expert."""
    count, columns, rows = weights.shape
    matrix = dense_matrix(raw_tensor(weights, name).view(count * rows, columns), bias, name)
    return replace(matrix, kind=_COLUMNS[matrix.kind])


def _concatenated(experts: Any) -> bool:
    """Whether all gate rows come first, rather than interleaved with the up rows."""
    return bool(getattr(experts, "is_concatenated", True))


def _part(module: Any, names: Iterable[str]) -> Any:
    """The first module of these names, if there is one."""
    return next(filter(None, (getattr(module, name, None) for name in names)), None)


def _apply(experts: Experts, module: Any, x: Tensor, shared: Any) -> Tensor:
    """What a description computes of inputs [n, hidden], in float32."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    weights, weighed = expert_weights(experts.router, x), experts.router.weighs_inputs
    for token, index in weights.nonzero().tolist():
        weight = weights[token, index]
        read = (x[token] * weight).to(x.dtype) if weighed else x[token]
        y[token] += (1.0 if weighed else weight) * _apply_expert(experts, module.experts, index, read).float()
    if shared is not None:
        gate = getattr(module, _SHARED_GATE, None)
        y += shared(x).float() * (1.0 if gate is None else gate(x).float().sigmoid())
    return y


def _apply_expert(experts: Experts, module: Any, index: int, x: Tensor) -> Tensor:
    activation: tuple[Activation, tuple[float, ...]] = experts.activation, experts.parameters
    if _is_split(module):
        *first, down = module.expert(index)
        parts = [layer(x[None]) for layer in first]
        if len(parts) == 1 and experts.gate:
            parts = [*parts[0].chunk(2, -1)]
        gate, up = parts if experts.gate else (parts[0], torch.ones((), device=x.device))
        outputs: Tensor = down(gated(*activation, gate, up))[0]
        return outputs
    if experts.gate is None:
        inner = gated(*activation, functional.linear(x, module.up_proj[index]), torch.ones((), device=x.device))
        return functional.linear(inner.to(x.dtype), module.down_proj[index])
    weights = [module.gate_up_proj[index], module.down_proj[index]]
    if experts.gate_layout != GateLayout.APART:
        weights = [weight.T for weight in weights]
    biases = [getattr(module, f"{key}_bias", None) for key in ("gate_up_proj", "down_proj")]
    first, second = (None if bias is None else bias[index] for bias in biases)
    both = functional.linear(x, weights[0], first)
    halves = both.unflatten(-1, (-1, 2)).unbind(-1) if experts.gate_layout == GateLayout.IN_TURNS else both.chunk(2, -1)
    return functional.linear(gated(*activation, *halves).to(x.dtype), weights[1], second)

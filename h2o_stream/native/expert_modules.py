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

from h2o_stream.native.abi import Scoring
from h2o_stream.native.description import DescriptionError, Matrix, Mlp
from h2o_stream.native.experts import Experts, Router
from h2o_stream.native.modules import (
    ACTIVATIONS,
    activation_of,
    as_float32,
    dense_matrix,
    matrix_of,
    relative_error,
)

_ROUTERS = ("gate", "router")
_SHARED = ("shared_expert", "shared_experts")
_SPLIT = ("gate_proj", "up_proj", "down_proj")
_STACKED = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))
_SHARED_GATE = "shared_expert_gate"
_CHOICE_BIAS = "e_score_correction_bias"

_SAMPLED, _ROUTED, _FED = 512, 8, 2
"""Random inputs, how many of them a router is evaluated on, and how many all of a block."""


def has_experts(module: Any) -> bool:
    """Whether a module is a block of experts, of a kind that `experts_of` may know."""
    experts = getattr(module, "experts", None)
    stacked = any(all(isinstance(getattr(experts, key, None), nn.Parameter) for key in names) for names in _STACKED)
    return (stacked or _is_split(experts)) and hasattr(experts, "act_fn")


def _is_split(experts: Any) -> bool:
    """Whether experts are packed linear layers, see `models.packed_experts`."""
    return all(hasattr(getattr(experts, name, None), "tiles") for name in _SPLIT)


@torch.no_grad()
def experts_of(module: Any, name: str, mlp_of: Callable[[Any], Mlp]) -> Experts:
    """Determine what a block of experts computes; weights are not copied.

    Args:
        module: of which `has_experts` holds.
        name: for the message.
        mlp_of: describes a shared expert.

    Raises:
        DescriptionError: it computes something else, or has other weights.
    """
    experts, router = module.experts, _part(module, _ROUTERS)
    weight = getattr(router, "weight", None)
    chosen = getattr(router, "top_k", getattr(module, "top_k", None))
    if not isinstance(weight, Tensor) or not isinstance(chosen, int):
        raise DescriptionError(f"{name} has a {type(module).__name__} with no known router")
    shared = _part(module, _SHARED)
    shared_gate = getattr(module, _SHARED_GATE, None)
    gate, up, down, stride = _matrices(experts, len(weight), name)
    dtype = weight.dtype if _is_split(experts) else experts.down_proj.dtype
    described = Experts(
        router=_router_of(router, chosen, dtype, f"the router of {name}"),
        gate=gate,
        up=up,
        down=down,
        inner_size=down.columns,
        stride=stride,
        activation=activation_of(experts.act_fn, f"act_fn of {name}"),
        shared=None if shared is None else mlp_of(shared),
        shared_gate=None if shared_gate is None else matrix_of(shared_gate, f"{_SHARED_GATE} of {name}"),
    )
    within = (shared, shared_gate, experts)
    read = {id(tensor) for part in within if part is not None for _, tensor in _tensors(part)}
    read |= {id(tensor) for tensor in (weight, getattr(router, "bias", None), _choice_bias(router))}
    if unknown := next((key for key, tensor in _tensors(module) if id(tensor) not in read), None):
        raise DescriptionError(f"{name} has the parameter {unknown} in its {type(module).__name__}")
    x = _inputs(described.router, dtype)[:_FED]
    expected = _first_output(module, x, name)
    if not relative_error(_apply(described, module, x), expected) < _tolerance(x.dtype):
        raise DescriptionError(f"{name} has a {type(module).__name__} that computes something else than known experts")
    return described


def _part(module: Any, names: Iterable[str]) -> Any:
    """The first module of these names, if there is one."""
    return next(filter(None, (getattr(module, name, None) for name in names)), None)


def _matrices(experts: Any, count: int, name: str) -> tuple[Matrix | None, Matrix, Matrix, int]:
    """Gate, if there is one, up and down of all experts, and the rows from one to the next of the former."""
    if _is_split(experts):
        gate, up, down = (matrix_of(getattr(experts, key), f"{key} of {name}") for key in _SPLIT)
        return gate, up, down, down.columns
    down = dense_matrix(experts.down_proj.flatten(0, 1), None, f"down_proj of {name}")
    if not hasattr(experts, "gate_up_proj"):
        return None, dense_matrix(experts.up_proj.flatten(0, 1), None, f"up_proj of {name}"), down, down.columns
    both = dense_matrix(experts.gate_up_proj.flatten(0, 1), None, f"gate_up_proj of {name}")
    inner, rows = down.columns, both.rows - down.columns
    if both.rows != 2 * inner * count:
        raise DescriptionError(f"{name} has {count} experts with {both.rows} rows for {inner} columns")
    return both.row_range(0, rows), both.row_range(inner, rows), down, 2 * inner


def _tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    yield from itertools.chain(module.named_parameters(), module.named_buffers())


def _choice_bias(router: Any) -> Tensor | None:
    return next((value for key, value in _tensors(router) if key.endswith(_CHOICE_BIAS)), None)


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 3e-2


def _router_of(module: Any, chosen: int, dtype: torch.dtype, name: str) -> Router:
    """Determine how a module chooses among experts, for inputs of `dtype`."""
    bias, scales = _choice_bias(module), {1.0, float(getattr(module, "routed_scaling_factor", None) or 1.0)}
    described = Router(
        matrix=dense_matrix(module.weight, getattr(module, "bias", None), name),
        chosen=chosen,
        scoring=Scoring.SOFTMAX,
        normalized=True,
        choice_bias=None if bias is None else as_float32(bias.reshape(-1), name),
    )
    best, smallest_error = described, torch.inf
    for scoring in Scoring:
        x = _inputs(replace(described, scoring=scoring), dtype)
        expected = _expert_weights(module, x, chosen, name)
        for normalized, scale in itertools.product((True, False), scales):
            candidate = replace(described, scoring=scoring, normalized=normalized, scale=scale)
            error = relative_error(_weights(candidate, x), expected)
            if error < smallest_error:
                best, smallest_error = candidate, error
    if not smallest_error < _tolerance(dtype):
        raise DescriptionError(f"{name} is a {type(module).__name__} that chooses in an unknown way")
    return best


def _expert_weights(module: Any, x: Tensor, chosen: int, name: str) -> Tensor:
    """[n, experts] float32: the weights that a router gives to the experts for inputs [n, hidden]."""
    outputs = _evaluate(module, x, name)
    found = [y for y in outputs if isinstance(y, Tensor) and y.shape == (len(x), chosen)]
    indices, weights = ([y for y in found if y.is_floating_point() == kind] for kind in (False, True))
    if len(indices) != 1 or len(weights) != 1:
        raise DescriptionError(f"{name} is a {type(module).__name__} that does not return experts and their weights")
    none = torch.zeros(len(x), len(module.weight), dtype=torch.float32, device="cpu")
    return none.scatter(-1, indices[0], weights[0].float())


def _weights(router: Router, x: Tensor) -> Tensor:
    """The same for a description."""
    scores = _scores(router, x)
    worths = scores if router.choice_bias is None else scores + router.choice_bias
    weights = torch.zeros_like(scores)
    indices = worths.topk(router.chosen, -1).indices
    weights.scatter_(-1, indices, scores.gather(-1, indices))
    return weights * router.scale / (weights.sum(-1, keepdim=True) if router.normalized else 1.0)


def _inputs(router: Router, dtype: torch.dtype) -> Tensor:
    """[n, hidden] inputs for which rounding does not change the choice."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn((_SAMPLED, router.matrix.columns), generator=random, device="cpu").to(dtype)
    scores = _scores(router, x)
    if router.choice_bias is not None:
        scores = scores + router.choice_bias
    ordered = scores.sort(-1, descending=True).values
    last, next_best = ordered[:, router.chosen - 1], ordered[:, router.chosen : router.chosen + 1].sum(-1)
    gaps = (last - next_best) / (last.abs() + next_best.abs())
    return x[gaps.argsort(descending=True)[:_ROUTED]]


def _scores(router: Router, x: Tensor) -> Tensor:
    """[n, experts] of inputs [n, hidden], in float32."""
    logits = functional.linear(x.float(), router.matrix.weights.float(), router.matrix.bias)
    return logits.sigmoid() if router.scoring == Scoring.SIGMOID else logits.softmax(-1)


def _apply(experts: Experts, module: Any, x: Tensor) -> Tensor:
    """What a description computes of inputs [n, hidden], in float32."""
    y = torch.zeros(x.shape, dtype=torch.float32, device="cpu")
    weights = _weights(experts.router, x)
    for token, index in weights.nonzero().tolist():
        y[token] += weights[token, index] * _apply_expert(experts, module.experts, index, x[token]).float()
    if (shared := _part(module, _SHARED)) is not None:
        gate = getattr(module, _SHARED_GATE, None)
        y += shared(x).float() * (1.0 if gate is None else gate(x).float().sigmoid())
    return y


def _apply_expert(experts: Experts, module: Any, index: int, x: Tensor) -> Tensor:
    activate = ACTIVATIONS[experts.activation]
    if _is_split(module):
        gate, up, down = module.expert(index)
        outputs: Tensor = down(activate(gate(x[None])) * up(x[None]))[0]
        return outputs
    if experts.gate is None:
        return functional.linear(activate(functional.linear(x, module.up_proj[index])), module.down_proj[index])
    first, second = functional.linear(x, module.gate_up_proj[index]).chunk(2, -1)
    return functional.linear(activate(first) * second, module.down_proj[index])


def _first_output(module: Any, x: Tensor, name: str) -> Tensor:
    """[n, hidden] float32, the output of a block that may have others."""
    first: Tensor = next(iter(_evaluate(module, x[None], name))).float()
    return first.reshape(x.shape)


def _evaluate(module: Any, x: Tensor, name: str) -> tuple[Any, ...]:
    """The outputs of a module."""
    try:
        y = module(x)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DescriptionError(f"{name}, a {type(module).__name__}, cannot be evaluated: {error}") from error
    return y if isinstance(y, tuple) else (y,)

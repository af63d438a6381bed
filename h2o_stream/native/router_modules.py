"""How a module chooses among experts, determined by evaluating it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_stream.native.abi import GroupWorth, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.experts import Router
from h2o_stream.native.matrix import NO_NORM, Norm
from h2o_stream.native.modules import apply_norm
from h2o_stream.native.probing import in_more_bits, only_match
from h2o_stream.native.torch_modules import as_float32, dense_matrix

_ROUTERS = ("gate", "router")
_CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")
_SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
_COUNTS = ("top_k", "num_experts_per_tok", "moe_topk", "top_k_experts")
_GROUPS, _CHOSEN_GROUPS = ("num_group", "n_group"), ("topk_group",)

_SAMPLED, _ROUTED = 512, 64
"""Random inputs, and how many of them a router is evaluated on."""

_LOGITS = (16.0, 1.0)
"""Largest logits of these inputs."""


class RouterModule:
    """The router of a block of experts, and its tensors.

    Raises:
        DescriptionError: there is none with one matrix, or it does not say how many experts it chooses.
    """

    def __init__(self, block: Any, name: str) -> None:
        self.name = name
        self.module = next(filter(None, (getattr(block, key, None) for key in _ROUTERS)), None)
        own = () if self.module is None else self.module.named_parameters()
        matrices = [x for key, x in own if x.dim() == 2 and not key.endswith(_CHOICE_BIASES)]
        chosen = self._setting(_COUNTS, block, self.module)
        if self.module is None or len(matrices) != 1 or not isinstance(chosen, int):
            raise DescriptionError(f"{name} is of no known kind in a {type(block).__name__}")
        self.weight, self.chosen = matrices[0], chosen
        tensors = [*named_tensors(self.module), *((key, x) for key, x in named_tensors(block) if key in _CHOICE_BIASES)]
        self.bias = next((x for key, x in tensors if key.rpartition(".")[2] == "bias"), None)
        self.factors = next((x for key, x in tensors if key == "per_expert_scale"), None)
        self.choice_bias = next((x for key, x in tensors if key.endswith(_CHOICE_BIASES)), None)
        scales = (getattr(part, key, None) for part in (self.module, block) for key in _SCALES)
        self.scales = list(dict.fromkeys((1.0, *(float(scale) for scale in scales if scale))))
        self.groups = int(self._setting(_GROUPS, self.module) or 0)
        self.chosen_groups = int(self._setting(_CHOSEN_GROUPS, self.module) or 0)
        self.jitter = float(getattr(self.module, "router_jitter_noise", None) or 0.0)

    @staticmethod
    def _setting(keys: Iterable[str], *parts: Any) -> Any:
        """The first of these attributes of these modules or their configs."""
        places = [place for part in parts for place in (part, getattr(part, "config", None))]
        values = (getattr(place, key, None) for place in places for key in keys)
        return next((value for value in values if value is not None), None)

    @cached_property
    def _precise(self) -> tuple[Any, Tensor | None]:
        """The module and its choice bias in float64."""
        return in_more_bits(self.module), None if self.choice_bias is None else self.choice_bias.double()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, experts] float64: the weights that it gives to the experts for inputs [n, hidden]."""
        (module, choice_bias), x = self._precise, x.double()
        try:
            outputs = module(x)
        except (TypeError, ValueError, RuntimeError, IndexError):
            try:
                outputs = module(x, choice_bias)
            except (TypeError, ValueError, RuntimeError, IndexError):
                outputs = evaluated(module, (x[None], choice_bias), self.name)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        tensors = [y for y in outputs if isinstance(y, Tensor)]
        of_chosen = [y for y in tensors if y.shape == (len(x), self.chosen)]
        indices, weights = ([y for y in of_chosen if y.is_floating_point() == kind] for kind in (False, True))
        shape = len(x), len(self.weight)
        if len(indices) == 1 and len(weights) == 1:
            none = torch.zeros(shape, dtype=torch.float64, device=x.device)
            return none.scatter(-1, indices[0], weights[0].double())
        for y in tensors:
            if y.shape == shape and bool((y != 0).sum(-1).eq(self.chosen).all()):
                return y.double()
        kind = type(self.module).__name__
        raise DescriptionError(f"{self.name} is a {kind} that does not return experts and their weights")


def router_of(module: RouterModule, dtype: torch.dtype, norm: Norm = NO_NORM) -> Router:
    """Determine how a module chooses among experts, for inputs of `dtype`, which it norms."""
    bias = module.choice_bias
    described = Router(
        matrix=dense_matrix(module.weight, module.bias, module.name),
        chosen=module.chosen,
        scoring=Scoring.SOFTMAX,
        normalized=True,
        choice_bias=None if bias is None else as_float32(bias.reshape(-1), module.name),
        jitter=module.jitter,
        factors=as_float32(module.factors, module.name),
    )
    problem = f"is a {type(module.module).__name__} that chooses in an unknown way"
    inputs = {scoring: inputs_of(replace(described, scoring=scoring), dtype) for scoring in Scoring}
    expected = torch.cat([module(x) for x in inputs.values()])
    x = torch.cat([apply_norm(norm, x.double()) for x in inputs.values()])
    candidates = ((candidate, expert_weights(candidate, x)) for candidate in _candidates(described, module))
    matched = only_match(candidates, expected, module.name, problem)
    return matched if matched.scoring == Scoring.SPARSE_MIXER else replace(matched, jitter=0.0)


def _candidates(described: Router, module: RouterModule) -> Iterator[Router]:
    """All ways in which a router may choose, no two of them the same."""
    grouped = [(0, 0, GroupWorth.BEST_ONE)]
    if module.groups > 1 and module.chosen_groups < module.groups:
        # By their best one, so many groups have all experts that would be chosen without groups.
        worths = [x for x in GroupWorth if x != GroupWorth.BEST_ONE or module.chosen_groups < module.chosen]
        grouped += [(module.groups, module.chosen_groups, worth) for worth in worths]
    for scoring, scale in itertools.product(Scoring, module.scales):
        if scoring == Scoring.SPARSE_MIXER:
            yield replace(described, scoring=scoring, normalized=False, scale=scale)
            continue
        sums_to_one = scoring == Scoring.SOFTMAX and module.chosen == described.matrix.rows
        for normalized, (groups, chosen, worth) in itertools.product(
            (True,) if sums_to_one else (True, False), grouped
        ):
            scaled = replace(described, scoring=scoring, scale=scale, normalized=normalized)
            yield replace(scaled, groups=groups, chosen_groups=chosen, group_worth=worth)


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest error of a description, relative to the largest number."""
    return 1e-4 if dtype == torch.float32 else 3e-2


def expert_weights(router: Router, x: Tensor) -> Tensor:
    """What `RouterModule` gives, for a description."""
    if router.scoring == Scoring.SPARSE_MIXER:
        return _mixed_sparsely(router, _logits(router, x))
    scores = _scores(router, x)
    worths = scores if router.choice_bias is None else scores + router.choice_bias
    if router.groups:
        of_group = worths.unflatten(-1, (router.groups, -1))
        best = of_group.topk(2, -1).values.sum(-1) if router.group_worth == GroupWorth.BEST_TWO else of_group.amax(-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(router.chosen_groups, -1).indices, True)
        worths = of_group.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)
    weights = torch.zeros_like(scores)
    indices = worths.topk(router.chosen, -1).indices
    weights.scatter_(-1, indices, scores.gather(-1, indices))
    weights = weights * router.scale / (weights.sum(-1, keepdim=True) if router.normalized else 1.0)
    return weights if router.factors is None else weights * router.factors


def _mixed_sparsely(router: Router, logits: Tensor) -> Tensor:
    """See `Scoring` in `abi.h`."""
    left, weights = logits.clone(), torch.zeros_like(logits)
    for _ in range(router.chosen):
        highest, best = left.max(-1, keepdim=True)
        near = (highest - logits) / logits.abs().maximum(highest) <= 2 * router.jitter
        shares = left.masked_fill(~near, -torch.inf).softmax(-1)
        weights.scatter_(-1, best, shares.gather(-1, best))
        left.scatter_(-1, best, -torch.inf)
    return weights * router.scale


def inputs_of(router: Router, dtype: torch.dtype) -> Tensor:
    """[n, hidden] inputs for which rounding does not change the choice: half have large logits, half up to 1.

    With large logits a few experts may have all the weight, which is 1 then whether it is normalized or not.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn((_SAMPLED, router.matrix.columns), generator=random, device="cpu").to(
        router.matrix.weights.device, dtype
    )
    largest = _logits(router, x).abs().max()
    scales = [2.0 ** -float((largest / limit).clamp(1).log2().ceil()) for limit in _LOGITS]
    return torch.cat([_clear(router, x * scale) for scale in scales])  # a power of 2 rounds nothing


def _clear(router: Router, x: Tensor) -> Tensor:
    """The inputs for which the chosen experts are farthest from the others."""
    scores = _scores(router, x)
    if router.choice_bias is not None:
        scores = scores + router.choice_bias
    ordered = scores.sort(-1, descending=True).values
    last, next_best = ordered[:, router.chosen - 1], ordered[:, router.chosen : router.chosen + 1].sum(-1)
    gaps = (last - next_best) / (last.abs() + next_best.abs())
    return x[gaps.argsort(descending=True)[:_ROUTED]]


def _logits(router: Router, x: Tensor) -> Tensor:
    """[n, experts] of inputs [n, hidden], in float64."""
    bias = router.matrix.bias
    return functional.linear(x.double(), router.matrix.weights.double(), None if bias is None else bias.double())


def _scores(router: Router, x: Tensor) -> Tensor:
    logits = _logits(router, x)
    return logits.sigmoid() if router.scoring == Scoring.SIGMOID else logits.softmax(-1)


def named_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module by name."""
    yield from itertools.chain(module.named_parameters(), module.named_buffers())


def first_output(module: Any, x: Tensor, name: str) -> Tensor:
    """[n, hidden] float32, the output of a block that may have others."""
    y = evaluated(module, (x[None],), name)
    first: Tensor = (y[0] if isinstance(y, tuple) else y).float()
    return first.reshape(x.shape)


def evaluated(module: Any, arguments: tuple[Any, ...], name: str) -> Any:
    """What a module makes of inputs."""
    try:
        return module(*arguments)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DescriptionError(f"{name}, a {type(module).__name__}, cannot be evaluated: {error}") from error

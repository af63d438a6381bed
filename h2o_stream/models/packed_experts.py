"""Experts whose matrices may be packed, in place of those of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.models.packed_layers import PackedLinear
from h2o_stream.native.packing import ROWS

_MATRICES = ("gate_proj", "up_proj", "down_proj")

FUSED = "gate_up_proj"
"""In place of the first two, where the rows of each expert's gate are followed by those of what it is for."""

_NOT_PLAIN = ("is_transposed", "has_bias", "has_post_expert_norm")
"""Flags of transformers' experts that compute something else than gated MLPs."""

_CLAMPED = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
"""Weights of experts with biases and clamped gates (gpt-oss)."""


class SplitExperts(nn.Module):
    """The experts of a block, as three linear layers, or two without gates: the rows of all experts follow one another.

    They are of a known kind (`can_split`), perhaps on the meta device. `fused` gates are in one layer with `up`.
    """

    is_concatenated = True

    def __init__(self, experts: Any, fused: bool = False) -> None:
        super().__init__()
        clamped = is_clamped(experts)
        if clamped:
            self.num_experts, self.inner_size, self.hidden_size = experts.down_proj.shape
            self.alpha, self.limit = experts.alpha, experts.limit
        else:
            self.num_experts, self.hidden_size, self.inner_size = experts.down_proj.shape
            self.act_fn = experts.act_fn
        self.is_gated = not is_ungated(experts)
        gated = (FUSED, _MATRICES[-1]) if fused else _MATRICES
        for name in gated if self.is_gated else _MATRICES[1:]:
            columns, rows = self.hidden_size, self.inner_size * (2 if name == FUSED else 1)
            if name == _MATRICES[-1]:
                columns, rows = rows, columns
            self.add_module(name, nn.Linear(columns, self.num_experts * rows, bias=clamped, device="meta"))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Feed inputs [n, hidden] to their experts [n, k], and add their outputs times their weights [n, k]."""
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == expert)
            *first, down = self.expert(expert)
            x = hidden_states[tokens]
            inner = self._apply_gate(torch.cat([layer(x) for layer in first], -1))
            outputs = down(inner) * top_k_weights[tokens, places, None]
            y.index_add_(0, tokens, outputs.to(y.dtype))
        return y

    def _apply_gate(self, both: Tensor) -> Tensor:
        """The input of `down` from gates and what they are for."""
        if not self.is_gated:
            activated: Tensor = self.act_fn(both)
            return activated
        gate, up = both.chunk(2, -1)
        if hasattr(self, "act_fn"):
            inner: Tensor = self.act_fn(gate) * up
            return inner
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        clamped: Tensor = gate * (gate * self.alpha).sigmoid() * (up + 1)
        return clamped

    def expert(self, index: int) -> list[PackedLinear]:
        """Gate, if there are gates, up and down of one expert, sharing memory."""
        return [self._rows_of(layer, index) for layer in self.children() if hasattr(layer, "tiles")]

    def _rows_of(self, layer: Any, index: int) -> PackedLinear:
        rows = layer.out_features // self.num_experts
        tiles = layer.tiles[index * rows // ROWS : (index + 1) * rows // ROWS]
        bias = None if layer.bias is None else nn.Parameter(layer.bias[index * rows : (index + 1) * rows], False)
        return PackedLinear(layer.kind, layer.in_features, rows, bias, tiles)


def can_split(experts: Any) -> bool:
    """Whether experts are of a kind that `SplitExperts` computes, and of whole tiles each."""
    return is_plain(experts) or is_clamped(experts) or is_ungated(experts)


def is_ungated(experts: Any) -> bool:
    """Whether experts are stacked matrices of MLPs without gates (Nemotron-H), of whole tiles each."""
    shapes = {name: tuple(weight.shape) for name, weight in experts.named_parameters()}
    plain = hasattr(experts, "act_fn") and not any(getattr(experts, flag, True) for flag in ("has_gate", *_NOT_PLAIN))
    if shapes.keys() != {"up_proj", "down_proj"} or not plain:
        return False
    count, hidden, inner = shapes["down_proj"]
    return shapes["up_proj"] == (count, inner, hidden) and not (hidden % ROWS or inner % ROWS)


def is_clamped(experts: Any) -> bool:
    """Whether experts are those of gpt-oss: with biases, and with gates in turns with what they are for."""
    shapes = {name: tuple(weight.shape) for name, weight in experts.named_parameters()}
    if shapes.keys() != _CLAMPED or not all(hasattr(experts, key) for key in ("alpha", "limit", "_apply_gate")):
        return False
    count, inner, hidden = shapes["down_proj"]
    both = torch.linspace(-9, 9, 32, dtype=torch.float32, device="cpu")
    gate, up = both[::2].clamp(max=experts.limit), both[1::2].clamp(-experts.limit, experts.limit)
    expected = gate * (gate * experts.alpha).sigmoid() * (up + 1)
    return (
        shapes["gate_up_proj"] == (count, hidden, 2 * inner)
        and not (hidden % ROWS or inner % ROWS)
        and torch.allclose(experts._apply_gate(both), expected)
    )


def is_plain(experts: Any) -> bool:
    """Whether experts are stacked matrices of gated MLPs, of whole tiles each."""
    shapes = {name: tuple(weight.shape) for name, weight in experts.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or not hasattr(experts, "act_fn"):
        return False
    count, hidden, inner = shapes["down_proj"]
    return (
        shapes["gate_up_proj"] == (count, 2 * inner, hidden)
        and not (hidden % ROWS or inner % ROWS)
        and not any(getattr(experts, flag, True) for flag in _NOT_PLAIN)
        and getattr(experts, "is_concatenated", False)
        and _multiplies_gates(experts)
    )


def _multiplies_gates(experts: Any) -> bool:
    """Whether it is the gate's activation times the rest."""
    both = torch.linspace(-3, 3, 16, dtype=torch.float32, device="cpu")
    gate, up = both.chunk(2)
    gated: Tensor = experts._apply_gate(both)
    return gated.equal(experts.act_fn(gate) * up)


def split_experts(
    model: Any, names: set[str] | None = None, fused: bool = False, split: type[SplitExperts] = SplitExperts
) -> None:
    """Replace experts of known kinds in a model by split ones, without weights.

    The names of the needed matrices tell which, and whether gates are fused; None is all, and `fused` says it.
    """
    for name, module in list(model.named_modules()):
        if (names is None or f"{name}.{_MATRICES[-1]}" in names) and can_split(module):
            model.set_submodule(name, split(module, fused if names is None else f"{name}.{FUSED}" in names))


def split_stacked_experts(model: Any) -> None:
    """Split experts whose matrices, stacked as they are in transformers, have the rows of split ones."""
    for name, module in list(model.named_modules()):
        if is_plain(module) or is_ungated(module):
            model.set_submodule(name, SplitExperts(module, fused=True))

"""Experts whose matrices may be packed, in place of those of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.models.packed_layers import PackedLinear
from h2o_stream.native.packing import ROWS

_MATRICES = ("gate_proj", "up_proj", "down_proj")

_NOT_PLAIN = ("is_transposed", "has_bias", "has_post_expert_norm")
"""Flags of transformers' experts that compute something else than gated MLPs."""


class SplitExperts(nn.Module):
    """The experts of a block, as three linear layers: in each, the rows of all experts follow one another.

    Args:
        experts: of transformers, plain ones (`is_plain`); may be on the meta device, as the layers are.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.inner_size = experts.down_proj.shape
        self.act_fn = experts.act_fn
        sizes = (
            (self.hidden_size, self.inner_size),
            (self.hidden_size, self.inner_size),
            (self.inner_size, self.hidden_size),
        )
        for name, (columns, rows) in zip(_MATRICES, sizes, strict=True):
            self.add_module(name, nn.Linear(columns, self.num_experts * rows, bias=False, device="meta"))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Feed inputs [n, hidden] to their experts [n, k], and add their outputs times their weights [n, k]."""
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == expert)
            gate, up, down = self.expert(expert)
            x = hidden_states[tokens]
            outputs = down(self.act_fn(gate(x)) * up(x)) * top_k_weights[tokens, places, None]
            y.index_add_(0, tokens, outputs.to(y.dtype))
        return y

    def expert(self, index: int) -> list[PackedLinear]:
        """Gate, up and down of one expert, sharing memory."""
        return [self._rows_of(self.get_submodule(name), index) for name in _MATRICES]

    def _rows_of(self, layer: Any, index: int) -> PackedLinear:
        rows = layer.out_features // self.num_experts
        tiles = layer.tiles[index * rows // ROWS : (index + 1) * rows // ROWS]
        return PackedLinear(layer.kind, layer.in_features, rows, None, tiles)


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


def split_experts(model: Any, names: set[str] | None = None) -> None:
    """Replace plain experts by split ones, without weights.

    Args:
        model: changed in place.
        names: of the matrices that are needed; None for all.
    """
    for name, module in list(model.named_modules()):
        if (names is None or f"{name}.{_MATRICES[0]}" in names) and is_plain(module):
            model.set_submodule(name, SplitExperts(module))

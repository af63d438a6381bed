"""Describes the MLPs and the experts of a model."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy

from h2o_stream.native.abi import Activation, GateLayout, MatrixKind
from h2o_stream.native.description import DescriptionError, Matrix, Mlp, Norm
from h2o_stream.native.experts import BesideMlp, Experts, Router, halves_of
from h2o_stream.native.matrix import require
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.parameters import ExpertParameters, Parameters
from h2o_stream.runtime.weights import Weights

_COLUMNS = (MatrixKind.FLOAT32_COLUMNS, MatrixKind.BFLOAT16_COLUMNS)
_BESIDE_NORMS = ("pre_ffw_norm_2", "post_ffw_norm_2", "post_ffw_norm_1")
"""llama.cpp's names of the norms of `BesideMlp`, in its order, but for the router's."""


class MlpReader:
    """Reads those of layers by their numbers.

    Args:
        norm: returns the norm of a name and a layer; its third argument says whether it must be there.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Parameters,
        weights: Weights,
        dtype: str,
        norm: Callable[..., Norm],
    ) -> None:
        self._architecture, self._parameters, self._weights, self._dtype = architecture, parameters, weights, dtype
        self._norm = norm

    def mlp(self, number: int, inner: int, kind: str = "") -> Mlp:
        """The MLP of a layer, or with `kind` ``_shexp`` the expert for all tokens."""
        weights, hidden, family = self._weights, self._parameters.hidden_size, self._architecture
        gate: Matrix | None = None
        fused = f"ffn_gate_up{kind}" if weights.has(f"ffn_gate_up{kind}", number) else "ffn_up"
        if family.fused_mlp or fused != "ffn_up":
            both = weights.matrix(fused, number, 2 * inner, hidden)
            gate, up = both.row_range(0, inner), both.row_range(inner, inner)
        else:
            up = weights.matrix(f"ffn_up{kind}", number, inner, hidden)
            if weights.has(f"ffn_gate{kind}", number):
                gate = weights.matrix(f"ffn_gate{kind}", number, inner, hidden)
        down, altup = weights.matrix(f"ffn_down{kind}", number, hidden, inner), self._parameters.altup
        activation = self._xielu(number) if family.activation == Activation.XIELU else family.activation_parameters
        cut, inner_norm = altup.gate_deviations[number] if altup else None, self._norm("ffn_sub_norm", number, False)
        factors = self._parameters.multipliers
        gate = gate.scaled(factors.gate) if gate else None
        return Mlp(gate, up, down.scaled(factors.down), family.activation, activation, inner_norm, cut)

    def _xielu(self, number: int) -> tuple[float, ...]:
        """The parameters of the activation of a layer, see `abi.h`."""
        names = [f"ffn_act.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")]
        values = [self._weights.vector(name, number) for name in names]
        scalars = [math.nan if value is None or value.size != 1 else float(value[0]) for value in values]
        require(not math.isnan(sum(scalars)), f"layer {number} does not have the four numbers of its activation")
        positive, negative = (float(numpy.logaddexp(numpy.float32(0), numpy.float32(x))) for x in scalars[:2])
        return positive, negative + scalars[2], scalars[2], scalars[3]

    def experts(self, number: int, experts: ExpertParameters) -> Experts:
        """The experts of a layer."""
        weights, hidden, inner = self._weights, self._parameters.hidden_size, experts.inner_size
        gated, fused = weights.has("ffn_gate_inp_shexp", number), weights.has("ffn_gate_up_exps", number)
        rows, gate = experts.count * inner, None
        layout, up = GateLayout.APART, None
        if fused:
            gate = weights.matrix("ffn_gate_up_exps", number, 2 * rows, hidden)
            if gate.kind in _COLUMNS:
                layout = GateLayout.IN_TURNS if self._architecture.interleaved_experts else GateLayout.HALVES
            else:
                gate, up = halves_of(gate, inner)
        else:
            up = weights.matrix("ffn_up_exps", number, rows, hidden)
            if not self._architecture.ungated_experts:
                gate = weights.matrix("ffn_gate_exps", number, rows, hidden)
        is_shared, bias = experts.shared_size > 0, weights.vector("exp_probs_b", number, "bias")
        fits = bias is None or not (self._architecture.biases_logits and bias.any())
        require(fits, f"layer {number} adds something to logits for the choice of experts")
        require(is_shared == weights.has("ffn_down_shexp", number), f"layer {number} has other shared experts")
        shared = self.mlp(number, experts.shared_size, "_shexp") if is_shared else None
        beside = self._beside(number) if weights.has("pre_ffw_norm_2", number) else None
        if beside:
            shared = self.mlp(number, self._parameters.layer_shape(number).inner_size)
        return Experts(
            router=Router(
                matrix=self._dense("ffn_gate_inp", number, experts.count),
                chosen=experts.chosen,
                scoring=experts.scoring,
                normalized=experts.normalized,
                scale=experts.scale,
                choice_bias=bias,
                groups=experts.groups,
                chosen_groups=experts.chosen_groups,
                group_worth=experts.group_worth,
                factors=weights.vector("ffn_down_exps.scale", number),
                jitter=experts.jitter,
                weighs_inputs=self._architecture.weighs_inputs,
            ),
            gate=gate,
            up=up,
            down=weights.matrix("ffn_down_exps", number, experts.count * hidden, inner),
            inner_size=inner,
            stride=2 * inner if fused else inner,
            gate_layout=layout,
            activation=self._architecture.activation,
            parameters=self._architecture.activation_parameters,
            shared=shared,
            shared_gate=self._dense("ffn_gate_inp_shexp", number, 1) if gated else None,
            beside=beside,
        )

    def _beside(self, number: int) -> BesideMlp:
        """The norms of experts beside an MLP; that of the router has a factor for each element."""
        parameters, scale = self._parameters, self._weights.vector("ffn_gate_inp.scale", number)
        if scale is None:
            raise DescriptionError(f"layer {number} has no ffn_gate_inp.scale")
        weight = scale * numpy.float32(parameters.hidden_size**-0.5)
        router = Norm(parameters.norm, weight, None, parameters.epsilon)
        return BesideMlp(router, *(self._norm(name, number) for name in _BESIDE_NORMS))

    def _dense(self, name: str, number: int, rows: int) -> Matrix:
        """A small matrix [rows, hidden] that is not packed, in the dtype of the model."""
        return self._weights.small_matrix(name, number, rows, self._parameters.hidden_size, self._dtype)

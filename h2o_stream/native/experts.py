"""Mixtures of experts, as part of a model's description."""

from __future__ import annotations

from dataclasses import dataclass, fields

from h2o_stream.native import abi
from h2o_stream.native.abi import Activation, GateLayout, GroupWorth, Scoring
from h2o_stream.native.description import DescriptionError, Matrix, Mlp
from h2o_stream.native.matrix import Norm, check_count, require
from h2o_stream.native.pointers import Array, pointer


@dataclass(frozen=True, eq=False)
class Router:
    """Chooses the experts of a token, and their weights.

    Attributes:
        matrix: [experts, hidden], float32 or bfloat16; gives the logits of all experts.
        chosen: experts per token: those with the highest scores.
        scoring: how logits become scores, which are the weights of experts.
        normalized: whether the scores of a token's experts are divided by their sum.
        choice_bias: [experts] float32, added to scores for the choice only; or None.
        groups: the experts are in so many groups of equal size; 0 if they are in none.
        chosen_groups: how many of them experts are chosen from.
        group_worth: how groups are ranked: by their best expert, or by the sum of the best two.
        weighs_inputs: whether weights are factors on what goes into an expert, not on its output.
        factors: [experts] float32, on weights; or None.
    """

    matrix: Matrix
    chosen: int
    scoring: Scoring
    normalized: bool
    scale: float = 1.0
    choice_bias: Array | None = None
    groups: int = 0
    chosen_groups: int = 0
    group_worth: GroupWorth = GroupWorth.BEST_ONE
    jitter: float = 0.0
    weighs_inputs: bool = False
    factors: Array | None = None

    def __post_init__(self) -> None:
        count, groups = self.matrix.rows, self.groups
        require(0 < self.chosen <= count, f"tokens go through {self.chosen} of {count} experts")
        if groups:
            left = self.chosen_groups * (count // groups)
            fits = groups > 0 and count % groups == 0 and 0 < self.chosen_groups <= groups and self.chosen <= left
            require(fits, f"tokens go through {self.chosen} experts of too few or unequal groups")
        check_count(self.choice_bias, count, "the bias of experts")
        check_count(self.factors, count, "the factors of experts")


def halves_of(both: Matrix, inner: int) -> tuple[Matrix, Matrix]:
    """Views of the gate and up rows, `inner` each, in a fused matrix of all experts."""
    rows = both.rows - inner
    return both.row_range(0, rows), both.row_range(inner, rows)


@dataclass(frozen=True, eq=False)
class BesideMlp:
    """Norms of experts that read what goes into the norm before the MLP, which is their `shared` one (Gemma 4).

    Attributes:
        router: norm of the router's input.
        inputs: norm of the experts' input.
        output: norm of the sum of the experts' outputs.
        mlp: norm of the MLP's output.
    """

    router: Norm
    inputs: Norm
    output: Norm
    mlp: Norm


@dataclass(frozen=True, eq=False)
class Experts:
    """MLPs, each for some tokens only; their outputs are added, times their weights.

    The matrices of all experts are one: rows of the next expert start `stride` rows later in `gate` and `up`, and
    `hidden` rows later in `down`.

    Attributes:
        gate: gate matrices of all experts, with the rows of `up` unless gates are separate; or None.
        up: up matrices of all experts; None if their rows are in `gate`.
        inner_size: rows of one expert's `gate` and `up`.
        stride: rows from one expert's `gate` to the next; more than `inner_size` if `up` is between them.
        activation: activation of all experts and of the shared one.
        parameters: parameters of the activation, see `abi.h`.
        gate_layout: arrangement of the gate rows.
        beside: norms of experts beside the MLP, or None.
        shared: an expert that all tokens go through, or None.
        shared_gate: [1, hidden]: the sigmoid of its output is a factor on the shared expert's; or None.

    Raises:
        DescriptionError: sizes do not fit, or the experts of packed matrices do not start at tiles.
    """

    router: Router
    gate: Matrix | None
    up: Matrix | None
    down: Matrix
    inner_size: int
    stride: int
    activation: Activation
    shared: Mlp | None = None
    shared_gate: Matrix | None = None
    parameters: tuple[float, ...] = ()
    gate_layout: GateLayout = GateLayout.APART
    beside: BesideMlp | None = None

    def __post_init__(self) -> None:
        count, hidden, inner, stride = self.count, self.hidden, self.inner_size, self.stride
        if self.shared_gate:
            self.shared_gate.check_shape(1, hidden, "the gate of the shared expert")
        require(self.shared is None or self.shared.hidden == hidden, "the shared expert does not fit the others")
        for norm in (getattr(self.beside, field.name) for field in fields(BesideMlp)) if self.beside else ():
            norm.check_size(hidden, "a norm beside experts")
        apart = self.gate_layout == GateLayout.APART
        rows = (count - 1) * stride + (inner if apart else 2 * inner)
        needed = [("gate", self.gate, rows, hidden, stride), ("up", self.up, rows, hidden, stride)]
        needed += [("down", self.down, count * hidden, inner, hidden)]
        for name, matrix, rows, columns, step in needed:
            if matrix is None:
                continue
            if (matrix.rows, matrix.columns) != (rows, columns):
                raise DescriptionError(f"{name} of {count} experts has {matrix.rows} rows of {matrix.columns}")
            matrix.row_range(step, 0)
        require(0 < inner <= stride, f"{count} experts of {inner} rows are {stride} rows apart")
        if apart == (self.up is None) or (self.gate is None and not apart):
            raise DescriptionError(f"the gates of {count} experts are neither apart nor with other rows")
        if self.router.weighs_inputs and any(m is not None and m.bias is not None for m in (self.gate, self.up)):
            raise DescriptionError("the inputs of experts with biases are weighed")
        own = self.activation, self.parameters
        if self.shared and (self.shared.activation, self.shared.parameters) != own:
            raise DescriptionError("the shared expert has another activation than the others")

    @property
    def hidden(self) -> int:
        """Size of the vectors that it takes and gives."""
        return self.router.matrix.columns

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.router.matrix.rows

    def expert(self, index: int) -> Mlp:
        """One of the experts, in the same memory; gates must be apart."""
        assert self.up is not None
        first, hidden = index * self.stride, self.hidden
        gate = self.gate.row_range(first, self.inner_size) if self.gate else None
        up, down = self.up.row_range(first, self.inner_size), self.down.row_range(index * hidden, hidden)
        return Mlp(gate, up, down, self.activation, self.parameters)

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices of some size; the router and the shared expert's gate are small."""
        return [*self._own, *(self.shared.matrices if self.shared else [])]

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        inner = self.inner_size if self.gate_layout == GateLayout.APART else 2 * self.inner_size
        rows = (self.gate, inner), (self.up, inner), (self.down, self.hidden)
        of_one: int = sum(matrix.weights.nbytes * count // matrix.rows for matrix, count in rows if matrix)
        return of_one * self.router.chosen + (self.shared.nbytes if self.shared else 0)

    @property
    def _own(self) -> list[Matrix]:
        return [matrix for matrix in (self.gate, self.up, self.down) if matrix]

    def fill(self, struct: abi.Layer) -> None:
        """Fill the structure of a layer."""
        if self.shared:
            self.shared.fill(struct)
        router, struct.activation = self.router, self.activation
        struct.activation_parameters[: len(self.parameters)] = self.parameters
        struct.experts = abi.Experts(
            router=router.matrix.to_struct(),
            choice_bias=pointer(router.choice_bias, "float32", self.count),
            gate=self.gate.to_struct() if self.gate else abi.Matrix(),
            up=self.up.to_struct() if self.up else abi.Matrix(),
            down=self.down.to_struct(),
            shared_gate=self.shared_gate.to_struct() if self.shared_gate else abi.Matrix(),
            chosen=router.chosen,
            inner_size=self.inner_size,
            stride=self.stride,
            scoring=router.scoring,
            normalized=router.normalized,
            scale=router.scale,
            groups=router.groups,
            chosen_groups=router.chosen_groups,
            group_worth=router.group_worth,
            jitter=router.jitter,
            gate_layout=self.gate_layout,
            weighs_inputs=router.weighs_inputs,
            factors=pointer(router.factors, "float32", self.count),
        )
        if norms := self.beside:
            hidden = self.hidden
            struct.experts.router_norm = norms.router.to_struct(hidden)
            struct.experts.input_norm = norms.inputs.to_struct(hidden)
            struct.experts.output_norm = norms.output.to_struct(hidden)
            struct.experts.mlp_norm = norms.mlp.to_struct(hidden)

"""Mixtures of experts, as part of a model's description."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_stream.native import abi
from h2o_stream.native.abi import Activation, Array, Scoring, pointer
from h2o_stream.native.description import DescriptionError, Matrix, Mlp


@dataclass(frozen=True, eq=False)
class Router:
    """Chooses the experts of a token, and their weights.

    Attributes:
        matrix: [experts, hidden], float32 or bfloat16; gives the logits of all experts.
        chosen: experts per token: those with the highest scores.
        scoring: how logits become scores, which are the weights of experts.
        normalized: whether the scores of a token's experts are divided by their sum.
        scale: factor on weights.
        choice_bias: [experts] float32, added to scores for the choice only; or None.
    """

    matrix: Matrix
    chosen: int
    scoring: Scoring
    normalized: bool
    scale: float = 1.0
    choice_bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Experts:
    """MLPs, each for some tokens only; their outputs are added, times their weights.

    The matrices of all experts are one: rows of the next expert start `stride` rows later in `gate` and `up`, and
    `hidden` rows later in `down`.

    Attributes:
        router: chooses among them.
        gate: of all experts, or None.
        up: of all experts.
        down: of all experts.
        inner_size: rows of one expert's `gate` and `up`.
        stride: rows from one expert's `gate` to the next; more than `inner_size` if `up` is between them.
        activation: of all experts, and of the shared one.
        shared: an expert that all tokens go through, or None.
        shared_gate: [1, hidden]: the sigmoid of its output is a factor on the shared expert's; or None.

    Raises:
        DescriptionError: sizes do not fit, or the experts of packed matrices do not start at tiles.
    """

    router: Router
    gate: Matrix | None
    up: Matrix
    down: Matrix
    inner_size: int
    stride: int
    activation: Activation
    shared: Mlp | None = None
    shared_gate: Matrix | None = None

    def __post_init__(self) -> None:
        count, hidden, inner, stride = self.count, self.router.matrix.columns, self.inner_size, self.stride
        rows = (count - 1) * stride + inner
        needed = {"gate": (rows, hidden, stride), "up": (rows, hidden, stride), "down": (count * hidden, inner, hidden)}
        for name, (rows, columns, stride) in needed.items():
            matrix: Matrix | None = getattr(self, name)
            if matrix is None:
                continue
            if (matrix.rows, matrix.columns) != (rows, columns):
                raise DescriptionError(f"{name} of {count} experts has {matrix.rows} rows of {matrix.columns}")
            matrix.row_range(stride, 0)
        if not 0 < self.router.chosen <= count:
            raise DescriptionError(f"tokens go through {self.router.chosen} of {count} experts")
        if self.shared and self.shared.activation != self.activation:
            raise DescriptionError("the shared expert has another activation than the others")

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.router.matrix.rows

    def expert(self, index: int) -> Mlp:
        """One of the experts, in the same memory."""
        first, hidden = index * self.stride, self.router.matrix.columns
        gate = self.gate.row_range(first, self.inner_size) if self.gate else None
        return Mlp(
            gate,
            self.up.row_range(first, self.inner_size),
            self.down.row_range(index * hidden, hidden),
            self.activation,
        )

    @property
    def matrices(self) -> list[Matrix]:
        """See `FeedForward`; the router and the shared expert's gate are small."""
        return [*self._own, *(self.shared.matrices if self.shared else [])]

    @property
    def nbytes(self) -> int:
        """See `FeedForward`."""
        whole: int = sum(matrix.weights.nbytes for matrix in self._own)
        return whole * self.router.chosen // self.count + (self.shared.nbytes if self.shared else 0)

    @property
    def _own(self) -> list[Matrix]:
        return [*([self.gate] if self.gate else []), self.up, self.down]

    def fill(self, struct: abi.Layer) -> None:
        """See `FeedForward`."""
        if self.shared:
            self.shared.fill(struct)
        router, struct.activation = self.router, self.activation
        struct.experts = abi.Experts(
            router=router.matrix.to_struct(),
            choice_bias=pointer(router.choice_bias, "float32", self.count),
            gate=self.gate.to_struct() if self.gate else abi.Matrix(),
            up=self.up.to_struct(),
            down=self.down.to_struct(),
            shared_gate=self.shared_gate.to_struct() if self.shared_gate else abi.Matrix(),
            chosen=router.chosen,
            inner_size=self.inner_size,
            stride=self.stride,
            scoring=router.scoring,
            normalized=router.normalized,
            scale=router.scale,
        )

"""Recurrent mixers as part of a model's description: what each keeps of earlier tokens is of constant size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from h2o_stream.native import abi
from h2o_stream.native.abi import MixerKind
from h2o_stream.native.matrix import DescriptionError, Matrix, Norm, check_count, require
from h2o_stream.native.pointers import Array, pointer


class Mixer(Protocol):
    """Mixes tokens by states instead of attention; see `src/mixer.h`."""

    @property
    def kind(self) -> MixerKind:
        """What it computes."""

    @property
    def projections(self) -> Sequence[Matrix]:
        """Matrices [rows, hidden] whose outputs are concatenated, at most `abi.MAX_PROJECTIONS`."""

    @property
    def out(self) -> Matrix:
        """The output projection."""

    @property
    def states(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of its states, float32, of one stream, by the names of `cache.recurrent.states_of`, in C++'s order."""

    def fill(self, struct: abi.Mixer) -> None:
        """Fill the fields that only this kind has."""


def check_mixer(mixer: Mixer, hidden: int) -> None:
    """Raises DescriptionError if a mixer does not take and give so many numbers."""
    for matrix in mixer.projections:
        matrix.check_shape(matrix.rows, hidden, "a projection of a recurrent mixer")
    mixer.out.check_shape(hidden, mixer.out.columns, "the output projection of a recurrent mixer")


def fill_mixer(mixer: Mixer, struct: abi.Mixer, first_state: int) -> None:
    """Fill a structure; mixers of the layers before have `first_state` states."""
    struct.kind, struct.in_count, struct.first_state = mixer.kind, len(mixer.projections), first_state
    for index, matrix in enumerate(mixer.projections):
        getattr(struct, "in")[index] = matrix.to_struct()
    struct.out = mixer.out.to_struct()
    mixer.fill(struct)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A causal convolution of every channel by itself.

    Attributes:
        weight: [channels, kernel] float32, of the oldest input first.
        bias: [channels] float32, or None.
    """

    weight: Array
    bias: Array | None

    def __post_init__(self) -> None:
        if not 0 < self.kernel <= abi.MAX_KERNEL:
            raise DescriptionError(f"a convolution over {self.kernel} tokens; at most {abi.MAX_KERNEL} are supported")
        check_count(self.bias, self.channels, "the bias of a convolution")

    @property
    def channels(self) -> int:
        """Number of channels."""
        return int(self.weight.shape[0])

    @property
    def kernel(self) -> int:
        """How many tokens it looks at."""
        return int(self.weight.shape[1])

    def to_struct(self) -> abi.Convolution:
        """As a C structure."""
        weight = pointer(self.weight, "float32", self.channels * self.kernel)
        return abi.Convolution(weight, pointer(self.bias, "float32", self.channels), self.channels, self.kernel)


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """out(c * convolution(b * x)) with (b, c, x) = projection(y), as in LFM2."""

    projection: Matrix
    convolution: Convolution
    out: Matrix
    kind = MixerKind.SHORT_CONVOLUTION

    def __post_init__(self) -> None:
        size = self.convolution.channels
        if (self.projection.rows, self.out.columns) != (3 * size, size):
            raise DescriptionError(f"the projections of a convolution of {size} channels are of other sizes")

    @property
    def projections(self) -> list[Matrix]:
        """Matrices whose outputs are concatenated."""
        return [self.projection]

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the states: the last inputs of the convolution, the newest last."""
        return {"conv.0": (self.convolution.channels, self.convolution.kernel)}

    def fill(self, struct: abi.Mixer) -> None:
        """Fill the fields of this kind."""
        struct.convolution = self.convolution.to_struct()


@dataclass(frozen=True)
class HeadColumns:
    """Where a part of the heads is in the output of projections: key head g's starts at offset + g * stride."""

    offset: int
    stride: int

    def to_struct(self) -> abi.HeadColumns:
        """As a C structure."""
        return abi.HeadColumns(self.offset, self.stride)


@dataclass(frozen=True)
class DeltaColumns:
    """Where the parts of the heads of a `GatedDelta` are; value heads that share a key head follow one another."""

    query: HeadColumns
    key: HeadColumns
    value: HeadColumns
    gate: HeadColumns
    beta: HeadColumns
    decay: HeadColumns


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """The gated delta rule of Qwen3-Next, Qwen 3.5 and OLMo hybrid; see `src/abi.h` for what it computes.

    Attributes:
        projections: matrices that compute everything that `columns` names.
        columns: places of the projections' results.
        convolution: convolution over all queries, then all keys, then all values.
        key_heads: number of heads of queries and keys.
        heads: number of value heads, a multiple of the key heads.
        rate: [heads] float32, by how much a unit of decay makes the state smaller; negative.
        decay_bias: [heads] float32, added to decays.
        beta_scale: factor on betas, after the sigmoid.
        norm: norm of the output of each head, before the gate.
        out_in_turns: its columns are interleaved by key head: the first value head of each key head comes first.

    Raises:
        DescriptionError: sizes do not fit.
    """

    projections: Sequence[Matrix]
    columns: DeltaColumns
    convolution: Convolution
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    rate: Array
    decay_bias: Array
    beta_scale: float
    norm: Norm
    out: Matrix
    out_in_turns: bool = False
    kind = MixerKind.GATED_DELTA

    def __post_init__(self) -> None:
        keys, values = self.key_heads * self.key_size, self.heads * self.value_size
        _check_heads(self, 2 * (keys + values + self.heads))
        self.norm.check_size(self.value_size, "the norm of a recurrent mixer")
        shared, rows = self.heads // self.key_heads, sum(matrix.rows for matrix in self.projections)
        sizes = {"query": self.key_size, "key": self.key_size, "beta": shared, "decay": shared}
        for name, size in {**sizes, "value": shared * self.value_size, "gate": shared * self.value_size}.items():
            at = getattr(self.columns, name)
            inside = min(at.offset, at.stride) >= 0 and at.offset + (self.key_heads - 1) * at.stride + size <= rows
            require(inside, f"the {name} of {self.key_heads} heads from {at.offset} on is not in {rows} rows")

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the states: the last inputs of the convolution, the newest last; and what each head has learned."""
        convolution = self.convolution.channels, self.convolution.kernel
        return {"conv.0": convolution, "recurrent.0": (self.heads, self.key_size, self.value_size)}

    def fill(self, struct: abi.Mixer) -> None:
        """Fill the fields of this kind."""
        struct.convolution, struct.norm = self.convolution.to_struct(), self.norm.to_struct(self.value_size)
        for name in ("key_heads", "heads", "key_size", "value_size", "beta_scale", "out_in_turns"):
            setattr(struct, name, getattr(self, name))
        for name in ("query", "key", "value", "gate", "beta", "decay"):
            setattr(struct, name, getattr(self.columns, name).to_struct())
        struct.rate = pointer(self.rate, "float32", self.heads)
        struct.decay_bias = pointer(self.decay_bias, "float32", self.heads)


@dataclass(frozen=True, eq=False)
class Mamba2:
    """Mamba-2, as in Granite 4 hybrids, Bamba, Nemotron-H and Falcon-H1; see `src/abi.h` for what it computes.

    Attributes:
        projections: matrices for gates, values, keys (B), queries (C) and decays (dt), in this order.
        key_heads: number of heads of queries and keys (groups).
        heads: number of value heads, a multiple of the key heads.
        key_size: size of queries and keys (of the state).
        rate: [heads] float32, by how much a unit of step makes the state smaller; negative.
        decay_bias: [heads] float32, added to decays.
        step_limits: smallest and largest step.
        skip: [heads] float32, of a value in its output.
        norm_groups: parts of the output that are normed by themselves.
        norm_before_gate: whether the norm comes before the gate.

    Raises:
        DescriptionError: sizes do not fit.
    """

    projections: Sequence[Matrix]
    convolution: Convolution
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    rate: Array
    decay_bias: Array
    step_limits: tuple[float, float]
    skip: Array
    norm: Norm
    norm_groups: int
    norm_before_gate: bool
    out: Matrix
    kind = MixerKind.MAMBA2

    def __post_init__(self) -> None:
        _check_heads(self, 2 * (self.inner + self.keys) + self.heads)
        parts = f"{self.inner} numbers are not normed in {self.norm_groups} equal parts"
        require(self.norm_groups > 0 and self.inner % self.norm_groups == 0, parts)
        self.norm.check_size(self.inner, "the norm of a recurrent mixer")
        check_count(self.skip, self.heads, "the skips of a recurrent mixer")

    @property
    def inner(self) -> int:
        """Numbers in the values of all heads."""
        return self.heads * self.value_size

    @property
    def keys(self) -> int:
        """Numbers in the keys of all heads."""
        return self.key_heads * self.key_size

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the states: the last inputs of the convolution, the newest last; and what each head carries on."""
        convolution = self.convolution.channels, self.convolution.kernel
        return {"conv.0": convolution, "recurrent.0": (self.heads, self.value_size, self.key_size)}

    def fill(self, struct: abi.Mixer) -> None:
        """Fill the fields of this kind."""
        struct.convolution, struct.norm = self.convolution.to_struct(), self.norm.to_struct(self.inner)
        for name in ("key_heads", "heads", "key_size", "value_size", "norm_groups", "norm_before_gate"):
            setattr(struct, name, getattr(self, name))
        struct.least_step, struct.largest_step = self.step_limits
        sizes = {"gate": self.inner, "value": self.inner, "key": self.keys, "query": self.keys, "decay": self.heads}
        offset = 0
        for name, size in sizes.items():
            setattr(struct, name, HeadColumns(offset, size // self.key_heads).to_struct())
            offset += size
        for name in ("rate", "decay_bias", "skip"):
            setattr(struct, name, pointer(getattr(self, name), "float32", self.heads))


def _check_heads(mixer: GatedDelta | Mamba2, needed: int) -> None:
    """Check that matrices and convolution fit the heads of a mixer, which projects to `needed` numbers."""
    sizes = mixer.key_heads, mixer.heads, mixer.key_size, mixer.value_size
    require(min(sizes) > 0, f"a recurrent mixer has key heads, heads, and sizes of these of {sizes}")
    keys, values = mixer.key_heads * mixer.key_size, mixer.heads * mixer.value_size
    rows = sum(matrix.rows for matrix in mixer.projections)
    fits = rows == needed and mixer.convolution.channels == 2 * keys + values and mixer.out.columns == values
    if not fits or mixer.heads % mixer.key_heads:
        raise DescriptionError(f"projections to {rows} do not fit {mixer.heads} heads of {mixer.value_size} numbers")
    if len(mixer.projections) > abi.MAX_PROJECTIONS:
        raise DescriptionError(f"{len(mixer.projections)} projections; at most {abi.MAX_PROJECTIONS} are supported")
    check_count(mixer.rate, mixer.heads, "the rates of a recurrent mixer")
    check_count(mixer.decay_bias, mixer.heads, "the biases of decays in a recurrent mixer")

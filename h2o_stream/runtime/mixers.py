"""Describes the recurrent mixers of a model from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, groupby

import numpy

from h2o_stream.native.abi import NormKind
from h2o_stream.native.description import DescriptionError, Matrix, Norm
from h2o_stream.native.mixers import Convolution, DeltaColumns, GatedDelta, HeadColumns, Mamba2, Mixer, ShortConvolution
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.parameters import MixerParameters, Parameters
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import Weights

_CONVOLUTION, _STATE_SPACE, _DELTA, _APART = "shortconv.in_proj", "ssm_in", "ssm_conv1d", "ssm_conv1d.q"
"""Tensors by which kinds of mixers are recognized, in this order."""


def has_mixer(weights: Weights, layer: int) -> bool:
    """Whether a layer has a recurrent mixer."""
    return any(weights.has(name, layer) for name in (_CONVOLUTION, _STATE_SPACE, _DELTA, _APART))


def describe_mixer(architecture: Architecture, parameters: Parameters, weights: Weights, layer: int) -> Mixer:
    """Describe the recurrent mixer of the layer with this number.

    Raises:
        DescriptionError: weights are missing, not packed, or of other sizes.
    """
    reader = _MixerReader(architecture, parameters, weights, layer)
    if weights.has(_CONVOLUTION, layer):
        return reader.short_convolution()
    if parameters.mixer is None:
        raise DescriptionError(f"the recurrent layer {layer} has no sizes")
    return reader.mamba2(parameters.mixer) if weights.has(_STATE_SPACE, layer) else reader.delta(parameters.mixer)


class _MixerReader:
    def __init__(self, architecture: Architecture, parameters: Parameters, weights: Weights, layer: int) -> None:
        self._architecture, self._weights, self._layer = architecture, weights, layer
        self._hidden, self._epsilon = parameters.hidden_size, parameters.epsilon
        if parameters.mixer and parameters.mixer.epsilon:
            self._epsilon = parameters.mixer.epsilon
        self._multipliers = parameters.multipliers

    def short_convolution(self) -> ShortConvolution:
        """A short convolution, as in LFM2."""
        hidden = self._hidden
        return ShortConvolution(
            self._matrix("shortconv.in_proj", 3 * hidden),
            self._convolution("shortconv.conv", hidden),
            self._matrix("shortconv.out_proj", hidden),
        )

    def mamba2(self, sizes: MixerParameters) -> Mamba2:
        """A Mamba-2 mixer, as in Granite 4 hybrids, Falcon-H1 and Nemotron-H."""
        inner, keys = sizes.heads * sizes.value_size, sizes.key_heads * sizes.key_size
        weight = self._weights.vector("ssm_norm", self._layer)
        return Mamba2(
            projections=self._scaled_parts((inner, inner, keys, keys, sizes.heads)),
            convolution=self._convolution("ssm_conv1d", inner + 2 * keys),
            key_heads=sizes.key_heads,
            heads=sizes.heads,
            key_size=sizes.key_size,
            value_size=sizes.value_size,
            rate=self._vector("ssm_a", sizes.heads),
            decay_bias=self._vector("ssm_dt", sizes.heads, "bias"),
            step_limits=sizes.step_limits,
            skip=self._vector("ssm_d", sizes.heads),
            norm=Norm() if weight is None else Norm(NormKind.RMS, weight, None, self._epsilon),
            norm_groups=1 if weight is None else sizes.key_heads,
            norm_before_gate=sizes.norm_before_gate,
            out=self._matrix("ssm_out", self._hidden, inner).scaled(self._multipliers.mixer_out),
        )

    def _scaled_parts(self, rows: tuple[int, ...]) -> list[Matrix]:
        """The first matrix, in parts below each other that have factors of their own."""
        whole, factors = self._matrix("ssm_in", sum(rows)), self._multipliers.mixer_parts
        if (rounded := self._weights.vector("ssm_factors", self._layer)) is not None:
            factors = tuple(rounded[[0, *accumulate(rows[:-1])]].tolist())
        matrices, first = [], 0
        for factor, parts in groupby(zip(rows, factors, strict=True), lambda part: part[1]):
            count = sum(size for size, _ in parts)
            matrices.append(whole.row_range(first, count).scaled(factor, self._multipliers.mixer_in))
            first += count
        return matrices

    def delta(self, sizes: MixerParameters) -> GatedDelta:
        """A gated delta rule, as in Qwen3-Next and Qwen 3.5; betas and decays may be one matrix, by key head."""
        inner, keys = sizes.heads * sizes.value_size, sizes.key_heads * sizes.key_size
        paired = self._weights.has("ssm_ba", self._layer)
        pairs = {"ssm_ba": 2 * sizes.heads} if paired else dict.fromkeys(("ssm_beta", "ssm_alpha"), sizes.heads)
        rows: Mapping[str, int] = {"attn_qkv": 2 * keys + inner, "attn_gate": inner, **pairs}
        columns = paired_columns if paired else separate_columns
        if self._weights.has("ssm_qkvz", self._layer):
            rows, columns = {"ssm_qkvz": 2 * (keys + inner), **pairs}, columns_by_key_head
        elif self._weights.has("ssm_q", self._layer):
            rows = {"ssm_q": keys, "ssm_k": keys, "ssm_v": inner, "attn_gate": inner, **pairs}
        return GatedDelta(
            projections=[self._matrix(name, count) for name, count in rows.items()],
            columns=columns(sizes.key_heads, sizes.heads, sizes.key_size, sizes.value_size),
            convolution=self._convolution("ssm_conv1d", 2 * keys + inner),
            key_heads=sizes.key_heads,
            heads=sizes.heads,
            key_size=sizes.key_size,
            value_size=sizes.value_size,
            rate=self._vector("ssm_a", sizes.heads),
            decay_bias=self._vector("ssm_dt", sizes.heads, "bias"),
            beta_scale=sizes.beta_scale,
            norm=Norm(NormKind.RMS, self._vector("ssm_norm", sizes.value_size), None, self._epsilon),
            out=self._matrix("ssm_out", self._hidden, inner),
            out_in_turns=self._architecture.interleaved_heads and sizes.heads != sizes.key_heads,
        )

    def _matrix(self, name: str, rows: int, columns: int = 0) -> Matrix:
        return self._weights.matrix(name, self._layer, rows, columns or self._hidden)

    def _vector(self, name: str, size: int, kind: str = "weight") -> Floats:
        return self._weights.sized_vector(name, self._layer, size, kind)

    def _convolution(self, name: str, channels: int) -> Convolution:
        weight = self._weights.vector(name, self._layer)
        if weight is None:
            parts = [self._weights.vector(f"{name}.{part}", self._layer) for part in "qkv"]
            weight = numpy.concatenate([part for part in parts if part is not None] or [numpy.ones(0, numpy.float32)])
        if weight.size == 0 or weight.size % channels:
            raise DescriptionError(f"{name} of layer {self._layer} is not of {channels} channels")
        return Convolution(weight.reshape(channels, -1), self._weights.vector(name, self._layer, "bias"))


def separate_columns(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
    """Columns of a projection by kind, for all heads: queries, keys, values, gates, betas, decays."""
    shared, offset, parts = heads // key_heads, 0, []
    for size in (key_size, key_size, shared * value_size, shared * value_size, shared, shared):
        parts.append(HeadColumns(offset, size))
        offset += key_heads * size
    return DeltaColumns(*parts)


def paired_columns(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
    """Columns of a projection by kind, but for betas and decays, which stand together for each key head."""
    shared, separate = heads // key_heads, separate_columns(key_heads, heads, key_size, value_size)
    first = separate.beta.offset
    return replace(separate, beta=HeadColumns(first, 2 * shared), decay=HeadColumns(first + shared, 2 * shared))


def columns_by_key_head(key_heads: int, heads: int, key_size: int, value_size: int) -> DeltaColumns:
    """Query, key, values and gates of each key head together; then its betas and decays."""
    shared = heads // key_heads
    stride = 2 * (key_size + shared * value_size)
    both, rest = 2 * key_size, key_heads * stride
    return DeltaColumns(
        query=HeadColumns(0, stride),
        key=HeadColumns(key_size, stride),
        value=HeadColumns(both, stride),
        gate=HeadColumns(both + shared * value_size, stride),
        beta=HeadColumns(rest, 2 * shared),
        decay=HeadColumns(rest + shared, 2 * shared),
    )

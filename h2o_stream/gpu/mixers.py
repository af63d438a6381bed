"""Recurrent mixers of a description: from rows of their projections to what their output projection takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from h2o_stream.gpu.matrices import overlapping
from h2o_stream.gpu.mixer_kernels import (
    attention_gate_kernel,
    convolution_kernel,
    delta_kernel,
    gated_norm_kernel,
    mamba2_kernel,
)
from h2o_stream.native.abi import GateKind, NormKind
from h2o_stream.native.attention import Gate
from h2o_stream.native.mixers import GatedDelta, HeadColumns, Mamba2, Mixer, ShortConvolution

_CHANNELS, _TOKENS = 128, 16
"""Of a program of `convolution_kernel`: channels, and tokens of a prompt."""

_MAX_STATE, _BLOCK = 1 << 15, 1 << 13
"""Numbers of the state of a head, and of a program of `mamba2_kernel`, that fit into registers."""


def why_not(mixer: Mixer) -> str:
    """Why the kernels do not compute this mixer, or nothing."""
    if isinstance(mixer, ShortConvolution):
        return ""
    if not isinstance(mixer, GatedDelta | Mamba2):
        return "its recurrent layers are of another kind"
    if mixer.norm.bias is not None or mixer.norm.kind == NormKind.LAYER:
        return "its recurrent layers are normed in another way"
    size = triton.next_power_of_2(mixer.key_size) * triton.next_power_of_2(mixer.value_size)
    return f"its recurrent heads have more than {_MAX_STATE} numbers" if size > _MAX_STATE else ""


def mix(
    mixer: Mixer, projected: Tensor, states: Mapping[str, Tensor], out: Tensor, rows: int, in_prompt: bool
) -> None:  # fmt: skip
    """Take tokens through the states of a layer, in order.

    Args:
        mixer: one that `why_not` has no objection to.
        projected: [B Q, n] outputs of its projections.
        states: see `Mixer.states`, [B, ...] of any dtype; written in place.
        out: [B Q, columns of `mixer.out`], is written.
        rows: B.
        in_prompt: whether the tokens are a prompt, or a part of one.
    """
    convolution, tokens = states["conv.0"], len(projected) // rows
    if isinstance(mixer, ShortConvolution):
        values = HeadColumns(2 * mixer.convolution.channels, mixer.convolution.channels)
        _convolve(mixer, projected, convolution, out, rows, values)
    elif isinstance(mixer, GatedDelta):
        _delta(mixer, projected, convolution, states["recurrent.0"], out, rows, tokens)
    else:
        assert isinstance(mixer, Mamba2)
        _mamba2(mixer, projected, convolution, states["recurrent.0"], out, rows, tokens, in_prompt)


def _convolve(
    mixer: Any, projected: Tensor, state: Tensor, out: Tensor, rows: int, value: HeadColumns,
    keys: tuple[HeadColumns, HeadColumns] | None = None,
) -> None:  # fmt: skip
    """Convolve values, or `keys` (those of queries and keys) and values."""
    channels, kernel, tokens = mixer.convolution.channels, mixer.convolution.kernel, len(projected) // rows
    first, second = keys or (value, value)
    convolution_kernel[rows, triton.cdiv(channels, _CHANNELS)](
        projected, state, mixer.convolution.weight, mixer.convolution.bias, out, tokens, projected.stride(0),
        first.offset, first.stride, second.offset, second.stride, value.offset, value.stride, CHANNELS=channels,
        KEYS=mixer.key_heads * mixer.key_size if keys else 0, KEY_SIZE=mixer.key_size if keys else 1,
        VALUE_SIZE=mixer.heads // mixer.key_heads * mixer.value_size if keys else channels,
        GATED=isinstance(mixer, ShortConvolution), KERNEL=kernel, BT=_TOKENS if tokens > 1 else 1, BC=_CHANNELS,
        num_warps=4, **overlapping(projected),
    )  # fmt: skip


def _delta(
    mixer: GatedDelta, projected: Tensor, convolution: Tensor, state: Tensor, out: Tensor, rows: int, tokens: int
) -> None:
    at, keys, values = mixer.columns, mixer.key_size, mixer.value_size
    x = projected.new_empty(len(projected), mixer.convolution.channels)
    _convolve(mixer, projected, convolution, x, rows, at.value, (at.query, at.key))
    delta_kernel[(rows * mixer.heads,)](
        x, projected, state, mixer.rate, mixer.decay_bias, mixer.norm.weight, out, tokens, projected.stride(0),
        mixer.beta_scale, mixer.norm.epsilon, at.gate.offset, at.gate.stride, at.beta.offset, at.beta.stride,
        at.decay.offset, at.decay.stride, KEY_HEADS=mixer.key_heads, SHARED=mixer.heads // mixer.key_heads, K=keys,
        V=values, KP=triton.next_power_of_2(keys), VP=triton.next_power_of_2(values), IN_TURNS=mixer.out_in_turns,
        num_warps=8, **overlapping(projected),
    )  # fmt: skip


def _mamba2(
    mixer: Mamba2, projected: Tensor, convolution: Tensor, state: Tensor, out: Tensor, rows: int, tokens: int,
    in_prompt: bool,
) -> None:  # fmt: skip
    inner, channels, width = mixer.inner, mixer.convolution.channels, projected.stride(0)
    x = projected.new_empty(len(projected), channels)
    _convolve(mixer, projected, convolution, x, rows, HeadColumns(inner, channels))
    keys, values = (triton.next_power_of_2(size) for size in (mixer.key_size, mixer.value_size))
    block = min(values, _BLOCK // keys)
    y = torch.empty(len(projected), inner, dtype=torch.float32, device=projected.device)
    mamba2_kernel[rows * mixer.heads, triton.cdiv(mixer.value_size, block)](
        x, projected, state, mixer.rate, mixer.decay_bias, mixer.skip, y, tokens, width, inner + channels,
        *mixer.step_limits, KEY_HEADS=mixer.key_heads, HEADS=mixer.heads, K=mixer.key_size, V=mixer.value_size, KP=keys,
        BV=block, PROMPT=in_prompt, num_warps=4, **overlapping(projected),
    )  # fmt: skip
    size, norm = inner // mixer.norm_groups, mixer.norm
    gated_norm_kernel[len(projected), mixer.norm_groups](
        y, projected, norm.weight, out, width, norm.epsilon, N=size, GROUPS=mixer.norm_groups,
        BN=triton.next_power_of_2(size), NORM_FIRST=mixer.norm_before_gate, num_warps=8, **overlapping(projected),
    )  # fmt: skip


def apply_gate(gate: Gate, projected: Tensor, out: Tensor, heads: int) -> None:
    """Multiply the output [n, heads * D] of an attention by its gates, which were projected with its queries."""
    size = out.shape[1] // heads
    attention_gate_kernel[len(out), heads](
        out, projected, projected.stride(0), gate.offset, gate.stride, HEADS=heads, V=size, SIZE=gate.size,
        BV=triton.next_power_of_2(size), SOFTPLUS=gate.kind == GateKind.SOFTPLUS_GATE, num_warps=1,
        **overlapping(projected),
    )  # fmt: skip

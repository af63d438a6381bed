"""What a recurrent mixer of transformers computes: names say where weights are, evaluation what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from h2o_stream.native.abi import NormKind
from h2o_stream.native.matrix import DescriptionError, Norm
from h2o_stream.native.mixer_layouts import DELTA_LAYOUTS, DeltaLayout
from h2o_stream.native.mixers import Convolution, GatedDelta, HeadColumns, Mamba2, Mixer, ShortConvolution
from h2o_stream.native.modules import apply_norm, as_float32, matrix_of
from h2o_stream.native.multipliers import scaled_projections
from h2o_stream.native.probing import in_more_bits

_TOKENS = 7
"""Tokens that a mixer is evaluated on."""

_LENGTH_EPSILON = 1e-6
"""Added to the square of the length of a query or key."""

_DTYPE = torch.float32
"""Mixers are evaluated in it, whatever their weights are in; they compute in nothing wider."""

_ROUNDING = 1e-3
"""Of an output: outputs of heads that nearly cancel are normed, which amplifies their rounding."""


def mixer_of(module: Any, hidden: int, name: str) -> Mixer:
    """Determine what a recurrent mixer computes; matrices are not copied.

    Args:
        module: takes and gives vectors of `hidden` numbers.
        hidden: size of the residual stream.
        name: name of the layer, for messages.

    Raises:
        DescriptionError: it is none of the known ones.
    """
    names = {key for key, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    if names == {"conv", "in_proj", "out_proj"}:
        return _short_convolution(module, hidden, f"the convolution of {name}")
    for layout in DELTA_LAYOUTS:
        if names == {*layout.projections, layout.norm, layout.out, "conv1d", "A_log", "dt_bias"}:
            return _gated_delta(module, layout, hidden, f"the delta rule of {name}")
    if names - {"norm", "act"} == {"in_proj", "conv1d", "dt_bias", "A_log", "D", "out_proj"}:
        return _mamba2(module, hidden, f"the Mamba-2 of {name}")
    raise DescriptionError(f"{name} has a {type(module).__name__}, which is no mixer that is known")


def has_convolution(module: Any) -> bool:
    """Whether a module can be a recurrent mixer: all known ones have a convolution."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def convolution_of(module: Any, name: str) -> Convolution:
    """The weights of a causal convolution of single channels.

    Raises:
        DescriptionError: it is another one.
    """
    if type(module) is not nn.Conv1d or module.padding_mode != "zeros":
        raise DescriptionError(f"{name} is a {type(module).__name__} where a convolution is expected")
    kernel, channels = module.kernel_size[0], module.in_channels
    shape = module.groups, module.out_channels, module.padding[0], module.stride[0], module.dilation[0]
    if shape != (channels, channels, kernel - 1, 1, 1):
        raise DescriptionError(f"{name} is not a causal convolution of {channels} single channels")
    return Convolution(_float32(module.weight, name).view(channels, kernel), as_float32(module.bias, name))


def _short_convolution(module: Any, hidden: int, name: str) -> ShortConvolution:
    mixer = ShortConvolution(
        matrix_of(module.in_proj, f"in_proj of {name}"),
        convolution_of(module.conv, f"conv of {name}"),
        matrix_of(module.out_proj, f"out_proj of {name}"),
    )

    def expected(module: Any, x: Tensor) -> Tensor:
        b, c, inputs = module.in_proj(x).float().chunk(3, -1)
        y: Tensor = c * convolved(mixer.convolution, b * inputs)
        return y

    _check(module, mixer, "out_proj", hidden, expected, name)
    return mixer


def _float32(tensor: Tensor, name: str) -> Tensor:
    converted = as_float32(tensor, name)
    assert converted is not None
    return converted


def _sizes(module: Any, names: tuple[str, str, str, str], name: str) -> tuple[int, int, int, int]:
    """Key heads, heads, and sizes of their keys and values, by the names of attributes."""
    sizes = [getattr(module, key, 0) for key in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise DescriptionError(f"{name} has no sizes of heads")
    key_heads, heads, key_size, value_size = sizes
    return key_heads, heads, key_size, value_size


def _gated_delta(module: Any, layout: DeltaLayout, hidden: int, name: str) -> GatedDelta:
    sizes = _sizes(module, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"), name)
    key_heads, heads, key_size, value_size = sizes
    activation = getattr(module, "activation", None)
    if activation != "silu" or heads % key_heads:
        raise DescriptionError(f"{name} has {heads} heads for {key_heads}, and the activation {activation}")
    norm = getattr(module, layout.norm)
    rate, bias, weight = (_float32(tensor, name) for tensor in (module.A_log, module.dt_bias, norm.weight))
    if not rate.shape == bias.shape == (heads,) or weight.shape != (value_size,):
        raise DescriptionError(f"{name} has other numbers of decays or weights than heads")
    mixer = GatedDelta(
        projections=[matrix_of(getattr(module, key), f"{key} of {name}") for key in layout.projections],
        columns=layout.columns(*sizes),
        convolution=convolution_of(module.conv1d, f"conv1d of {name}"),
        key_heads=key_heads,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        rate=-rate.exp(),
        decay_bias=bias,
        beta_scale=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        norm=Norm(NormKind.RMS, weight, None, float(getattr(norm, "variance_epsilon", 0.0))),
        out=matrix_of(getattr(module, layout.out), f"{layout.out} of {name}"),
    )

    def expected(module: Any, x: Tensor) -> Tensor:
        projected = torch.cat([getattr(module, key)(x).float() for key in layout.projections], -1)
        return delta_rule(mixer, projected[0])[None]

    _check(module, mixer, layout.out, hidden, expected, name)
    return mixer


def delta_rule(mixer: GatedDelta, projected: Tensor) -> Tensor:
    """The input [n, inner] of the output projection for tokens [n, rows] from empty states on, token by token."""
    count, groups, shared = len(projected), mixer.key_heads, mixer.heads // mixer.key_heads

    def part(at: HeadColumns, size: int) -> Tensor:
        return torch.stack([projected[:, at.offset + g * at.stride :][:, :size] for g in range(groups)], 1)

    columns, key_size, size = mixer.columns, mixer.key_size, mixer.value_size
    parts = [part(columns.query, key_size), part(columns.key, key_size), part(columns.value, shared * size)]
    inputs = torch.cat([x.flatten(1) for x in parts], 1)
    mixed = functional.silu(convolved(mixer.convolution, inputs[None])[0])
    lengths = [x[0].numel() for x in parts]
    query, key, value = (x.view(count, groups, -1) for x in mixed.split(lengths, 1))
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPSILON)).repeat_interleave(shared, 1)
        for x in (query, key)
    )
    value, gate = (x.reshape(count, mixer.heads, size) for x in (value, part(columns.gate, shared * size)))
    beta, decay = (part(at, shared).reshape(count, mixer.heads) for at in (columns.beta, columns.decay))
    learn = mixer.beta_scale * beta.sigmoid()
    keep = (mixer.rate * functional.softplus(decay + mixer.decay_bias)).exp()
    state, outputs = torch.zeros(mixer.heads, key_size, size), []
    for token in range(count):
        state = state * keep[token][:, None, None]
        delta = (value[token] - torch.einsum("hkv,hk->hv", state, key[token])) * learn[token][:, None]
        state = state + key[token][:, :, None] * delta[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token] * key_size**-0.5))
    normed = apply_norm(mixer.norm, torch.stack(outputs))
    return (normed * functional.silu(gate)).flatten(1)


def _mamba2(module: Any, hidden: int, name: str) -> Mamba2:
    keys = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
    key_heads, heads, key_size, value_size = _sizes(module, keys, name)
    if (activation := getattr(module, "activation", None)) != "silu":
        raise DescriptionError(f"{name} has the activation {activation}")
    if len(limits := tuple(getattr(module, "time_step_limit", None) or ())) != 2:
        raise DescriptionError(f"{name} has no limits of its steps")
    rate, bias, skip = (_float32(getattr(module, key), name) for key in ("A_log", "dt_bias", "D"))
    norm, weight = module.norm, as_float32(getattr(module.norm, "weight", None), name)
    normed = Norm() if weight is None else Norm(NormKind.RMS, weight, None, float(norm.variance_epsilon))
    mixer = Mamba2(
        projections=scaled_projections(module, matrix_of(module.in_proj, f"in_proj of {name}"), name),
        convolution=convolution_of(module.conv1d, f"conv1d of {name}"),
        key_heads=key_heads,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        rate=-rate.exp(),
        decay_bias=bias,
        step_limits=(float(limits[0]), float(limits[1])),
        skip=skip,
        norm=normed,
        norm_groups=key_heads if weight is not None else 1,
        norm_before_gate=bool(getattr(norm, "norm_before_gate", False)),
        out=matrix_of(module.out_proj, f"out_proj of {name}"),
    )

    def expected(module: Any, x: Tensor) -> Tensor:
        projected = module.in_proj(x * getattr(module, "ssm_in_multiplier", 1.0)) * getattr(module, "mup_vector", 1.0)
        return mamba2(mixer, projected.float()[0])[None]

    _check(module, mixer, "out_proj", hidden, expected, name)
    return mixer


def mamba2(mixer: Mamba2, projected: Tensor) -> Tensor:
    """The input [n, inner] of the output projection for tokens [n, rows] from empty states on, token by token."""
    count, shared = len(projected), mixer.heads // mixer.key_heads
    gate, inputs, decay = projected.split([mixer.inner, mixer.convolution.channels, mixer.heads], 1)
    mixed = functional.silu(convolved(mixer.convolution, inputs[None])[0])
    value, *keys = mixed.split([mixer.inner, mixer.keys, mixer.keys], 1)
    value = value.view(count, mixer.heads, mixer.value_size)
    key, query = (x.view(count, mixer.key_heads, mixer.key_size).repeat_interleave(shared, 1) for x in keys)
    step = functional.softplus(decay + mixer.decay_bias).clamp(*mixer.step_limits)
    keep, state, outputs = (mixer.rate * step).exp(), torch.zeros(mixer.heads, mixer.value_size, mixer.key_size), []
    for token in range(count):
        new = (step[token][:, None] * value[token])[..., None] * key[token][:, None]
        state = keep[token][:, None, None] * state + new
        outputs.append(torch.einsum("hvk,hk->hv", state, query[token]) + mixer.skip[:, None] * value[token])
    y, opened = torch.stack(outputs).flatten(1), functional.silu(gate)
    return _normed(mixer, y) * opened if mixer.norm_before_gate else _normed(mixer, y * opened)


def _normed(mixer: Mamba2, x: Tensor) -> Tensor:
    """Parts of x [n, inner] normed by themselves."""
    if mixer.norm.weight is None:
        return x
    parts = x.view(len(x), mixer.norm_groups, -1)
    scaled = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + mixer.norm.epsilon)
    weighted: Tensor = scaled.flatten(1) * mixer.norm.weight
    return weighted


def convolved(convolution: Convolution, x: Tensor) -> Tensor:
    """A causal convolution of x [B, Q, channels] float32, from zeros on."""
    padded = functional.pad(x.transpose(1, 2), (convolution.kernel - 1, 0))
    y = functional.conv1d(padded, convolution.weight[:, None], convolution.bias, groups=convolution.channels)
    return y.transpose(1, 2)


@torch.no_grad()
def _check(module: Any, mixer: Mixer, out: str, hidden: int, mixed: Callable[[Any, Tensor], Tensor], name: str) -> None:
    """Check that a module computes what its output projection, its child `out`, makes of mixed(module, x).

    Raises:
        DescriptionError: it does not.
    """
    for matrix in mixer.projections:
        _check_size(matrix.columns, hidden, name)
    _check_size(mixer.out.rows, hidden, name)
    x, precise = (
        torch.randn(1, _TOKENS, hidden, generator=torch.Generator().manual_seed(0), device="cpu"),
        in_more_bits(module, _DTYPE),
    )
    try:
        computed = precise(x)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise DescriptionError(f"{name}, a {type(module).__name__}, cannot be evaluated: {error}") from error
    computed = computed[0] if isinstance(computed, tuple) else computed
    expected = getattr(precise, out)(mixed(precise, x))
    if computed.shape != expected.shape or not (computed - expected).norm() < _ROUNDING * expected.norm():
        raise DescriptionError(f"{name} is a {type(module).__name__} that computes something else")


def _check_size(size: int, hidden: int, name: str) -> None:
    if size != hidden:
        raise DescriptionError(f"{name} has projections of {size} instead of {hidden} numbers")

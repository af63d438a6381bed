"""Describes the recurrent mixers of transformers by the names of their parts.

What a forward does with them is compared by the logits of the whole model (`attachment.verification`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from h2o_stream.native.abi import NormKind
from h2o_stream.native.matrix import DescriptionError, Norm
from h2o_stream.native.mixer_layouts import DELTA_LAYOUTS, DeltaLayout
from h2o_stream.native.mixers import Convolution, GatedDelta, Mamba2, Mixer, ShortConvolution
from h2o_stream.native.multipliers import scaled_projections
from h2o_stream.native.torch_modules import as_float32, matrix_of


def mixer_of(module: Any, name: str) -> Mixer:
    """What a recurrent mixer computes, by the names of its parts; matrices are not copied.

    Raises:
        DescriptionError: it is none of the known ones.
    """
    names = {key for key, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    if names == {"conv", "in_proj", "out_proj"}:
        return _short_convolution(module, f"the convolution of {name}")
    for layout in DELTA_LAYOUTS:
        if names == {*layout.projections, layout.norm, layout.out, "conv1d", "A_log", "dt_bias"}:
            return _gated_delta(module, layout, f"the delta rule of {name}")
    if names - {"norm", "act"} == {"in_proj", "conv1d", "dt_bias", "A_log", "D", "out_proj"}:
        return _mamba2(module, f"the Mamba-2 of {name}")
    raise DescriptionError(f"{name} has a {type(module).__name__}, which is no mixer that is known")


def has_convolution(module: Any) -> bool:
    """Whether a module can be a recurrent mixer: all known ones have a convolution."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def convolution_of(module: Any, name: str) -> Convolution:
    """The weights of a causal convolution of single channels; raises DescriptionError if it is another one."""
    if type(module) is not nn.Conv1d or module.padding_mode != "zeros":
        raise DescriptionError(f"{name} is a {type(module).__name__} where a convolution is expected")
    kernel, channels = module.kernel_size[0], module.in_channels
    shape = module.groups, module.out_channels, module.padding[0], module.stride[0], module.dilation[0]
    if shape != (channels, channels, kernel - 1, 1, 1):
        raise DescriptionError(f"{name} is not a causal convolution of {channels} single channels")
    return Convolution(_float32(module.weight, name).view(channels, kernel), as_float32(module.bias, name))


def _short_convolution(module: Any, name: str) -> ShortConvolution:
    return ShortConvolution(
        matrix_of(module.in_proj, f"in_proj of {name}"),
        convolution_of(module.conv, f"conv of {name}"),
        matrix_of(module.out_proj, f"out_proj of {name}"),
    )


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


def _gated_delta(module: Any, layout: DeltaLayout, name: str) -> GatedDelta:
    sizes = _sizes(module, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"), name)
    key_heads, heads, key_size, value_size = sizes
    activation = getattr(module, "activation", None)
    if activation != "silu" or heads % key_heads:
        raise DescriptionError(f"{name} has {heads} heads for {key_heads}, and the activation {activation}")
    norm = getattr(module, layout.norm)
    rate, bias, weight = (_float32(tensor, name) for tensor in (module.A_log, module.dt_bias, norm.weight))
    if not rate.shape == bias.shape == (heads,) or weight.shape != (value_size,):
        raise DescriptionError(f"{name} has other numbers of decays or weights than heads")
    return GatedDelta(
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


def _mamba2(module: Any, name: str) -> Mamba2:
    keys = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
    key_heads, heads, key_size, value_size = _sizes(module, keys, name)
    if (activation := getattr(module, "activation", None)) != "silu":
        raise DescriptionError(f"{name} has the activation {activation}")
    if len(limits := tuple(getattr(module, "time_step_limit", None) or ())) != 2:
        raise DescriptionError(f"{name} has no limits of its steps")
    rate, bias, skip = (_float32(getattr(module, key), name) for key in ("A_log", "dt_bias", "D"))
    norm, weight = module.norm, as_float32(getattr(module.norm, "weight", None), name)
    normed = Norm() if weight is None else Norm(NormKind.RMS, weight, None, float(norm.variance_epsilon))
    return Mamba2(
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

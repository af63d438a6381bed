"""What rotary embeddings and the functions that apply them compute."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.rope import dimension_orders, rotate_back
from h2o_stream.native.attention import Rope
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.probing import ROUNDING, relative_error

_FIXED_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional"}
"""RoPE types whose frequencies do not depend on the sequence length."""

_TEST_POSITIONS = (0, 1, 5)


_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_emb")
"""Functions beside an attention that rotate its queries and keys."""

_OF_PAIRS = "apply_rotary_pos_emb_interleave"
"""Takes pairs of neighbours and gives halves."""


def rope_of(rotary: Any, layer_type: str | None, attention: Any, size: int, name: str, tail: int = 0) -> Rope:
    """Frequencies, scale and form of a rotary embedding of transformers, which the module `attention` applies.

    `layer_type` is that of the layer, if the embedding distinguishes several; `tail`, how many of the last elements of
    a head it is applied to, 0 for all.

    Raises:
        DescriptionError: it does not rotate in a known form by fixed angles per position.
    """
    prefix, kind = "", rotary.rope_type
    layer_args: tuple[str, ...] = ()
    if isinstance(kind, dict):
        if layer_type is None or layer_type not in kind:
            raise DescriptionError(f"{name} is in a layer without rotary positions")
        prefix, kind, layer_args = f"{layer_type}_", kind[layer_type], (layer_type,)
    # "original" frequencies stay the same while a long text is processed
    angles = getattr(rotary, f"{prefix}original_inv_freq", getattr(rotary, f"{prefix}inv_freq", None))
    if angles is None or angles.is_meta:
        raise DescriptionError(f"{type(rotary).__name__} has no angles per position")
    scale = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    frequencies = angles.detach().float().cpu().contiguous()
    rotary_dims, applied = 2 * len(frequencies), tail or size
    if getattr(attention, "rotary_ndims", rotary_dims) != rotary_dims:
        raise DescriptionError(f"{name} rotates {attention.rotary_ndims} elements, its table has {rotary_dims}")
    if rotary_dims > applied or (tail and rotary_dims != tail):
        raise DescriptionError(f"{name} rotates {rotary_dims} of {applied} elements")
    positions = torch.tensor([_TEST_POSITIONS], device=angles.device)
    computed = rotary(torch.zeros(1, dtype=torch.float32, device=angles.device), positions, *layer_args)
    computed = computed.cpu() if isinstance(computed, Tensor) else tuple(part.cpu() for part in computed)
    table = torch.outer(positions[0].float().cpu(), frequencies)
    rotations = torch.cat((table.cos(), table.sin()), -1) * scale
    order = _rotated_order(attention, computed, rotations, applied)
    if order is None:
        raise DescriptionError(f"{name} does not rotate in a known form")
    if tail:
        order = torch.cat((order + size - tail, torch.arange(size - tail)))
    return Rope(frequencies, scale, kind in _FIXED_ROPE_TYPES, None if order.diff().eq(1).all() else order.int())


def _rotated_order(attention: Any, angles: Any, rotations: Tensor, size: int) -> Tensor | None:
    """The order [size] int64 in which a function beside an attention rotates halves, None if it is no known one.

    Angles are cosines and sines, or complex numbers, as its rotary embedding gives them; `rotations` [n, Drot] are the
    same, once for each pair.
    """
    takes_pairs = getattr(getattr(attention, "config", None), "rope_interleave", False)
    beside = sys.modules[type(attention).__module__]
    functions = [getattr(beside, key, None) for key in ((_OF_PAIRS,) if takes_pairs else _FUNCTIONS)]
    inverse = rotations * torch.tensor([1.0, -1.0]).repeat_interleave(rotations.shape[-1] // 2)
    for count in dict.fromkeys((size, rotations.shape[-1])):  # attentions may cut heads before
        x = (torch.arange(len(rotations) * count, dtype=torch.float32, device="cpu") * 0.9).sin().view(1, 1, -1, count)
        ordered = x.unflatten(-1, (-1, 2)).mT.flatten(-2) if takes_pairs else x
        for rotated in _applied(filter(None, functions), x, angles):
            for order in dimension_orders(count, rotations.shape[-1]):
                if relative_error(rotated[..., order], rotate_back(ordered[..., order], inverse)) < ROUNDING:
                    return torch.cat((order, torch.arange(count, size)))
    return None


def _applied(functions: Iterable[Any], x: Tensor, found: Any) -> Iterator[Tensor]:
    """What these functions make of x [1, 1, n, D], in any of the forms in which models call them."""
    angles, across = (found,) if isinstance(found, Tensor) else tuple(found), x.transpose(1, 2)
    for function, (inputs, back) in itertools.product(
        functions, (((x, x), False), ((x,), False), ((across, across), True))
    ):
        try:
            rotated = function(*inputs, *angles)
        except (TypeError, ValueError, RuntimeError, IndexError):
            continue
        both = rotated if isinstance(rotated, tuple) else (rotated,)
        if all(y.shape == inputs[0].shape and y.equal(both[0]) for y in both):
            yield both[0].transpose(1, 2) if back else both[0]

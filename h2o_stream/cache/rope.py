"""Rotary positions by distance.

RoPE depends only on differences, so the newest token of a forward is at position 0 and every other one at minus its
distance. Keys are stored un-rotated and rotated by a table lookup when they are attended to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from h2o_stream.cache.rotations import Rotations
from h2o_stream.config import Positions
from h2o_stream.errors import UnsupportedModelError

_WITHIN_CONTEXT = {"default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic"}
"""Kinds of RoPE whose frequencies do not change inside the distances that `support.max_distance_of` gives."""


ABSOLUTE_TAKEN = "the model has no rotary positions: --positions absolute is taken, and the stream ends at its last one"


class PositionsError(UnsupportedModelError):
    """A model is refused because of the position mode, for this reason; ``absolute`` might work."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; use --positions absolute")


class RopeLookup(NamedTuple):
    """The rotations of the keys.

    Attributes:
        table: [N, Drot], cosines and sines by distance.
        distance: [B, Hkv, K] int64, distance of each key from the newest token.
    """

    table: Tensor
    distance: Tensor


def distances(positions: Positions, span: int | Tensor, age: Tensor, rank: Tensor) -> Tensor:
    """How far RoPE places each key behind the newest token.

    Args:
        positions: ``gap`` or ``rolling``.
        span: with ``gap``, the distance up to which distances are true.
        age: int64, tokens seen since the key.
        rank: int64, same shape, kept keys newer than it; never above age.

    Returns:
        int64, same shape: rank for ``rolling``, ``min(age, span + rank)`` for ``gap``. Both grow with age,
        so the order of the tokens is kept.
    """
    if positions == "rolling":
        return rank.long()
    return torch.minimum(age, rank.long() + span)


def rotate_back(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate by minus the angles of the table, in the rotate-half form of RoPE.

    Args:
        x: [..., D] un-rotated queries or keys.
        rotation: [..., Drot] out of `RotaryTable.upto`; dimensions of x beyond Drot stay as they are.
    """
    half = rotation.shape[-1] // 2
    cos, sin = rotation[..., :half], rotation[..., half:]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [torch.addcmul(first * cos, second, sin), torch.addcmul(second * cos, first, sin, value=-1)]
    return torch.cat(rotated if x.shape[-1] == 2 * half else [*rotated, x[..., 2 * half :]], dim=-1)


class RotaryTable(Rotations):
    """The rotations of a model's own rotary embedding, as tensors, too.

    The model still scales queries and keys by its ``attention_scaling`` (YaRN) when it rotates them by position 0; the
    table omits that factor, so that it is applied once.

    Args:
        rotary: the model's rotary embedding.
        layer_type: name of one of several frequencies (Gemma 3), or None if there is one.
    """

    def __init__(self, rotary: Any, layer_type: str | None = None) -> None:
        self._rotary = rotary
        self._layer_type = (layer_type,) if layer_type else ()
        prefix = f"{layer_type}_" if layer_type else ""
        self._scaling = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
        self._tensors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def upto(self, limit: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`on_cpu` on any device, [N, Drot] in any dtype."""
        key = (device, dtype)
        if key not in self._tensors or len(self._tensors[key]) < limit:
            self._tensors[key] = torch.from_numpy(self.on_cpu(limit)).to(device, dtype)
        return self._tensors[key]

    @torch.no_grad()
    def _make(self, limit: int) -> NDArray[numpy.float32]:
        device = next(self._rotary.buffers(), torch.empty(0, device="cpu")).device
        position = torch.arange(limit, device=device)[None]
        rotations = self._rotary(torch.zeros(1, device=device, dtype=torch.float32), position, *self._layer_type)
        cos, sin = (rotations.real, rotations.imag) if isinstance(rotations, Tensor) else rotations
        table = torch.cat((_once(cos[0]), _once(sin[0])), dim=-1)
        rows: NDArray[numpy.float32] = (table / self._scaling).float().cpu().numpy()
        return rows


def _once(x: Tensor) -> Tensor:
    """One number for each pair of dimensions: the first half of x, every second one, or all if none comes twice."""
    if x.shape[-1] % 2:
        return x
    first, second = x.chunk(2, dim=-1)
    even, odd = x[..., ::2], x[..., 1::2]
    return first if first.equal(second) else even if even.equal(odd) else x


def dimension_orders(size: int, rotary_dims: int) -> Iterator[Tensor]:
    """Orders of the dimensions of a head in which some model's RoPE is the rotate-half form.

    The rotary dimensions come first or, in latent attention, last. They are halves as in Llama, adjacent pairs (GLM,
    Cohere), and each in one direction or the other (nanochat). The first order changes nothing.

    Yields:
        [D] int64. Products of queries and keys are the same in every order.
    """
    dims = torch.arange(size, device="cpu")
    for start in dict.fromkeys((0, size - rotary_dims)):
        rotary, others = dims[start : start + rotary_dims], torch.cat((dims[:start], dims[start + rotary_dims :]))
        for halves in (rotary.view(2, -1), rotary.view(-1, 2).T):
            yield torch.cat((*halves, others))
            yield torch.cat((*halves.flip(0), others))


def tables_of(model: nn.Module, layer_types: Iterable[str]) -> dict[str, list[RotaryTable]]:
    """The tables that may apply to each kind of layer: one for each rotary embedding of a model, most have one."""
    tables: dict[str, list[RotaryTable]] = {kind: [] for kind in layer_types}
    for rotary in model.modules():
        types: Any = getattr(rotary, "rope_type", None)
        if types is None:
            continue
        by_layer = isinstance(types, dict)
        for rope in types.values() if by_layer else (types,):
            if rope not in _WITHIN_CONTEXT:
                raise PositionsError(f"{type(model).__name__} uses {rope} RoPE, which is not known here")
        shared = RotaryTable(rotary)
        for kind, ours in tables.items():
            ours.append(RotaryTable(rotary, kind) if by_layer else shared)
    return tables

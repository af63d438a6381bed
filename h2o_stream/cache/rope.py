"""Rotary positions by distance: where RoPE sees the kept tokens.

RoPE only sees differences, so the newest token of a forward stands at position 0 and every other one at
minus its distance. Keys are stored un-rotated and rotated by a table lookup when they are attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from h2o_stream.config import Positions
from h2o_stream.errors import UnsupportedModelError

_WITHIN_CONTEXT = {"default", "linear", "llama3", "yarn", "proportional", "longrope", "dynamic"}
"""Kinds of RoPE whose frequencies do not change inside the distances that `support.max_distance_of` gives."""


class PositionsError(UnsupportedModelError):
    """What is refused for the positions that were asked for: the model's own might be served.

    Args:
        reason: why they are refused; the message also says what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; use --positions absolute")


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


def rotate_back(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate by minus the tabled angles, as the rotate-half form of RoPE does.

    Args:
        x: [..., D] un-rotated queries or keys.
        turns: [..., Drot] out of `RotaryTable.upto`; dimensions of x past Drot stay as they are.
    """
    half = turns.shape[-1] // 2
    cos, sin = turns[..., :half], turns[..., half:]
    first, second = x[..., :half], x[..., half : 2 * half]
    pieces = [torch.addcmul(first * cos, second, sin), torch.addcmul(second * cos, first, sin, value=-1)]
    return torch.cat(pieces if x.shape[-1] == 2 * half else [*pieces, x[..., 2 * half :]], dim=-1)


class RotaryTable:
    """Cosines and sines of a model's own rotary embedding by distance, made once and grown when needed.

    The model still scales queries and keys by its ``attention_scaling`` (YaRN) when it rotates them by
    position 0; the table leaves that factor out, so that it is applied once.

    Args:
        rotary: the model's rotary embedding.
        layer_type: which of its several frequencies (Gemma 3), or None where it has one.
    """

    def __init__(self, rotary: nn.Module, layer_type: str | None = None) -> None:
        self._rotary = rotary
        self._which = (layer_type,) if layer_type else ()
        prefix = f"{layer_type}_" if layer_type else ""
        self._scaling = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def upto(self, limit: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Cosines and sines by distance.

        Args:
            limit: distances from 0 to limit - 1 are needed.
            device: of the result.
            dtype: of the result.

        Returns:
            [N, Drot], N at least `limit`: Drot / 2 cosines, then as many sines.
        """
        key = (device, dtype)
        if key not in self._tables or len(self._tables[key]) < limit:
            self._tables[key] = self._make(limit, *key)
        return self._tables[key]

    @torch.no_grad()
    def _make(self, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        places = torch.arange(size, device=device)[None]
        cos, sin = self._rotary(torch.zeros(1, device=device, dtype=torch.float32), places, *self._which)
        half = cos.shape[-1] // 2
        table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        return (table / self._scaling).to(dtype)


def rotary_of(model: nn.Module) -> nn.Module:
    """The one rotary embedding of a model.

    Raises:
        PositionsError: there is none, there are several, or its kind is not known.
    """
    name = type(model).__name__
    found = [module for module in model.modules() if hasattr(module, "rope_type")]
    if len(found) != 1:
        raise PositionsError(f"{name} has {len(found)} rotary embeddings, rolling and gap positions need one")
    kinds = found[0].rope_type
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind not in _WITHIN_CONTEXT:
            raise PositionsError(f"{name} uses {kind} RoPE, which is not known here")
    return found[0]


def table_for(rotary: nn.Module, layer_type: str) -> RotaryTable:
    """The table of one kind of layer; most models have one for all."""
    return RotaryTable(rotary, layer_type if isinstance(rotary.rope_type, dict) else None)

"""Rotary positions by distance: where RoPE sees the kept tokens.

RoPE only sees differences, so the newest token of a forward stands at position 0 and every other one at
minus its distance. Keys are stored un-rotated and rotated by a table lookup when they are attended to.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from h2o_stream.config import CachePlan
from h2o_stream.errors import UnsupportedModelError

_FIXED_FREQUENCIES = {"default", "linear", "llama3", "yarn"}


def distances(plan: CachePlan, age: Tensor, rank: Tensor) -> Tensor:
    """How far RoPE places each key behind the newest token.

    Args:
        plan: gives ``positions`` and ``span``.
        age: int64, tokens seen since the key.
        rank: int64, same shape, kept keys newer than it; never above age.

    Returns:
        int64, same shape: rank for ``rolling``, ``min(age, span + rank)`` for ``gap``. Both grow with age,
        so the order of the tokens is kept.
    """
    if plan.positions == "rolling":
        return rank
    return torch.minimum(age, rank + plan.span)


def rotate_back(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate by minus the tabled angles, as the rotate-half form of RoPE does.

    Args:
        x: [..., D] un-rotated queries or keys.
        turns: [..., Drot] from `RotaryTable.lookup`; dimensions of x past Drot stay as they are.
    """
    half = turns.shape[-1] // 2
    cos, sin = turns[..., :half], turns[..., half:]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (torch.addcmul(first * cos, second, sin), torch.addcmul(second * cos, first, sin, value=-1))
    return torch.cat(turned if x.shape[-1] == 2 * half else (*turned, x[..., 2 * half :]), dim=-1)


class RotaryTable:
    """Cosines and sines of a model's own rotary embedding by distance, made once and grown when needed.

    The model still scales queries and keys by its ``attention_scaling`` (YaRN) when it rotates them by
    position 0; the table leaves that factor out, so that it is applied once.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def lookup(self, distance: Tensor, dtype: torch.dtype, limit: int) -> Tensor:
        """Cosines and sines for each distance.

        Args:
            distance: int64, any shape, values from 0 to limit - 1.
            dtype: of the result.
            limit: a bound on the distances, known without looking at them.

        Returns:
            [*distance.shape, Drot]: Drot / 2 cosines, then as many sines.
        """
        key = (distance.device, dtype)
        if key not in self._tables or len(self._tables[key]) < limit:
            self._tables[key] = self._make(limit, *key)
        return nn.functional.embedding(distance, self._tables[key])

    @torch.no_grad()
    def _make(self, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        places = torch.arange(size, device=device)[None]
        cos, sin = self._rotary(torch.zeros(1, device=device, dtype=torch.float32), places)
        half = cos.shape[-1] // 2
        table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        return (table / float(getattr(self._rotary, "attention_scaling", 1.0))).to(dtype)


def rotary_of(model: nn.Module) -> nn.Module:
    """The one rotary embedding of a model, checked to rotate as `rotate_back` does.

    Raises:
        UnsupportedModelError: there is none, there are several, its frequencies change with the length, or
            it pairs the dimensions in another way.
    """
    name = type(model).__name__
    found = [m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(found)} rotary embeddings, rolling and gap positions need one; try --positions absolute"
        )
    rotary = found[0]
    kind = getattr(rotary, "rope_type", "default")
    if kind not in _FIXED_FREQUENCIES:
        raise UnsupportedModelError(
            f"{name} uses {kind} RoPE, whose frequencies change with the length; try --positions absolute"
        )
    _check_convention(rotary, name)
    return rotary


@torch.no_grad()
def _check_convention(rotary: nn.Module, name: str) -> None:
    apply = getattr(sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None)
    device = next(rotary.buffers()).device
    cos, sin = rotary(torch.zeros(1, device=device), torch.tensor([[3]], device=device))
    if apply is not None:
        x = torch.linspace(-1, 1, cos.shape[-1], device=device).view(1, 1, 1, -1)
        half = cos.shape[-1] // 2
        ours = rotate_back(x, torch.cat((cos[..., :half], -sin[..., :half]), dim=-1)[:, None])
        if torch.allclose(apply(x, x, cos, sin)[0], ours, atol=1e-5):
            return
    raise UnsupportedModelError(f"{name} applies RoPE in a form we do not reproduce; try --positions absolute")

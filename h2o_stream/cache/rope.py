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


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first Drot of D dimensions by minus the tabled angle, as the rotate-half form of RoPE does.

    Args:
        x: [..., D] un-rotated queries or keys.
        cos: [..., Drot], broadcastable to x.
        sin: [..., Drot].
    """
    size = cos.shape[-1]
    turned, passed = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((second, -first), dim=-1) * sin
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned


class RotaryTable:
    """Cosines and sines of a model's own rotary embedding by distance, made once and grown when needed.

    The model still scales queries and keys by its ``attention_scaling`` (YaRN) when it rotates them by
    position 0; the table leaves that factor out, so that it is applied once.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def lookup(self, distance: Tensor, dtype: torch.dtype, limit: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each distance.

        Args:
            distance: int64, any shape, values from 0 to limit - 1.
            dtype: of the result.
            limit: a bound on the distances, known without looking at them.

        Returns:
            Two tensors of shape [*distance.shape, Drot].
        """
        key = (distance.device, dtype)
        if key not in self._tables or len(self._tables[key][0]) < limit:
            self._tables[key] = self._make(limit, *key)
        cos, sin = self._tables[key]
        return cos[distance], sin[distance]

    @torch.no_grad()
    def _make(self, size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        places = torch.arange(size, device=device)[None]
        cos, sin = self._rotary(torch.zeros(1, device=device, dtype=torch.float32), places)
        scaling = float(getattr(self._rotary, "attention_scaling", 1.0))
        return (cos[0] / scaling).to(dtype), (sin[0] / scaling).to(dtype)


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
        theirs = apply(x, x, cos, sin)[0]
        if torch.allclose(theirs, rotate_back(x, cos, -sin), atol=1e-5):
            return
    raise UnsupportedModelError(f"{name} applies RoPE in a form we do not reproduce; try --positions absolute")

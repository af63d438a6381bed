"""Numbers of versions of the residual stream, from the header of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h2o_stream.models.gguf import GgufFile


@dataclass(frozen=True)
class AltUpParameters:
    """Numbers of a model with versions of the residual stream.

    Attributes:
        count: versions.
        active: the one that layers read.
        rank: of the residuals of low rank.
        gate_deviations: of each layer, see `native.description.Mlp`.
    """

    count: int
    active: int
    rank: int
    gate_deviations: tuple[float | None, ...]


def altup_of(file: GgufFile, get: Callable[[str], Any]) -> AltUpParameters:
    """The numbers of a GGUF file."""
    deviations = [float(number) for number in get("activation_sparsity_scale")]
    return AltUpParameters(
        int(get("altup.num_inputs")),
        int(get("altup.active_idx")),
        file.tensors["blk.0.laurel_l.weight"].shape[0],
        tuple(None if number == -math.inf else number for number in deviations),
    )

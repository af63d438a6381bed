"""Numbers of versions of the residual stream, from the header of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import MAX_VERSIONS
from h2o_stream.native.matrix import require


@dataclass(frozen=True)
class AltUpParameters:
    """Numbers of a model with `count` versions of the residual stream, of which layers read the one that is active.

    Attributes:
        gate_deviations: deviations of each layer, see `native.description.Mlp`.
        corrects_scale: whether the active version is scaled before a layer's embedding is added.

    Raises:
        DescriptionError: they do not fit each other.
    """

    count: int
    active: int
    rank: int
    gate_deviations: tuple[float | None, ...]
    corrects_scale: bool = True

    def __post_init__(self) -> None:
        count = f"altup.num_inputs is {self.count}, not a number from 2 to {MAX_VERSIONS}"
        require(1 < self.count <= MAX_VERSIONS, count)
        active = f"altup.active_idx is {self.active}, not a number from 0 to {self.count - 1}"
        require(0 <= self.active < self.count, active)


def altup_of(file: GgufFile, get: Callable[[str], Any]) -> AltUpParameters:
    """The numbers of a GGUF file."""
    deviations = [float(number) for number in get("activation_sparsity_scale")]
    return AltUpParameters(
        int(get("altup.num_inputs")),
        int(get("altup.active_idx")),
        file.tensors["blk.0.laurel_l.weight"].shape[0],
        tuple(None if number == -math.inf else number for number in deviations),
    )

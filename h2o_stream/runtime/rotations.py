"""RoPE of layers, and its frequencies, in numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from h2o_stream.native.matrix import require

Floats = NDArray[numpy.float32]

MAX_FLOAT = float(numpy.finfo(numpy.float32).max)
MAX_ROTARY_DIMS = 2**16
"""Most numbers of a head that RoPE turns, before it is known how many the head has."""


@dataclass(frozen=True, eq=False)
class RopeParameters:
    """RoPE of a layer.

    Attributes:
        frequencies: [rotary_dims / 2] float32, angles per position.
        scale: factor on rotated queries and keys.
        fixed: whether rotations depend on the position alone, not on the length of the text.
        max_distance: distance up to which this is so, 0 for any.

    Raises:
        DescriptionError: they are no numbers.
    """

    frequencies: Floats
    scale: float = 1.0
    fixed: bool = True
    max_distance: int = 0

    def __post_init__(self) -> None:
        require(bool(numpy.isfinite(self.frequencies).all()), "the frequencies of RoPE are not all numbers")
        require(abs(self.scale) < MAX_FLOAT, f"rope.scaling.attn_factor makes {self.scale}, not a number")
        require(self.max_distance >= 0, f"rope.scaling.original_context_length is {self.max_distance}")

    def check_head(self, size: int) -> None:
        """Raises DescriptionError if it turns more numbers than a head has."""
        dims, keys = 2 * len(self.frequencies), "rope.dimension_count, partial_rotary_factor"
        require(dims <= size, f"RoPE turns {dims} numbers ({keys}), more than the {size} of a head")


@numpy.errstate(all="ignore")  # `RopeParameters` refuses what comes of numbers out of range
def rope_frequencies(theta: float, rotary_dims: int) -> Floats:
    """[rotary_dims / 2] float32, angles per position of plain RoPE, computed in float32 as transformers does.

    Raises:
        DescriptionError: these are not numbers of a RoPE.
    """
    dims = "rope.dimension_count, partial_rotary_factor of a head"
    fits = 0 < rotary_dims <= MAX_ROTARY_DIMS and rotary_dims % 2 == 0
    require(fits, f"RoPE turns {rotary_dims} numbers ({dims}), not an even number up to {MAX_ROTARY_DIMS}")
    require(0 < theta < MAX_FLOAT, f"rope.freq_base, rope_theta is {theta}, not a positive number")
    exponents = numpy.arange(0, rotary_dims, 2, dtype=numpy.float32) / numpy.float32(rotary_dims)
    return numpy.float32(1) / numpy.float32(theta) ** exponents


def yarn_magnitude(factor: float, share: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, each."""
    return 0.1 * share * math.log(factor) + 1


@numpy.errstate(all="ignore")
def yarn_frequencies(
    theta: float, rotary_dims: int, factor: float, context: int, betas: tuple[float, float], whole_ramp: bool = True
) -> Floats:
    """[rotary_dims / 2] float32, angles per position of YaRN (arXiv 2309.00071).

    Args:
        theta: base.
        rotary_dims: rotated elements of a head.
        factor: how much slow rotations are stretched.
        context: positions of the original model.
        betas: rotations within `context`: from the first on none are stretched, up to the second all.
        whole_ramp: between these, frequencies are mixed from one whole dimension to another.

    Raises:
        DescriptionError: these are not numbers of a RoPE.
    """
    fits = all(0 < x < MAX_FLOAT for x in (factor, context, *betas)) and theta != 1
    require(fits, f"YaRN has the factor {factor}, the context {context} and the betas {betas} for base {theta}")
    plain = rope_frequencies(theta, rotary_dims)
    low, high = (rotary_dims * math.log(context / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in betas)
    if whole_ramp:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dims - 1)
    dims = numpy.arange(rotary_dims // 2, dtype=numpy.float32)
    ramp = (dims - numpy.float32(low)) / numpy.float32((high - low) or 0.001)
    stretched = ramp.clip(0, 1)
    mixed: Floats = plain / numpy.float32(factor) * stretched + plain * (1 - stretched)
    return mixed

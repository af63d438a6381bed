"""Chooses in how many bits weights fit into memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from h2o_stream.base.memory import format_bytes
from h2o_stream.errors import OutOfMemoryError


class Dtype(Protocol):
    """A dtype of torch, or `FileDtype`."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


@dataclass(frozen=True)
class FileDtype:
    """A dtype where there is no torch."""

    name: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.name == "float32" else 2

    def __str__(self) -> str:
        return self.name


DEFAULT_SHARE = 0.6
"""Share of the free memory that weights may take by default."""

MAX_SHARE = 0.9
"""Share they may take if the user asks for it or no smaller format is left."""


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights: in float32, with matrices packed in 8 or 4 bits, and the largest tensor, which exists
    twice for a moment.
    """

    float32: int
    int8: int
    int4: int
    largest: int

    def bytes_of(self, dtype: Dtype, quantize: str) -> int:
        """Memory needed for loading."""
        if quantize == "none":
            return self.float32 * dtype.itemsize // 4
        return self.largest + (self.int8 if quantize == "int8" else self.int4)


@dataclass(frozen=True)
class Precision:
    """A choice of precision: dtype of unpacked weights and activations, packed format, a reason if it may surprise."""

    dtype: Any
    quantize: str
    reason: str = ""


def choose_precision(
    name: str,
    sizes: WeightSizes,
    free_bytes: int,
    quantize: str,
    dtypes: tuple[Dtype, ...],
    can_pack: bool = True,
) -> Precision:
    """Choose the precision of weights for the free memory: the user's, or for ``auto`` the widest that fits.

    Dtypes come best first; `can_pack` says whether this machine can pack weights. The name is for messages.

    Raises:
        OutOfMemoryError: no allowed choice fits.
    """

    def fits(dtype: Dtype, scheme: str, share: float) -> bool:
        return sizes.bytes_of(dtype, scheme) <= share * free_bytes

    def explain(dtype: Dtype, scheme: str) -> str:
        needed = format_bytes(sizes.bytes_of(dtypes[0], "none"))
        packed = format_bytes(sizes.bytes_of(dtype, scheme) - sizes.largest)
        return (
            f"{name} takes {needed} in {dtype_name(dtypes[0])} and {format_bytes(free_bytes)} of memory are free: "
            f"its weights are packed into {scheme} ({packed}); --quantize chooses otherwise."
        )

    best = dtypes[0]
    if quantize != "auto" or not can_pack:
        scheme = "none" if quantize == "auto" else quantize
        for dtype in dtypes:
            if fits(dtype, scheme, MAX_SHARE):
                return Precision(dtype, scheme)
    else:
        if fits(best, "none", DEFAULT_SHARE):
            return Precision(best, "none")
        for scheme, share in (("int8", DEFAULT_SHARE), ("int4", MAX_SHARE)):
            if fits(best, scheme, share):
                return Precision(best, scheme, explain(best, scheme))
        scheme = "int4"
    needed, smallest = sizes.bytes_of(dtypes[-1], scheme), sizes.bytes_of(best, "int4")
    can_shrink = scheme != "int4" and can_pack
    hint = f"--quantize int4 takes {format_bytes(smallest)}" if can_shrink else "take a smaller --model"
    width = dtype_name(dtypes[-1]) if scheme == "none" else scheme
    raise OutOfMemoryError(
        f"{name} needs {format_bytes(needed)} of memory in {width}, {format_bytes(free_bytes)} are free; {hint}"
    )


def dtype_name(dtype: Dtype) -> str:
    """Such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")

"""Chooses in how many bits weights fit into memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_stream.base.memory import format_bytes
from h2o_stream.errors import OutOfMemoryError


def item_size(dtype: str) -> int:
    """Bytes of a number in this dtype, one for activations."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


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

    def bytes_of(self, dtype: str, quantize: str) -> int:
        """Memory needed for loading."""
        if quantize == "none":
            return self.float32 * item_size(dtype) // 4
        return self.largest + (self.int8 if quantize == "int8" else self.int4)


@dataclass(frozen=True)
class Precision:
    """A choice of precision: dtype of unpacked weights and activations, packed format, a reason if it may surprise."""

    dtype: str
    quantize: str
    reason: str = ""


def choose_precision(
    name: str,
    sizes: WeightSizes,
    free_bytes: int,
    quantize: str,
    dtypes: tuple[str, ...],
    can_pack: bool = True,
) -> Precision:
    """Choose the precision of weights for the free memory: the user's, or for ``auto`` the widest that fits.

    Dtypes come best first; `can_pack` says whether this machine can pack weights. The name is for messages.

    Raises:
        OutOfMemoryError: no allowed choice fits.
    """

    def fits(dtype: str, scheme: str, share: float) -> bool:
        return sizes.bytes_of(dtype, scheme) <= share * free_bytes

    def explain(dtype: str, scheme: str) -> str:
        needed = format_bytes(sizes.bytes_of(dtypes[0], "none"))
        packed = format_bytes(sizes.bytes_of(dtype, scheme) - sizes.largest)
        return (
            f"{name} takes {needed} in {dtypes[0]} and {format_bytes(free_bytes)} of memory are free: "
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
    width = dtypes[-1] if scheme == "none" else scheme
    raise OutOfMemoryError(
        f"{name} needs {format_bytes(needed)} of memory in {width}, {format_bytes(free_bytes)} are free; {hint}"
    )

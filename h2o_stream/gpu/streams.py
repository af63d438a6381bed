"""Where the slots of several streams are, for one launch: a table [streams, n] int64 of addresses and numbers."""

import triton
import triton.language as tl

ARRAYS = (
    "keys", "values", "key_codes", "value_codes", "key_range", "value_grid", "scores", "longs", "index", "rank", "free",
    "seen", "pins", "transient",
)  # fmt: skip
"""Whose addresses are in a row of the table, in this order; after them `NUMBERS`."""

NUMBERS = ("pin_count", "transient_count", "token")
"""Others than addresses: the last is the row of a stream's token."""

ALIGNED = 16
"""Bytes of which all addresses are multiples, as torch allocates them."""

_ALIGNED = tl.constexpr(ALIGNED)
_SIZE = tl.constexpr(len(ARRAYS) + len(NUMBERS))


@triton.jit
def array_of(streams, stream, array, PLACE: tl.constexpr):
    """An array of a stream, which is like another; None if that is."""
    if array is not None:
        address = tl.load(streams + stream * _SIZE + PLACE)
        array = tl.multiple_of(address.to(tl.pointer_type(array.dtype.element_ty)), _ALIGNED)
    return array


@triton.jit
def number_of(streams, stream, PLACE: tl.constexpr):
    """One of the `NUMBERS` of a stream."""
    return tl.load(streams + stream * _SIZE + PLACE).to(tl.int32)

"""The slots of some KV heads: keys, values and the bookkeeping of the tokens in them, in arrays. Imports no torch.

The layout stands here alone: in memory, in states, and as `abi.h` has it. A number in bfloat16 is a uint16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from h2o_stream.base.memory import anonymous_memory
from h2o_stream.cache.group_rules import GroupRules, HeadShape
from h2o_stream.cache.mapped_memory import mapped_memory
from h2o_stream.cache.state import Array, dtype_of, require_array
from h2o_stream.cache.windows import Schedule
from h2o_stream.config import CachePlan
from h2o_stream.errors import ConfigError, H2OStreamError

STORED = ("keys", "values")
ENCODED = ("key_codes", "value_codes", "value_grid")
_ENTRIES = ("scores", "index", "rank", "long_term_scores")
"""Arrays with a row for each slot in full precision, for each other slot, and for every slot."""

_ALIGNMENT = 64
"""Bytes of a cache line, at which arrays begin."""


class Field(NamedTuple):
    """An array: its shape, the number in it while it is empty, and its dtype by name."""

    shape: tuple[int, ...]
    value: float
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> numpy.dtype[Any]:
        """The dtype that holds its bits."""
        return numpy.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)


class Slots(GroupRules):
    """S slots of each of Hkv heads, in B rows; nothing is allocated before the first token.

    Args:
        plan: also says how keys and values are stored.
        shape: shape of the layer's heads; None if the first keys show it.
        dtype: dtype of keys and values, such as ``bfloat16``; None likewise.
        on_disk: whether keys and values are in mapped files.

    Attributes:
        filled: slots from this index on are empty. Undefined if keys and values are in few bits.
        queries_per_key: query heads per KV head; 0 before the first token.
    """

    device: Any = "cpu"
    is_initialized = False
    filled = queries_per_key = 0

    def __init__(
        self,
        plan: CachePlan,
        *,
        shape: HeadShape | None = None,
        dtype: Any = None,
        on_disk: bool = False,
        **rules: Any,
    ) -> None:
        super().__init__(plan, **rules)
        self.shape, self.dtype, self.on_disk = shape, dtype, on_disk
        self._arrays: dict[str, Any] = {}

    # layout

    def layout(self, shape: HeadShape, dtype: Any, rows: int, slots: int) -> Mapping[str, Field]:
        """What B `rows` of S `slots` are made of, by name: [B, Hkv, *], and ``seen`` [B, 1, 1].

        ``keys`` and ``values`` are un-rotated, or rotated by token index with ``absolute``; for those in a few bits see
        `QuantizedStore`. ``scores`` are -inf where a slot is empty, ``index`` is the token index in its row or -1,
        ``rank`` the number of newer tokens in the slots or, where empty, at least as many as they hold. ``free`` is an
        empty slot for the next token, ``seen`` how many tokens a row has taken: the copy of `tokens.lengths` beside
        the slots.

        Raises:
            ConfigError: heads do not fill the bytes of their codes.
        """
        heads = shape.kv_heads if self.heads is None else len(self.heads)
        name, bits = str(dtype).removeprefix("torch."), self.plan.kv_bits
        return _layout(shape, name, rows, slots, heads, self.exact, bits, self.has_long_term)

    def bytes_of(self, shape: HeadShape, dtype: Any) -> int:
        """Bytes that one row takes at most."""
        return sum(field.nbytes for field in self.layout(shape, dtype, 1, self.schedule.common + self.spare).values())

    # what is held

    def tensors(self) -> dict[str, Any]:
        """Everything allocated, by name: tensors or arrays, which native code writes in place."""
        return self._arrays

    def _as_array(self, tensor: Any) -> Array:
        array: Array = tensor
        return array

    def _in_numpy(self) -> dict[str, Array]:
        """Everything in arrays: copies of what is elsewhere than on the CPU."""
        return {name: self._as_array(tensor) for name, tensor in self.tensors().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self._arrays["index"].shape[-1])

    @property
    def token_indices(self) -> NDArray[numpy.int32]:
        """[B, Hkv, S] int32 on the CPU, the token in each slot, -1 where it is empty."""
        return self._as_array(self._arrays["index"])

    @property
    def used_slots(self) -> int:
        """Slots from this index on are empty."""
        return int(numpy.flatnonzero((self.token_indices >= 0).any((0, 1))).max(initial=-1)) + 1

    def arrays(self) -> dict[str, Array]:
        """A copy of everything in use, by name. Empty slots at the end are left out."""
        return {name: array.copy() for name, array in self._first(self.used_slots, self._in_numpy()).items()}

    def _first(self, slots: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Views of arrays with so many slots."""
        counts = _counts(slots, self.exact)
        return {name: x[:, :, : counts[name]] if name in counts else x for name, x in arrays.items()}

    # allocation

    def allocate(self, shape: HeadShape, dtype: str, rows: int, slots: int) -> None:
        """Allocate every slot, empty; the rest as in `layout`."""
        self.shape, self.dtype, self.queries_per_key = shape, dtype, shape.query_heads // shape.kv_heads
        self._hold(self._empty(rows, slots))
        self.filled = 0

    def _empty(self, rows: int, slots: int) -> dict[str, Array]:
        assert self.shape is not None
        fields, apart = self.layout(self.shape, self.dtype, rows, slots), dict[str, Field]()
        if self.on_disk:
            apart = {name: fields[name] for name in (*STORED, *ENCODED) if name in fields}
            fields = {name: field for name, field in fields.items() if name not in apart}
        arrays = _in_one_block(fields, anonymous_memory) | (_in_one_block(apart, mapped_memory) if apart else {})
        if "key_range" in arrays:
            arrays["key_range"][:, :, 1] = -numpy.inf
        return arrays

    def _hold(self, arrays: dict[str, Any]) -> None:
        """Continue with these arrays in place of what is held."""
        self._arrays, self.is_initialized = arrays, True
        self.revision.bump()

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        self._arrays, self.is_initialized = {}, False
        self.revision.bump()

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Continue with the arrays of a state, by the names of `arrays`, whose tokens are counted already.

        Raises:
            H2OStreamError: they do not fit.
        """
        keys, values, index = (require_array(arrays, name) for name in (*STORED, "index"))
        if self.shape is None:
            if keys.ndim != 4 or values.ndim != 4:
                raise H2OStreamError(f"the state does not fit: values are {values.shape} {dtype_of(values)}")
            heads = keys.shape[1]
            self.shape = HeadShape(self.queries_per_key * heads, heads, keys.shape[3], values.shape[3])
        self.dtype = self.dtype or dtype_of(keys)
        loaded = self._empty(len(index), self.slots_of(arrays))
        for name, array in self._first(index.shape[-1], loaded).items():
            array[:] = require_array(arrays, name, like=array)
        self._hold(loaded)

    def slots_of(self, arrays: Mapping[str, Array]) -> int:
        """Slots for a state, whose tokens are counted already; raises H2OStreamError if it has too many."""
        slots: int = require_array(arrays, "index").shape[-1]
        minimum = self.slots_needed(self.tokens.lengths)
        if slots > self.plan.window + self.schedule.max_held + self.spare:
            raise H2OStreamError(f"the state does not fit: it has {slots} slots, {minimum} are needed")
        return max(slots, minimum)

    def fit(self, lengths: Sequence[int]) -> None:
        """Allocate what rows of so many tokens need in their stages."""
        if (slots := self.slots_needed(lengths)) != self.num_slots:
            self.resize(slots, max(map(self.schedule.held, lengths)))

    def set_schedule(self, schedule: Schedule) -> None:
        """Hold as many tokens as `schedule` says from now on, which are those held now and later ones."""
        self.schedule = schedule
        if self.is_initialized:
            self.fit(self.tokens.lengths)
        self.revision.bump()

    def resize(self, slots: int, filled: int) -> None:
        """Move to an allocation of that many slots: in token order, except for slots with a fixed purpose.

        `filled` are the tokens of the head that holds most.
        """
        before, exact = self._in_numpy(), self.exact
        index = before["index"][..., exact:]
        is_token = index >= 0
        order = numpy.where(is_token, index, numpy.iinfo(index.dtype).max).argsort(-1)[..., : slots - exact]
        resized = self._empty(len(index), slots)
        movable = (*_ENTRIES, *(ENCODED if exact else STORED))
        for name, new in resized.items():
            old, kept = before[name], 0 if name in ENCODED else exact
            if name not in movable:
                new[:] = old
                continue
            new[:, :, :kept] = old[:, :, :kept]
            places = order.reshape(*order.shape, *(1,) * (old.ndim - order.ndim))
            new[:, :, kept : kept + order.shape[-1]] = numpy.take_along_axis(old[:, :, kept:], places, 2)
        resized["rank"][resized["index"] < 0] = slots
        resized["free"][:] = is_token.sum(-1, keepdims=True) + exact
        self._hold(resized)
        self.filled = filled


@lru_cache(maxsize=1024)
def _layout(
    shape: HeadShape, dtype: str, rows: int, slots: int, heads: int, exact: int, bits: int, has_long_term: bool
) -> Mapping[str, Field]:
    """See `Slots.layout`: many layers have the same."""
    for size in (shape.key_size, shape.value_size):
        if size * bits % 8:
            raise ConfigError(f"kv_bits is {bits}, but heads of size {size} do not fill bytes; raise --kv-bits")
    fields = {
        "keys": Field((shape.key_size,), 0, dtype),
        "values": Field((shape.value_size,), 0, dtype),
        "key_codes": Field((shape.key_size * bits // 8,), 0, "uint8"),
        "value_codes": Field((shape.value_size * bits // 8,), 0, "uint8"),
        "key_range": Field((2, shape.key_size), numpy.inf, "float32"),
        "value_grid": Field((2,), 0, "float16"),
        "scores": Field((), -numpy.inf, "float32"),
        "long_term_scores": Field((), 0, "float32"),
        "index": Field((), -1, "int32"),
        "rank": Field((), slots, rank_dtype(slots)),
        "free": Field((1,), exact, "int64"),
    }
    unused: set[str] = {"key_range", *ENCODED} if bits == 16 else set()
    unused |= set() if has_long_term else {"long_term_scores"}
    counts = _counts(slots, exact)
    made = {
        name: field._replace(shape=(rows, heads, *([counts[name]] if name in counts else []), *field.shape))
        for name, field in fields.items()
        if name not in unused
    }
    return MappingProxyType(made | {"seen": Field((rows, 1, 1), 0, "int64")})


def _counts(slots: int, exact: int) -> dict[str, int]:
    """How many rows each array has that has some for slots, of which `exact` are in full precision or, if 0, all."""
    exact = exact or slots
    parts = (STORED, exact), (ENCODED, max(slots - exact, 0)), (_ENTRIES, slots)
    return {name: count for names, count in parts for name in names}


@lru_cache(maxsize=1024)
def _starts(*fields: Field) -> list[int]:
    """Where arrays begin in a block, and its end."""
    return [0, *accumulate(-(-field.nbytes // _ALIGNMENT) * _ALIGNMENT for field in fields)]


def rank_dtype(slots: int) -> str:
    """The smallest signed type for the ranks in that many slots: at most twice their number, while they fill up."""
    return "int16" if 2 * slots < 2**15 else "int32"


def _in_one_block(fields: Mapping[str, Field], memory: Callable[[int], Any]) -> dict[str, Array]:
    """Empty arrays in memory of their own, which goes back to the system with them.

    Slots are resized while others come and go. What is freed in the heap stays there as holes between them: a fifth of
    what 64 conversations took.
    """
    starts = _starts(*fields.values())
    block = memory(starts[-1])
    arrays = dict[str, Array]()
    for (name, field), start in zip(fields.items(), starts, strict=False):
        arrays[name] = numpy.ndarray(field.shape, field.numpy_dtype, block, start)
        if field.value:
            arrays[name].fill(field.value)
    return arrays

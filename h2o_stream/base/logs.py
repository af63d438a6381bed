"""Sequences that only grow, and of which every earlier version stays as it was without being copied.

A version is a length of memory that all of them share. Appending to the newest one costs what is appended; appending to
an older one, after something was undone, copies it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy
from numpy.typing import NDArray

T = TypeVar("T")

MAX_MARKS = 16
"""Marks of a `NumberLog`: more than there are turns that can be undone."""

_MIN_CAPACITY = 256


class Log(Sequence[T]):
    """Values of any kind; never changed."""

    __slots__ = ("_length", "_values")

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._values = list(values)
        self._length = len(self._values)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._values[place] for place in range(*index.indices(self._length))]
        return self._values[range(self._length)[index]]

    def __iter__(self) -> Iterator[T]:
        return (self._values[place] for place in range(self._length))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Log) and other._values is self._values:
            return self._length == other._length
        return isinstance(other, Sequence) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]

    def append(self, value: T) -> Log[T]:
        """A version with one more value."""
        longer: Log[T] = Log.__new__(Log)
        longer._values = self._values if len(self._values) == self._length else self[:]
        longer._length = self._length + 1
        longer._values.append(value)
        return longer

    def first(self, length: int) -> Log[T]:
        """The version of this length."""
        shorter: Log[T] = Log.__new__(Log)
        shorter._values, shorter._length = self._values, length
        return shorter

    def upto(self, limit: Any, key: Callable[[T], Any]) -> Log[T]:
        """The version before the first value of which `key` is larger than the limit; `key` grows with the values."""
        return self.first(bisect_right(self._values, limit, hi=self._length, key=key))


class NumberLog(Sequence[int]):
    """Whole numbers, 4 bytes each; never changed.

    Attributes:
        marks: some lengths and the CRC-32 of the numbers up to them, in order. Two logs that have a mark in common
            have the same numbers up to it.
    """

    __slots__ = ("_length", "_shared", "marks")

    def __init__(self, numbers: Any = (), marks: Sequence[tuple[int, int]] = ()) -> None:
        array = numpy.asarray(numbers, numpy.int32)
        self._shared, self._length = _Shared(array), len(array)
        self.marks = tuple(marks)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            part: list[int] = self._shared.array[: self._length][index].tolist()
            return part
        return int(self._shared.array[range(self._length)[index]])

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberLog):
            return self._length == other._length and (
                self._shared is other._shared or numpy.array_equal(self.array, other.array)
            )
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def array(self) -> NDArray[numpy.int32]:
        """The numbers, read-only; not a copy."""
        view = self._shared.array[: self._length]
        view.flags.writeable = False
        return view

    def append(self, numbers: Sequence[int]) -> NumberLog:
        """A version with more numbers."""
        longer = NumberLog.__new__(NumberLog)
        longer._length, longer.marks = self._length + len(numbers), self.marks
        longer._shared = self._shared.extended(self._length, numbers)
        return longer

    def shortened(self, count: int) -> NumberLog:
        """A version with so many numbers fewer at the end."""
        shorter = NumberLog.__new__(NumberLog)
        shorter._length, shorter._shared = self._length - count, self._shared
        shorter.marks = tuple(mark for mark in self.marks if mark[0] <= shorter._length)
        return shorter

    def marked(self) -> NumberLog:
        """This version with a mark at the end."""
        length, crc = self.marks[-1] if self.marks else (0, 0)
        if self.marks and length == self._length:
            return self
        marked = self.shortened(0)
        marked.marks = (*self.marks, (self._length, zlib.crc32(self.array[length:].data, crc)))[-MAX_MARKS:]
        return marked


class _Shared:
    """The memory of several versions: `array`, of which `used` numbers belong to the longest one."""

    __slots__ = ("array", "used")

    def __init__(self, array: NDArray[numpy.int32]) -> None:
        self.array, self.used = array, len(array)

    def extended(self, length: int, numbers: Sequence[int]) -> _Shared:
        """Memory with more numbers after so many of these: this one if possible."""
        stop, shared = length + len(numbers), self
        if self.used != length or stop > len(self.array):
            array = numpy.empty(max(2 * stop, _MIN_CAPACITY), numpy.int32)
            array[:length] = self.array[:length]
            if self.used == length:
                self.array = array
            else:
                shared = _Shared(array)
        shared.array[length:stop] = numbers
        shared.used = stop
        return shared

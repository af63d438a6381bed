"""Arrays of bytes in an unnamed file: the system keeps in memory what is used, and writes the rest to disk."""

from __future__ import annotations

import hashlib
import math
import mmap
import tempfile
import weakref
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.mapped_files import prefer_huge_pages, reserve_room
from h2o_stream.base.resources import cache_folder
from h2o_stream.errors import H2OStreamError

Segment = NDArray[numpy.uint8]

_MAPPED = 128
"""Segments that are mapped together."""

_HUGE_PAGE = 2 << 20
"""What a page of the largest size holds; the file grows by as much."""


def digest_of(segment: Segment) -> str:
    """Identifies the content of a segment."""
    return hashlib.sha256(segment.data).hexdigest()[:32]


class SegmentFile:
    """Segments of equal size, each of which is free for the next one when nobody holds it any more.

    Args:
        segment_bytes: size of a segment, a multiple of 64.
    """

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        unit = math.lcm(mmap.ALLOCATIONGRANULARITY, _HUGE_PAGE)
        self._map_bytes = (_MAPPED * segment_bytes + unit - 1) // unit * unit
        self._maps: list[mmap.mmap] = []
        self._free: list[int] = []
        self._used = 0
        self._digests: dict[int, str] = {}
        folder = cache_folder() / "memory"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as it is mapped
        except OSError as error:
            raise H2OStreamError(f"no file for --memory can be made in {folder}: {error.strerror or error}") from error

    def take(self) -> Segment:
        """A segment with undefined content; raises OSError if, for example, the disk is full."""
        place = self._free.pop() if self._free else self._extend()
        number, offset = divmod(place, _MAPPED)
        segment = numpy.frombuffer(self._maps[number], numpy.uint8, self.segment_bytes, offset * self.segment_bytes)
        weakref.finalize(segment, _release, self._free, self._digests, place, id(segment))
        return segment

    def take_in_ram(self) -> Segment:
        """A segment that is not in the file, for when the disk is full."""
        segment = numpy.frombuffer(mmap.mmap(-1, self.segment_bytes), numpy.uint8)
        weakref.finalize(segment, self._digests.pop, id(segment), None)
        return segment

    def _extend(self) -> int:
        """The place of one more segment, for which the disk has room."""
        number, offset = divmod(self._used, _MAPPED)
        start = number * self._map_bytes + offset * self.segment_bytes
        reserve_room(self._file, start, -(-(start + self.segment_bytes) // _HUGE_PAGE) * _HUGE_PAGE)
        if number == len(self._maps):
            self._file.truncate((number + 1) * self._map_bytes)
            self._maps.append(mmap.mmap(self._file.fileno(), self._map_bytes, offset=number * self._map_bytes))
            prefer_huge_pages(self._maps[-1])  # a search reads a few bytes in many places
        self._used += 1
        return self._used - 1

    def seal(self, segment: Segment) -> str:
        """The digest of a segment that does not change any more, computed once."""
        if id(segment) not in self._digests:
            segment.flags.writeable = False
            self._digests[id(segment)] = digest_of(segment)
        return self._digests[id(segment)]

    def is_sealed(self, segment: Any) -> bool:
        """Whether an array is a sealed segment of this file."""
        return id(segment) in self._digests


def _release(free: list[int], digests: dict[int, str], place: int, key: int) -> None:
    digests.pop(key, None)
    free.append(place)

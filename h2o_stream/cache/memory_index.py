"""The index of a stream's memory: chapters of full segments, see `native/src/memory_index.h`.

A chapter is as large as a segment and lies in the same file. It never changes, so that copies of a stream share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.segment_file import Segment, SegmentFile
from h2o_stream.cache.state import Array, State, require_array
from h2o_stream.errors import H2OStreamError

_CHAPTER = "chapter."
"""What the names of chapters in states begin with."""

_ABOUT = "chapters"
"""The array that describes them: where the first begins, how many there are, and of how many segments each is."""


class HeadPart(NamedTuple):
    """Where a head is in a memory.

    Attributes:
        data: first byte of its records in a segment.
        record: bytes of a record.
        found: its first place in what queries have found.
        queries: query heads that share it.
        scan: first byte of its codes in a segment.
        codebook: first number of its codebook.
        floats: numbers of that.
        key_size: D.
    """

    data: int
    record: int
    found: int
    queries: int
    scan: int
    codebook: int
    floats: int
    key_size: int


class MakeChapter(Protocol):
    """Makes a head's part of a chapter."""

    def __call__(self, segments: Array, head: HeadPart, codebook: Array, scratch: Array, chapter: Array) -> None:
        """Write the index of the segments at these addresses into `chapter`; `head` has the offsets in a segment."""


@dataclass(frozen=True)
class IndexLayout:
    """How chapters are made.

    Attributes:
        segments: number of segments in a chapter; 0 if no index is made.
        scratch: bytes that are needed.
    """

    make: MakeChapter
    segments: int
    tokens: int
    scratch: int

    def segments_that_fit(self, limit: int) -> int:
        """Segments for tokens, if so many fit with those of the index."""
        return limit * self.segments // (self.segments + 1) if self.segments else limit


class MemoryIndex:
    """The chapters of a stream's memory.

    Attributes:
        chapters: the chapters, oldest first.
        addresses: [n] int64, theirs.
        bounds: [2] int64, the place where the first begins, negative if some of it was forgotten; how many there are.
    """

    def __init__(self, layout: IndexLayout, heads: Sequence[HeadPart], file: SegmentFile, max_segments: int) -> None:
        self._layout, self._heads, self._file = layout, heads, file
        self.addresses = numpy.zeros(max_segments // max(layout.segments, 1) + 2, numpy.int64)
        self.bounds = numpy.zeros(2, numpy.int64)
        self.chapters: list[Segment] = []

    @property
    def _chapter_tokens(self) -> int:
        return self._layout.segments * self._layout.tokens

    def extend(self, addresses: NDArray[numpy.int64], count: int, codebooks: NDArray[numpy.float32]) -> None:
        """Make chapters of the segments that are full, by their addresses and the codebooks of all heads.

        The head that has fewest tokens has `count`.
        """
        with suppress(OSError):  # no room on disk: segments without an index are searched without one
            while self._layout.segments and (first := self._end) + self._chapter_tokens <= count:
                segment = first // self._layout.tokens
                self._append(self._make(addresses[segment : segment + self._layout.segments], codebooks))

    def missing(self, count: int) -> int:
        """How many tokens more than `count` a chapter needs; many if none are made."""
        return self._end + self._chapter_tokens - count if self._layout.segments else 2**62

    def _make(self, addresses: NDArray[numpy.int64], codebooks: NDArray[numpy.float32]) -> Segment:
        chapter = self._file.take()
        chapter.fill(0)
        scratch = numpy.empty(self._layout.scratch, numpy.uint8)
        for head in self._heads:
            codebook = codebooks[head.codebook : head.codebook + head.floats]
            self._layout.make(addresses, head, codebook, scratch, chapter)
        return chapter

    def _append(self, chapter: Segment) -> None:
        self._file.seal(chapter)
        self.addresses[len(self.chapters)] = chapter.ctypes.data
        self.chapters.append(chapter)
        self.bounds[1] += 1

    @property
    def _end(self) -> int:
        """Where the next chapter begins."""
        return int(self.bounds[0]) + len(self.chapters) * self._chapter_tokens

    def drop_segment(self) -> None:
        """Forget the tokens of the oldest segment."""
        if self.chapters:
            self.bounds[0] -= self._layout.tokens
            if self.bounds[0] + self._chapter_tokens == 0:
                del self.chapters[0]
                self.addresses[:-1] = self.addresses[1:]
                self.bounds[:] = 0, len(self.chapters)

    def arrays(self) -> State:
        """Everything by name; chapters are not copied."""
        about = numpy.array([*self.bounds, self._layout.segments], numpy.int64)
        return {_ABOUT: about, **{f"{_CHAPTER}{number}": chapter for number, chapter in enumerate(self.chapters)}}

    def load(self, arrays: Mapping[str, Any], count: int) -> None:
        """Continue with the arrays of a memory; without them, or with chapters of another length, it is made again.

        Raises:
            H2OStreamError: they do not fit.
            OSError: there is no room on disk.
        """
        start, number, segments = map(int, arrays.get(_ABOUT, (0, 0, 0)))
        if segments != self._layout.segments or not segments:
            return
        tokens = self._chapter_tokens
        if not -tokens < start <= 0 <= number or start + number * tokens > count:
            raise H2OStreamError(f"the state is damaged: its memory has {number} chapters for {count} tokens")
        self.bounds[0] = start
        for chapter in (arrays[f"{_CHAPTER}{i}"] for i in range(number)):
            if not self._file.is_sealed(chapter):
                copied = self._file.take()
                copied[:] = require_array({_CHAPTER: chapter}, _CHAPTER, like=copied)
                chapter = copied
            self._append(chapter)

"""Codes of the keys in a memory, by which native code searches: what the cache asks of whoever makes them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from h2o_stream.cache.group_rules import HeadShape, MemoryPart
from h2o_stream.cache.memory_index import HeadPart
from h2o_stream.cache.state import Array
from h2o_stream.cache.stream_memory import StreamMemory

HEADER = 8
"""Bytes of a record before its key and value: the index of the token, an int32, and the scales of both, float16."""

_SEGMENT = 512
"""Tokens in a segment without codes."""

Queries = NDArray[numpy.float32]
"""[n, D] of a KV head, rotated for keys at the largest distance."""


class HeadBytes(NamedTuple):
    """What a head takes of a segment, see `native/src/memory.h`.

    Attributes:
        scan: bytes that every search reads, codes of keys.
        data: bytes of which it reads a few.
        tokens: tokens in a segment.
        floats: numbers of its codebook, which are in memory.
        chapter: bytes of its index of a chapter, in the place of its data; 0 if there is none.
        scratch: bytes that are needed to make that.
    """

    scan: int
    data: int
    tokens: int
    floats: int
    chapter: int = 0
    scratch: int = 0


class Codes(Protocol):
    """Makes codes of keys."""

    def head_bytes(self, shape: HeadShape) -> HeadBytes:
        """What a head of this shape takes of a segment."""

    def add(self, part: MemoryPart, stream: StreamMemory, head: int, added: int, queries: Queries) -> None:
        """Add the codes of the newest tokens of a head, which torch has appended.

        Args:
            part: part of the memory that belongs to a head group.
            stream: memory of the stream that the tokens belong to.
            head: index within the group.
            added: how many tokens.
            queries: queries of the head, from which the codebook is learned.

        Raises:
            OutOfMemoryError: there is none for the computation.
        """

    def make_chapter(self, segments: Array, head: HeadPart, codebook: Array, scratch: Array, chapter: Array) -> None:
        """Make an index of full segments."""


class NoCodes:
    """Without the native library there are none."""

    def head_bytes(self, shape: HeadShape) -> HeadBytes:
        """The records alone."""
        return HeadBytes(0, _SEGMENT * (HEADER + shape.key_size + shape.value_size), _SEGMENT, 0)

    def add(self, part: MemoryPart, stream: StreamMemory, head: int, added: int, queries: Queries) -> None:
        """Do nothing."""

    def make_chapter(self, segments: Array, head: HeadPart, codebook: Array, scratch: Array, chapter: Array) -> None:
        """Do nothing."""

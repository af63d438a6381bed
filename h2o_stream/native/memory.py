"""The memory of a cache as native code sees it. Imports no torch."""

from __future__ import annotations

from ctypes import CDLL, addressof

import numpy

from h2o_stream import config
from h2o_stream.cache.group_rules import HeadShape, MemoryPart
from h2o_stream.cache.memory_codes import HeadBytes, Queries
from h2o_stream.cache.memory_index import HeadPart
from h2o_stream.cache.stream_memory import StreamMemory
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.native.abi import AttentionLayer, Slots
from h2o_stream.native.pointers import Array, pointer


def memory_fields(part: MemoryPart, stream: StreamMemory, heads: int) -> dict[str, int]:
    """The fields of `Slots` for the part of a stream's memory that a group of so many heads has."""
    places = heads * (part.shape.query_heads // part.shape.kv_heads) * config.MEMORY_MATCHES
    return {
        "memory_segments": pointer(stream.addresses, "int64", 1),
        "memory_counts": pointer(stream.counts[part.first :], "int64", heads),
        "memory_codebooks": pointer(stream.codebooks[part.codebook :], "float32", heads),
        "memory_found": pointer(stream.found[part.found :], "int32", places),
        "memory_scan": part.scan,
        "memory_data": part.data,
        "memory_chapters": pointer(stream.index.addresses, "int64", 1),
        "memory_chapter_bounds": pointer(stream.index.bounds, "int64", 2),
    }


class NativeCodes:
    """`Codes` that native code makes and searches."""

    def __init__(self, native: CDLL) -> None:
        self._native = native

    def head_bytes(self, shape: HeadShape) -> HeadBytes:
        """What a head of this shape takes of a segment."""
        layout = numpy.zeros(6, numpy.int64)
        sizes = shape.key_size, shape.value_size, config.MEMORY_CHAPTER
        self._native.h2o_memory_layout(*sizes, pointer(layout, "int64", 6))
        return HeadBytes(*layout.tolist())

    def add(self, part: MemoryPart, stream: StreamMemory, head: int, added: int, queries: Queries) -> None:
        """Add the codes of the newest tokens of a head, which torch has appended."""
        query_heads, kv_heads, key_size, value_size = part.shape
        layer = AttentionLayer(query_heads=query_heads, kv_heads=kv_heads, head_size=key_size, value_size=value_size)
        slots = Slots(**memory_fields(part, stream, head + 1))
        failed = self._native.h2o_memory_encode(
            addressof(layer),
            addressof(slots),
            head,
            added,
            pointer(queries, "float32", len(queries) * key_size),
            len(queries),
        )
        if failed:
            raise OutOfMemoryError(f"out of memory for the codes of {added} keys")

    def make_chapter(self, segments: Array, head: HeadPart, codebook: Array, scratch: Array, chapter: Array) -> None:
        """Make an index of full segments."""
        self._native.h2o_memory_chapter(
            pointer(segments, "int64", len(segments)),
            len(segments),
            head.scan,
            head.data,
            pointer(codebook, "float32", len(codebook)),
            head.key_size,
            pointer(scratch, "uint8", len(scratch)),
            pointer(chapter, "uint8", len(chapter)),
        )

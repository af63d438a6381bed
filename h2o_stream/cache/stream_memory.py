"""The memory of one stream: its segments, in the order of eviction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from h2o_stream import config
from h2o_stream.cache.group_rules import GroupRules
from h2o_stream.cache.memory_index import HeadPart, IndexLayout, MemoryIndex
from h2o_stream.cache.segment_file import Segment, SegmentFile
from h2o_stream.cache.state import Array, State, require_array
from h2o_stream.errors import H2OStreamError

_MIN_SEGMENTS = 3
"""Room for the tokens of a forward, `PREFILL_STEP_MAX`, and a segment that is being filled."""


@dataclass(frozen=True)
class MemoryLayout:
    """How large the memory of a stream is, and where its heads are."""

    groups: Sequence[GroupRules]
    heads: Sequence[HeadPart]
    floats: int
    places: int
    tokens: int
    limit: int
    index: IndexLayout

    @property
    def shrinkage(self) -> int:
        """Tokens that a head may evict besides as many as arrive, because its window shrinks in a stream."""
        return max(0, *(group.schedule.common - group.schedule.window for group in self.groups))

    @property
    def min_segments(self) -> int:
        """As many as hold a forward."""
        return _MIN_SEGMENTS + -(-self.shrinkage // self.tokens)

    @property
    def max_segments(self) -> int:
        """As many as fit into the limit."""
        return max(self.index.segments_that_fit(self.limit), self.min_segments)


class StreamMemory:
    """The memory of one stream.

    Attributes:
        counts: [heads] int64, tokens in memory; native code counts them.
        codebooks: [floats] float32, for the codes of all heads' keys.
        found: [places] int32, what the last queries of all heads attended to; -1 for nothing.
        addresses: [n] int64, those of the segments.
        segments: segments, oldest first, as many as are needed.
        dropped: tokens of each head that were forgotten, because the memory was full.
    """

    def __init__(self, layout: MemoryLayout, file: SegmentFile) -> None:
        self._layout, self._file = layout, file
        self.counts = numpy.zeros(len(layout.heads), numpy.int64)
        self.codebooks = numpy.zeros(layout.floats, numpy.float32)
        self.found = numpy.full(layout.places, -1, numpy.int32)
        self.addresses = numpy.zeros(layout.max_segments, numpy.int64)
        self.segments: list[Segment] = []
        self.index = MemoryIndex(layout.index, layout.heads, file, layout.max_segments)
        self.dropped = 0

    def max_in_memory(self, seen: int) -> int:
        """The most that a head may have in memory in a stream of `seen` tokens, if no more were dropped than seen."""
        return seen + self._layout.shrinkage - self.dropped

    def make_room(self, seen: int, before: int) -> int:
        """Make room for what a stream of `seen` tokens may have evicted; for how many tokens there is.

        The oldest are forgotten if the memory is full, but no more than have been fed: otherwise heads could have more
        in memory than was seen and not dropped.

        Args:
            seen: tokens of the stream after the next forward.
            before: how many of them have been fed.

        Raises:
            H2OStreamError: there is no room for so many tokens at once; the stream can go on.
        """
        tokens = self._layout.tokens
        while (missing := self.max_in_memory(seen) - len(self.segments) * tokens) > 0:
            if len(self.segments) < len(self.addresses) and self._grow():
                continue
            if self.dropped + -(-missing // tokens) * tokens > before:
                max_tokens = max((len(self.segments) - 1) * tokens - self._layout.shrinkage, 0)
                raise H2OStreamError(
                    f"{seen - before} tokens at once do not fit into the memory; feed at most {max_tokens}, "
                    "or raise --memory"
                )
            self._drop_oldest()
        return self.dropped + len(self.segments) * tokens - self._layout.shrinkage

    def extend_index(self) -> None:
        """Index the segments that are full, unless a forward needs the room on disk."""
        if len(self.segments) >= self._layout.min_segments:
            self.index.extend(self.addresses, self._min_count, self.codebooks)

    def _grow(self) -> bool:
        """Add a segment, if there is room on disk or it is one of those that are always needed."""
        try:
            self._add(self._take(len(self.segments)))
        except OSError:
            return False
        return True

    def _take(self, others: int) -> Segment:
        """A segment beside so many others; in RAM if it is needed and the disk is full.

        To forget the oldest then need not make room, because earlier states may hold them, and without a segment a turn
        could be neither read nor taken back.
        """
        try:
            return self._file.take()
        except OSError:
            if others >= self._layout.min_segments:
                raise
            return self._file.take_in_ram()

    def _add(self, segment: Segment) -> None:
        self.addresses[len(self.segments)] = segment.ctypes.data
        self.segments.append(segment)

    def _drop_oldest(self) -> None:
        self.dropped += self._layout.tokens
        numpy.maximum(self.counts - self._layout.tokens, 0, out=self.counts)
        self.found[:] = numpy.where(self.found < self._layout.tokens, -1, self.found - self._layout.tokens)
        del self.segments[0]
        self.addresses[:-1] = self.addresses[1:]
        self.index.drop_segment()

    def token_indices(self, head: int) -> NDArray[numpy.int32]:
        """The tokens that a head has in memory, in the order in which it evicted them."""
        return self.records(head, 4).view(numpy.int32)[:, 0]

    def records(self, head: int, size: int | None = None) -> NDArray[numpy.uint8]:
        """The first `size` bytes of the records of all tokens of a head [n, size]; None for whole ones."""
        part, count = self._layout.heads[head], self.counts[head]
        parts = [self._records_in(segment, head)[:, :size] for segment in self.segments]
        return numpy.concatenate([numpy.empty((0, size or part.record), numpy.uint8), *parts])[:count]

    def _records_in(self, segment: Segment, head: int) -> NDArray[numpy.uint8]:
        part = self._layout.heads[head]
        return segment[part.data : part.data + part.record * self._layout.tokens].reshape(-1, part.record)

    def append(self, head: int, records: NDArray[numpy.uint8]) -> None:
        """Append tokens to those of a head, for which there is room."""
        first, tokens = int(self.counts[head]), self._layout.tokens
        for start in range(first - first % tokens, first + len(records), tokens):
            of_segment = records[max(start - first, 0) : start + tokens - first]
            place = max(first - start, 0)
            self._records_in(self.segments[start // tokens], head)[place : place + len(of_segment)] = of_segment
        self.counts[head] += len(records)

    def set_found(self, head: int, places: NDArray[numpy.int64]) -> None:
        """Note what the last query of each query head of a KV head attends to [queries, n], the most first."""
        part = self._layout.heads[head]
        matches = self.found[part.found : part.found + part.queries * config.MEMORY_MATCHES].reshape(part.queries, -1)
        matches[:] = -1
        matches[:, : places.shape[1]] = places

    def looked_back(self) -> list[int]:
        """The token in memory that each query head attends to most, as far as there is one."""
        tokens = list[int]()
        for head in self._layout.heads:
            last = head.found + head.queries * config.MEMORY_MATCHES
            for place in self.found[head.found : last : config.MEMORY_MATCHES].tolist():
                if place >= 0:
                    segment, row = divmod(place, self._layout.tokens)
                    first = head.data + row * head.record
                    tokens.append(int(self.segments[segment][first : first + 4].view(numpy.int32)[0]))
        return tokens

    @property
    def _min_count(self) -> int:
        """Tokens of the head that has fewest."""
        return min(int(self.counts.min(initial=2**62)), len(self.segments) * self._layout.tokens)

    @property
    def num_sealed(self) -> int:
        """Segments that are full for every head."""
        return self._min_count // self._layout.tokens

    @property
    def steps_ahead(self) -> int:
        """How many tokens of each head can come before something is learned or indexed."""
        learned = all(self.codebooks[head.codebook] for head in self._layout.heads)
        return self.index.missing(self._min_count) if learned else 0

    def fork(self) -> StreamMemory:
        """A copy, which shares the segments that are full; raises OSError if there is no room on disk."""
        return self.of(self.arrays(), self.dropped)

    def of(self, arrays: Mapping[str, Array], dropped: int) -> StreamMemory:
        """The memory of another stream, with these arrays.

        Raises:
            H2OStreamError: they do not fit.
            OSError: there is no room on disk.
        """
        made = StreamMemory(self._layout, self._file)
        made.dropped = dropped
        made.counts[:] = require_array(arrays, "counts", like=made.counts)
        made.codebooks[:] = require_array(arrays, "codebooks", like=made.codebooks)
        made.found[:] = require_array(arrays, "found", like=made.found)
        count = sum(map(str.isdecimal, arrays))
        if not 0 <= count <= len(made.addresses):
            raise H2OStreamError(f"the state does not fit: its memory has {count} segments")
        if not 0 <= made.counts.min(initial=0) <= made.counts.max(initial=0) <= count * self._layout.tokens:
            raise H2OStreamError(f"the state is damaged: its memory has {made.counts.max()} tokens")
        if not -1 <= made.found.min(initial=-1) <= made.found.max(initial=-1) < made.counts.max(initial=1):
            raise H2OStreamError("the state is damaged: its memory has found what it does not hold")
        for number in range(count):
            segment = arrays[str(number)]
            if not self._file.is_sealed(segment):
                segment = made._take(count - 1 - number)
                segment[:] = require_array(arrays, str(number), like=segment)
            made._add(segment)
        made.index.load(arrays, made._min_count)
        return made

    def arrays(self) -> State:
        """Everything by name; full segments are not copied."""
        sealed = self.num_sealed
        for segment in self.segments[:sealed]:
            self._file.seal(segment)
        segments = {
            str(number): segment if number < sealed else segment.copy() for number, segment in enumerate(self.segments)
        }
        small: State = {"counts": self.counts, "codebooks": self.codebooks, "found": self.found}
        return {name: array.copy() for name, array in small.items()} | segments | self.index.arrays()

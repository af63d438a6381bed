"""The memory of a cache: keys and values that the heads which retrieve have evicted.

Heads that retrieve are those with the largest windows, where windows are measured. Each stream has segments, which
hold the same number of tokens of every such head and are filled in the order of eviction. Full ones never change, so
that copies of a stream share them. `memory_attention` in torch and native code fill and search them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h2o_stream import config
from h2o_stream.cache.group_rules import GroupRules, HeadShape, MemoryPart
from h2o_stream.cache.memory_codes import Codes, NoCodes, Queries
from h2o_stream.cache.memory_index import HeadPart, IndexLayout
from h2o_stream.cache.segment_file import Segment, SegmentFile, digest_of
from h2o_stream.cache.state import Array, State, decode_json, encode_json, require_array, with_prefix
from h2o_stream.cache.stream_memory import MemoryLayout, StreamMemory
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.errors import ConfigError, H2OStreamError

PREFIX = "memory."
"""What the names of its arrays in states begin with."""

ABOUT = "memory"
"""The array that describes them."""

MEMORY_FILE = "memory-"
"""What the names of files with segments begin with."""


def sealed_segments(state: Mapping[str, Array]) -> dict[str, str]:
    """The arrays of a state that never change, with names for their files, which identify their content."""
    if ABOUT not in state:
        return {}
    return {name: f"{MEMORY_FILE}{digest}" for name, digest in decode_json(state, ABOUT)["sealed"].items()}


def retrieving(windows: Sequence[Sequence[HeadWindow]]) -> list[list[bool]]:
    """Which groups of heads retrieve, by layer: those of the largest shares, at most `MEMORY_SHARE` of all heads.

    Args:
        windows: the groups of each layer that evicts, of others none. Where no head has a larger share than another,
            all retrieve.
    """
    groups = [group for layer in windows for group in layer]
    total = sum(group.weight for group in groups)
    shares = sorted({group.share for group in groups}, reverse=True)
    weights = [sum(group.weight for group in groups if group.share >= share) for share in shares]
    fitting = [share for share, weight in zip(shares, weights, strict=True) if weight <= config.MEMORY_SHARE * total]
    minimum = min(fitting, default=shares[-1] if len(shares) == 1 else shares[0]) if shares else 0.0
    return [[group.share >= minimum for group in layer] for layer in windows]


class TokenMemory:
    """The memories of the streams of a cache.

    Args:
        limit_bytes: largest number of bytes that the segments of a stream take.

    Attributes:
        limit_bytes: see above.
        searched: whether attention searches it; see `WindowRules.search_memory`.
    """

    searched = True

    def __init__(self, limit_bytes: int, previous: TokenMemory | None = None) -> None:
        self.limit_bytes, self._room = limit_bytes, 0
        self._layout: MemoryLayout | None = None
        self._codes: Codes = NoCodes()
        self._file: SegmentFile | None = previous._file if previous else None
        self.rows: list[StreamMemory] = []

    def assign(
        self,
        layers: Sequence[Sequence[GroupRules]],
        windows: Sequence[Sequence[HeadWindow]],
        shapes: Sequence[HeadShape | None],
        codes: Codes,
    ) -> None:
        """Give groups of heads their parts of a segment; layers that do not evict have no groups."""
        chosen = [
            (group, shape, codes.head_bytes(shape), shape.kv_heads if len(layer) == 1 else group.weight)
            for layer, shape, retrieve in zip(layers, shapes, retrieving(windows), strict=True)
            for group, chosen in zip(layer, retrieve, strict=True)
            if shape and chosen and group.sliding is None
        ]
        if not chosen:
            raise ConfigError("no head of this model evicts what --memory could keep; take --memory off")
        scan = floats = places = 0
        data = sum(count * size.scan for _, _, size, count in chosen)
        heads = list[HeadPart]()
        for group, shape, size, count in chosen:
            group.memory = MemoryPart(self, len(heads), floats, places, scan, data, shape)
            queries = shape.query_heads // shape.kv_heads
            for _ in range(count):
                record = size.data // size.tokens
                heads.append(HeadPart(data, record, places, queries, scan, floats, size.floats, shape.key_size))
                places += queries * config.MEMORY_MATCHES
                scan, data, floats = scan + size.scan, data + size.data, floats + size.floats
        groups, sizes = [group for group, *_ in chosen], [size for _, _, size, _ in chosen]
        has_index = all(0 < size.chapter <= size.data for size in sizes)
        tokens, scratch = sizes[0].tokens, max(size.scratch for size in sizes)
        index = IndexLayout(codes.make_chapter, config.MEMORY_CHAPTER if has_index else 0, tokens, scratch)
        self._layout = MemoryLayout(groups, heads, floats, places, tokens, self.limit_bytes // data, index)
        self._codes = codes
        if self._file is None or self._file.segment_bytes != data:
            self._file = SegmentFile(data)

    def begin(self, rows: int) -> None:
        """Start so many streams."""
        assert self._layout, "it is assigned when a model is attached"
        assert self._file
        self.rows, self._room = [StreamMemory(self._layout, self._file) for _ in range(rows)], 0

    def reset(self) -> None:
        """Forget everything."""
        self.rows, self._room = [], 0

    def make_room(self, lengths: Sequence[int], before: Sequence[int]) -> None:
        """Make room for streams of so many tokens, of which there were `before`, and index what these have filled.

        Raises:
            H2OStreamError: there is no room for so many tokens at once.
        """
        for row in self.rows:
            row.extend_index()
        if max(lengths) > self._room:
            self._room = min(row.make_room(*seen) for row, *seen in zip(self.rows, lengths, before, strict=True))

    def steps_ahead(self, length: int) -> int:
        """How many tokens of one stream of this length, each of which evicts one, can come before anything else changes
        than what is appended.
        """
        row = self.rows[0] if self.rows else None
        return min(self._room - length, row.steps_ahead) if row else 0

    def append(self, part: MemoryPart, row: int, head: int, records: Segment, queries: Queries) -> None:
        """Append tokens that a head, by its index in the group of `part`, has evicted, and their codes (see `Codes`).

        The records [n, bytes] are in the layout of `native/src/memory.h`; `row` is that of the stream in the batch.
        """
        self.rows[row].append(part.first + head, records)
        self._codes.add(part, self.rows[row], head, len(records), queries)

    def invalidate_room(self) -> None:
        """Find out again how much room is needed, since windows have changed."""
        self._room = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`, or raise H2OStreamError, changing nothing: the disk is full."""
        try:
            self.rows, self._room = [self.rows[row].fork() for row in rows], 0
        except OSError as error:
            raise _cannot_be_on_disk(error) from error

    @property
    def tokens(self) -> int:
        """Tokens in memory, of the head and the stream that have most."""
        return max((int(row.counts.max(initial=0)) for row in self.rows), default=0)

    @property
    def num_heads(self) -> int:
        """KV heads that have a memory."""
        return len(self._layout.heads) if self._layout else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, which are on disk."""
        return sum(segment.nbytes for row in self.rows for segment in (*row.segments, *row.index.chapters))

    def state(self) -> tuple[State, State]:
        """What it holds as arrays, and the segments among them that never change: these are shared, not copied."""
        changing, sealed = State(), State()
        for number, row in enumerate(self.rows):
            for name, array in row.arrays().items():
                of = sealed if self._file and self._file.is_sealed(array) else changing
                of[f"{PREFIX}{number}.{name}"] = array
        digests = {name: self._file.seal(segment) for name, segment in sealed.items()} if self._file else {}
        about = {"dropped": [row.dropped for row in self.rows], "sealed": digests}
        return changing | {ABOUT: encode_json(about)}, sealed

    def load(self, state: Mapping[str, Array], lengths: Sequence[int]) -> None:
        """Continue with the streams of a state, of so many tokens.

        Raises:
            H2OStreamError: they do not fit, are damaged, or there is no room on disk.
        """
        about = decode_json(state, ABOUT)
        if self._layout is None or self._file is None or len(about["dropped"]) != len(lengths):
            raise H2OStreamError(f"the state does not fit: its memory is that of {len(about['dropped'])} streams")
        if bool(require_array(state, f"{PREFIX}0.codebooks").size) != bool(self._layout.floats):
            kept, here = ("without", "used") if self._layout.floats else ("with", "missing")
            raise H2OStreamError(
                f"the state does not fit: its memory was kept {kept} the compiled library, which is {here} here"
            )
        for name, digest in about["sealed"].items():
            segment = require_array(state, name)
            if not self._file.is_sealed(segment) and digest_of(segment) != digest:
                raise H2OStreamError(f"the state is damaged: {name} is not what was saved")
        self.begin(len(lengths))
        try:
            self.rows = [
                row.of(with_prefix(state, f"{PREFIX}{number}."), int(dropped))
                for number, (row, dropped) in enumerate(zip(self.rows, about["dropped"], strict=True))
            ]
        except OSError as error:
            raise _cannot_be_on_disk(error) from error
        for row, length in zip(self.rows, lengths, strict=True):
            if not 0 <= row.dropped <= length or row.counts.max(initial=0) > row.max_in_memory(length):
                raise H2OStreamError(f"the state is damaged: its memory has more than {length} tokens")


def _cannot_be_on_disk(error: OSError) -> H2OStreamError:
    """The error of a segment that has no room on disk."""
    return H2OStreamError(f"the memory cannot be put on disk: {error.strerror or error}; take --memory off")

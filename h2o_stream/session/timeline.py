"""Decode speed and cache memory over the tokens of a run, in a bounded number of entries."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_ENTRIES = 512
"""Beyond this, neighbours are merged: finer than any terminal shows."""


@dataclass
class Entry:
    """A stretch of the stream."""

    new_tokens: int = 0
    decode_s: float = 0.0
    cache_bytes: int = 0

    @property
    def tok_s(self) -> float:
        """Generated tokens per second; 0 if none was generated."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    def add(self, later: Entry) -> None:
        """Append what came after it."""
        self.new_tokens += later.new_tokens
        self.decode_s += later.decode_s
        self.cache_bytes = later.cache_bytes or self.cache_bytes


@dataclass
class Timeline:
    """Entries of equal length, by tokens seen."""

    width: int = 16
    seen: int = 0
    _entries: dict[int, Entry] = field(default_factory=dict)

    def add(self, seen: int, entry: Entry) -> None:
        """Append what happened up to the token `seen`."""
        self.seen = max(seen, self.seen)
        self._at(max(seen - 1, 0) // self.width).add(entry)
        while len(self._entries) > MAX_ENTRIES:
            merged, self._entries, self.width = self._entries, {}, 2 * self.width
            for number, old in sorted(merged.items()):
                self._at(number // 2).add(old)

    def columns(self, end: int, count: int) -> list[Entry | None]:
        """The stream from 0 to `end` in `count` parts; None where nothing was measured."""
        parts: dict[int, Entry] = {}
        for number, entry in sorted(self._entries.items()):
            first = min(number * self.width * count // max(end, 1), count - 1)
            beyond = min((number + 1) * self.width, self.seen) * count // max(end, 1)
            for column in range(first, max(min(beyond, count), first + 1)):
                parts.setdefault(column, Entry()).add(entry)
        return [parts.get(column) for column in range(count)]

    def _at(self, number: int) -> Entry:
        return self._entries.setdefault(number, Entry())

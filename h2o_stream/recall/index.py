"""The index of what was said: passages on disk, found by their words. Knows neither models nor conversations.

It only repeats what the transcript has: if its file is damaged or cannot be written, it is replaced by an empty one,
and `PassageIndex.sync` fills it again.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy

from h2o_stream.base.progress import ignore
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.recall import database
from h2o_stream.recall.database import FIELDS, PASSAGES
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import UNSPACED
from h2o_stream.recall.terms import Floats

T = TypeVar("T")

_MAX_ROWS = 3000
"""Passages that are ranked in a search: 4 ms. Common words are left out, or only the newest passages are ranked."""

_SAMPLE = 300
"""Passages from which the frequency of a common word is estimated."""

_IS_TYPED = """typed.role = 'user' AND NOT EXISTS
    (SELECT 1 FROM passages WHERE turn = typed.turn AND role = 'user' AND id != typed.id)"""

_TYPED = f"JOIN passages AS typed ON typed.id = words.rowid AND {_IS_TYPED}"

_MAX_TERMS = 64
_MAX_TERM_LENGTH = 256

_MAX_REPLACEMENTS = 3
"""After so many errors the index is switched off, as filling it again and again would delay every turn."""

_UNSPACED_RUN = re.compile(f"[{UNSPACED}]+")


class PassageIndex:
    """Passages of a stream in a database, in the order of the stream. Not for use by two threads at once.

    After an error it is empty and `stale`, until `sync` fills it again. None of its methods raises an error of SQLite
    or of the disk: `notify` gets one line. Without a path the file is temporary.

    Raises:
        H2OStreamError: the SQLite library of this Python has no full-text index.
    """

    def __init__(self, path: Path | None = None, notify: Callable[[str], None] = ignore) -> None:
        self.stale = False
        self._path, self._notify = path, notify
        self._replacements = 0
        self._connection: sqlite3.Connection | None = None
        try:
            self._connection = database.connect(path)
        except (*database.ERRORS, OSError) as error:
            self._replace(error)

    def __len__(self) -> int:
        """The number of passages."""
        return self._run(database.count, 0)

    def close(self) -> None:
        """Close the file; a temporary one is deleted. From now on nothing is found and nothing is added."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def add(self, turn: int, prompt: str, reply: str, passages: Sequence[Passage]) -> None:
        """Add a turn, completely or not at all. It replaces this turn and all after it, if there are any."""

        def change(connection: sqlite3.Connection) -> None:
            database.truncate(connection, turn - 1)
            database.add(connection, turn, prompt, reply, passages)

        self._change(change)

    def truncate(self, turn: int) -> None:
        """Delete every turn after this one; 0 deletes all."""
        self._change(lambda connection: database.truncate(connection, turn))

    def sync(
        self, turns: Sequence[tuple[int, str, str]], passages: Callable[[int, str, str], Sequence[Passage]]
    ) -> None:
        """Make the index hold exactly these turns: number, prompt and reply of each, in order.

        Those at the start that it already has are kept as they are. If the last of these has other tokens now, because
        the stream was fed again in another way, none is kept. `passages` is called for that one and for those that are
        missing.
        """

        def change(connection: sqlite3.Connection) -> None:
            kept = database.common_prefix(connection, turns)
            if kept and not database.has_passages(connection, turns[kept - 1][0], passages(*turns[kept - 1])):
                kept = 0
            database.truncate(connection, turns[kept - 1][0] if kept else 0)
            for turn in turns[kept:]:
                database.add(connection, *turn, passages(*turn))

        if self._change(change) or self._change(change):
            self.stale = False

    def search(self, terms: Sequence[str], limit: int, *, typed: bool = False) -> list[Passage]:
        """Passages that contain any of the terms, best first, by BM25. Endings of English words do not matter.

        Args:
            terms: words or phrases of the user, in any form. If there are rarer ones, the most common are ignored.
            limit: the number of passages.
            typed: only messages of one passage: what the user typed, not what was pasted.
        """
        return self._run(lambda connection: [Passage(*row) for _, *row in _search(connection, terms, limit, typed)], [])

    def around(self, terms: Sequence[str], limit: int, distance: int) -> dict[int, Passage]:
        """The passages that `search` finds, by number, with `distance` more before and after each."""
        query = f"SELECT id, {FIELDS} FROM passages WHERE id BETWEEN ? AND ?"

        def read(connection: sqlite3.Connection) -> dict[int, Passage]:
            best = [number for number, *_ in _search(connection, terms, limit, False)]
            spans = ((number - distance, number + distance) for number in best)
            return {row[0]: Passage(*row[1:]) for span in spans for row in connection.execute(query, span)}

        return self._run(read, {})

    def rarity(self, terms: Sequence[str]) -> Floats:
        """How rare each term is among the passages, as BM25 weighs it, [T]."""

        def measure(connection: sqlite3.Connection) -> Floats:
            total = database.count(connection)
            counts = numpy.array(
                [min(_estimate(connection, phrase, total), total) if (phrase := _phrase(term)) else 0 for term in terms]
            )
            return numpy.log1p((total - counts + 0.5) / (counts + 0.5)).astype(numpy.float32)

        return self._run(measure, numpy.ones(len(terms), numpy.float32))

    def without_keys(self, head: str, limit: int) -> list[tuple[int, str]]:
        """The numbers and texts of the newest typed passages whose keys in an answer head are not known."""
        query = f"""SELECT id, text FROM passages AS typed WHERE {_IS_TYPED}
            AND NOT EXISTS (SELECT 1 FROM keys WHERE keys.id = typed.id AND head = ?) ORDER BY id DESC LIMIT ?"""
        return self._run(lambda connection: list(connection.execute(query, (head, limit))), [])

    def add_keys(self, head: str, number: int, keys: Floats | None, baseline: float) -> None:
        """Note the keys [m, D] of a passage, or that it answers nothing, and its score for what asks nothing."""
        data = None if keys is None else keys.astype(numpy.float16).tobytes()
        insert = "INSERT OR REPLACE INTO keys VALUES(?, ?, ?, ?)"
        self._change(lambda connection: connection.execute(insert, (number, head, baseline, data)))

    def with_keys(self, head: str, size: int, limit: int) -> Iterator[tuple[int, Floats, float]]:
        """The numbers, keys [m, size] and baselines of the newest passages that have some."""
        query = "SELECT id, keys, baseline FROM keys WHERE head = ? AND keys IS NOT NULL ORDER BY id DESC LIMIT ?"
        rows: list[tuple[int, bytes, float]] = self._run(
            lambda connection: list(connection.execute(query, (head, limit))), []
        )
        for number, data, baseline in rows:
            yield number, numpy.frombuffer(data, numpy.float16).reshape(-1, size).astype(numpy.float32), baseline

    def passage(self, number: int) -> Passage | None:
        """A passage by its number."""
        row = self._run(lambda connection: connection.execute(f"{PASSAGES} WHERE id = ?", (number,)).fetchone(), None)
        return Passage(*row) if row else None

    def following(self, passage: Passage, count: int) -> list[Passage]:
        """The next passages of the stream."""
        query = f"""{PASSAGES} WHERE id > (
            SELECT id FROM passages WHERE turn = ? AND start = ? AND role = ? AND text = ? LIMIT 1
        ) ORDER BY id LIMIT ?"""
        values = passage.turn, passage.start, passage.role, replace_surrogates(passage.text), count
        return self._run(lambda connection: [Passage(*row) for row in connection.execute(query, values)], [])

    def _run(self, action: Callable[[sqlite3.Connection], T], default: T) -> T:
        """The result of the action; the default after an error, or if the index is closed."""
        if self._connection is None:
            return default
        try:
            if self._connection.in_transaction:  # a change was cut off while it was being undone
                self._connection.rollback()
            return action(self._connection)
        except database.ERRORS as error:
            self._replace(error)
            return default

    def _change(self, action: Callable[[sqlite3.Connection], Any]) -> bool:
        """Run the action in a transaction. Returns whether it took place."""

        def change(connection: sqlite3.Connection) -> bool:
            with database.transaction(connection):
                action(connection)
            return True

        return self._run(change, False)

    def _replace(self, error: Exception) -> None:
        """After an error: continue with an empty file, or with a temporary one, or with none."""
        self.close()
        self._replacements += 1
        self.stale = False
        reason = getattr(error, "strerror", None) or str(error)
        if self._replacements > _MAX_REPLACEMENTS:
            self._notify(f"the index of the session is off: {reason}")
            return
        if self._path is not None and not database.cannot_write(error):
            with suppress(*database.ERRORS, OSError):
                database.delete(self._path)
                self._connection = database.connect(self._path)
                self.stale = True
                self._notify("the index of the session was damaged and is rebuilt")
                return
        if self._path is not None:
            self._path = None
            self._notify(f"the index of the session cannot be saved: {reason}; a temporary one is used")
        try:
            self._connection = database.connect(None)
            self.stale = True
        except (*database.ERRORS, OSError) as failure:
            self._notify(f"the index of the session is off: {failure}")


def _search(connection: sqlite3.Connection, terms: Sequence[str], limit: int, typed: bool) -> list[tuple[Any, ...]]:
    """The numbers of passages and their fields."""
    phrases = dict.fromkeys(phrase for term in terms for part in _parts(term) if (phrase := _phrase(part)))
    total, rows, chosen = database.count(connection), 0, list[str]()
    counts = ((_estimate(connection, phrase, total), phrase) for phrase in list(phrases)[:_MAX_TERMS])
    for count, phrase in sorted(pair for pair in counts if pair[0]):
        if chosen and rows + count > _MAX_ROWS:
            break
        chosen.append(phrase)
        rows += count
    if not chosen:
        return []
    oldest = int(total * (1 - _MAX_ROWS / max(rows, _MAX_ROWS)))
    query = f"""SELECT id, {FIELDS} FROM passages JOIN (
            SELECT words.rowid, rank FROM words {_TYPED if typed else ""}
            WHERE words MATCH ? AND words.rowid > ? ORDER BY rank, words.rowid DESC LIMIT ?
        ) AS found ON id = found.rowid ORDER BY found.rank, id DESC"""
    return list(connection.execute(query, (" OR ".join(chosen), oldest, limit)))


def _estimate(connection: sqlite3.Connection, phrase: str, total: int) -> int:
    """About how many of all passages have the phrase; exact up to `_SAMPLE`."""
    query = "SELECT count(*), max(rowid) FROM (SELECT rowid FROM words WHERE words MATCH ? LIMIT ?)"
    count, last = connection.execute(query, (phrase, _SAMPLE)).fetchone()
    return int(count if count < _SAMPLE else count * total // last)


def _parts(term: str) -> list[str]:
    """A term, or the pairs of characters in it that may be words."""
    parts = list[str]()
    for run in _UNSPACED_RUN.findall(term[:_MAX_TERM_LENGTH]):
        parts += [run[at : at + 2] for at in range(max(1, len(run) - 1))]
    rest = _UNSPACED_RUN.sub(" ", term)
    return [term] if not parts else [*parts, rest]


def _phrase(term: str) -> str:
    """A term as a quoted phrase of FTS5; empty if there is no letter or digit in it."""
    text = replace_surrogates(database.spaced(term[:_MAX_TERM_LENGTH])).replace("\0", " ").replace('"', " ")
    return f'"{text}"' if any(map(str.isalnum, text)) else ""

"""The index of what was said: passages on disk, found by their words. Knows neither models nor conversations.

A SQLite database with a full-text index (FTS5). Every change is one transaction, so a killed process leaves a file
that is consistent. It only repeats what the transcript has: if it is damaged or cannot be written, it is replaced by an
empty one, and `PassageIndex.sync` fills it again.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, TypeVar

from h2o_stream.errors import H2OStreamError
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import UNSPACED
from h2o_stream.resources import replace_surrogates

T = TypeVar("T")

_APPLICATION_ID = 0x48324F49
_VERSION = 1
"""Of the schema and of `_spaced`. Files of another version are replaced."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE turns(turn INTEGER PRIMARY KEY, digest BLOB NOT NULL, passages BLOB NOT NULL);
CREATE TABLE passages(id INTEGER PRIMARY KEY, turn INTEGER, role TEXT, text TEXT, start INTEGER, stop INTEGER);
CREATE INDEX places ON passages(turn, start);
CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize='porter unicode61 remove_diacritics 2');
INSERT INTO words(words, rank) VALUES('automerge', 0);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
COMMIT;
"""
"""The ids of passages are 1, 2, 3 and so on in the order of the stream, as only the newest are ever deleted."""

_MERGED_PAGES = 16
"""Work on the index after each turn, and for each of its passages, in kB: what keeps it compact without pauses."""

_MAX_ROWS = 3000
"""Passages that are ranked in a search: 4 ms. Common words are left out, or only the newest passages are ranked."""

MAX_TOLD = 3
"""Passages of a message that a user types, at most; a longer one is pasted text: 100 to 200 words."""

_MAX_TERMS = 64
_MAX_TERM_LENGTH = 256

_MAX_REPLACEMENTS = 3
"""After so many errors the index is switched off, as filling it again and again would delay every turn."""

_UNSPACED = re.compile(f"[{UNSPACED}]")
_UNSPACED_RUN = re.compile(f"[{UNSPACED}]+")

_WRITE_ERRORS = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
)


def ignore(message: str) -> None:
    """Drop a notice."""


class PassageIndex:
    """Passages of a stream in a database, in the order of the stream. Not for use by two threads at once.

    After an error the index is empty. None of its methods raises an error of SQLite or of the disk.

    Args:
        path: of the file; None for a temporary one that is deleted when it is closed.
        notify: is told in one line if the file was damaged or cannot be written.

    Attributes:
        stale: the index was emptied because of an error; `sync` fills it again.

    Raises:
        H2OStreamError: the SQLite library of this Python has no full-text index.
    """

    def __init__(self, path: Path | None = None, notify: Callable[[str], None] = ignore) -> None:
        self.stale = False
        self._path, self._notify = path, notify
        self._replacements = 0
        self._connection: sqlite3.Connection | None = None
        try:
            self._connection = _connect(path)
        except (sqlite3.Error, OSError) as error:
            self._replace(error)

    def __len__(self) -> int:
        """The number of passages."""
        return self._run(_count, 0)

    def close(self) -> None:
        """Close the file; a temporary one is deleted. From now on nothing is found and nothing is added."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def add(self, turn: int, prompt: str, reply: str, passages: Sequence[Passage]) -> None:
        """Add a turn, completely or not at all. It replaces this turn and all after it, if there are any.

        Args:
            turn: its number.
            prompt: the user's message.
            reply: the model's reply.
            passages: of both, in the order of the stream.
        """

        def change(connection: sqlite3.Connection) -> None:
            _truncate(connection, turn - 1)
            _add(connection, turn, prompt, reply, passages)

        self._change(change)

    def truncate(self, turn: int) -> None:
        """Delete every turn after this one; 0 deletes all."""
        self._change(lambda connection: _truncate(connection, turn))

    def sync(
        self, turns: Sequence[tuple[int, str, str]], passages: Callable[[int, str, str], Sequence[Passage]]
    ) -> None:
        """Make the index hold exactly these turns. Those at the start that it already has are kept as they are.

        Args:
            turns: number, prompt and reply of each, in order.
            passages: returns the passages of a turn that is missing.
        """

        def change(connection: sqlite3.Connection) -> None:
            kept = _common_prefix(connection, turns)
            _truncate(connection, turns[kept - 1][0] if kept else 0)
            for turn in turns[kept:]:
                _add(connection, *turn, passages(*turn))

        if self._change(change) or self._change(change):
            self.stale = False

    def search(self, terms: Sequence[str], limit: int, *, told: bool = False) -> list[Passage]:
        """Passages that contain any of the terms, best first, by BM25. Endings of English words do not matter.

        Args:
            terms: words or phrases of the user, in any form. If there are rarer ones, the most common are ignored.
            limit: the number of passages.
            told: only what the user typed: messages of at most `MAX_TOLD` passages.
        """
        return self._run(lambda connection: _search(connection, terms, limit, told), [])

    def frequency(self, term: str) -> int:
        """The number of passages that contain a word or phrase."""
        phrase = _phrase(term)
        query = "SELECT count(*) FROM words WHERE words MATCH ?"
        return self._run(lambda connection: int(connection.execute(query, (phrase,)).fetchone()[0]), 0) if phrase else 0

    def following(self, passage: Passage, count: int) -> list[Passage]:
        """The next passages of the stream."""
        query = f"""{_PASSAGES} WHERE id > (
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
        except (sqlite3.Error, OSError) as error:
            self._replace(error)
            return default

    def _change(self, action: Callable[[sqlite3.Connection], None]) -> bool:
        """Run the action in a transaction. Returns whether it took place."""

        def change(connection: sqlite3.Connection) -> bool:
            with _transaction(connection):
                action(connection)
            return True

        return self._run(change, False)

    def _replace(self, error: sqlite3.Error | OSError) -> None:
        """After an error: continue with an empty file, or with a temporary one, or with none."""
        self.close()
        self._replacements += 1
        self.stale = False
        reason = getattr(error, "strerror", None) or str(error)
        if self._replacements > _MAX_REPLACEMENTS:
            self._notify(f"the index of the session is off: {reason}")
            return
        if self._path is not None and not _cannot_write(error):
            with suppress(sqlite3.Error, OSError):
                _delete(self._path)
                self._connection = _connect(self._path)
                self.stale = True
                self._notify("the index of the session was damaged and is rebuilt")
                return
        if self._path is not None:
            self._path = None
            self._notify(f"the index of the session cannot be saved: {reason}; a temporary one is used")
        try:
            self._connection = _connect(None)
            self.stale = True
        except (sqlite3.Error, OSError) as failure:
            self._notify(f"the index of the session is off: {failure}")


_PASSAGES = "SELECT turn, role, text, start, stop FROM passages"
_TOLD = f"""told.role = 'user' AND
    (SELECT count(*) FROM passages WHERE turn = told.turn AND role = 'user') <= {MAX_TOLD}"""


def _connect(path: Path | None) -> sqlite3.Connection:
    """Open a database and check it, or create it.

    Raises:
        sqlite3.Error, OSError: it is damaged, of another kind or version, or in use.
        H2OStreamError: there is no full-text index.
    """
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let others read it
    connection = sqlite3.connect(path or "", timeout=1, isolation_level=None, check_same_thread=False)
    try:
        # Without syncing, a power cut may damage the file, which the check notices. A killed process does not.
        connection.executescript("PRAGMA cache_size = -2000; PRAGMA temp_store = FILE; PRAGMA synchronous = OFF")
        if connection.execute("PRAGMA schema_version").fetchone()[0]:
            _check(connection)
        else:
            connection.executescript(_SCHEMA)
    except BaseException as error:
        connection.close()
        if "no such module" in str(error):
            raise H2OStreamError(f"SQLite {sqlite3.sqlite_version} has no FTS5, which --recall auto needs") from error
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Check a whole file: 0.2 s for a million tokens.

    Raises:
        sqlite3.Error: it is damaged, or of another kind or version.
    """
    identity = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if identity != [_APPLICATION_ID, _VERSION] or connection.execute("PRAGMA quick_check").fetchone()[0] != "ok":
        raise sqlite3.DatabaseError("the file is damaged")
    connection.execute("INSERT INTO words(words) VALUES('integrity-check')")
    query = """SELECT turns.passages, turns.turn, role, text, start, stop, id FROM turns
        LEFT JOIN passages ON passages.turn = turns.turn ORDER BY turns.turn, id"""
    count = 0
    for digest, rows in groupby(connection.execute(query), lambda row: row[0]):
        passages = [row[1:6] for row in rows if row[6] is not None]
        count += len(passages)
        if _passages_digest(passages) != digest:
            raise sqlite3.DatabaseError("the file is damaged")
    if count != _count(connection):
        raise sqlite3.DatabaseError("the file is damaged")


def _delete(path: Path) -> None:
    for ending in ("", "-journal", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def _cannot_write(error: sqlite3.Error | OSError) -> bool:
    """Whether the reason is the disk or the folder, not the content of the file."""
    return isinstance(error, OSError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _WRITE_ERRORS


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT ifnull(max(id), 0) FROM passages").fetchone()[0])


def _add(connection: sqlite3.Connection, turn: int, prompt: str, reply: str, passages: Sequence[Passage]) -> None:
    rows = [(turn, item.role, replace_surrogates(item.text), item.start, item.stop) for item in passages]
    digests = _turn_digest(turn, prompt, reply), _passages_digest(rows)
    connection.execute("INSERT INTO turns VALUES(?, ?, ?)", (turn, *digests))
    for number, row in enumerate(rows, _count(connection) + 1):
        connection.execute("INSERT INTO passages VALUES(?, ?, ?, ?, ?, ?)", (number, *row))
        connection.execute("INSERT INTO words(rowid, text) VALUES(?, ?)", (number, _spaced(row[2])))
    pages = _MERGED_PAGES * (1 + len(rows))
    connection.execute("INSERT INTO words(words, rank) VALUES('merge', ?)", (pages,))


def _truncate(connection: sqlite3.Connection, turn: int) -> None:
    first = connection.execute("SELECT min(id) FROM passages WHERE turn > ?", (turn,)).fetchone()[0]
    connection.execute("DELETE FROM turns WHERE turn > ?", (turn,))
    if first is None:
        return
    if first == 1:
        connection.execute("INSERT INTO words(words) VALUES('delete-all')")
    else:
        for number, text in connection.execute("SELECT id, text FROM passages WHERE id >= ?", (first,)):
            values = number, _spaced(text)
            connection.execute("INSERT INTO words(words, rowid, text) VALUES('delete', ?, ?)", values)
    connection.execute("DELETE FROM passages WHERE id >= ?", (first,))


def _common_prefix(connection: sqlite3.Connection, turns: Sequence[tuple[int, str, str]]) -> int:
    """How many of the turns, from the start, are in the index as its first ones."""
    stored = connection.execute("SELECT turn, digest FROM turns ORDER BY turn")
    pairs = zip(stored, turns, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == (pair[1][0], _turn_digest(*pair[1])), pairs))


def _turn_digest(turn: int, prompt: str, reply: str) -> bytes:
    return _digest([repr((turn, prompt, reply))])


def _passages_digest(rows: Iterable[tuple[Any, ...]]) -> bytes:
    return _digest(map(repr, rows))


def _digest(texts: Iterable[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _search(connection: sqlite3.Connection, terms: Sequence[str], limit: int, told: bool) -> list[Passage]:
    phrases = dict.fromkeys(phrase for term in terms for part in _parts(term) if (phrase := _phrase(part)))
    total, rows, chosen = _count(connection), 0, list[str]()
    counts = ((_estimate(connection, phrase, total), phrase) for phrase in list(phrases)[:_MAX_TERMS])
    for count, phrase in sorted(pair for pair in counts if pair[0]):
        if chosen and rows + count > _MAX_ROWS:
            break
        chosen.append(phrase)
        rows += count
    if not chosen:
        return []
    oldest = int(total * (1 - _MAX_ROWS / max(rows, _MAX_ROWS)))
    joined = f"JOIN passages AS told ON told.id = words.rowid AND {_TOLD}" if told else ""
    query = f"""{_PASSAGES} JOIN (
            SELECT words.rowid, rank FROM words {joined}
            WHERE words MATCH ? AND words.rowid > ? ORDER BY rank, words.rowid DESC LIMIT ?
        ) AS found ON id = found.rowid ORDER BY found.rank, id DESC"""
    return [Passage(*row) for row in connection.execute(query, (" OR ".join(chosen), oldest, limit))]


def _estimate(connection: sqlite3.Connection, phrase: str, total: int) -> int:
    """About how many of all passages have the phrase; exact up to `_MAX_ROWS`."""
    query = "SELECT count(*), max(rowid) FROM (SELECT rowid FROM words WHERE words MATCH ? LIMIT ?)"
    count, last = connection.execute(query, (phrase, _MAX_ROWS)).fetchone()
    return int(count if count < _MAX_ROWS else count * total // last)


def _parts(term: str) -> list[str]:
    """A term, or the pairs of characters in it that may be words."""
    parts = list[str]()
    for run in _UNSPACED_RUN.findall(term[:_MAX_TERM_LENGTH]):
        parts += [run[at : at + 2] for at in range(max(1, len(run) - 1))]
    rest = _UNSPACED_RUN.sub(" ", term)
    return [term] if not parts else [*parts, rest]


def _phrase(term: str) -> str:
    """A term as a quoted phrase of FTS5; empty if there is no letter or digit in it."""
    text = replace_surrogates(_spaced(term[:_MAX_TERM_LENGTH])).replace("\0", " ").replace('"', " ")
    return f'"{text}"' if any(map(str.isalnum, text)) else ""


def _spaced(text: str) -> str:
    """Spaces around each character of scripts that have none, so that any of their words is a phrase."""
    return _UNSPACED.sub(r" \g<0> ", text)

"""The database of the index: its schema, its checks, and its changes. Knows nothing of searches.

Every change is one transaction, so a killed process leaves a file that is consistent.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.errors import H2OStreamError
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import UNSPACED

FIELDS = "turn, role, text, start, stop"

PASSAGES = f"SELECT {FIELDS} FROM passages"
"""A query for the fields of `Passage`."""

_APPLICATION_ID = 0x48324F49
_VERSION = 2
"""Version of the schema and of `spaced`. Files of another version are replaced."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE turns(turn INTEGER PRIMARY KEY, digest BLOB NOT NULL, passages BLOB NOT NULL);
CREATE TABLE passages(id INTEGER PRIMARY KEY, turn INTEGER, role TEXT, text TEXT, start INTEGER, stop INTEGER);
CREATE INDEX places ON passages(turn, start);
CREATE TABLE keys(id INTEGER PRIMARY KEY, head TEXT, baseline REAL, keys BLOB);
CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize='porter unicode61 remove_diacritics 2');
INSERT INTO words(words, rank) VALUES('automerge', 0);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
COMMIT;
"""
"""The ids of passages are 1, 2, 3 and so on in the order of the stream, as only the newest are ever deleted.
`keys` has those of some passages in the answer head, float16, and null for passages that answer nothing."""

_MERGED_PAGES = 4
"""Pages of words that are merged after each turn, and for each of its passages. At a million tokens 2 to 16 leave the
same number of segments, but with 16 some turns take 5 ms instead of 2."""

_UNSPACED = re.compile(f"[{UNSPACED}]")

ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged file raises; the second if a message would quote it."""

_WRITE_ERRORS = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
)


def connect(path: Path | None) -> sqlite3.Connection:
    """Open a database and check it, or create it.

    Raises:
        sqlite3.Error, UnicodeDecodeError, OSError: it is damaged, of another kind or version, or in use.
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
    """Check a whole file, and raise what `connect` does: 0.2 s for a million tokens."""
    identity = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if identity != [_APPLICATION_ID, _VERSION] or connection.execute("PRAGMA quick_check").fetchone()[0] != "ok":
        raise sqlite3.DatabaseError("the file is damaged")
    connection.execute("INSERT INTO words(words) VALUES('integrity-check')")
    query = """SELECT turns.passages, turns.turn, role, text, start, stop, id FROM turns
        LEFT JOIN passages ON passages.turn = turns.turn ORDER BY turns.turn, id"""
    checked = 0
    for (digest, _), rows in groupby(connection.execute(query), lambda row: row[:2]):
        passages = [row[1:6] for row in rows if row[6] is not None]
        checked += len(passages)
        if _passages_digest(passages) != digest:
            raise sqlite3.DatabaseError("the file is damaged")
    indexed = connection.execute("SELECT count(*) FROM words_docsize").fetchone()[0]
    if not checked == indexed == count(connection):
        raise sqlite3.DatabaseError("the file is damaged")


def delete(path: Path) -> None:
    """Delete a database and what a killed process left beside it."""
    for ending in ("", "-journal", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def cannot_write(error: Exception) -> bool:
    """Whether the reason is the disk or the folder, not the content of the file."""
    return isinstance(error, OSError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _WRITE_ERRORS


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make all changes of the block or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def count(connection: sqlite3.Connection) -> int:
    """The number of passages."""
    return int(connection.execute("SELECT ifnull(max(id), 0) FROM passages").fetchone()[0])


def add(connection: sqlite3.Connection, turn: int, prompt: str, reply: str, passages: Sequence[Passage]) -> None:
    """Add a turn after the last one."""
    rows = _rows(turn, passages)
    digests = _turn_digest(turn, prompt, reply), _passages_digest(rows)
    connection.execute("INSERT INTO turns VALUES(?, ?, ?)", (turn, *digests))
    for number, row in enumerate(rows, count(connection) + 1):
        connection.execute("INSERT INTO passages VALUES(?, ?, ?, ?, ?, ?)", (number, *row))
        connection.execute("INSERT INTO words(rowid, text) VALUES(?, ?)", (number, spaced(row[2])))
    pages = _MERGED_PAGES * (1 + len(rows))
    connection.execute("INSERT INTO words(words, rank) VALUES('merge', ?)", (pages,))


def truncate(connection: sqlite3.Connection, turn: int) -> None:
    """Delete every turn after this one."""
    query = "SELECT min(id) FROM passages INDEXED BY places WHERE turn > ?"  # by itself SQLite would read every id
    first = connection.execute(query, (turn,)).fetchone()[0]
    connection.execute("DELETE FROM turns WHERE turn > ?", (turn,))
    if first is None:
        return
    if first == 1:
        connection.execute("INSERT INTO words(words) VALUES('delete-all')")
    else:
        for number, text in connection.execute("SELECT id, text FROM passages WHERE id >= ?", (first,)):
            values = number, spaced(text)
            connection.execute("INSERT INTO words(words, rowid, text) VALUES('delete', ?, ?)", values)
    connection.execute("DELETE FROM passages WHERE id >= ?", (first,))
    connection.execute("DELETE FROM keys WHERE id >= ?", (first,))


def common_prefix(connection: sqlite3.Connection, turns: Sequence[tuple[int, str, str]]) -> int:
    """How many of the turns, from the start, are in the index as its first ones."""
    stored = connection.execute("SELECT turn, digest FROM turns ORDER BY turn")
    pairs = zip(stored, turns, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == (pair[1][0], _turn_digest(*pair[1])), pairs))


def has_passages(connection: sqlite3.Connection, turn: int, passages: Sequence[Passage]) -> bool:
    """Whether these are the passages of a turn, with the same tokens."""
    stored = connection.execute("SELECT passages FROM turns WHERE turn = ?", (turn,)).fetchone()
    return bool(stored == (_passages_digest(_rows(turn, passages)),))


def _rows(turn: int, passages: Sequence[Passage]) -> list[tuple[int, str, str, int, int]]:
    return [(turn, item.role, replace_surrogates(item.text), item.start, item.stop) for item in passages]


def _turn_digest(turn: int, prompt: str, reply: str) -> bytes:
    return _digest([repr((turn, prompt, reply))])


def _passages_digest(rows: Iterable[tuple[Any, ...]]) -> bytes:
    return _digest(map(repr, rows))


def _digest(texts: Iterable[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def spaced(text: str) -> str:
    """Spaces around each character of scripts that have none, so that any of their words is a phrase."""
    return _UNSPACED.sub(r" \g<0> ", text)

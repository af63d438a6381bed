"""Finds what was said in any session: a full-text index of all transcripts, which follows them when it is asked.

The index can be made again from the transcripts: a damaged one is replaced, and where it cannot be written it
is in memory.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.errors import DataError
from h2o_stream.recall.database import ERRORS, delete, spaced
from h2o_stream.recall.passages import UNSPACED
from h2o_stream.session.folders import TRANSCRIPT, sessions_folder, transcripts
from h2o_stream.session.transcript import Transcript

MARKS = "\1", "\2"
"""Around the words that were found in the excerpt of a `Match`."""

_VERSION = 1
_SCHEMA = f"""
CREATE TABLE sessions(name TEXT PRIMARY KEY, stamp TEXT NOT NULL);
CREATE VIRTUAL TABLE turns USING fts5(
    name UNINDEXED, turn UNINDEXED, time UNINDEXED, text, tokenize='porter unicode61 remove_diacritics 2'
);
PRAGMA user_version = {_VERSION};
"""

_QUERY = """
SELECT name, turn, time, snippet(turns, 3, ?, ?, '…', 24) FROM turns WHERE turns MATCH ? ORDER BY rank LIMIT ?
"""

_UNSPACED = re.compile(f" ([{MARKS[0]}]?[{UNSPACED}][{MARKS[1]}]?) ")


@dataclass(frozen=True)
class Match:
    """A turn in which all words were said, with an excerpt in one line; `time` is ISO 8601."""

    session: str
    turn: int
    time: str
    excerpt: str


def search(words: str, limit: int) -> list[Match]:
    """The turns of all sessions that have all of these words, in any form, best first; DataError without words."""
    query = " AND ".join(f'"{spaced(word)}"' for word in re.findall(r"\w+", words))
    if not query:
        raise DataError(f"{words!r} has no word to search for")
    path = sessions_folder() / "search.sqlite"
    for place in (path, path, None):
        try:
            with closing(_open(place)) as connection:
                _follow(connection)
                rows = connection.execute(_QUERY, (*MARKS, query, limit)).fetchall()
            return [Match(name, turn, time, _readable(text)) for name, turn, time, text in rows]
        except (*ERRORS, OSError):
            if place is None:
                raise
            with suppress(OSError):
                delete(place)
    raise AssertionError("the last place is memory")


def _readable(text: str) -> str:
    """An excerpt in one line, without the spaces of `spaced`."""
    return " ".join(_UNSPACED.sub(r"\1", text).split())


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let others read it
    connection = sqlite3.connect(path or ":memory:", timeout=1)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError("an index of another version")
        if not version:
            connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _follow(connection: sqlite3.Connection) -> None:
    """Read the sessions that are new or have changed, and forget those that are gone."""
    known = dict(connection.execute("SELECT name, stamp FROM sessions"))
    stamps = dict(_stamps())
    with connection:
        for name in [name for name, stamp in known.items() if stamps.get(name) != stamp]:
            connection.execute("DELETE FROM turns WHERE name = ?", (name,))
            connection.execute("DELETE FROM sessions WHERE name = ?", (name,))
        for name in [name for name, stamp in stamps.items() if known.get(name) != stamp]:
            connection.executemany("INSERT INTO turns VALUES(?, ?, ?, ?)", _rows(name))
            connection.execute("INSERT INTO sessions VALUES(?, ?)", (name, stamps[name]))


def _stamps() -> Iterator[tuple[str, str]]:
    for path in transcripts():
        with suppress(OSError):
            status = path.stat()
            yield path.parent.name, f"{status.st_mtime_ns} {status.st_size}"


def _rows(name: str) -> Sequence[tuple[str, int, str, str]]:
    with suppress(DataError):
        entries = Transcript(sessions_folder() / name / TRANSCRIPT).entries
        texts = ((entry, replace_surrogates(f"{entry.prompt}\n{entry.text}")) for entry in entries)
        return [(name, entry.turn, entry.time, spaced(text)) for entry, text in texts]
    return []

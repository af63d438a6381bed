"""Conversations on disk: each is a session, with a file that says how it is recognised. Used by one process.

A session holds the text of every turn and the states after the last ones; see `session.sessions`. The file has a line
about the conversation, and one for each turn, which is written before the turn. So a turn costs two lines and a state,
however many there are.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.logs import Log
from h2o_stream.base.resources import PRIVATE, write_atomically
from h2o_stream.cache.state import Array, State
from h2o_stream.errors import DataError, file_errors
from h2o_stream.session.folders import TRANSCRIPT
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header, last_turn

_log = logging.getLogger(__name__)

_FILE = "serve.jsonl"
_ID = re.compile("[0-9a-f]{32}")


@dataclass
class Kept:
    """What is known of a conversation, awake or asleep.

    Attributes:
        id: names its session; it opens nothing, see `ids`.
        key: of its options, see `Options.key`.
        system: its system prompt.
        hashes: before the first turn, and after each; `turns` has the number of each turn in the session.
        turns: numbers of turns, 0 before the first.
        owner: whose it is, see `Access.owner`.
        ids: of responses, by which their clients go on; after how many turns they come.
        used: when it was used last, seconds since 1970.
        nbytes: on disk.
        file_bytes: of the file, without lines of turns that were not saved.
        stateless: after how many turns there is no state, as far as that is known.
        session: while it is awake and on disk.
    """

    id: str
    key: list[Any]
    system: str | None
    hashes: Log[str]
    turns: Log[int] = field(default_factory=lambda: Log([0]))
    owner: str = ""
    ids: dict[str, int] = field(default_factory=dict)
    used: float = field(default_factory=time.time)
    nbytes: int = 0
    file_bytes: int = 0
    stateless: set[int] = field(default_factory=set)
    session: Session | None = None

    def close(self) -> None:
        """Close its session."""
        session, self.session = self.session, None
        if session is not None:
            session.close()


class Store:
    """The conversations in a folder.

    Args:
        folder: of their sessions.
        model: the name of the model; conversations of others are left alone.
        max_states: see `Session`.
        max_bytes: of all of them.
        expiry_s: seconds after which one that was not used is forgotten.

    Raises:
        DataError: the folder cannot be written, or another server uses it.
    """

    def __init__(self, folder: Path, model: str, max_states: int, max_bytes: int, expiry_s: float) -> None:
        from filelock import FileLock, Timeout

        self._folder, self._model, self._max_states = folder, model, max_states
        self._max_bytes, self._expiry_s = max_bytes, expiry_s
        with file_errors(f"--folder {folder}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(folder / "server.lock", timeout=0, thread_local=False)  # any thread may close it
            try:
                self._lock.acquire()
            except Timeout as error:
                raise DataError(f"another h2o-serve uses {folder}; give each a --folder of its own") from error
            self._delete_unwritten()
            self._rewrite_older()
        self.conversations = {kept.id: kept for kept in sorted(self._read(), key=lambda kept: kept.used)}
        self.nbytes = sum(kept.nbytes for kept in self.conversations.values())
        self._by_hash: dict[str, dict[str, int]] = {}
        self._by_id: dict[str, Kept] = {}
        for kept in self.conversations.values():
            self._index(kept, 0, kept.ids)

    def close(self) -> None:
        """Let other servers use the folder."""
        for kept in self.conversations.values():
            kept.close()
        self._lock.release()

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on this disk."""
        return shutil.disk_usage(self._folder).free

    def last_known(self, hashes: Sequence[str]) -> Iterator[int]:
        """After which of these hashes any conversation may go on, the last one first, without the first."""
        return (number for number in range(len(hashes) - 1, 0, -1) if hashes[number] in self._by_hash)

    def with_hash(self, known: str, owner: str) -> Iterator[tuple[Kept, int]]:
        """Conversations of an owner that may go on after it, and after how many turns; the newest first."""
        for name, turn in reversed(self._by_hash.get(known, {}).items()):
            if self.conversations[name].owner == owner:
                yield self.conversations[name], turn

    def with_id(self, response: str, owner: str) -> tuple[Kept, int] | None:
        """The conversation in which an owner got this response, and after how many turns."""
        kept = self._by_id.get(response)
        return (kept, kept.ids[response]) if kept is not None and kept.owner == owner else None

    def create(self, key: list[Any], system: str | None, first: str, owner: str) -> Kept:
        """A new conversation, which is not on disk before its first turn."""
        kept = Kept(secrets.token_hex(16), key, system, Log([first]), owner=owner)
        self.conversations[kept.id] = kept
        return kept

    def wake(self, kept: Kept) -> None:
        """Open the session of a conversation, which stays open until `Kept.close`.

        Raises:
            DataError: see `Session`.
        """
        if kept.session is None:
            kept.session = self._session(kept, create=kept.nbytes == 0)

    def saved(self, kept: Kept, turn: int) -> tuple[State, Log[Entry]] | None:
        """The state after so many turns, and their entries; None if the state is not kept any more."""
        with suppress(DataError), self._opened(kept) as session:
            number = kept.turns[turn]
            if (state := session.state(number)) is not None:
                return state, session.transcript.entries.upto(number, lambda entry: entry.turn)
        return None

    def save(
        self,
        kept: Kept,
        header: Header,
        entries: Sequence[Entry],
        hashes: Sequence[str],
        state: Mapping[str, Array],
        before: Sequence[Entry],
        response: str = "",
    ) -> None:
        """Save turns and the state after them. `entries` and `hashes` belong together, those of pins have no hash.

        Args:
            kept: the conversation, which is changed.
            header: for a session that begins.
            entries: the new turns.
            hashes: after each turn that has one, the last ones of `entries`.
            state: after the last one.
            before: turns of a branch before the new ones, if it is not on disk yet.
            response: the id by which its client goes on after the last turn.

        Raises:
            DataError: for example, the disk is full. The conversation is as it was.
        """
        number, hashes_after, turns_after = len(entries) - len(hashes), kept.hashes, kept.turns
        for known, entry in zip(hashes, entries[number:], strict=True):
            hashes_after, turns_after = hashes_after.append(known), turns_after.append(entry.turn)
        self.wake(kept)
        session = kept.session
        assert session is not None
        if session.transcript.entries and session.transcript.entries[-1].turn > kept.turns[-1]:
            session.undo(kept.turns[-1])  # a turn whose state could not be saved
        file_bytes = self._write(kept, hashes_after, turns_after, response)
        if not session.transcript.entries and len(before) + len(entries) > 1:
            last = entries[-1].turn
            session.add_all(header, [*before, *entries], lambda turn: state if turn == last else None)
        else:
            for entry in entries[:-1]:
                session.add(entry, None, header)
            session.add(entries[-1], state, header)
        kept.hashes, kept.turns, kept.used, kept.file_bytes = hashes_after, turns_after, time.time(), file_bytes
        if response:
            kept.ids[response] = len(hashes_after) - 1

    def _write(self, kept: Kept, hashes: Log[str], turns: Log[int], response: str) -> int:
        """Write what the file of a conversation lacks. Returns its size."""
        first = len(kept.hashes) if kept.file_bytes else 1
        lines = list[Any](zip(hashes[first:], turns[first:], strict=True))
        if response:
            lines[-1] = (*lines[-1], response)
        if not kept.file_bytes:
            about = {"model": self._model, "key": kept.key, "system": kept.system, "owner": kept.owner}
            lines.insert(0, {**about, "first": hashes[0]})
        data, path = "".join(json.dumps(line) + "\n" for line in lines).encode(), self._folder / kept.id / _FILE
        with file_errors(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE), "wb", 0) as file:
            file.truncate(kept.file_bytes)
            file.seek(kept.file_bytes)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return kept.file_bytes + len(data)

    def committed(self, kept: Kept, new: int, ids: Iterable[str] = ()) -> None:
        """Recognise a conversation by so many new turns, which were saved, and ids of responses; it was used last."""
        self._index(kept, new, ids)
        before, kept.nbytes = kept.nbytes, _size(self._folder / kept.id)
        self.nbytes += kept.nbytes - before
        self.conversations[kept.id] = self.conversations.pop(kept.id)

    def _index(self, kept: Kept, new: int, ids: Iterable[str] = ()) -> None:
        """Recognise a conversation, with so many new turns, by its last hashes, which may have states, and ids."""
        self._by_id.update(dict.fromkeys(ids, kept))
        first = max(len(kept.hashes) - self._max_states, 1)
        self._remove(kept, kept.hashes[max(first - new, 0) : first])
        for turn, known in enumerate(kept.hashes[first:], first):
            self._by_hash.setdefault(known, {})[kept.id] = turn

    def _remove(self, kept: Kept, hashes: Iterable[str]) -> None:
        """Do not recognise a conversation by these hashes any more."""
        for known in hashes:
            if (names := self._by_hash.get(known)) and names.pop(kept.id, None) and not names:
                del self._by_hash[known]

    def to_forget(self, used: Collection[str]) -> list[Kept]:
        """Conversations that have expired or that there is no room for, without those with these ids."""
        now, excess = time.time(), self.nbytes - self._max_bytes
        found = []
        for kept in self.conversations.values():
            if excess <= 0 and now - kept.used <= self._expiry_s:
                break
            if kept.id not in used and kept.nbytes:
                found.append(kept)
                excess -= kept.nbytes
        return found

    def forget(self, kept: Kept) -> None:
        """Delete a conversation."""
        self._remove(kept, kept.hashes)
        for response in kept.ids:
            self._by_id.pop(response, None)
        self.conversations.pop(kept.id, None)
        self.nbytes -= kept.nbytes
        kept.close()
        shutil.rmtree(self._folder / kept.id, ignore_errors=True)

    def _session(self, kept: Kept, create: bool) -> Session:
        return Session(kept.id, self._folder, create, self._max_states, sync_states=False)

    @contextmanager
    def _opened(self, kept: Kept) -> Iterator[Session]:
        """The session of a conversation, which is closed again unless it is awake."""
        if kept.session is not None:
            yield kept.session
            return
        with self._session(kept, create=False) as session:
            yield session

    def _delete_unwritten(self) -> None:
        """Delete conversations whose first turn was being saved when a server was killed."""
        for folder in self._folder.iterdir():
            transcript = folder / TRANSCRIPT
            with suppress(OSError):  # a folder of somebody else
                if _ID.fullmatch(folder.name) and not (transcript.exists() and transcript.stat().st_size):
                    shutil.rmtree(folder, ignore_errors=True)

    def _rewrite_older(self) -> None:
        """Bring the files of earlier versions, which were written anew each turn, into the form of today."""
        for path in self._folder.glob("*/serve.json"):
            if not (_ID.fullmatch(path.parent.name) and path.is_file()):
                continue
            with suppress(ValueError, KeyError, TypeError):
                record = parse_json(path.read_bytes())
                hashes = record.pop("hashes")
                lines = [{**record, "first": hashes[0]}, *zip(hashes[1:], record.pop("turns")[1:], strict=True)]
                text = "".join(json.dumps(line) + "\n" for line in lines)
                write_atomically(path.with_name(_FILE), text.encode(), PRIVATE)
                path.unlink()

    def _read(self) -> Iterator[Kept]:
        for path in self._folder.glob(f"*/{_FILE}"):
            try:
                _check_usable(path.parent, path, path.with_name(TRANSCRIPT))
                about, *lines = path.read_bytes().splitlines(keepends=True)
                record, kept_bytes = parse_json(about), len(about)
                if record["model"] != self._model:
                    continue
                first, owner = _texts(record["first"], record.get("owner", ""))
                kept = Kept(path.parent.name, record["key"], record["system"], Log([first]), owner=owner)
                said = last_turn(path.with_name(TRANSCRIPT))
                for line in lines:
                    known, turn, *response = parse_json(line) if line.endswith(b"\n") else ("", 0)
                    if not 0 < turn <= said:  # its line was written before it
                        break
                    known, *response = _texts(known, *response)
                    kept.hashes, kept.turns = kept.hashes.append(known), kept.turns.append(turn)
                    kept.ids.update(dict.fromkeys(response, len(kept.hashes) - 1))
                    kept_bytes += len(line)
                kept.used, kept.nbytes, kept.file_bytes = path.stat().st_mtime, _size(path.parent), kept_bytes
                yield kept
            except (OSError, ValueError, KeyError, TypeError, DataError) as error:
                _log.warning("%s is left alone: %s", path.parent, error)


def _check_usable(folder: Path, *files: Path) -> None:
    """Raise OSError if one of these cannot be written, or a file is a pipe, say."""
    for path in (folder, *files):
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if path != folder and not path.is_file():
            raise OSError(errno.EINVAL, "it is no file", str(path))


def _texts(*values: Any) -> tuple[str, ...]:
    """The same values.

    Raises:
        TypeError: one of them is no text.
    """
    if not all(isinstance(value, str) for value in values):
        raise TypeError("a hash, an owner or an id of a response is no text")
    return values


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())

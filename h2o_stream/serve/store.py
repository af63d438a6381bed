"""Conversations on disk: each is a session, with a file that says how it is recognised. Used by one process.

A session holds the text of every turn and the states after the last ones; see `session.sessions`.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from h2o_stream.cache.state import Array, State
from h2o_stream.errors import DataError, file_errors
from h2o_stream.resources import PRIVATE, write_atomically
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header

_log = logging.getLogger(__name__)

_FILE = "serve.json"
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
        ids: of responses, by which their clients go on; how many turns they come after.
        used: when it was used last, seconds since 1970.
        nbytes: on disk.
    """

    id: str
    key: list[Any]
    system: str | None
    hashes: list[str]
    turns: list[int] = field(default_factory=lambda: [0])
    owner: str = ""
    ids: dict[str, int] = field(default_factory=dict)
    used: float = field(default_factory=time.time)
    nbytes: int = 0


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
        with file_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(folder / "server.lock", timeout=0)
            try:
                self._lock.acquire()
            except Timeout as error:
                raise DataError(f"another h2o-serve uses {folder}; give each a --folder of its own") from error
            self._delete_unwritten()
        self.conversations = {kept.id: kept for kept in self._read()}
        self._by_hash: dict[str, list[str]] = {}
        self._by_id: dict[str, Kept] = {}
        for kept in self.conversations.values():
            self.index(kept, kept.hashes[1:], kept.ids)

    def close(self) -> None:
        """Let other servers use the folder."""
        self._lock.release()

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(kept.nbytes for kept in [*self.conversations.values()])

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on this disk."""
        return shutil.disk_usage(self._folder).free

    def with_hash(self, known: str, owner: str) -> Iterator[tuple[Kept, int]]:
        """Conversations of an owner that were in this state, and after how many turns; the newest first."""
        for name in reversed(self._by_hash.get(known, ())):
            kept = self.conversations[name]
            if known in kept.hashes and kept.owner == owner:
                yield kept, kept.hashes.index(known)

    def with_id(self, response: str, owner: str) -> tuple[Kept, int] | None:
        """The conversation in which an owner got this response, and after how many turns."""
        kept = self._by_id.get(response)
        return (kept, kept.ids[response]) if kept is not None and kept.owner == owner else None

    def create(self, key: list[Any], system: str | None, first: str, owner: str) -> Kept:
        """A new conversation, which is not on disk before its first turn."""
        kept = Kept(secrets.token_hex(16), key, system, [first], owner=owner)
        self.conversations[kept.id] = kept
        return kept

    def saved(self, kept: Kept, turn: int) -> tuple[State, list[Entry]] | None:
        """The state after so many turns, and their entries; None if the state is not kept any more."""
        with suppress(DataError), self._session(kept, create=False) as session:
            number = kept.turns[turn]
            state = session.state(number)
            if state is not None:
                return state, [entry for entry in session.transcript.entries if entry.turn <= number]
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
        numbers = [entry.turn for entry in entries[len(entries) - len(hashes) :]]
        longer = replace(kept, hashes=[*kept.hashes, *hashes], turns=[*kept.turns, *numbers], used=time.time())
        if response:
            longer.ids = {**kept.ids, response: len(longer.hashes) - 1}
        with self._session(kept, create=True) as session:
            if session.transcript.entries and session.transcript.entries[-1].turn > kept.turns[-1]:
                session.undo(kept.turns[-1])  # a turn whose state could not be saved
            record = json.dumps(_record(longer, self._model)).encode()
            with file_errors(self._folder):
                write_atomically(self._folder / kept.id / _FILE, record, PRIVATE)
            if not session.transcript.entries and len(before) + len(entries) > 1:
                last = entries[-1].turn
                session.add_all(header, [*before, *entries], lambda turn: state if turn == last else None)
            else:
                for entry in entries[:-1]:
                    session.add(entry, None, header)
                session.add(entries[-1], state, header)
        kept.hashes, kept.turns, kept.used, kept.ids = longer.hashes, longer.turns, longer.used, longer.ids
        kept.nbytes = _size(self._folder / kept.id)

    def index(self, kept: Kept, hashes: Sequence[str], ids: Iterable[str]) -> None:
        """Recognise a conversation by these hashes, and by these ids of responses, from now on."""
        self._by_id.update(dict.fromkeys(ids, kept))
        for known in hashes:
            names = self._by_hash.setdefault(known, [])
            if kept.id not in names:
                names.append(kept.id)

    def to_forget(self, awake: Mapping[str, Any]) -> list[Kept]:
        """Conversations that have expired or that there is no room for, without those that are awake."""
        now, room = time.time(), self._max_bytes
        found = []
        for kept in sorted(self.conversations.values(), key=lambda kept: -kept.used):
            room -= kept.nbytes
            if kept.id not in awake and kept.nbytes and (room < 0 or now - kept.used > self._expiry_s):
                found.append(kept)
        return found

    def forget(self, kept: Kept) -> None:
        """Delete a conversation."""
        for known in kept.hashes:
            names = self._by_hash.get(known, [])
            if kept.id in names:
                names.remove(kept.id)
            if not names:
                self._by_hash.pop(known, None)
        for response in kept.ids:
            self._by_id.pop(response, None)
        self.conversations.pop(kept.id, None)
        shutil.rmtree(self._folder / kept.id, ignore_errors=True)

    def _session(self, kept: Kept, create: bool) -> Session:
        return Session(kept.id, self._folder, create, self._max_states, sync_states=False)

    def _delete_unwritten(self) -> None:
        """Delete conversations whose first turn was being saved when a server was killed."""
        for folder in self._folder.iterdir():
            transcript = folder / "transcript.jsonl"
            if _ID.fullmatch(folder.name) and not (transcript.exists() and transcript.stat().st_size):
                shutil.rmtree(folder, ignore_errors=True)

    def _read(self) -> Iterator[Kept]:
        for path in self._folder.glob(f"*/{_FILE}"):
            try:
                record = json.loads(path.read_bytes())
                if record["model"] != self._model:
                    continue
                kept = Kept(path.parent.name, record["key"], record["system"], record["hashes"], record["turns"])
                with self._session(kept, create=False) as session:  # the file is written before the turn
                    said = {0, *(entry.turn for entry in session.transcript.entries)}
                kept.owner = record.get("owner", "")
                count = next((n for n, turn in enumerate(kept.turns) if turn not in said), len(kept.turns))
                kept.hashes, kept.turns = kept.hashes[:count], kept.turns[:count]
                kept.ids = {response: turn for response, turn in record.get("ids", {}).items() if turn < count}
                kept.used, kept.nbytes = path.stat().st_mtime, _size(path.parent)
                yield kept
            except (OSError, ValueError, KeyError, TypeError, DataError) as error:
                _log.warning("%s is left alone: %s", path.parent, error)


def _record(kept: Kept, model: str) -> dict[str, Any]:
    names = ("key", "system", "hashes", "turns", "owner", "ids")
    return {"model": model, **{name: getattr(kept, name) for name in names}}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())

"""The folders of sessions: which there are, their names, and what is known of them while they are not open."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import PRIVATE, data_folder, write_atomically
from h2o_stream.errors import ConfigError, DataError, file_errors
from h2o_stream.session.transcript import Transcript

AUTOMATIC = "automatic"
"""The file that marks a session which the user did not name."""

SESSIONS = "sessions"
"""The folder of all sessions in the user's data folder."""

TRANSCRIPT = "transcript.jsonl"
"""The file of a session's turns."""

_SETTINGS = "settings.json"

_NAME = re.compile(r"\w[\w.-]{0,63}")
_NAME_BYTES = 255
"""The limit of file systems."""

_SIMILARITY = 0.8
"""From this ratio of difflib on, a name may be a slip of another one."""


def transcripts(folder: Path | None = None) -> Iterator[Path]:
    """The files of all sessions' turns, among all sessions or in this folder."""
    return (folder or sessions_folder()).glob(f"*/{TRANSCRIPT}")


def saved_sessions(folder: Path | None = None) -> list[tuple[str, Transcript]]:
    """All sessions with their names, in order. Damaged ones are omitted."""
    sessions = []
    for path in sorted(transcripts(folder)):
        with suppress(DataError):
            sessions.append((path.parent.name, Transcript(path)))
    return sessions


def session_names() -> list[str]:
    """The names of all sessions, the one used last first."""
    times = dict[str, int]()
    for path in transcripts():
        with suppress(OSError):
            if (stat := path.stat()).st_size:
                times[path.parent.name] = stat.st_mtime_ns
    return sorted(times, key=times.__getitem__, reverse=True)


def similar_session(name: str) -> str | None:
    """The session that was probably meant by a name that none has. Names that differ in a number are not similar."""
    names = [known for known in session_names() if _digits(known) == _digits(name)]
    return next(iter(difflib.get_close_matches(name, names, 1, _SIMILARITY)), None)


def _digits(name: str) -> str:
    return re.sub(r"\D", "", name)


def unknown_session(name: str) -> DataError:
    """The error about a name that no session has."""
    similar = similar_session(name)
    hint = f"did you mean {similar}?" if similar else "h2o-chat --sessions lists them"
    return DataError(f"there is no session {name}; {hint}")


def sessions_folder() -> Path:
    """The user's folder of sessions."""
    return data_folder() / SESSIONS


def find_transcript(name: str) -> Transcript:
    """The transcript of a session, for reading only.

    Raises:
        ConfigError: the name is not allowed.
        DataError: there is no such session.
    """
    path = session_folder(name) / TRANSCRIPT
    if not path.exists():
        raise unknown_session(name)
    return Transcript(path)


def read_settings(name: str) -> dict[str, Any]:
    """The options that a session was left with; none if nothing is known of them."""
    with suppress(OSError, ValueError):
        values = parse_json((session_folder(name) / _SETTINGS).read_bytes())
        return values if isinstance(values, dict) else {}
    return {}


def write_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Keep the options of a session. A disk that is full keeps the text alone."""
    with suppress(OSError):
        write_atomically(session_folder(name) / _SETTINGS, json.dumps(settings, default=str).encode(), PRIVATE)


def remove_session(name: str) -> None:
    """Remove a session, even a damaged one.

    Raises:
        ConfigError, DataError: there is no such session, or it is open in a process.
    """
    with _locked(name) as folder:
        shutil.rmtree(folder)


def rename_session(name: str, new_name: str) -> None:
    """Give a session another name, under which it is kept until the user removes it.

    Raises:
        ConfigError, DataError: see `remove_session`; or a session of the new name exists.
    """
    target = session_folder(new_name)
    with _locked(name) as folder:
        if new_name != name and target.exists():
            raise DataError(f"session {new_name} already exists; choose another name")
        folder.rename(target)
        (target / AUTOMATIC).unlink(missing_ok=True)


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    from filelock import FileLock, Timeout

    folder = session_folder(name)
    if not folder.is_dir():
        raise unknown_session(name)
    try:
        with FileLock(folder / "lock", timeout=0), file_errors(f"session {name}"):
            yield folder
    except Timeout as error:
        raise open_elsewhere(name) from error


def open_elsewhere(name: str) -> DataError:
    """The error about a session that another process has open."""
    return DataError(f"session {name} is open in another process; close it there or choose another name")


def check_name(name: str) -> None:
    """Refuse a name that cannot be the name of a folder."""
    if not _NAME.fullmatch(name) or len(os.fsencode(name)) > _NAME_BYTES:
        raise ConfigError(
            f"{name!r} cannot name a session; --session takes letters, digits, _, - and ., at most 64 characters "
            f"and {_NAME_BYTES} bytes"
        )


def session_folder(name: str, folder: Path | None = None) -> Path:
    """The folder of a session, among all sessions or in this one; raises ConfigError if the name is not allowed."""
    check_name(name)
    return (folder or sessions_folder()) / name

"""Sessions of chats that the user did not name: their names, and how much of the disk they take.

Named sessions are never touched here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from h2o_stream.base.resources import private_data_folder
from h2o_stream.config import AUTOMATIC_BYTES
from h2o_stream.errors import DataError
from h2o_stream.session.folders import AUTOMATIC, SESSIONS, sessions_folder
from h2o_stream.session.sessions import Session
from h2o_stream.session.state_files import LOG_FILE

_NAME_LETTERS = 32
"""Most letters of a name that is made of first words."""


def automatic_session(text: str) -> Session:
    """A new session, named by the first words of its first message. The oldest automatic ones make room for it.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        private_data_folder(SESSIONS)
        make_room(AUTOMATIC_BYTES)
        name = _reserve(_name(text))
        (sessions_folder() / name / AUTOMATIC).touch()
    except OSError as error:
        raise DataError(f"{error.strerror or error}: {sessions_folder()}") from error
    return Session(name)


def _name(text: str) -> str:
    """The first words of a text, as far as they fit into a name."""
    words = re.findall(r"\w+", text[: 10 * _NAME_LETTERS].casefold())
    kept = [word for number, word in enumerate(words) if len("-".join(words[: number + 1])) <= _NAME_LETTERS]
    return "-".join(kept) or "".join(words)[:_NAME_LETTERS] or "chat"


def _reserve(name: str) -> str:
    """Create the folder of a session that does not exist: of this name, or with a number after it."""
    for number in count(1):
        numbered = name if number == 1 else f"{name}-{number}"
        with suppress(FileExistsError):
            (sessions_folder() / numbered).mkdir(mode=0o700)
            return numbered
    raise AssertionError("numbers do not end")


def automatic_folders() -> list[tuple[Path, int]]:
    """The folders of automatic sessions with their bytes, the one used longest ago first."""
    folders = []
    for mark in sessions_folder().glob(f"*/{AUTOMATIC}"):
        with suppress(OSError):
            sizes = [file.stat() for file in mark.parent.iterdir()]
            folders.append((max(size.st_mtime_ns for size in sizes), mark.parent, sum(size.st_size for size in sizes)))
    return [(folder, nbytes) for _, folder, nbytes in sorted(folders)]


def make_room(limit: int) -> None:
    """Keep automatic sessions within so many bytes: the oldest lose their states first, which their text can replace,
    and go as a whole if that is not enough. Those that are open stay.
    """
    folders = automatic_folders()
    total = sum(nbytes for _, nbytes in folders)
    for remove in (_remove_states, shutil.rmtree):
        for folder, _ in folders:
            if total <= limit:
                return
            before = _num_bytes(folder)
            with suppress(OSError, Timeout), FileLock(folder / "lock", timeout=0):
                remove(folder)
            total -= before - _num_bytes(folder)


def _remove_states(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors*"), *folder.glob(f"*{LOG_FILE}")):
        file.unlink(missing_ok=True)


def _num_bytes(folder: Path) -> int:
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    with suppress(OSError):
        for file in folder.iterdir():
            yield file.stat().st_size

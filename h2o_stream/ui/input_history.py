"""The messages that were typed at the prompt, for Up and Ctrl-R: in a file of limited size, or in memory only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from h2o_stream.resources import PRIVATE, private_data_folder, replace_surrogates, write_atomically

MAX_MESSAGES = 1000
MAX_BYTES = 2**20

_START = b"\n# "
"""Begins a message in prompt_toolkit's format; lines of its text begin with +."""


def input_history(keep: bool, notify: Callable[[str], None]) -> History:
    """The history of the user's prompts: kept in the file ``history`` of the user's data folder, or in memory.

    `notify` receives a line if the file cannot be written.
    """
    if keep:
        try:
            path = private_data_folder() / "history"
            path.touch(PRIVATE)
            path.chmod(PRIVATE)
            return LimitedHistory(path)
        except OSError as error:
            notify(f"no input history: {error}")
    return InMemoryHistory()


class LimitedHistory(FileHistory):
    """The last `MAX_MESSAGES` messages in a file of at most `MAX_BYTES`. Errors do not end the prompt."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        with suppress(OSError):
            self._trim()

    def store_string(self, string: str) -> None:
        """Append a message, and drop the oldest ones beyond the limits. Longer ones than the file may be are not kept.

        A full disk or undecodable input is ignored.
        """
        text = replace_surrogates(string)
        with suppress(OSError):
            if len(text.encode()) < MAX_BYTES // 2:
                super().store_string(text)
                self._trim()

    def _trim(self) -> None:
        messages = [_START + message for message in self._path.read_bytes().split(_START)[1:]]
        kept, size = 0, 0
        for message in reversed(messages[-MAX_MESSAGES:]):
            size += len(message)
            if size > MAX_BYTES:
                break
            kept += 1
        if kept < len(messages):
            write_atomically(self._path, b"".join(messages[len(messages) - kept :]), PRIVATE)

"""The prompt for messages: input history, multiple lines, completion, an external editor."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from h2o_stream.base.resources import PRIVATE, private_data_folder, replace_surrogates, write_atomically
from h2o_stream.ui.command_list import COMMANDS
from h2o_stream.ui.interrupts import DOUBLE_PRESS_S

PROMPT, CONTINUATION, QUOTES = "> ", ". ", '"""'

PASTED = re.compile(r"\[pasted [\d,]+ (?:lines|characters)(?:, \d+)?\]")
"""Stands for a text that was pasted."""

_MAX_PASTED_LINES, _MAX_PASTED_LETTERS = 9, 2000
"""Most lines and letters of a pasted text that is shown as it is."""


class MessagePrompt:
    """Reads messages from a terminal. Enter sends; Meta-Enter, or Enter inside triple quotes, starts a new line.

    The toolbar is below the prompt, which begins with the starting text. A long text that is pasted is shown as a line,
    and not kept in the history. `background` runs in this thread while the first message is typed, which waits until it
    is done; if it raises, so does `messages`.
    """

    def __init__(
        self,
        toolbar: Callable[[], FormattedText],
        vim: bool,
        history: History,
        starting_text: Callable[[], str],
        background: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._background, self._starting_text = background, starting_text
        self._pasted = dict[str, str]()
        self.waiting = False
        self._session: PromptSession[str] = PromptSession(
            history=history,
            bottom_toolbar=toolbar,
            completer=CommandCompleter(),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_history_search=True,
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=CONTINUATION,
            tempfile_suffix=".md",
            vi_mode=vim,
        )
        self._session.app.terminal_size_polling_interval = None  # SIGWINCH is enough, and an idle prompt should sleep
        buffer = self._session.default_buffer
        buffer.on_text_changed += self._edited
        self._send, buffer.accept_handler = buffer.accept_handler, self._accept

    @property
    def draft(self) -> str:
        """What was typed but not sent."""
        return self._with_pasted(self._session.default_buffer.text)

    def _with_pasted(self, text: str) -> str:
        return PASTED.sub(lambda shown: self._pasted.get(shown[0], shown[0]), text)

    def _paste(self, text: str) -> str:
        """What is shown of a text that is pasted."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.rstrip("\n").count("\n") + 1
        if lines <= _MAX_PASTED_LINES and len(text) <= _MAX_PASTED_LETTERS:
            return text
        size = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        shown = next(
            shown
            for number in count(1)
            if self._pasted.get(shown := f"[pasted {size}{f', {number}' * (number > 1)}]", text) == text
        )
        self._pasted[shown] = text
        return shown

    def messages(self) -> Iterator[str]:
        """Messages until Ctrl-D, or Ctrl-C twice on an empty line, or once while the background task runs."""
        last = float("-inf")
        while True:
            try:
                text = self._session.prompt(PROMPT, default=self._starting_text(), pre_run=self._begin)
            except KeyboardInterrupt:
                if self._background is not None or time.monotonic() - last < DOUBLE_PRESS_S:
                    raise
                last = time.monotonic()
                continue
            except EOFError:
                return
            yield self._with_pasted(unquoted(text))

    def _begin(self) -> None:
        if self._background is not None:
            self._session.app.create_background_task(self._finish(self._background))

    async def _finish(self, background: Callable[[], Awaitable[None]]) -> None:
        app = self._session.app
        try:
            await background()
        except Exception as error:  # noqa: BLE001
            if app.future is not None and not app.future.done():
                app.erase_when_done = True
                app.exit(exception=error)
            return
        self._background = None
        if self.waiting:
            self._session.default_buffer.validate_and_handle()

    def _accept(self, buffer: Buffer) -> bool:
        """Handles Enter, and the end of the editor. Returns whether the text stays."""
        if self._background is None and self._send is not None:
            return self._send(buffer)
        self.waiting = bool(buffer.text.strip())
        return True

    def _edited(self, buffer: Buffer) -> None:
        self.waiting = False

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) % 2:
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste, filter=has_focus(DEFAULT_BUFFER))
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._paste(event.data))

        @keys.add("c-d", filter=Condition(lambda: self.waiting))
        def _(event: KeyPressEvent) -> None:
            event.app.exit(exception=EOFError)

        return keys


class CommandCompleter(Completer):
    """Completes commands, and file names for commands that take one."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Complete commands, and paths after those that take a file."""
        name, gap, argument = document.text_before_cursor.partition(" ")
        if not gap:
            for command in COMMANDS:
                if name.startswith("/") and command.startswith(name):
                    yield Completion(command, -len(name))
        elif name in COMMANDS and COMMANDS[name].takes_file:
            yield from self._files.get_completions(Document(argument.lstrip("\"'")), complete_event)


def unquoted(text: str) -> str:
    """A message without the triple quotes around it."""
    inner = text.strip()
    if inner.startswith(QUOTES) and inner.endswith(QUOTES) and len(inner) >= 2 * len(QUOTES):
        return inner.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


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
    return _MemoryHistory()


class _WithoutPasted(History):
    """Keeps no texts that were pasted, nor the lines that stand for them."""

    def append_string(self, string: str) -> None:
        """Add a message to the history."""
        if not PASTED.search(string):
            super().append_string(string)
        elif typed := PASTED.sub("", string).strip():
            super().append_string(typed)


class _MemoryHistory(_WithoutPasted, InMemoryHistory):
    pass


class LimitedHistory(_WithoutPasted, FileHistory):
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

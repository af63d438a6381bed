"""What a person types: history that is kept, several lines, completion, an editor."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from h2o_stream.resources import data_folder, replace_surrogates
from h2o_stream.ui.interrupts import TWICE_S

PROMPT, MORE, QUOTES = "> ", ". ", '"""'


class Typist:
    """Reads messages from a terminal. Enter sends, Meta-Enter begins a new line; so does Enter after three open quotes.

    Args:
        words: commands, each with whether it takes the name of a file.
        toolbar: what stands under the prompt.
        vim: vi's keys in place of Emacs'.
        notify: told a line when the history cannot be kept.
        beside: what has to be done before the first message can be taken. It runs while that is typed, in this thread;
            Enter holds the message back until it is done. If it raises, so does `messages`.

    Attributes:
        held: whether a message is held back.
    """

    def __init__(
        self,
        words: Mapping[str, bool],
        toolbar: Callable[[], FormattedText],
        vim: bool,
        notify: Callable[[str], None],
        beside: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._beside = beside
        self.held = False
        self._session: PromptSession[str] = PromptSession(
            history=_history(notify),
            bottom_toolbar=toolbar,
            completer=CommandCompleter(words),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_history_search=True,
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=MORE,
            tempfile_suffix=".md",
            vi_mode=vim,
        )
        self._session.app.terminal_size_polling_interval = None  # SIGWINCH says so; an idle prompt sleeps
        buffer = self._session.default_buffer
        buffer.on_text_changed += self._edited
        self._send, buffer.accept_handler = buffer.accept_handler, self._accept

    @property
    def draft(self) -> str:
        """What was typed and not sent."""
        return self._session.default_buffer.text

    def messages(self) -> Iterator[str]:
        """Until Ctrl-D, or Ctrl-C twice on an empty line; once, while there is something to be done beside.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        last = float("-inf")
        while True:
            try:
                text = self._session.prompt(PROMPT, pre_run=self._begin)
            except KeyboardInterrupt:
                if self._beside is not None or time.monotonic() - last < TWICE_S:
                    raise
                last = time.monotonic()
                continue
            except EOFError:
                return
            yield unquoted(text)

    def _begin(self) -> None:
        if self._beside is not None:
            self._session.app.create_background_task(self._finish(self._beside))

    async def _finish(self, beside: Callable[[], Awaitable[None]]) -> None:
        app = self._session.app
        try:
            await beside()
        except Exception as error:  # noqa: BLE001
            if app.future is not None and not app.future.done():
                app.erase_when_done = True
                app.exit(exception=error)
            return
        self._beside = None
        if self.held:
            self._session.default_buffer.validate_and_handle()

    def _accept(self, buffer: Buffer) -> bool:
        """What Enter does, or leaving the editor; returns whether the text stays."""
        if self._beside is None and self._send is not None:
            return self._send(buffer)
        self.held = bool(buffer.text.strip())
        return True

    def _edited(self, buffer: Buffer) -> None:
        self.held = False

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

        @keys.add("c-d", filter=Condition(lambda: self.held))
        def _(event: KeyPressEvent) -> None:
            event.app.exit(exception=EOFError)

        return keys


class CommandCompleter(Completer):
    """Completes commands, and the names of files where a command takes one."""

    def __init__(self, words: Mapping[str, bool]) -> None:
        self._words = words
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """See prompt_toolkit."""
        command, gap, rest = document.text_before_cursor.partition(" ")
        if not gap:
            for word in self._words:
                if command.startswith("/") and word.startswith(command):
                    yield Completion(word, -len(command))
        elif self._words.get(command):
            yield from self._files.get_completions(Document(rest.lstrip("\"'")), complete_event)


def unquoted(text: str) -> str:
    """A message without the quotes around its lines."""
    inner = text.strip()
    if inner.startswith(QUOTES) and inner.endswith(QUOTES) and len(inner) >= 2 * len(QUOTES):
        return inner.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text


class _KeptHistory(FileHistory):
    """A history in a file. A disk that is full, or keys that are no letters, do not end the prompt."""

    def store_string(self, string: str) -> None:
        """See prompt_toolkit."""
        with suppress(OSError):
            super().store_string(replace_surrogates(string))


def _history(notify: Callable[[str], None]) -> History:
    try:
        path = data_folder() / "history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(0o600)
        return _KeptHistory(str(path))
    except OSError as error:
        notify(f"no input history: {error}")
        return InMemoryHistory()

"""The chat before its model is there: the first message can be typed while a thread loads.

Everything that draws, and every signal, stays in the main thread. Imports neither torch nor transformers: the thread
does, when the prompt has been drawn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.formatted_text import FormattedText
from rich.control import Control
from rich.segment import ControlType

from h2o_stream.config import ChatConfig, Settings
from h2o_stream.progress import Listener, Progress
from h2o_stream.session.records import Records
from h2o_stream.startup import LOADER, collector_paused
from h2o_stream.ui.command_list import COMMANDS
from h2o_stream.ui.loading import LoadingLine
from h2o_stream.ui.terminal import Terminal
from h2o_stream.ui.typing import Typist

if TYPE_CHECKING:
    from h2o_stream.engine.events import Finish
    from h2o_stream.ui.chat import Chat
    from h2o_stream.ui.start import Started

_FRAME_S = 0.2
"""Between two frames of the toolbar while the model loads: drawing takes time from the imports."""

_LINE_START = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

_GRACE_S = 2.0
"""How long a loader may take to remove what is half written."""


class Loader:
    """Imports torch and transformers and prepares a conversation, in a thread of its own.

    Attributes:
        result: the conversation, or why there is none.
        lines: what the user should be told; to be taken out on the left.

    Args:
        settings: of the conversation.
        progress: told how far it has come.
    """

    def __init__(self, settings: Settings, progress: Listener) -> None:
        self.result: Future[Started] = Future()
        self.lines: deque[str] = deque()
        self._settings, self._progress = settings, progress
        self._stop, self._at_work = threading.Event(), False
        self._thread = threading.Thread(target=self._load, name=LOADER, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Give up what is not loaded yet, when its progress is told next. An import goes on: nothing interrupts it."""
        self._stop.set()
        if self._thread.is_alive() and self._at_work:
            self._thread.join(_GRACE_S)

    def _load(self) -> None:
        try:
            with collector_paused():
                import h2o_stream.ui.chat  # noqa: F401
                from h2o_stream.ui.start import prepare

            self.result.set_result(prepare(self._settings, self.lines.append, self._listen))
        except BaseException as error:  # noqa: BLE001
            self.result.set_exception(error)

    def _listen(self, progress: Progress) -> None:
        self._at_work = progress.done < progress.total
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._progress(progress)


class EarlyChat:
    """A chat whose first message can be typed while the model loads. A context manager.

    Args: see `run_chat`; the terminal is a live one with a person at it.
    """

    def __init__(
        self,
        settings: Settings,
        config: ChatConfig,
        terminal: Terminal,
        records: Records,
        sources: Mapping[str, tuple[Any, str]],
    ) -> None:
        self._opened_with = settings, config, terminal, records, sources
        self._terminal = terminal
        self._line = LoadingLine(settings.model.model)
        self._loader = Loader(settings, self._line)
        words = {name: command.takes_file for name, command in COMMANDS.items()}
        self._typist = Typist(words, self._toolbar, config.vim, terminal.note, beside=self._wait)
        self._stack = ExitStack()
        self._talk: Chat | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.stop()
        self._stack.close()

    def run(self) -> Finish | None:
        """Messages and replies, to the end.

        Raises:
            H2OStreamError: the model cannot be loaded; what was typed is printed then.
        """
        messages = self._typist.messages()
        self._terminal.console.control(_LINE_START)  # after keys that came before the prompt, which has them
        try:
            first = next(messages, None)
        except Exception:
            if draft := self._typist.draft.strip():
                self._terminal.console.print(f"Not sent: {draft}", soft_wrap=True)
            raise
        if first is None or self._talk is None:
            return None
        return self._talk.run(chain((first,), messages))

    async def _wait(self) -> None:
        """Beside the prompt: show how far it is, and open the chat above the prompt when the model is there."""
        if not self._loader.result.done():
            self._loader.start()
        while not self._loader.result.done():
            await asyncio.sleep(_FRAME_S)
            if self._loader.lines:
                await run_in_terminal(self._print_lines)
            get_app().invalidate()
        await run_in_terminal(self._open)

    def _print_lines(self) -> None:
        while self._loader.lines:
            self._terminal.note(self._loader.lines.popleft())

    def _open(self) -> None:
        self._print_lines()
        ready = self._loader.result.result()
        from h2o_stream.ui.chat import opened_chat

        self._talk = self._stack.enter_context(opened_chat(*self._opened_with, ready))

    def _toolbar(self) -> FormattedText:
        if self._talk is not None:
            return self._talk.toolbar()
        waits = " · your message waits" if self._typist.held else ""
        return FormattedText([("noreverse", self._line.text(self._terminal.console.width - 1 - len(waits)) + waits)])

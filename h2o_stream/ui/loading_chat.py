"""The chat while its model loads: the first message can be typed while a thread loads the model.

All drawing and all signals stay in the main thread. This module imports neither torch nor transformers: the thread does
so after the prompt has been drawn.
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

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.base.startup import LOADER, importing
from h2o_stream.config import ChatConfig, Settings
from h2o_stream.models.find import find_before_imports
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.ui.loading import LoadingLine
from h2o_stream.ui.message_prompt import MessagePrompt, input_history
from h2o_stream.ui.terminal import Terminal

if TYPE_CHECKING:
    from h2o_stream.engine.events import Finish
    from h2o_stream.ui.chat import Chat
    from h2o_stream.ui.start import LoadedConversation

_FRAME_S = 0.2
"""Between two frames of the toolbar while the model loads, as drawing takes time from the imports."""

_LINE_START = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

_GRACE_S = 2.0
"""How long the loader may take to remove partial files."""


class BackgroundLoader:
    """Imports torch and transformers and loads a conversation, in its own thread."""

    def __init__(self, settings: Settings, progress: ProgressCallback) -> None:
        self.result: Future[LoadedConversation] = Future()
        self.notes: deque[str] = deque()
        self._settings, self._progress = settings, progress
        self._stop, self._busy = threading.Event(), False
        self._thread = threading.Thread(target=self._load, name=LOADER, daemon=True)

    def start(self) -> None:
        """Start loading."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel loading at the next progress report. A running import is not interrupted."""
        self._stop.set()
        if self._thread.is_alive() and self._busy:
            self._thread.join(_GRACE_S)

    def _load(self) -> None:
        try:
            with importing():
                find_before_imports(self._settings.model.model, self._settings.model.offline)
                import h2o_stream.ui.chat  # noqa: F401
                from h2o_stream.ui.start import load_conversation

            self.result.set_result(load_conversation(self._settings, self.notes.append, self._listen))
        except BaseException as error:  # noqa: BLE001
            self.result.set_exception(error)

    def _listen(self, progress: Progress) -> None:
        self._busy = progress.done < progress.total
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._progress(progress)


class LoadingChat:
    """A chat whose first message can be typed while the model loads. A context manager.

    Arguments as for `open_chat`. The terminal must be live and interactive.
    """

    def __init__(
        self,
        settings: Settings,
        config: ChatConfig,
        terminal: Terminal,
        jsonl: JsonlWriter,
        sources: Mapping[str, tuple[Any, str]],
    ) -> None:
        self._arguments = settings, config, terminal, jsonl, sources
        self._terminal = terminal
        self._line = LoadingLine(settings.model.model)
        self._loader = BackgroundLoader(settings, self._line)
        history = input_history(config.history, terminal.note)
        self._prompt = MessagePrompt(self._toolbar, config.vim, history, self._starting_text, background=self._wait)
        self._stack = ExitStack()
        self._chat: Chat | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.stop()
        self._stack.close()

    def run(self) -> Finish | None:
        """Read messages and reply, until the end. If the model cannot be loaded, what was typed is shown."""
        messages = self._prompt.messages()
        self._terminal.console.control(_LINE_START)  # erases keys echoed before the prompt, which has them
        try:
            first = next(messages, None)
        except Exception:
            if draft := self._prompt.draft.strip():
                self._terminal.console.print(f"Not sent: {draft}")
            raise
        if first is None or self._chat is None:
            return None
        return self._chat.run(chain((first,), messages))

    async def _wait(self) -> None:
        """Show the progress below the prompt, and open the chat above it when the model is loaded."""
        if not self._loader.result.done():
            self._loader.start()
        while not self._loader.result.done():
            await asyncio.sleep(_FRAME_S)
            if self._loader.notes:
                await run_in_terminal(self._print_notes)
            get_app().invalidate()
        await run_in_terminal(self._open)

    def _print_notes(self) -> None:
        while self._loader.notes:
            self._terminal.note(self._loader.notes.popleft())

    def _open(self) -> None:
        self._print_notes()
        loaded = self._loader.result.result()
        from h2o_stream.ui.chat import open_chat

        self._chat = self._stack.enter_context(open_chat(*self._arguments, loaded))

    def _starting_text(self) -> str:
        return "" if self._chat is None else self._chat.starting_text()

    def _toolbar(self) -> FormattedText:
        if self._chat is not None:
            return self._chat.toolbar()
        waits = " · your message waits" if self._prompt.waiting else ""
        return FormattedText([("noreverse", self._line.text(self._terminal.console.width - 1 - len(waits)) + waits)])

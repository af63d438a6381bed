"""What the chat loop and its commands share: the conversation, the terminal and the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from h2o_stream.config import ChatConfig, ThinkMode
from h2o_stream.engine.events import Finished, PrefillProgress
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.history import ConversationHistory, ResumeError
from h2o_stream.session.report import RunReport
from h2o_stream.ui.start import LoadedConversation
from h2o_stream.ui.terminal import PrefillStatus, Terminal


@dataclass
class ChatContext:
    """A chat's state.

    Attributes:
        loaded: the model, its title and its interrupts.
        history: the conversation.
        config: of the chat.
        terminal: where replies and notes go.
        sources: every option's value and where it comes from.
        think: how thinking is shown.
        report: statistics so far.
        leaving: whether the user has asked to leave.
    """

    loaded: LoadedConversation
    history: ConversationHistory
    config: ChatConfig
    terminal: Terminal
    sources: Mapping[str, tuple[Any, str]]
    think: ThinkMode
    report: RunReport = field(default_factory=RunReport)
    leaving: bool = False

    def feed(self, events: Iterator[PrefillProgress | Finished]) -> bool:
        """Show the progress of feeding without a reply, which Ctrl-C ends. Returns whether it was completed.

        Raises:
            KeyboardInterrupt: the program is to end, or Ctrl-C was pressed where nobody can type another message.
        """
        with self.loaded.interrupts, closing(PrefillStatus(self.terminal)) as status:
            complete = True
            for event in events:
                if isinstance(event, PrefillProgress):
                    status.show(event.done, event.total)
                else:
                    complete = False
                    self.terminal.error(event.detail or f"{event.reason}: not all of it was read")
        interrupts = self.loaded.interrupts
        if interrupts.terminated or (interrupts.requested and not self.terminal.interactive):
            raise KeyboardInterrupt
        return complete

    def open_session(self, name: str | None = None) -> None:
        """Resume a session. If its state cannot be loaded, its transcript may be fed again.

        Args:
            name: of an existing session; None for the one of the configuration, which may be new.

        Raises:
            H2OStreamError: it cannot be opened, or its state cannot be loaded and its transcript is not to be fed.
        """
        create, name = name is None, name or self.config.session
        if name is None:
            return
        try:
            existed = self.history.open(name, create)
        except ResumeError as error:
            question = "Feed its transcript to this model again? The cache will differ from what it was."
            if not self.config.retell and not self._confirm(f"{error}.", question):
                raise ResumeError(f"{error}; --retell feeds its transcript again") from error
            if not self.feed(self.history.replay(name)):
                raise H2OStreamError(f"session {name} was not fed completely and is unchanged") from error
            existed = True
        entries = self.history.entries
        if entries:
            last = " ".join(entries[-1].prompt.split())
            self.terminal.note(f"session {name} resumed after turn {entries[-1].turn}: {last[:60]}", style="dim")
        elif not existed:
            self.terminal.note(f"session {name} started", style="dim")

    def _confirm(self, fact: str, question: str) -> bool:
        if not self.terminal.interactive:
            return False
        self.terminal.note(fact)
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

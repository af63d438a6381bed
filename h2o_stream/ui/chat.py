"""The chat loop: messages, streamed replies, and commands in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil
from rich.text import Text

from h2o_stream.base.texts import piped_lines
from h2o_stream.config import DEFAULT_MODEL, ChatConfig, Settings
from h2o_stream.engine.events import Finish, PrefillProgress
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.recommended import better_models
from h2o_stream.recall.passage import Recalled
from h2o_stream.session.conversation import ReplyEvents
from h2o_stream.session.folders import session_names
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.transcript import Entry
from h2o_stream.session.turn import Turn
from h2o_stream.ui.chat_context import ChatContext, header
from h2o_stream.ui.command_list import is_command
from h2o_stream.ui.documents import read_ahead
from h2o_stream.ui.format import context_bar, slot_bar, status_line, turn_line
from h2o_stream.ui.recall import note_recalled
from h2o_stream.ui.reply import MarkdownReply, PlainReply, Reply, Thinking
from h2o_stream.ui.sessions import NOT_KEPT
from h2o_stream.ui.start import LoadedConversation, open_conversation
from h2o_stream.ui.terminal import PrefillStatus, Terminal

if TYPE_CHECKING:
    from prompt_toolkit.formatted_text import FormattedText

    from h2o_stream.ui.commands import Commands

_MIN_BAR, _MAX_BAR = 8, 40
"""Columns of the bar of slots."""

_ANSI = {"bright_black": "ansibrightblack"}
"""Colors whose prompt_toolkit name is not rich's name with the prefix ``ansi``."""


@contextmanager
def open_chat(
    settings: Settings,
    config: ChatConfig,
    terminal: Terminal,
    jsonl: JsonlWriter,
    sources: Mapping[str, Any],
    loaded: LoadedConversation | None = None,
) -> Iterator[Chat]:
    """A chat that is ready for its first message, on a conversation that may be `loaded` already."""
    with open_conversation("h2o-chat", settings, terminal, jsonl, loaded) as loaded:
        history = ConversationHistory(loaded.conversation, header(loaded))
        context = ChatContext(loaded, history, config, terminal, jsonl, sources, settings.think)
        with Chat(context) as chat:
            context.open_session()
            context.keep_options()
            if config.prompt is None:
                if terminal.interactive and config.history:
                    history.keep(context.start_session)
                private = NOT_KEPT * (not config.history and history.session is None)
                terminal.note(f"{loaded.header}. {private}/help lists the commands, Ctrl-D leaves.", style="dim")
                if terminal.interactive and settings.model.model == DEFAULT_MODEL and not session_names():
                    terminal.note(better_models(), style="dim")
            yield chat


class Chat:
    """Chats with a person at the keyboard, or with a pipe. A context manager."""

    def __init__(self, context: ChatContext) -> None:
        self._context, self._jsonl = context, context.jsonl
        self._terminal, self._report = context.terminal, context.report
        self._process = psutil.Process()
        self._offered: Entry | None = None

    @property
    def _history(self) -> ConversationHistory:
        return self._context.history

    @cached_property
    def _commands(self) -> Commands:
        from h2o_stream.ui.commands import Commands

        return Commands(self._context)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exception: object) -> None:
        self._history.close()
        self._jsonl.write(self._report.record())

    def run(self, typed: Iterator[str] | None = None) -> Finish | None:
        """Read messages and reply, until the end; from a prompt of our own or standard input, unless they are given."""
        config = self._context.config
        if config.prompt is not None:
            message = read_ahead(self._context, config.prompt, config.piped)
            return "interrupted" if message is None else self.say(message)
        for message in self._messages(typed or (self._typed() if self._terminal.interactive else _piped())):
            finish = self.say(message)
            if finish == "oom" or config.single_turn or (finish == "interrupted" and not self._terminal.interactive):
                return finish
        return None

    def say(self, message: str) -> Finish:
        """One turn: the reply streams to stdout, statistics go to stderr. Ctrl-C ends the turn."""
        interrupts = self._context.loaded.interrupts
        with interrupts, self._terminal.unechoed():
            with closing(self._history.say(message)) as events:
                try:
                    turn = self._show(events)
                except OSError:  # the terminal or pipe is gone: end the turn, which keeps what was said
                    interrupts.requested = True
                    for event in events:
                        self._report.add_event(event)
                    raise
            self._jsonl.write(turn.record())
            self._terminal.note(turn_line(turn), style="dim")
            self._context.loaded.note_disk(turn, self._terminal)
            if turn.detail:
                self._terminal.error(turn.detail)
        return turn.finish

    def _show(self, events: ReplyEvents) -> Turn:
        """Draw a turn up to its end."""
        with ExitStack() as stack:
            status = stack.enter_context(closing(PrefillStatus(self._terminal)))
            reply: Reply | None = None
            for event in events:
                self._report.add_event(event)
                if isinstance(event, Recalled):
                    note_recalled(self._terminal, event)
                    continue
                if isinstance(event, PrefillProgress):
                    if reply is None:
                        status.show(event.done, event.total)
                    continue
                status.close()
                if reply is None:
                    reply = self._reply()
                    stack.enter_context(reply)
                if isinstance(event, Turn):
                    return event
                reply.add_token(event)
        raise AssertionError("a turn always ends with a Turn")

    def toolbar(self) -> FormattedText:
        """The line under the prompt, for prompt_toolkit."""
        from prompt_toolkit.formatted_text import FormattedText

        blocks, line = self._status()
        shown = [(f"noreverse fg:{_ANSI.get(color, f'ansi{color}')}", text) for color, text in blocks]
        return FormattedText([*shown, ("noreverse", line)])

    def _footer(self, width: int) -> Text:
        """The line under the prompt, for rich."""
        blocks, line = self._status()
        shown = Text.assemble(*((text, color) for color, text in blocks), line)
        shown.truncate(width - 1, overflow="ellipsis")
        return shown

    def _status(self) -> tuple[list[tuple[str, str]], str]:
        engine = self._history.conversation.engine
        counts = engine.counts
        line = status_line(counts, self._report.total, self._process.memory_info().rss)
        width = min(max(self._terminal.console.width - len(line) - 2, _MIN_BAR), _MAX_BAR)
        return slot_bar(counts, width) or context_bar(counts, engine.context, width), f" {line}"

    def _reply(self) -> Reply:
        thinking = Thinking(self._context.think, ", /think shows it" if self._context.config.prompt is None else "")
        if self._context.config.plain or not self._terminal.live or self._terminal.quiet:
            return PlainReply(self._terminal, thinking)
        return MarkdownReply(self._footer, self._terminal.stdout_console, thinking)

    def _messages(self, texts: Iterator[str]) -> Iterator[str]:
        """The messages for the model. Commands are executed, empty lines skipped."""
        for text in texts:
            try:
                to_send = self._prepared(text.strip())
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise
                self._terminal.error("stopped; the conversation goes on as before")
                continue
            if to_send:
                yield to_send
            if self._context.leaving:
                return

    def _prepared(self, message: str) -> str | None:
        if is_command(message):
            return self._commands.execute(message)
        return self._read_ahead(message.removeprefix("/") if message.startswith("//") else message) if message else None

    def starting_text(self) -> str:
        """The text that the prompt begins with: the message to edit. Who leaves the prompt without it edits nothing."""
        entry = self._context.edited
        if entry is None or entry is not self._offered:
            self._offered = entry
            return "" if entry is None else entry.prompt
        self._context.edited = self._offered = None
        self._terminal.note("nothing was edited")
        return ""

    def _read_ahead(self, message: str) -> str | None:
        try:
            if (edited := self._context.edited) is not None:
                self._context.edited = self._offered = None
                self._context.go_back(sum(entry.turn >= edited.turn for entry in self._history.entries))
            return read_ahead(self._context, message)
        except H2OStreamError as error:
            self._terminal.error(str(error))
            return None

    def _typed(self) -> Iterator[str]:
        from h2o_stream.ui.message_prompt import MessagePrompt, input_history

        config = self._context.config
        history = input_history(config.history, self._terminal.note)
        yield from MessagePrompt(self.toolbar, config.vim, history, self.starting_text).messages()


def _piped() -> Iterator[str]:
    return piped_lines(sys.stdin.buffer, "standard input")

"""The chat loop: a message, a reply that streams, and the commands in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
from prompt_toolkit.formatted_text import FormattedText
from rich.text import Text

from h2o_stream.config import ChatConfig, Settings
from h2o_stream.engine.events import Finish, Finished, PrefillProgress, Token
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.keeper import Keeper, NoFitError
from h2o_stream.session.recording import Recorder
from h2o_stream.session.records import Records
from h2o_stream.session.report import RunReport
from h2o_stream.session.transcript import Header
from h2o_stream.session.turn import Turn
from h2o_stream.ui.command_list import COMMANDS, is_command
from h2o_stream.ui.commands import Commands
from h2o_stream.ui.figures import bar, speed, status, turn_line
from h2o_stream.ui.reply import MarkdownReply, PlainReply, Reply
from h2o_stream.ui.start import Started, started
from h2o_stream.ui.terminal import Reading, Terminal

_BAR = 8, 40
"""Least and most columns of the bar of slots."""


def run_chat(
    settings: Settings, chat: ChatConfig, terminal: Terminal, records: Records, sources: Mapping[str, tuple[Any, str]]
) -> Finish | None:
    """Chat until the user leaves or the input ends.

    Args:
        settings: of the conversation.
        chat: how it is held.
        terminal: where replies and notes go.
        records: gets a record for the run, each turn and the summary.
        sources: every option's value and where it comes from.

    Returns:
        Why the last reply ended if it was the end of the chat too; None when the user left.
    """
    with opened_chat(settings, chat, terminal, records, sources) as talk:
        return talk.run()


@contextmanager
def opened_chat(
    settings: Settings,
    chat: ChatConfig,
    terminal: Terminal,
    records: Records,
    sources: Mapping[str, tuple[Any, str]],
    ready: Started | None = None,
) -> Iterator[Chat]:
    """A chat that is ready for its first message. Arguments as for `run_chat`; `ready` is the model if it is there."""
    with (
        started("h2o-chat", settings, terminal, records, ready) as ready,
        Recorder(chat.record, ready.title) as recorder,
        Chat(ready, chat, terminal, records, recorder, sources) as talk,
    ):
        talk.open_session()
        if chat.prompt is None:
            terminal.note(f"{ready.title}. /help lists the commands, Ctrl-D leaves.", style="dim")
        yield talk


_ANSI = {"bright_black": "ansibrightblack"}
"""Colours that prompt_toolkit calls otherwise than rich with ansi before it."""


class Chat:
    """A conversation with someone at the keyboard, or with a pipe. A context manager.

    Attributes:
        ready: the conversation's engine, interrupts and title.
        keeper: the conversation.
        report: figures so far.
        leaving: whether the user has asked to leave.
        sources: every option's value and where it comes from.
    """

    def __init__(
        self,
        ready: Started,
        config: ChatConfig,
        terminal: Terminal,
        records: Records,
        recorder: Recorder,
        sources: Mapping[str, tuple[Any, str]],
    ) -> None:
        self.ready, self.terminal, self.sources = ready, terminal, sources
        self.report = RunReport()
        self.leaving = False
        plan = ready.conversation.engine.cache.plan
        self.keeper = Keeper(ready.conversation, Header(ready.name, plan.policy, plan.window, None))
        self._config, self._records, self._recorder = config, records, recorder
        self._commands = Commands(self)
        self._process = psutil.Process()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exception: object) -> None:
        self.keeper.close()
        self._records.write(self.report.record())

    def run(self, typed: Iterator[str] | None = None) -> Finish | None:
        """Messages and replies, to the end.

        Args:
            typed: where messages come from, in place of a prompt of its own or standard input.
        """
        if self._config.prompt is not None:
            return self.say(self._config.prompt)
        for message in self._messages(typed or (self._typed() if self.terminal.interactive else _piped())):
            finish = self.say(message)
            if finish == "oom" or self._config.single_turn:
                return finish
            if finish == "interrupted" and (self.ready.interrupts.ended or not self.terminal.interactive):
                return finish
        return None

    def say(self, message: str) -> Finish:
        """One turn: the reply streams to stdout, what it took goes to stderr. Ctrl-C ends the turn."""
        self._recorder.asked(f"turn {self.keeper.conversation.turns + 1}", message)
        with self.ready.interrupts, ExitStack() as stack:
            reading = stack.enter_context(closing(Reading(self.terminal)))
            reply: Reply | None = None
            events = self.keeper.say(message)
            try:
                for event in events:
                    self.report.observe(event)
                    self._recorder.event(event)
                    if isinstance(event, PrefillProgress):
                        reading.show(event.done, event.total)
                        continue
                    reading.close()
                    reply = reply or stack.enter_context(self._reply())
                    if isinstance(event, Token):
                        reply.push(event.text)
                        continue
                    stack.close()
                    self._close(event)
                    return event.finish
            except OSError:  # the terminal or the pipe is gone: what was said until now is kept
                self.ready.interrupts.requested = True
                for event in events:
                    self.report.observe(event)
                raise
        raise AssertionError("a turn always ends with a Turn")

    def fed(self, events: Iterator[PrefillProgress | Finished]) -> bool:
        """Show how far feeding without a reply has come; whether it came to the end. Ctrl-C ends it."""
        with self.ready.interrupts, closing(Reading(self.terminal)) as reading:
            complete = True
            for event in events:
                if isinstance(event, PrefillProgress):
                    reading.show(event.done, event.total)
                else:
                    complete = False
                    self.terminal.error(event.detail or f"{event.reason}: not all of it was read")
        return complete

    def open_session(self, name: str | None = None) -> None:
        """Go on with a session; where its state does not fit, its transcript may be fed again.

        Args:
            name: of one that is there; None for the one of the configuration, which begins if it is not.

        Raises:
            H2OStreamError: it cannot be opened, or does not fit and is not to be fed again.
        """
        create, name = name is None, name or self._config.session
        if name is None:
            return
        try:
            there = self.keeper.open(name, create)
        except NoFitError as error:
            question = "Feed its transcript to this model again? The cache will not be what it was."
            if not self._config.retell and not self._agreed(f"{error}.", question):
                raise NoFitError(f"{error}; --retell feeds its transcript again") from error
            if not self.fed(self.keeper.retell(name)):
                raise H2OStreamError(f"session {name} was not fed to its end and is left as it was") from error
            there = True
        entries = self.keeper.entries
        if entries:
            last = " ".join(entries[-1].prompt.split())
            self.terminal.note(f"session {name} goes on after turn {entries[-1].turn}: {last[:60]}", style="dim")
        elif not there:
            self.terminal.note(f"session {name} begins", style="dim")

    def toolbar(self) -> FormattedText:
        """The line under the prompt, for prompt_toolkit."""
        blocks, line = self._figures()
        shown = [(f"noreverse fg:{_ANSI.get(color, f'ansi{color}')}", text) for color, text in blocks]
        return FormattedText([*shown, ("noreverse", line)])

    def _footer(self, width: int) -> Text:
        """The same, for rich."""
        blocks, line = self._figures()
        shown = Text.assemble(*((text, color) for color, text in blocks), line)
        shown.truncate(width - 1, overflow="ellipsis")
        return shown

    def _figures(self) -> tuple[list[tuple[str, str]], str]:
        counts = self.keeper.conversation.engine.counts
        line = status(counts, speed(self.report.total.decode_tok_s), self._process.memory_info().rss)
        least, most = _BAR
        return bar(counts, min(max(self.terminal.console.width - len(line) - 2, least), most)), f" {line}"

    def _reply(self) -> Reply:
        if self._config.plain or not self.terminal.live or self.terminal.quiet:
            return PlainReply(self.terminal)
        return MarkdownReply(self._footer, self.terminal.page)

    def _close(self, turn: Turn) -> None:
        self.terminal.note(turn_line(turn), style="dim")
        if turn.detail:
            self.terminal.error(turn.detail)
        self._records.write(turn.record())

    def _messages(self, texts: Iterator[str]) -> Iterator[str]:
        """What the user says, commands carried out and empty lines left out."""
        for text in texts:
            message = text.strip()
            if is_command(message):
                said = self._commands.carry_out(message)
                if said:
                    yield said
            elif message:
                yield message.removeprefix("/") if message.startswith("//") else message
            if self.leaving:
                return

    def _typed(self) -> Iterator[str]:
        from h2o_stream.ui.typing import Typist

        words = {name: command.takes_file for name, command in COMMANDS.items()}
        yield from Typist(words, self.toolbar, self._config.vim, self.terminal.note).messages()

    def _agreed(self, fact: str, question: str) -> bool:
        if not self.terminal.interactive:
            return False
        self.terminal.note(fact)
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False


def _piped() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace")

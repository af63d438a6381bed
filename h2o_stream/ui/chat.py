"""The chat loop: a prompt, a reply that streams, a few commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from h2o_stream.config import Settings
from h2o_stream.engine.events import Finish, PrefillProgress, Token
from h2o_stream.resources import data_folder
from h2o_stream.session.conversation import Turn
from h2o_stream.session.records import Records
from h2o_stream.session.report import RunReport
from h2o_stream.ui.figures import occupancy, size, speed, turn_line
from h2o_stream.ui.start import Started, started
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import Reading, Terminal

PROMPT = "> "


def run_chat(
    settings: Settings, prompt: str | None, single_turn: bool, terminal: Terminal, records: Records
) -> Finish | None:
    """Chat until the user leaves or the input ends.

    Args:
        settings: of the conversation.
        prompt: answer this and leave; None reads messages.
        single_turn: leave after the first reply.
        terminal: where replies and notes go.
        records: gets a record for the run, each turn and the summary.

    Returns:
        Why the last reply ended if it was the end of the chat too; None when the user left.
    """
    with started("h2o-chat", settings, terminal, records) as ready:
        chat = Chat(ready, terminal, records)
        try:
            if prompt is not None:
                return chat.say(prompt)
            terminal.note(f"{ready.title}. /help lists the commands, Ctrl-D leaves.", style="dim")
            for message in chat.messages():
                finish = chat.say(message)
                if finish == "oom" or single_turn or (finish == "interrupted" and not terminal.interactive):
                    return finish
            return None
        finally:
            records.write(chat.report.record())


class Chat:
    """A conversation with someone at the keyboard, or with a pipe."""

    def __init__(self, ready: Started, terminal: Terminal, records: Records) -> None:
        self.report = RunReport()
        self._ready, self._terminal, self._records = ready, terminal, records
        self._conversation = ready.conversation
        self._leaving = False
        self._commands: dict[str, tuple[str, Callable[[], None]]] = {
            "/help": ("list the commands", self._help),
            "/reset": ("forget the conversation, keep the system prompt", self._reset),
            "/stats": ("what is in the cache, and how fast it goes", self._stats),
            "/exit": ("leave (so does Ctrl-D)", self._exit),
        }

    def messages(self) -> Iterator[str]:
        """What the user says, commands carried out and empty lines left out."""
        for line in self._typed() if self._terminal.interactive else _piped():
            message = line.strip()
            if message.startswith("/") and not message.startswith("//"):
                self._command(message)
            elif message:
                yield message.removeprefix("/") if message.startswith("//") else message
            if self._leaving:
                return

    def say(self, message: str) -> Finish:
        """One turn: the reply streams to stdout, what it took goes to stderr. Ctrl-C ends the turn."""
        with self._ready.interrupts, closing(Reading(self._terminal)) as reading:
            for event in self._conversation.say(message):
                self.report.observe(event)
                if isinstance(event, PrefillProgress):
                    reading.show(event.done, event.total)
                elif isinstance(event, Token):
                    self._terminal.reply(event.text)
                else:
                    reading.close()
                    self._close(event)
                    return event.finish
        raise AssertionError("a turn always ends with a Turn")

    def _close(self, turn: Turn) -> None:
        self._terminal.reply("\n")
        self._terminal.note(turn_line(turn), style="dim")
        if turn.detail:
            self._terminal.error(turn.detail)
        self._records.write(turn.record())

    def _typed(self) -> Iterator[str]:
        """Lines from a terminal, with history; Ctrl-C drops the line, Ctrl-D ends."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory

        history: History = InMemoryHistory()
        try:
            data_folder().mkdir(parents=True, exist_ok=True)
            history = FileHistory(str(data_folder() / "history"))
        except OSError as error:
            self._terminal.note(f"no input history: {error}")
        session: PromptSession[str] = PromptSession(history=history, bottom_toolbar=self._toolbar)
        while True:
            try:
                yield session.prompt(PROMPT)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return

    def _toolbar(self) -> Any:
        counts = self._conversation.engine.counts
        return f" {self._ready.title} · {occupancy(counts)} · {speed(self.report.total.decode_tok_s)}"

    def _command(self, line: str) -> None:
        name = line.split()[0]
        if name in self._commands:
            self._commands[name][1]()
        else:
            self._terminal.error(f"{name} is not a command, /help lists them; start with // to say it to the model")

    def _help(self) -> None:
        for name, (summary, _) in self._commands.items():
            self._terminal.console.print(f"{name:<8} {summary}")
        self._terminal.console.print("Ctrl-C stops a reply and keeps what was said.")

    def _reset(self) -> None:
        self._conversation.reset()
        self._terminal.note("The conversation starts anew.")

    def _stats(self) -> None:
        counts = self._conversation.engine.counts
        print_report(self._terminal, self.report, self._ready.title)
        self._terminal.note(
            f"now {counts.sinks} sinks, {counts.pinned} pinned, {counts.heavy} heavy, {counts.recent} recent, "
            f"{counts.free} free; {size(counts.nbytes)}"
        )

    def _exit(self) -> None:
        self._leaving = True


def _piped() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace")
